"""Real vLLM engines one after another, each in a fork of a process that has imported vLLM once.

A program: `python served.py JOBS RESULTS`. JOBS is a JSON list of {"name", "path", "plan"} (fixed
precision) and {"name", "path", "memory", "page_bytes"} (elastic precision), either with "ranks",
vLLM's flags for several of them; with "refuse" the second rank's memory refuses so many uploads
once the burst has begun. Each result is written to RESULTS/name.json, {"error": text} where
there is none. Started the usual way an engine imports vLLM in three new processes, 30 s for a model
of 3 MB.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PROMPTS = ["The river was first", "In 1912 the company and a small town", "def parse(theorem"]
NEW_TOKENS = 8
BURST, BURST_NEW = 160, 112
"""Tokens of each request of a burst in all, and of its answer."""
AT_ONCE, LOOK = 2, 8
LIMIT = 240.0
"""Seconds for one engine, on a machine that is busy with other things."""


def serve(job: dict[str, Any]) -> list[Any]:
    """What the engine says at the bits of a plan (see `_say`)."""
    from vllm import LLM

    from pagedweight.serving.options import ServeOptions

    _fork_ranks()
    engine = LLM(
        job["path"],
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes=16 << 20,
        additional_config=ServeOptions(plan=job["plan"]).additional_config(),
        **{"enforce_eager": True, **job.get("ranks", {})},
    )
    return _say(engine)


def _fork_ranks() -> None:
    """Ranks are forked from this process, not started anew: each would import vLLM again."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def serve_elastic(job: dict[str, Any]) -> dict[str, Any]:
    """A burst of more requests than KV has room for at rest, and what the engine says afterwards.

    Every invariant of memory, page table and block pool is checked after every step.
    """
    import tempfile

    sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))
    from elastic_engine import Engine, prompts

    folder = Path(tempfile.mkdtemp())
    engine = Engine(Path(job["path"]), folder, job["memory"], page_bytes=job["page_bytes"])
    block = engine.llm.llm_engine.vllm_config.cache_config.block_size
    start, room, low, most = engine.bits, engine.usable, [], []

    def watch() -> None:
        low.append(engine.bits.mean())
        most.append(engine.usable)

    count = -(-room // -(-BURST // block)) + 1
    engine.add(prompts(count, BURST - BURST_NEW), BURST_NEW)
    done = engine.run(watch)
    return {
        "requests": [count, sum(len(tokens) == BURST_NEW for tokens in done.values())],
        "bits": [start.mean(), min(low), engine.bits.mean()],
        "usable": [room, max(most), engine.usable],
        "said": _say(engine.llm),
        "plan": engine.bits.tolist(),
    }


def serve_ranks(job: dict[str, Any]) -> dict[str, Any]:
    """As `serve_elastic` with ranks in processes of their own: every invariant of their memory is
    checked every few steps, and ranks that hold the same rows must have the same bits."""
    import tempfile

    sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))
    from elastic_engine import POLICY, prompts
    from vllm import LLM, SamplingParams

    from pagedweight.core.policy_file import save_policy
    from pagedweight.serving.launch import SCHEDULER, WORKER
    from pagedweight.serving.options import ServeOptions

    _fork_ranks()
    policy = Path(tempfile.mkdtemp()) / "policy.json"
    save_policy(POLICY, policy)
    options = ServeOptions(
        memory=job["memory"], policy=str(policy), poison=True, page_bytes=job["page_bytes"]
    )
    llm = LLM(
        job["path"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=64,
        block_size=32,
        kv_cache_memory_bytes=job["memory"],
        enable_prefix_caching=False,
        enforce_eager=True,
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        additional_config=options.additional_config(),
        **job["ranks"],
    )
    engine, control = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler.control
    granules, start = control.controller.granules, _held(llm)
    room = granules.usable_blocks
    low, most, lengths, steps = [start], [room], [], 0
    block = engine.vllm_config.cache_config.block_size
    count = -(-room // -(-BURST // block)) + 1
    asked = SamplingParams(temperature=0, max_tokens=BURST_NEW, ignore_eos=True, detokenize=False)
    for name, prompt in enumerate(prompts(count, BURST - BURST_NEW)):
        engine.add_request(f"r{name}", {"prompt_token_ids": prompt}, asked)
    llm.collective_rpc(_refuse, args=(job.get("refuse", 0),))
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():
        done = [out for out in engine.step() if out.finished]
        lengths += [len(output.outputs[0].token_ids) for output in done]
        most.append(granules.usable_blocks)
        steps += 1
        if steps % LOOK == 0:
            low.append(_held(llm))
    end = _held(llm)
    return {
        "requests": [count, lengths.count(BURST_NEW)],
        "bits": [_mean(start), min(map(_mean, low)), _mean(end)],
        "usable": [room, max(most), granules.usable_blocks],
        "rolled_back": control.controller.counters.get("rolled_back", 0),
        "gave_up": llm.collective_rpc(_gave_up),
        "held": [len(rows) for rows, _ in llm.collective_rpc("committed_rows")],
        "said": _say(llm),
        "plan": [end[row] for row in sorted(end)],
    }


def _checked(worker: Any) -> tuple[list[int], list[int]]:
    """On a rank: its memory is sound; its rows and their bits."""
    from pagedweight.runtime.integrity import check_worker

    check_worker(worker.store.worker)
    return worker.committed_rows()


def _refuse(worker: Any, calls: int) -> None:
    """On the second rank: the next `calls` uploads are refused, as by a driver that has no room."""
    from pagedweight.errors import Transient

    device = worker.store.worker.mover.weights.device
    original, left = device.upload, [calls if worker.rank == 1 else 0]

    def upload(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise Transient("refused by the test")
        return original(*args)

    device.upload = upload


def _gave_up(worker: Any) -> list[int]:
    """On a rank: batches that it rolled back, and batches that it gave up for another."""
    counters = worker.store.worker.counters
    return [counters.rolled_back, counters.aborted_batches]


def _held(llm: Any) -> dict[int, int]:
    """Bits of every row of the model, out of what its ranks hold."""
    out: dict[int, int] = {}
    for rows, bits in llm.collective_rpc(_checked):
        for row, found in zip(rows, bits, strict=True):
            assert out.setdefault(row, found) == found, f"ranks differ in row {row}"
    return out


def _mean(held: dict[int, int]) -> float:
    return sum(held.values()) / len(held)


def _say(engine: Any) -> list[Any]:
    """Greedy continuation of every prompt: all tokens, log-probabilities of all but the first."""
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    found = []
    for output in engine.generate(PROMPTS, asked, use_tqdm=False):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        pairs = zip(entries, tokens[1:], strict=True)
        found.append([tokens, [entry[token].logprob for entry, token in pairs]])
    return found


def _know(path: Path) -> None:
    """Tell vLLM the model's class, which it would otherwise look at in a process of its own."""
    import importlib

    from vllm import ModelRegistry

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    known = ModelRegistry.models[name]
    module = importlib.import_module(known.module_name)
    ModelRegistry.register_model(name, getattr(module, known.class_name))


def _child(job: dict[str, Any], results: Path) -> int:
    """Fork; the child serves, writes its result and ends. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _know(Path(job["path"]))
        many = serve_ranks if "ranks" in job else serve_elastic
        content: Any = many(job) if "memory" in job else serve(job)
    except BaseException:
        content = {"error": traceback.format_exc()}
    (results / f"{job['name']}.json").write_text(json.dumps(content))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(jobs: list[dict[str, Any]], results: Path) -> None:
    """Serve all jobs, AT_ONCE at a time; one that takes longer than LIMIT is killed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = "1"
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running[_child(waiting.pop(0), results)] = time.monotonic() + LIMIT
        ended, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(ended, None)
        for pid in [pid for pid, limit in running.items() if time.monotonic() > limit]:
            os.kill(pid, 9)
        time.sleep(0.1)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
