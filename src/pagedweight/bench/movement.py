"""How long from asking for memory to usable KV blocks, and what does a running batch feel of it?

For each size: KV asks for it at once while steps go on; the time runs from then to the moment when
the scheduler may hand out the last block. It stays for a while, so that steps at a mixed plan are
told from steps in which something moves. Then the load is gone, and the time runs until all bits
are back. Step times are held against those of the same engine while nothing moves; all repeats
count together, as one way has few steps. One engine takes all of --pages-per-step in turn.

    pagedweight bench movement --json benchmarks/results      on a machine with a CUDA GPU
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedweight.bench.arguments import positive, positive_float
from pagedweight.bench.layers import SHAPES
from pagedweight.bench.movement_engine import POLICY, MovementEngine, Setting
from pagedweight.bench.record import machine, write_record
from pagedweight.errors import UserError
from pagedweight.memory.cuda.device import CudaDevice
from pagedweight.memory.cuda.pages import CudaPages
from pagedweight.serving.elastic.backend import GPU_PAGES_PER_STEP

QUIET_STEPS = 300
SETTLING_STEPS, THERE_STEPS = 8, 40
"""At lowered bits, nothing moving: what steps at a mixed plan take by themselves."""
WAYS = ("to_kv", "there", "back")
PATIENCE = 30.0
GIB = 1 << 30


def measure(engine: MovementEngine, nbytes: int, repeats: int) -> dict[str, Any]:
    """`repeats` times to KV, a while there, and back: medians of the times, and the times of all
    steps together. ValueError when so much cannot be reached."""
    runs = [_there_and_back(engine, nbytes) for _ in range(repeats + 1)][1:]  # fresh addresses
    row: dict[str, Any] = {"bytes": nbytes, "repeats": repeats}
    for way in ("to_kv", "back"):
        seconds = [found[way]["seconds"] for found in runs]
        row[f"{way}_ms"] = 1e3 * float(np.median(seconds))
        row[f"{way}_worst_ms"] = 1e3 * max(seconds)
        row[f"{way}_steps"] = int(np.median([found[way]["steps"] for found in runs]))
    for way in WAYS:
        pooled = {kind: [t for f in runs for t in f[way][kind]] for kind in ("times", "host")}
        row |= {f"{way}_{name}": value for name, value in _spread(pooled).items()}
        row[f"{way}_parts_ms"], row[f"{way}_worst_parts_ms"] = _parts([f[way] for f in runs])
    for name in ("uploaded_bytes", "compacted_bytes", "rolled_back", "reclaimed_pages"):
        row[name] = int(np.median([found["counted"][name] for found in runs]))
    return row


def _there_and_back(engine: MovementEngine, nbytes: int) -> dict[str, dict[str, Any]]:
    """Step times of each of WAYS, and what the worker counted."""
    blocks = -(-nbytes // (engine.block_bytes * engine.granule_blocks)) * engine.granule_blocks
    granules = engine.controller.granules
    goal = granules.usable_blocks + blocks
    if goal > engine.granules * engine.granule_blocks - 1:
        raise ValueError(f"{nbytes} bytes are more than KV can reach in {engine.setting.memory}")
    pending = engine.free_blocks() + blocks - POLICY.offload_blocks - 1
    before = dict(engine.worker.counters.as_dict())
    to_kv = _until(engine, lambda: pending, lambda: granules.usable_blocks >= goal)
    # Neither pressure nor room for bits to return: the mixed plan that movement has led to.
    between = (POLICY.offload_blocks + POLICY.reload_blocks) // 2
    for _ in range(SETTLING_STEPS):
        engine.step(engine.free_blocks() - between)
    steps = iter(range(THERE_STEPS + 1))
    there = _until(
        engine,
        lambda: engine.free_blocks() - between,
        lambda: next(steps) == THERE_STEPS,
    )
    back = _until(engine, lambda: 0, engine.settled)
    counted = engine.worker.counters.as_dict()
    moved = {name: counted[name] - before[name] for name in before}
    return {"to_kv": to_kv, "there": there, "back": back, "counted": moved}


def _until(
    engine: MovementEngine, pending: Callable[[], int], reached: Callable[[], bool]
) -> dict[str, Any]:
    start = last = time.perf_counter()
    first, times = len(engine.host_seconds), []
    while not reached():
        now = engine.step(pending())
        times.append(now - last)
        last = now
        if now - start > PATIENCE:
            raise RuntimeError(f"not there after {PATIENCE} s: {engine.controller.status}")
    host = engine.host_seconds[first:]
    parts = engine.host_parts[first:]
    return {
        "seconds": last - start,
        "steps": len(times),
        "times": times,
        "host": host,
        "parts": parts,
    }


def _parts(runs: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of the host's by part: of all steps of a way, on average over `runs`; and of the
    step that took it longest. What is left of the host's time is `rest`."""

    def split(host: float, parts: Sequence[dict[str, float]], runs: int) -> dict[str, float]:
        sums = {name: sum(part[name] for part in parts) for name in parts[0]}
        sums["rest"] = host - sum(sums.values())
        return {name: round(1e3 * seconds / runs, 3) for name, seconds in sums.items()}

    steps = [(host, part) for r in runs for host, part in zip(r["host"], r["parts"], strict=True)]
    worst = max(steps, key=lambda step: step[0])
    together = split(sum(host for host, _ in steps), [part for _, part in steps], len(runs))
    return together, split(worst[0], [worst[1]], 1)


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

    ways = ", ".join(f"{steps(f'{way}_', row)} {way}" for way in WAYS)
    return (
        f"{row['bytes'] / GIB:5.2f} GiB  to KV {row['to_kv_ms']:8.1f} ms "
        f"({row['to_kv_worst_ms']:.1f} at most) in {row['to_kv_steps']:3d} steps, back "
        f"{row['back_ms']:8.1f} ms in {row['back_steps']:4d}; {row['rolled_back']} refused\n"
        f"   step p50/p99/max ms: {ways}, {steps('', still)} still; "
        f"host at most {row['to_kv_host_max_ms']:.2f}, {row['back_host_max_ms']:.2f} ms\n"
        f"   host to KV, all and longest step, ms: {row['to_kv_parts_ms']} "
        f"{row['to_kv_worst_parts_ms']}"
    )


