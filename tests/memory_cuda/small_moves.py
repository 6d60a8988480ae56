"""Random transitions under running steps for so many seconds: short enough for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \\
      python tests/memory_cuda/small_moves.py SECONDS

Exits with 1 when a step computed with planes that were not committed, or a byte is not the host's.
Comparing takes about as long again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))  # ranks

from test_cuda_rank import prepared_kernel, random_steps

from pagedweight.memory.cuda.device import CudaDevice

LEAST_STEPS, MOST_STEPS = 20, 400


def main(seconds: float) -> None:
    """Prints what moved."""
    device = CudaDevice()
    kernel = prepared_kernel(device)
    begun, steps = time.perf_counter(), 0

    def more(number: int) -> bool:
        nonlocal steps
        steps, spent = number, time.perf_counter() - begun
        return number < LEAST_STEPS or (spent < seconds and number < MOST_STEPS)

    print(f"{seconds:.0f} s of steps begin", flush=True)
    moved = random_steps(device, kernel, more)
    device.close()
    print(
        f"{steps} steps, {moved.rows_lowered} rows lowered, {moved.rows_raised} raised, "
        f"{moved.granules_grown} granules grown; every output and every byte is right"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]))
