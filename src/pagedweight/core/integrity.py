"""What must hold of a weight page table at every moment; each broken rule becomes one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.page_state import Moving, PageState
from pagedweight.errors import listing

if TYPE_CHECKING:
    from pagedweight.core.page_table import WeightPageTable

Mask = NDArray[np.bool_]


def violations(table: WeightPageTable) -> list[str]:
    """Every violated invariant of `table` as one sentence with its rows; empty when it is sound."""
    rules = _bits(table)
    if not any(mask.any() for mask in rules.values()):  # the others index by bits
        rules |= _pages(table) | _transitions(table)
    found = [_line(table, rule, mask) for rule, mask in rules.items() if mask.any()]
    return found + _totals(table)


def _line(table: WeightPageTable, rule: str, mask: Mask) -> str:
    rows = np.flatnonzero(mask)
    return f"{rule}: {listing(table.index.name(int(row)) for row in rows)}"


def _bits(table: WeightPageTable) -> dict[str, Mask]:
    low, high = table.sizes.lowest, table.sizes.planes
    columns = {
        "committed": table.committed_bits,
        "desired": table.desired_bits,
        "goal": table.goal_bits,
    }
    rules = {
        f"{name} bits outside {low}..{high}": (bits < low) | (bits > high)
        for name, bits in columns.items()
    }
    unknown = table.moving > max(Moving)
    return rules | {"unknown transition": unknown}


def _pages(table: WeightPageTable) -> dict[str, Mask]:
    planes, tables = table.plane_states, table.table_states
    q = table.committed_bits
    below_q = np.arange(table.sizes.planes) < q[:, None]
    own = np.take_along_axis(tables, (q - table.sizes.lowest)[:, None].astype(np.int64), axis=1)
    steps = np.diff(planes.astype(np.int16), axis=1)
    return {
        "a plane below q is not DEVICE": (below_q & (planes != PageState.DEVICE)).any(1),
        "a plane lies deeper on the device than the one before it": (steps > 0).any(1),
        "the committed level's lookup table is not DEVICE": own[:, 0] != PageState.DEVICE,
        "an unknown page state": (planes > max(PageState)).any(1)
        | (tables > max(PageState)).any(1),
    }


def _transitions(table: WeightPageTable) -> dict[str, Mask]:
    planes, tables = table.plane_states, table.table_states
    q, goal, moving = table.committed_bits, table.goal_bits, table.moving
    plane, level = np.arange(table.sizes.planes), np.array(table.sizes.levels)
    planes_move, tables_move = planes == PageState.IN_TRANSFER, tables == PageState.IN_TRANSFER
    is_goal = level == goal[:, None]
    arriving = (moving == Moving.LOWERING) | (moving == Moving.RELOADING)
    needed_absent = ((planes == PageState.HOST) & (plane < goal[:, None])).any(1)
    needed_absent |= ((tables == PageState.HOST) & is_goal).any(1)
    not_goal = (planes_move & (plane >= goal[:, None])).any(1) | (tables_move & ~is_goal).any(1)
    beyond_q = ((planes == PageState.DEVICE) & (plane >= q[:, None])).any(1)
    beyond_q |= ((tables == PageState.DEVICE) & (level != q[:, None])).any(1)
    return {
        "a page is IN_TRANSFER and the row is not moving": (moving == Moving.NONE)
        & (planes_move.any(1) | tables_move.any(1)),
        "something moves in that the goal does not need": arriving & not_goal,
        "the goal needs a page that is neither there nor coming": (goal != q) & needed_absent,
        "lowering to a level that is not below q": (moving == Moving.LOWERING) & (goal >= q),
        "reloading to a level that is not above q": (moving == Moving.RELOADING) & (goal <= q),
        "lowering moves a plane": (moving == Moving.LOWERING) & planes_move.any(1),
        "retiring towards another level than q": (moving == Moving.RETIRING) & (goal != q),
        "retiring leaves a page behind": (moving == Moving.RETIRING) & beyond_q,
        "at rest below a goal that was never committed": (moving == Moving.NONE) & (goal < q),
    }


def _totals(table: WeightPageTable) -> list[str]:
    counted, kept = table.count_slots(), table.counted
    per_pair = sum(table.sizes.plane_bytes) * table.sizes.planes
    stored = (per_pair + int(table.sizes.table_bytes.sum())) * (table.rows // len(KINDS))
    total = sum(table.bytes_in(state) for state in PageState)
    found = []
    if not np.array_equal(counted, kept):
        found.append(f"slots by state kept {kept.tolist()}, counted {counted.tolist()}")
    if total != stored:
        found.append(f"bytes of all states {total}, stored {stored}")
    return found
