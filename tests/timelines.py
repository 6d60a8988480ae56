"""Timelines for tests: a load that rises and falls, bits that give way and return."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pagedweight.runtime.timeline import BudgetSplit, Header, Sample, TimelineWriter

MIB = 1 << 20
HEADER = Header(
    started=1.7e9,
    version="1.2.3",
    model="tiny",
    precision="elastic",
    levels=(2, 3, 4, 5, 6),
    ranks=1,
    engine=0,
    budget=BudgetSplit(20 * MIB, 65536, MIB, 15 * MIB, 4 * MIB, 4 * MIB, 15 * MIB),
    block_tokens=32,
    block_bytes=65536,
    granule_blocks=4,
    usable_at_start=64,
    reachable=240,
    offload_blocks=16,
    reload_blocks=64,
    dwell_steps=32,
)
FIRST = Sample(
    time=1.7e9,
    monotonic=100.0,
    step=0,
    running=0,
    waiting=0,
    kv_demanded=0,
    kv_used=0,
    kv_usable=64,
    kv_reachable=240,
    bits=6.0,
    bits_gate_up=6.0,
    bits_down=6.0,
    device_bytes=15 * MIB,
    transfer_bytes=0,
    kv_bytes=4 * MIB,
    free_bytes=0,
    target_bytes=0,
    plan="none",
    stage="",
    plan_damage=0.0,
    damage=0.0,
    rows_waiting=0,
    batches=0,
    preemptions=0,
    tokens_scheduled=0,
    tokens_generated=0,
    rows_lowered=0,
    rows_raised=0,
    copied_bytes=0,
    compacted_bytes=0,
    floor_hits=0,
    damage_taken=0.0,
    rollbacks=0,
)


def burst(steps: int = 100, preempts: int = 0) -> list[Sample]:
    """A start, then a step every 0.1 s: bits fall in the second quarter, rise in the fourth.

    `preempts` requests are preempted halfway.
    """
    samples = [FIRST]
    for step in range(1, steps + 1):
        part, last = step / steps, samples[-1]
        falling, rising = 0.25 < part <= 0.5, part > 0.75
        bits = last.bits - falling * 12 / steps + rising * 12 / steps
        usable = last.kv_usable + 4 * (falling - rising)
        at = 100.0 + 50 + 0.1 * step
        samples.append(
            replace(
                last,
                time=FIRST.time + at - 100.0,
                monotonic=at,
                step=step,
                running=4 if step < steps else 0,
                kv_used=round(usable * 0.8) if step < steps else 0,
                kv_demanded=round(usable * 0.9) if step < steps else 0,
                kv_usable=usable,
                bits=bits,
                bits_gate_up=bits - 0.1,
                bits_down=bits + 0.2,
                plan="offload" if falling else "reload" if rising else "none",
                rows_lowered=last.rows_lowered + 8 * falling,
                rows_raised=last.rows_raised + 8 * rising,
                tokens_scheduled=4 * step + 100,
                tokens_generated=4 * (step - 1),  # this step's come after it
                preemptions=preempts * (step >= steps // 2),
            )
        )
    return samples


def write(path: Path, samples: list[Sample], header: Header = HEADER) -> Path:
    """A timeline file of these samples."""
    writer = TimelineWriter(path, header)
    for sample in samples:
        writer.write(sample)
    writer.close()
    return path