def run(
    setting: Setting,
    sizes: Sequence[float],
    most_pages: Sequence[int],
    repeats: int,
    told: Callable[[dict[str, Any]], None],
) -> None:
    """A row for each of `most_pages` (a step; 0: any number) and `sizes` (GiB), with the step times
    of the same engine at rest; `told` hears of each."""
    engine = MovementEngine(setting)
    print(
        f"pages of {setting.page_bytes >> 20} MiB: "
        f"{engine.usable_granules} granules at start, {engine.granules} reachable",
        flush=True,
    )
    for most in most_pages:
        engine.worker.pages_per_step = most or None
        print(f"{most or 'any number of'} pages a step", flush=True)
        still = quiet(engine)
        for gib in sizes:
            row = measure(engine, int(gib * GIB), repeats)
            print(show(row, still), flush=True)
            about = {
                "page_bytes": setting.page_bytes,
                "pages_per_step": most or None,
                "rows_per_batch": setting.rows_per_batch,
            }
            told({**about, **row, **{f"still_{name}": value for name, value in still.items()}})
    engine.close()


def costs() -> list[dict[str, Any]]:
    """`driver_costs` at the smallest page; on a device, which makes the GPU's context."""
    device = CudaDevice()
    device.create(512)
    rows = driver_costs(device.pages)
    device.close()
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
        ("--repeats", positive, 8, "of each size, after one that is not counted"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen1.5-moe", help="whose")
    for name, each, several, meaning in (
        ("--gib", positive_float, [0.25, 1.0, 4.0], "what KV asks for at once"),
        ("--page-mib", positive, [16], "sizes of a page"),
        ("--pages-per-step", int, [GPU_PAGES_PER_STEP], "most pages a step; 0: no limit"),
        ("--rows-per-batch", positive, [Setting.rows_per_batch], "rows moved together"),
    ):
        shown = f"{meaning} (%(default)s)"
        parser.add_argument(name, type=each, nargs="+", default=several, help=shown)
    parser.add_argument("--json", type=Path, help="folder to write movement.json into")
    parser.add_argument("--add", action="store_true", help="keep the rows that are there already")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UserError("bench movement moves a GPU's memory and needs one")
    record: dict[str, Any] = {
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "shape": asked.shape,
        "memory_bytes": int(asked.memory_gib * GIB),
        "batch": asked.batch,
        "reserve_rows": asked.reserve_rows,
        "rows": [],
        "driver": costs(),
    }
    path = asked.json / "movement.json" if asked.json else None
    if path and asked.add and path.exists():
        record["rows"] = json.loads(path.read_text())["rows"]

    def told(row: dict[str, Any]) -> None:
        """Written as they come: a long measurement may be cut short."""
        record["rows"].append(row)
        if path:
            write_record(path, record)

    for mib, rows in product(asked.page_mib, asked.rows_per_batch):
        setting = Setting(
            SHAPES[asked.shape],
            memory=int(asked.memory_gib * GIB),
            reserve_rows=asked.reserve_rows,
            rows_per_batch=rows,
            batch=asked.batch,
            page_bytes=mib << 20,
        )
        run(setting, asked.gib, asked.pages_per_step, asked.repeats, told)


if __name__ == "__main__":
    main()
