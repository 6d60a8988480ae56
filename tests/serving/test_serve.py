"""`pagedweight serve` is stock vLLM's OpenAI server: a real client streams from it."""

from __future__ import annotations

import re

import pytest
from openai import OpenAI
from server import serve

pytestmark = pytest.mark.vllm
FLAGS = ("--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")


@pytest.fixture(scope="module")
def server(tiny_quantized, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "server.log"
    with serve(tiny_quantized, log, "--bits", "4", "--", *FLAGS) as url:
        yield url, log


def test_a_client_streams_a_completion(server, tiny_quantized):
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    assert model == str(tiny_quantized)
    ask = {"model": model, "prompt": "The history of", "max_tokens": 24, "temperature": 0}
    pieces = [chunk.choices[0] for chunk in client.completions.create(**ask, stream=True)]
    whole = client.completions.create(**ask).choices[0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish_reason == whole.finish_reason == "length"
    assert len([piece for piece in pieces if piece.text]) > 1


def test_every_process_says_once_that_the_plugin_is_active(server):
    _, log = server
    said = re.findall(r"pagedweight \S+ is active in process (\d+)", log.read_text())
    assert len(said) == len(set(said))
    assert len(said) >= 3  # API server, engine core, worker
