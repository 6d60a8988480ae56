"""What every benchmark writes beside its numbers: where they were measured, and with what."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from pagedweight.errors import UserError
from pagedweight.eval.results import write_results


def machine() -> dict[str, Any]:
    """Processor, threads and versions; names no host."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [ln for ln in cpuinfo.read_text().splitlines() if ln.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """The shortest of `repeats` runs after one that is not counted: other load only adds."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote, with its list of rows; UserError when the file is another."""
    way_out = "move it away, or write to another place"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is there and cannot be read ({error}): {way_out}") from None
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is there and has no rows of this benchmark: {way_out}")
    return dict(found)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """`eval.results.write_results`, and the folder where there is none yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_results(path, record)
