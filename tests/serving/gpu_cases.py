"""What an elastic engine on a GPU must do; one engine, so one process for all of it.

    python tests/serving/gpu_cases.py OUT             make the model: random weights, four layers
    python tests/serving/gpu_cases.py OUT FOLDER      run every case on it

Retired memory is poisoned all the while, graphs are captured before anything moves, and in the end
every byte is compared with the host's. A case that fails says how things stand; the others go on.
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from chaos import differences, random_run, serial_run
from elastic_engine import ON_GPU, Engine, prompts

from pagedweight.errors import Transient
from pagedweight.runtime.integrity import check_worker

MEMORY = 5 << 29
LAYERS = 4
SPARE = 60
"""Granules that a replay has as room."""


def make_model(out: Path) -> None:
    """Four layers of Qwen1.5-MoE's shape with random weights."""
    from pagedweight.bench.models import model_config
    from pagedweight.bench.synthetic import make_checkpoint

    make_checkpoint(model_config("qwen1.5-moe", LAYERS), out, (2, 3, 4, 5, 6), "cuda")


class GpuEngine(Engine):
    """Settled runs, unchecked while they go on: a check waits for the GPU and hides races."""

    def __init__(self, path: Path, folder: Path) -> None:
        super().__init__(path, folder, MEMORY, {**ON_GPU, "max_num_seqs": 128})
        self.checking = False
        self.first: list[list[int]] = []
        self.settle()
        self.top = self.bits

    def settle(self) -> int:
        """Nothing is under way any more and what is left over is KV; the blocks there then."""
        self.run()
        self.serve(prompts(1, 8), 8)  # an engine without requests takes no steps
        return self.usable

    def serve(self, asked: list[list[int]], length: int) -> list[list[int]]:
        """Tokens of every request, in order."""
        names = self.add(asked, length)
        done = self.run()
        return [done[name] for name in names]


def inside_a_light_load_takes_no_bits(engine):
    assert "Elastic" in type(engine.worker).__name__
    engine.first = engine.serve(prompts(8, 40), 64)
    assert (engine.bits == engine.top).all()
    assert engine.serve(prompts(8, 40), 64) == engine.first, "the engine itself does not repeat"


def inside_a_burst_takes_bits_and_gives_them_back(engine):
    lowest, backed = [], []

    def watch():
        lowest.append(float(engine.bits.mean()))
        backed.append(engine.usable)

    start, usable = time.perf_counter(), engine.usable
    names = engine.add(prompts(128, 256, seed=1), 250)
    done = engine.run(watch)
    print(
        f"  {len(lowest)} steps in {time.perf_counter() - start:.1f} s: bits "
        f"{engine.top.mean():.2f} fell to {min(lowest):.2f}, KV grew from {usable} to "
        f"{max(backed)} blocks, {engine.control.preemptions} preemptions"
    )
    assert sorted(done) == sorted(names), "a request was lost"
    assert all(len(tokens) == 250 for tokens in done.values())
    assert min(lowest) < engine.top.mean() - 0.5
    assert max(backed) > usable
    assert (engine.bits == engine.top).all(), "bits came back"
    assert engine.usable == usable, "KV gave back what it took"
    engine.check()


def inside_graphs_and_planes_are_as_before_the_burst(engine):
    assert not differences(engine.serve(prompts(8, 40), 64), engine.first)


def inside_random_transitions_equal_their_serial_replay(engine):
    asked, length = prompts(16, 64, seed=3), 300
    found = random_run(engine, asked, length, seed=5)
    print(f"  {found.moved} rows moved in {found.steps} steps")
    assert found.moved >= 5_000
    preempted = engine.control.preemptions
    engine.run()
    engine.check()
    serial = serial_run(engine, asked, length, found.trace, SPARE)
    assert engine.control.preemptions == preempted, "KV was short: the batches were others"
    assert not differences(serial, found.tokens)


def inside_an_abandoned_burst_gives_everything_back(engine):
    usable = engine.settle()
    names = engine.add(prompts(128, 256, seed=2), 200)
    for _ in range(150):
        engine.step()
    assert engine.bits.mean() < engine.top.mean()
    engine.llm.llm_engine.abort_request(names)
    assert engine.run() == {}
    assert (engine.bits == engine.top).all()
    assert engine.usable == usable
    engine.check()


@contextmanager
def maps_refused(engine):
    """Every third of the first 60 maps is refused."""
    device = engine.memory.mover.weights.device
    original, calls = device.map, [0]

    def refusing(*args):
        calls[0] += 1
        if calls[0] % 3 == 0 and calls[0] < 60:
            raise Transient("map refused by the test")
        return original(*args)

    device.map = refusing
    try:
        yield
    finally:
        device.map = original


def inside_a_refused_map_is_rolled_back_and_service_goes_on(engine):
    before = engine.memory.counters.rolled_back
    with maps_refused(engine):
        names = engine.add(prompts(96, 256, seed=4), 100)
        done = engine.run()
    assert sorted(done) == sorted(names)
    assert engine.memory.counters.rolled_back > before
    engine.settle()
    engine.check()


def inside_every_byte_is_the_hosts_and_the_pool_has_not_grown(engine):
    engine.settle()
    check_worker(engine.memory, contents=True)
    assert engine.serve(prompts(8, 40), 64) == engine.first


CASES = [function for name, function in dict(globals()).items() if name.startswith("inside_")]


def state_of(engine) -> str:
    """What one needs to know when a case failed."""
    control, memory = engine.control, engine.memory
    dispatch, pool = control.controller._dispatch, memory.mover.weights.pool
    free, total = torch.cuda.mem_get_info()
    ledger = control.controller.granules
    return "\n".join(
        f"  {name}: {value}"
        for name, value in {
            "status": control.controller.status,
            "counters": memory.counters.as_dict(),
            "batches": memory.mover.statuses(),
            "last failure": dispatch.last_failure,
            "failures": dispatch.failures,
            "pool": f"{pool.free} free of {pool.total}, reserve {pool.reserve}",
            "granules": {int(s): int(ledger.count(s)) for s in set(ledger.states.tolist())},
            "backed": len(memory.kv.backed),
            "bits": f"{engine.bits.mean():.3f}, {np.bincount(engine.bits).tolist()}",
            "running, waiting": (len(engine.scheduler.running), len(engine.scheduler.waiting)),
            "preemptions": control.preemptions,
            "GPU": f"{free} bytes free of {total}",
        }.items()
    )


def run_cases(path: Path, folder: Path) -> int:
    """Failures; every case is tried as long as the GPU answers."""
    begun = time.perf_counter()
    engine = GpuEngine(path, folder)
    print(f"started in {time.perf_counter() - begun:.1f} s", flush=True)
    failed = 0
    for case in CASES:
        begun = time.perf_counter()
        try:
            engine.settle()
            case(engine)
        except Exception:
            failed += 1
            print(f"FAILED {case.__name__}\n{traceback.format_exc()}", flush=True)
            print(state_of(engine), flush=True)
        else:
            print(f"passed {case.__name__} in {time.perf_counter() - begun:.1f} s", flush=True)
        torch.cuda.synchronize()  # a fault of the GPU ends everything here
    print(f"{failed} failed" if failed else "all passed", flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 2:
        make_model(Path(sys.argv[1]))
    else:
        sys.exit(min(100, run_cases(*map(Path, sys.argv[1:]))))
