"""How long from asking for memory to usable KV blocks, and what does a running batch feel of it?

For each size: KV asks for it at once while steps go on; the time runs from then to the moment when
the scheduler may hand out the last block. Then the load is gone, and the time runs until all bits
are back. Step times during both are held against those of the same engine while nothing moves.

    pagedweight bench movement --json benchmarks/results      on a machine with a CUDA GPU
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedweight.bench.arguments import positive, positive_float
from pagedweight.bench.layers import SHAPES
from pagedweight.bench.movement_engine import POLICY, MovementEngine, Setting
from pagedweight.bench.record import machine, write_record
from pagedweight.errors import UserError
from pagedweight.memory.cuda.driver import bindings
from pagedweight.memory.cuda.pages import CudaPages

QUIET_STEPS = 300
PATIENCE = 30.0
GIB = 1 << 30


def measure(engine: MovementEngine, nbytes: int) -> dict[str, Any]:
    """One way to KV and back; ValueError when so much cannot be reached."""
    blocks = -(-nbytes // (engine.block_bytes * engine.granule_blocks)) * engine.granule_blocks
    granules = engine.controller.granules
    goal = granules.usable_blocks + blocks
    if goal > engine.granules * engine.granule_blocks - 1:
        raise ValueError(f"{nbytes} bytes are more than KV can reach in {engine.setting.memory}")
    pending = engine.free_blocks() + blocks - POLICY.offload_blocks - 1
    before = dict(engine.worker.counters.as_dict())
    to_kv = _until(engine, pending, lambda: granules.usable_blocks >= goal)
    back = _until(engine, 0, engine.settled)
    counted = engine.worker.counters.as_dict()
    return {
        "bytes": nbytes,
        "to_kv_ms": 1e3 * to_kv["seconds"],
        "to_kv_steps": to_kv["steps"],
        "back_ms": 1e3 * back["seconds"],
        "back_steps": back["steps"],
        **{f"to_kv_{name}": value for name, value in _spread(to_kv).items()},
        **{f"back_{name}": value for name, value in _spread(back).items()},
        **{
            name: counted[name] - before[name]
            for name in ("uploaded_bytes", "compacted_bytes", "rolled_back", "reclaimed_pages")
        },
    }


def _until(engine: MovementEngine, pending: int, reached: Any) -> dict[str, Any]:
    start = last = time.perf_counter()
    first, times = len(engine.host_seconds), []
    while not reached():
        now = engine.step(pending)
        times.append(now - last)
        last = now
        if now - start > PATIENCE:
            raise RuntimeError(f"not there after {PATIENCE} s: {engine.controller.status}")
    host = engine.host_seconds[first:]
    return {"seconds": last - start, "steps": len(times), "times": times, "host": host}


def _spread(run: dict[str, Any]) -> dict[str, float]:
    """Milliseconds: step times, and what of them the host spent on plan and memory."""
    step, host = 1e3 * np.array(run["times"]), 1e3 * np.array(run["host"])
    return {
        "step_p50_ms": float(np.median(step)),
        "step_p99_ms": float(np.percentile(step, 99)),
        "step_max_ms": float(step.max()),
        "host_p50_ms": float(np.median(host)),
        "host_max_ms": float(host.max()),
    }


def quiet(engine: MovementEngine) -> dict[str, float]:
    """Step times while nothing moves."""
    for _ in range(20):
        engine.step(0)
    times, first, last = [], len(engine.host_seconds), time.perf_counter()
    for _ in range(QUIET_STEPS):
        now = engine.step(0)
        times.append(now - last)
        last = now
    return _spread({"times": times, "host": engine.host_seconds[first:]})


def driver_costs(pages: CudaPages, counts: Sequence[int] = (1, 8, 64, 512)) -> list[dict[str, Any]]:
    """Microseconds of one `map` and one `unmap` of so many pages, in plain and tolerant ranges.

    `pages` has at least max(counts) pages that nobody holds, the first ones.
    """
    rows = []
    for tolerant in (False, True):
        name = f"costs-{tolerant}"
        span = pages.reserve(max(counts) * pages.page_bytes, name, tolerant)
        for count in counts:
            spent = np.empty((7, 2))
            for repeat in range(len(spent)):
                marks = [time.perf_counter()]
                pages.map(span, 0, range(count))
                marks.append(time.perf_counter())
                pages.unmap(span, 0, count)
                marks.append(time.perf_counter())
                spent[repeat] = np.diff(marks)
            map_us, unmap_us = (1e6 * np.median(spent, axis=0)).tolist()
            rows.append(
                {"tolerant": tolerant, "pages": count, "map_us": map_us, "unmap_us": unmap_us}
            )
    return rows


def show(row: dict[str, Any], still: dict[str, float]) -> str:
    """A few lines of the table."""

    def steps(of: str, numbers: dict[str, float]) -> str:
        names = [f"{of}step_{name}_ms" for name in ("p50", "p99", "max")]
        return "/".join(f"{numbers[name]:.2f}" for name in names)

    return (
        f"{row['bytes'] / GIB:5.2f} GiB  to KV {row['to_kv_ms']:8.1f} ms in "
        f"{row['to_kv_steps']:3d} steps, back {row['back_ms']:8.1f} ms in {row['back_steps']:4d}; "
        f"{row['rolled_back']} refused\n"
        f"   step p50/p99/max ms: {steps('to_kv_', row)} to KV, {steps('back_', row)} back, "
        f"{steps('', still)} still; host at most {row['to_kv_host_max_ms']:.2f}, "
        f"{row['back_host_max_ms']:.2f} ms"
    )


def run(setting: Setting, sizes: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each of `sizes` (GiB), with the step times of the same engine at rest."""
    engine = MovementEngine(setting)
    most = setting.pages_per_step or "any number"
    print(
        f"pages of {setting.page_bytes >> 20} MiB, {most} a step: "
        f"{engine.usable_granules} granules at start, {engine.granules} reachable",
        flush=True,
    )
    still, rows = quiet(engine), []
    for gib in sizes:
        measure(engine, int(gib * GIB))  # the first time touches fresh addresses
        row = measure(engine, int(gib * GIB))
        print(show(row, still), flush=True)
        about = {"page_bytes": setting.page_bytes, "pages_per_step": setting.pages_per_step}
        rows.append({**about, **row, **{f"still_{name}": value for name, value in still.items()}})
    engine.close()
    return rows


