"""Precision follows KV pressure inside real vLLM; every invariant holds after every step.

One engine for all tests of this file, in a process of its own (see `elastic_engine`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
MEMORY = 24 << 20
INSIDE = "--inside"


@pytest.mark.timeout(1100)
def test_in_a_process_of_its_own(tiny_quantized, tmp_path):
    """Runs every `inside_*` of this file; their names are in the output when one fails."""
    ended = subprocess.run(
        [sys.executable, __file__, str(tiny_quantized), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    passed = [line for line in ended.stdout.splitlines() if line.startswith("passed")]
    assert len(passed) == len(CASES)


def inside_a_burst_takes_bits_and_gives_them_back(engine):
    start_bits, start_blocks = engine.bits, engine.usable
    low, most = [], []

    def watch():
        low.append(engine.bits.mean())
        most.append(engine.usable)

    names = engine.add(prompts(20, 48), 120)
    done = engine.run(watch)
    assert sorted(done) == sorted(names)
    assert all(len(tokens) == 120 for tokens in done.values())
    assert max(most) > start_blocks
    assert min(low) < start_bits.mean() - 1
    assert np.array_equal(engine.bits, start_bits)
    assert engine.usable == start_blocks
    assert engine.control.preemptions == 0


def inside_bits_return_while_requests_run_on(engine):
    """Blocks in use lie scattered: granules have to drain before KV can give anything back."""
    start, rng, drained, lows = engine.bits.mean(), np.random.default_rng(0), 0, []
    for number in range(20):
        engine.add(prompts(1, 48, seed=number), int(rng.integers(30, 200)))
    for number in range(500):
        engine.step()
        lows.append(engine.bits.mean())
        drained = max(drained, engine.control.parking.held_back)
        running = len(engine.scheduler.running) + len(engine.scheduler.waiting)
        if min(lows) < start - 1 and lows[-1] == start:
            break
        if running < 3:
            engine.add(prompts(1, 48, seed=100 + number), int(rng.integers(40, 120)))
    assert lows[-1] == start
    assert engine.scheduler.running
    assert drained > 0


def inside_an_abandoned_burst_gives_everything_back(engine):
    start_bits, start_blocks = engine.bits, engine.usable
    names = engine.add(prompts(20, 48), 400)
    for _ in range(40):
        engine.step()
    assert engine.bits.mean() < start_bits.mean()
    engine.llm.llm_engine.abort_request(names)
    assert engine.run() == {}
    assert np.array_equal(engine.bits, start_bits)
    assert engine.usable == start_blocks


def inside_random_transitions_equal_their_serial_replay(engine):
    from chaos import differences, random_run, serial_run

    asked, length = prompts(3, 24, seed=3), 300
    found = random_run(engine, asked, length, seed=5)
    assert found.moved >= 10_000, (found.moved, found.steps)
    engine.run()
    assert not differences(serial_run(engine, asked, length, found.trace, 10), found.tokens)


def inside_faults_are_rolled_back_and_service_goes_on(engine):
    from pagedweight.errors import Transient

    device = engine.memory.mover.weights.device
    for name, every in (("map", 3), ("upload", 2), ("write", 3)):
        original, calls, faults = getattr(device, name), [0], [0]

        def failing(*args, original=original, every=every, calls=calls, faults=faults, name=name):
            calls[0] += 1
            if calls[0] % every == 0 and faults[0] < 6:
                faults[0] += 1
                raise Transient(f"{name} refused by the test")
            return original(*args)

        before = engine.memory.counters.rolled_back
        setattr(device, name, failing)
        names = engine.add(prompts(24, 48), 80)
        done = engine.run()
        setattr(device, name, original)
        engine.run()
        assert sorted(done) == sorted(names), name
        assert faults[0] > 0, name
        assert engine.memory.counters.rolled_back > before, name
    names = engine.add(prompts(4, 16), 20)
    assert sorted(engine.run()) == sorted(names)


def inside_a_prompt_longer_than_the_model_is_refused_with_both_numbers(engine):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="512") as error:
        engine.add(prompts(1, 600), 10)
    assert "600" in str(error.value)
    assert not engine.scheduler.has_requests()


def inside_the_null_block_is_never_counted(engine):
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert engine.usable == pool.num_gpu_blocks - 1 == engine.control.parking.free_blocks
    assert 0 in engine.memory.kv.backed


CASES = [function for name, function in dict(globals()).items() if name.startswith("inside_")]


def _inside(path: Path, folder: Path) -> None:
    engine = Engine(path, folder, MEMORY)
    for case in CASES:
        engine.run()
        case(engine)
        print("passed", case.__name__, flush=True)


if __name__ == "__main__":
    from elastic_engine import Engine, prompts

    _inside(Path(sys.argv[1]), Path(sys.argv[2]))
else:
    prompts = None
