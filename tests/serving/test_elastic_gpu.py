"""A real vLLM engine with elastic memory on a GPU, CUDA graphs and asynchronous scheduling on.

Under both model runners: a burst takes bits and gives them back, and then the same prompts give the
same tokens as before it, through graphs that were captured before any of it. Retired memory is
poisoned all the while, and in the end every byte is compared with the host's.

pytest tests/serving/test_elastic_gpu.py      on a machine with a GPU and vLLM 0.26
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
MEMORY = 2 << 30
LAYERS = 4


@pytest.fixture(scope="session")
def random_qwen(tmp_path_factory):
    """Four layers of Qwen1.5-MoE's shape with random weights."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from pagedweight.bench.models import model_config
    from pagedweight.bench.synthetic import make_checkpoint

    out = tmp_path_factory.mktemp("random") / "qwen"
    make_checkpoint(model_config("qwen1.5-moe", LAYERS), out, (2, 3, 4, 5, 6), "cuda")
    torch.cuda.empty_cache()
    return out


@pytest.mark.parametrize("runner", ["1", "0"], ids=["runner-v2", "runner-v1"])
def test_in_a_process_of_its_own(random_qwen, tmp_path, runner):
    ended = subprocess.run(
        [sys.executable, __file__, str(random_qwen), str(tmp_path)],
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(ended.stdout[-6000:])
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-6000:]
    assert "all passed" in ended.stdout


def answers(engine, asked):
    """64 tokens for each prompt, in the order of `asked`."""
    names = engine.add(asked, 64)
    done = engine.run()
    return [done[name] for name in names]


def _inside(path: Path, folder: Path) -> None:
    from elastic_engine import ON_GPU, Engine, prompts

    from pagedweight.runtime.integrity import check_worker

    begun = time.perf_counter()
    engine = Engine(path, folder, MEMORY, ON_GPU)
    print(f"started in {time.perf_counter() - begun:.1f} s", flush=True)
    memory, counted = engine.memory, engine.memory.counters
    device = memory.mover.weights.device
    assert type(engine.worker).__name__ == "ElasticGPUWorker"
    engine.run()
    top = engine.bits.copy()
    free = torch.cuda.mem_get_info()[0]
    before = answers(engine, prompts(8, 40))
    assert (engine.bits == top).all(), "a light load takes no bits"

    lowest, backed, marks = [], [], []

    def watch():
        marks.append(time.perf_counter())
        lowest.append(float(engine.bits.mean()))
        backed.append(engine.usable)

    engine.checking = False
    names = engine.add(prompts(64, 256, seed=1), 250)
    done = engine.run(watch)
    engine.checking = True
    engine.check()
    assert sorted(done) == sorted(names), "a request was lost"
    assert all(len(tokens) == 250 for tokens in done.values())
    print(
        f"bits {np.mean(top):.2f} fell to {min(lowest):.2f}, KV grew from {backed[0]} to "
        f"{max(backed)} blocks in {len(marks)} steps, {engine.control.preemptions} preemptions"
    )
    print(f"counters {counted.as_dict()}")
    assert min(lowest) < np.mean(top)
    assert max(backed) > backed[0]
    assert (engine.bits == top).all(), "bits came back"
    assert answers(engine, prompts(8, 40)) == before, "graphs and planes are as before the burst"
    check_worker(memory, contents=True)
    assert abs(torch.cuda.mem_get_info()[0] - free) <= 256 << 20, "the pool neither grows nor leaks"
    report = engine.control.controller
    print(
        f"free pages {report.free_pages}, pool {memory.mover.weights.pool.total} pages of "
        f"{device.page_bytes}"
    )
    print("all passed", flush=True)


if __name__ == "__main__":
    _inside(Path(sys.argv[1]), Path(sys.argv[2]))
