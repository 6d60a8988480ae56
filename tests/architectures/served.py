"""Real vLLM engines one after another, each in a fork of a process that has imported vLLM once.

A program: `python served.py JOBS RESULTS`. JOBS is a JSON list of {"name", "path", "plan"} (fixed
precision) and {"name", "path", "memory"} (elastic precision); each result is written to
RESULTS/name.json, {"error": text} where there is none. Started the usual way an engine imports vLLM
in three new processes, 30 s for a model of 3 MB.
"""

from __future__ import annotations

import json
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
AT_ONCE = 2
LIMIT = 240.0
"""Seconds for one engine, on a machine that is busy with other things."""


def serve(job: dict[str, Any]) -> list[Any]:
    """What the engine says at the bits of a plan (see `_say`)."""
    from vllm import LLM

    from pagedweight.serving.options import ServeOptions

    engine = LLM(
        job["path"],
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes=16 << 20,
        enforce_eager=True,
        additional_config=ServeOptions(plan=job["plan"]).additional_config(),
    )
    return _say(engine)


def serve_elastic(job: dict[str, Any]) -> dict[str, Any]:
    """A burst of more requests than KV has room for at rest, and what the engine says afterwards.

    Every invariant of memory, page table and block pool is checked after every step.
    """
    import tempfile

    sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))
    from elastic_engine import Engine, prompts

    engine = Engine(Path(job["path"]), Path(tempfile.mkdtemp()), job["memory"])
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
        content: Any = serve_elastic(job) if "memory" in job else serve(job)
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
