"""Random transitions on a GPU for a long time: no request lost, no token wrong.

    python tests/serving/soak_gpu.py OUT FOLDER SECONDS REPORT.json

OUT: a checkpoint that `gpu_cases.py` has made. Each round serves random requests while
rows go to random levels at every step, serves them again with the same changes one after the
other, and compares every token; then a burst moves memory between experts and KV, half of it given
up on the way, and in every second round with maps refused. Retired planes and granules are
poisoned. In the end every byte is compared with the host's. The report is written after every
round. SECONDS are those in which the engine steps, at most half a second for one step: the process
may be stopped and go on later, so that others can measure in between.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chaos import differences, random_run, serial_run
from elastic_engine import prompts
from gpu_cases import SPARE, GpuEngine, maps_refused, state_of

from pagedweight.runtime.integrity import check_worker

MOST_STEP_SECONDS = 0.5


class StepClock:
    """seconds: in which the engine stepped."""

    def __init__(self, engine: GpuEngine) -> None:
        self.seconds, self._step = 0.0, engine.step
        engine.step = self._counted  # type: ignore[method-assign]

    def _counted(self) -> list[Any]:
        begun = time.perf_counter()
        finished = self._step()
        self.seconds += min(time.perf_counter() - begun, MOST_STEP_SECONDS)
        return finished


def soak(path: Path, folder: Path, seconds: float, report: Path) -> int:
    """Requests lost and wrong, 0 when all is well."""
    engine = GpuEngine(path, folder)
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "rounds": 0, "faults": []}
    found |= {"requests": 0, "lost": 0, "wrong": 0, "rows_moved_at_random": 0, "steps": 0}
    found["preempted_while_compared"] = 0  # batches differ then, and with them the last bit
    clock = StepClock(engine)
    try:
        while clock.seconds < seconds:
            number = found["rounds"]
            asked = prompts(int(rng.integers(4, 33)), int(rng.integers(16, 129)), seed=number)
            length, preempted = int(rng.integers(100, 301)), engine.control.preemptions
            random = random_run(engine, asked, length, seed=number, rows=int(rng.integers(8, 257)))
            engine.settle()
            serial = serial_run(engine, asked, length, random.trace, SPARE)
            off = differences(random.tokens, serial)
            found["preempted_while_compared"] += engine.control.preemptions - preempted
            engine.settle()
            more = int(rng.integers(60, 251))
            names, done = engine.add(prompts(128, 256, seed=1000 + number), more), {}
            with maps_refused(engine) if number % 2 else nullcontext():
                for _ in range(int(rng.integers(20, 120))):
                    done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
            given_up = set(rng.choice(names, len(names) // 2, replace=False).tolist())
            engine.llm.llm_engine.abort_request(sorted(given_up))
            done |= engine.run()
            kept = [len(done.get(name, ())) for name in names if name not in given_up]
            engine.settle()
            check_worker(engine.memory, contents=number % 4 == 0)
            found["rounds"] += 1
            found["requests"] += 2 * len(asked) + len(names)
            found["lost"] += sum(len(t) != length for t in (*random.tokens, *serial))
            found["lost"] += sum(tokens != more for tokens in kept)
            found["wrong"] += len(off)
            found["faults"] += off
            found["rows_moved_at_random"] += random.moved
            found["steps"] += 2 * random.steps
            _write(report, found, engine, clock)
        check_worker(engine.memory, contents=True)
        found["every_byte_compared_at_the_end"] = True
    except BaseException as error:
        found["faults"].append(f"{type(error).__name__}: {error}")
        print(state_of(engine), flush=True)
        raise
    finally:
        _write(report, found, engine, clock)
    return found["lost"] + found["wrong"]


def _write(report: Path, found: dict[str, Any], engine: Any, clock: StepClock) -> None:
    counters = engine.memory.counters.as_dict()
    now = {"seconds_stepping": round(clock.seconds, 1), **found, "counters": counters}
    report.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(soak(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])))
