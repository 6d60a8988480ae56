"""What an operator sees of a real server under a burst: metrics, timeline, top, picture."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from server import serve

from pagedweight.bench.plot import Series, draw
from pagedweight.cli.main import main
from pagedweight.runtime.metrics import read_metrics
from pagedweight.runtime.timeline import Timeline
from pagedweight.runtime.watch import ServerSource

pytestmark = pytest.mark.vllm
FLAGS = ("--block-size", "32", "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "32")
REQUESTS, TOKENS = 24, 160


def _burst(url):
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id

    def ask(number):
        answer = client.completions.create(
            model=model,
            prompt=f"{number} The history of the",
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, range(REQUESTS)))


def _settled(source):
    """The view once no step has come for two seconds: bits are back."""
    view, quiet = source.read(), 0
    for _ in range(600):
        time.sleep(0.1)
        before, view = view, source.read()
        quiet = quiet + 1 if before.sample.step == view.sample.step else 0
        if quiet == 20:
            return view
    raise AssertionError(f"steps go on: {view}")


def test_a_burst_shows_everywhere(tiny_quantized, tmp_path, capsys):
    path = tmp_path / "timeline.jsonl"
    arguments = ("--memory", "20MiB", "--timeline", str(path), "--", *FLAGS)
    with serve(tiny_quantized, tmp_path / "server.log", *arguments) as url:
        source = ServerSource(url)
        start = source.read()
        assert start.sample.kv_usable == start.usable_at_start > 0
        assert _burst(url) == [TOKENS] * REQUESTS
        end = _settled(source).sample
        with pytest.raises(SystemExit) as ended:
            main(["top", url, "--once", "--interval", "0.1"])
        shown = capsys.readouterr().out
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            text = answer.read().decode()
    found = Timeline.load(path)

    assert end.rows_lowered > 0
    assert end.rows_raised > 0
    assert end.copied_bytes > 0
    assert end.damage_taken > 0
    assert end.tokens_generated == REQUESTS * TOKENS
    own = [line for line in text.splitlines() if line.startswith("vllm:num_preemptions_total")]
    assert float(own[0].split()[-1]) == end.preemptions

    assert ended.value.code in (0, None)
    assert f"generated {end.tokens_generated:,}" in shown
    assert f"lowered {end.rows_lowered:,}" in shown

    assert found.header.budget == start.budget
    assert found.header.levels == start.levels
    assert not found.truncated
    last = found.samples[-1]
    assert (last.running, last.kv_used) == (0, 0)
    assert last.rows_lowered == end.rows_lowered
    assert last.tokens_generated == end.tokens_generated
    assert found.column("kv_usable").max() > start.usable_at_start
    assert found.column("bits").min() < start.sample.bits
    assert {"offload", "reload"} <= {sample.plan for sample in found.samples}
    assert (found.column("kv_used") <= found.column("kv_usable")).all()
    assert (found.column("kv_demanded") >= found.column("kv_used")).all()
    assert (found.column("monotonic")[1:] >= found.column("monotonic")[:-1]).all()
    assert read_metrics(text, 0.0).sample.step == end.step

    assert {"offload", "reload"} <= {kind for kind, *_ in Series.of(found, "").phases()}
    draw([found], ["burst"], tmp_path / "burst.png")
