"""Random transitions under running steps for so many seconds: short enough for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \\
      python tests/memory_cuda/small_moves.py SECONDS

Exits with 1 when a step computed with planes that were not committed, when a byte is not the
host's, or when SECONDS were too few for LEAST_STEPS. Outputs are compared within SECONDS, after
every 50 steps; comparing all bytes comes after them. A line every few seconds says where it is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))  # ranks

from test_cuda_rank import prepared_kernel, random_steps

from pagedweight.memory.cuda.device import CudaDevice

LEAST_STEPS, MOST_STEPS = 60, 400
SAY_SECONDS = 5.0


class Clock:
    """Ends the steps; says how many there were."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0
        self._begun = self._said = time.perf_counter()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._begun

    def more(self, number: int) -> bool:
        self.steps = number
        if number == 1 or time.perf_counter() - self._said > SAY_SECONDS:
            self._said = time.perf_counter()
            self.say(f"{number} steps")
        return self.spent < self.seconds and number < MOST_STEPS

    def say(self, what: str) -> None:
        print(f"{self.spent:6.1f} s  {what}", flush=True)


def main(seconds: float) -> None:
    """Prints what moved."""
    torch.set_num_threads(1)
    device = CudaDevice()
    kernel = prepared_kernel(device)
    clock = Clock(seconds)
    clock.say("the kernels are there, steps begin")
    moved = random_steps(device, kernel, clock.more)
    clock.say("every output and every byte is right")
    device.close()
    print(
        f"{clock.steps} steps, {moved.rows_lowered} rows lowered, {moved.rows_raised} raised, "
        f"{moved.granules_grown} granules grown"
    )
    if clock.steps < LEAST_STEPS:
        sys.exit(f"{seconds:.0f} s were enough for {clock.steps} steps, fewer than {LEAST_STEPS}")


if __name__ == "__main__":
    main(float(sys.argv[1]))
