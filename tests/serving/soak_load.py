"""A random load in real vLLM on the CPU, every invariant after every step: is a request ever lost?

    python tests/serving/soak_load.py OUT FOLDER SECONDS [SEED]

OUT: tiny-moe, quantized. Requests of any length come at rates that change, some are given up, and
granules of 8 blocks drain and are put back. Fails when an answer is not whole, when somebody is
preempted while blocks are held back, or when a byte is not the host's in the end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from elastic_engine import Engine, prompts

from pagedweight.runtime.granules import GranuleState
from pagedweight.runtime.integrity import check_worker

MEMORY, PAGE = 32 << 20, 1 << 18
RATES = (0.02, 0.05, 0.1, 0.4, 1.5)
"""Requests a step; the highest is more than KV has room for."""
MOST = 80
"""Requests running and waiting at which none comes."""


class Load:
    """Requests asked for by name, with their lengths, and what became of them."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng, self.rate = engine, np.random.default_rng(seed), RATES[-1]
        self.asked: dict[str, int] = {}
        self.answered: dict[str, int] = {}
        self.given_up: set[str] = set()

    def come_and_go(self) -> None:
        rng, engine = self.rng, self.engine
        if rng.random() < 0.02:
            self.rate = float(rng.choice(RATES))
        room = MOST - len(engine.scheduler.running) - len(engine.scheduler.waiting)
        for _ in range(min(room, rng.poisson(self.rate))):
            prompt = prompts(1, int(rng.integers(1, 200)), seed=int(rng.integers(1000)))
            length = int(rng.integers(1, 300))
            (name,) = engine.add(prompt, length)
            self.asked[name] = length
        if rng.random() < 0.01:
            open_ = sorted(self.asked.keys() - self.answered.keys() - self.given_up)
            names = [name for name in open_ if rng.random() < 0.3]
            engine.llm.llm_engine.abort_request(names)
            self.given_up.update(names)

    def step(self) -> None:
        for output in self.engine.step():
            self.answered[output.request_id] = len(output.outputs[0].token_ids)

    @property
    def lost(self) -> list[str]:
        kept = self.asked.keys() - self.given_up
        return sorted(name for name in kept if self.answered.get(name) != self.asked[name])


def soak(path: Path, folder: Path, seconds: float, seed: int) -> None:
    engine = Engine(path, folder, MEMORY, page_bytes=PAGE)
    engine.run()
    load, granules, control = Load(engine, seed), engine.control.controller.granules, engine.control
    begun, steps, drains, before = time.perf_counter(), 0, 0, 0
    while (more := time.perf_counter() - begun < seconds) or engine.scheduler.has_requests():
        if more:
            load.come_and_go()
        preempted = control.preemptions
        load.step()
        steps += 1
        held_back = control.parking.held_back
        assert control.preemptions == preempted or not held_back, f"{held_back} blocks held back"
        draining = granules.count(GranuleState.DRAINING)
        drains, before = drains + (draining > before), draining
    check_worker(engine.memory, contents=True)
    print(
        f"{steps} steps, {len(load.asked)} requests, {len(load.given_up)} given up, "
        f"{len(load.lost)} lost, {control.preemptions} preemptions, {drains} times granules began "
        f"to drain, {engine.memory.counters.granules_grown} grown, "
        f"{engine.memory.counters.granules_shrunk} shrunk"
    )
    assert not load.lost, load.lost
    assert drains


if __name__ == "__main__":
    soak(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int((*sys.argv, 0)[4]))