def costs() -> list[dict[str, Any]]:
    """`driver_costs` at the smallest page."""
    pages = CudaPages(bindings(), torch.cuda.current_device())
    pages.create(512)
    rows = driver_costs(pages)
    pages.close()
    for row in rows:
        print(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and write it with `--json`."""
    parser = argparse.ArgumentParser(prog="pagedweight bench movement", description=__doc__)
    for name, kind, default, meaning in (
        ("--memory-gib", positive_float, 16.0, "of experts and KV together"),
        ("--batch", positive, Setting.batch, "tokens in a step"),
        ("--reserve-rows", positive, Setting.reserve_rows, "rows that the reserve can lower"),
        ("--rows-per-batch", positive, Setting.rows_per_batch, "rows moved together"),
        ("--pages-per-step", int, Setting.pages_per_step, "most pages a step; 0: no limit"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen1.5-moe", help="whose")
    parser.add_argument(
        "--gib",
        type=positive_float,
        nargs="+",
        default=[0.25, 1.0, 4.0],
        help="what KV asks for at once (%(default)s)",
    )
    parser.add_argument(
        "--page-mib",
        type=positive,
        nargs="+",
        default=[2, 8, 16],
        help="sizes of a page (%(default)s)",
    )
    parser.add_argument("--json", type=Path, help="folder to write movement.json into")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UserError("bench movement moves a GPU's memory and needs one")
    rows = []
    for mib in asked.page_mib:
        setting = Setting(
            SHAPES[asked.shape],
            memory=int(asked.memory_gib * GIB),
            reserve_rows=asked.reserve_rows,
            rows_per_batch=asked.rows_per_batch,
            batch=asked.batch,
            page_bytes=mib << 20,
            pages_per_step=asked.pages_per_step or None,
        )
        rows += run(setting, asked.gib)
    driver = costs()
    if asked.json:
        record = {
            "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
            "shape": asked.shape,
            "memory_bytes": int(asked.memory_gib * GIB),
            "batch": asked.batch,
            "reserve_rows": asked.reserve_rows,
            "rows_per_batch": asked.rows_per_batch,
            "rows": rows,
            "driver": driver,
        }
        write_record(asked.json / "movement.json", record)


if __name__ == "__main__":
    main()
