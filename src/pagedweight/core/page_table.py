"""WeightPageTable: bits and page states of every linear block (paper 3.1).

A page is one bit-plane of one linear block; the lookup tables have states of their own because only
the committed level's table has to be on the device. A row goes round like this:

    settled --begin_lower--> table of b' comes in --lower--> q = b', pages above q are surplus
       ^                                                          |
       +--finish_retire--  surplus pages IN_TRANSFER  <--begin_retire (no step reads them any more)

    settled --begin_reload--> pages and table IN_TRANSFER --finish_reload--> all DEVICE
       --raise_bits (safe boundary)--> q = b, the old table is surplus --begin_retire--> settled

Offload lowers q before a page goes; reload raises q after the last page came. Every `begin_*` gives
the row a new epoch and every completion names the epoch that it belongs to: a late one changes
nothing. Rows are given as integer arrays without repeats; an illegal verb is a bug in the caller
and raises ValueError, `can_*` says beforehand. Nothing here copies bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.integrity import violations
from pagedweight.core.page_state import Moving, PageState
from pagedweight.core.size_class import SlotCounts
from pagedweight.core.size_table import BlockIndex, IntArray, SizeTable
from pagedweight.errors import listing

BitsArray = NDArray[np.int32]
Mask = NDArray[np.bool_]

__all__ = ["Moving", "PageState", "WeightPageTable"]


class WeightPageTable:
    """One row per linear block; all columns are numpy arrays, read freely, written by verbs only.

    index:          names rows.
    sizes:          levels B_i and the size table M_i^b.
    committed_bits: int32 [rows], q_i, what the kernels read now.
    desired_bits:   int32 [rows], d_i, what the planner wants.
    plane_states:   uint8 [rows, P], `PageState` of each plane.
    table_states:   uint8 [rows, levels], `PageState` of each level's lookup table.
    moving:         uint8 [rows], `Moving`.
    goal_bits:      int32 [rows], level that the row is on its way to (after finish_reload it stays
                    until raise_bits or begin_retire); q_i when it is on none.
    epoch:          int64 [rows], number of the row's latest `begin_*`.
    version:        grows with every change of anything.
    """

    def __init__(self, index: BlockIndex, sizes: SizeTable, bits: int | BitsArray) -> None:
        """All rows settled at `bits` (one level, or int [rows]). Raises ValueError off levels."""
        self.index = index
        self.sizes = sizes
        rows = index.rows
        self.committed_bits: BitsArray = np.array(np.broadcast_to(bits, (rows,)), np.int32)
        self._require_levels(self.committed_bits)
        self.desired_bits = self.committed_bits.copy()
        self.goal_bits = self.committed_bits.copy()
        self.moving = np.zeros(rows, np.uint8)
        self.epoch = np.zeros(rows, np.int64)
        self.version = 0
        on_device = np.arange(sizes.planes) < self.committed_bits[:, None]
        self.plane_states = np.where(on_device, PageState.DEVICE, PageState.HOST).astype(np.uint8)
        at_level = np.array(sizes.levels) == self.committed_bits[:, None]
        self.table_states = np.where(at_level, PageState.DEVICE, PageState.HOST).astype(np.uint8)
        self._counts = self.count_slots()

    @property
    def rows(self) -> int:
        return self.index.rows

    # -- what is where ---------------------------------------------------------------------------

    def bytes_in(self, state: PageState) -> int:
        """Bytes of planes and tables in `state`; the three states add up to everything stored."""
        planes = self._counts[state, :, 0] @ np.array(self.sizes.plane_bytes, np.int64)
        return int(planes + (self._counts[state, :, 1:] * self.sizes.table_bytes).sum())

    def slots(self) -> SlotCounts:
        """Device slots taken by arena; a page IN_TRANSFER has one, whichever way it goes."""
        return _taken(self._counts)

    def taken_slots(self, rows: IntArray) -> SlotCounts:
        """`slots` of some rows, counted afresh."""
        return _taken(self.count_slots(rows))

    def count_slots(self, rows: IntArray | None = None) -> IntArray:
        """Planes and tables by state, counted afresh over `rows` (all when None).

        int64 [states, kinds, 1 + levels]: column 0 counts planes, the others tables by level.
        """
        pick = np.arange(self.rows) if rows is None else rows
        states, kinds, levels = len(PageState), len(KINDS), len(self.sizes.levels)
        kind = (pick % kinds)[:, None] * states
        planes = np.bincount((self.plane_states[pick] + kind).ravel(), minlength=kinds * states)
        of_level = np.arange(levels) * (kinds * states)
        tables = np.bincount(
            (self.table_states[pick] + kind + of_level).ravel(), minlength=levels * kinds * states
        )
        out = np.empty((states, kinds, 1 + levels), np.int64)
        out[:, :, 0] = planes.reshape(kinds, states).T
        out[:, :, 1:] = tables.reshape(levels, kinds, states).transpose(2, 1, 0)
        return out

    def device_bytes_by_row(self) -> IntArray:
        """Bytes that each row's slots take on the device, moving ones included, int64 [rows]."""
        planes = _count(self.plane_states != PageState.HOST)
        here: Mask = self.table_states != PageState.HOST
        out = np.empty(self.rows, np.int64)
        for kind, plane_bytes in enumerate(self.sizes.plane_bytes):
            of_kind = slice(kind, None, len(KINDS))
            out[of_kind] = planes[of_kind] * plane_bytes
            out[of_kind] += here[of_kind] @ self.sizes.table_bytes[kind]
        return out

    def mean_bits(self, bits: BitsArray | None = None) -> tuple[float, float, float]:
        """Mean of q (or of `bits`) per weight: (gate_up, down, both weighed by their weights)."""
        of = self.committed_bits if bits is None else bits
        gate_up, down = float(of[0::2].mean()), float(of[1::2].mean())
        weights = self.sizes.plane_bytes
        return gate_up, down, (gate_up * weights[0] + down * weights[1]) / sum(weights)

    def surplus(self, rows: IntArray | None = None) -> Mask:
        """Which rows (of `rows`) hold on the device more than q needs: planes at or above q, other
        tables."""
        pick = slice(None) if rows is None else rows
        planes = _count(self.plane_states[pick] == PageState.DEVICE) > self.committed_bits[pick]
        out: Mask = planes | (_count(self.table_states[pick] == PageState.DEVICE) > 1)
        return out

    def settled(self) -> Mask:
        """Rows with no transition, no surplus, and d = q."""
        at_rest: Mask = (self.moving == Moving.NONE) & ~self.surplus()
        at_rest &= self.desired_bits == self.committed_bits
        return at_rest

    # -- desired bits ----------------------------------------------------------------------------

    def set_desired(self, rows: ArrayLike, bits: ArrayLike) -> None:
        """d_i of `rows` becomes `bits`. Raises ValueError for a level that is not stored."""
        picked, values = self._pick(rows, bits)
        self.desired_bits[picked] = values
        self.version += 1

    # -- offload: lower q, then retire -----------------------------------------------------------

    def can_lower(self, rows: ArrayLike, bits: ArrayLike) -> Mask:
        """Which of `rows` may begin_lower to `bits`: below q, and no transition under way."""
        picked, values = self._pick(rows, bits)
        return self._still(picked) & (values < self.committed_bits[picked])

    def begin_lower(self, rows: ArrayLike, bits: ArrayLike) -> IntArray:
        """The target's lookup table starts to come in; returns the rows' new epochs."""
        self._require(self.can_lower(rows, bits), rows, "lower")
        return self._begin(rows, bits, Moving.LOWERING)

    def lower(self, rows: ArrayLike, epochs: ArrayLike) -> Mask:
        """The table is there: commit q = goal. Pages above q stay until retired.

        Returns which rows were committed; a stale epoch changes nothing.
        """
        picked, current = self._current(rows, epochs, Moving.LOWERING)
        self._land(picked, PageState.DEVICE)
        self.committed_bits[picked] = self.goal_bits[picked]
        return current

    def abort_lower(self, rows: ArrayLike, epochs: ArrayLike) -> Mask:
        """The table did not come: back to where `begin_lower` found the row, d = q."""
        return self._abort(rows, epochs, Moving.LOWERING)

    def can_retire(self, rows: ArrayLike) -> Mask:
        """Which of `rows` have surplus pages or tables and no transition under way."""
        picked = self._rows(rows)
        return self._still(picked) & self.surplus(picked)

    def begin_retire(self, rows: ArrayLike) -> IntArray:
        """Surplus pages and tables are leaving: no step may read them from here on."""
        self._require(self.can_retire(rows), rows, "retire")
        picked = self._rows(rows)
        bits = self.committed_bits[picked, None]
        planes: Mask = np.arange(self.sizes.planes) >= bits
        tables: Mask = np.array(self.sizes.levels) != bits
        self._shift(picked, planes, tables, PageState.DEVICE, PageState.IN_TRANSFER)
        return self._opened(picked, bits[:, 0], Moving.RETIRING)

    def finish_retire(self, rows: ArrayLike, epochs: ArrayLike) -> Mask:
        """The pages are gone: their bytes are free. Returns which rows were current."""
        picked, current = self._current(rows, epochs, Moving.RETIRING)
        self._land(picked, PageState.HOST)
        return current

    # -- reload: pages in, then raise q ----------------------------------------------------------

    def can_reload(self, rows: ArrayLike, bits: ArrayLike) -> Mask:
        """Which of `rows` may begin_reload to `bits`: above q, and no transition under way."""
        picked, values = self._pick(rows, bits)
        return self._still(picked) & (values > self.committed_bits[picked])

    def begin_reload(self, rows: ArrayLike, bits: ArrayLike) -> IntArray:
        """Planes below `bits` and its table that the device lacks start to come in; new epochs."""
        self._require(self.can_reload(rows, bits), rows, "reload")
        return self._begin(rows, bits, Moving.RELOADING)

    def finish_reload(self, rows: ArrayLike, epochs: ArrayLike) -> Mask:
        """Everything came: pages are DEVICE, q not yet raised. Returns which rows were current."""
        picked, current = self._current(rows, epochs, Moving.RELOADING)
        self._land(picked, PageState.DEVICE)
        return current

    def abort_reload(self, rows: ArrayLike, epochs: ArrayLike) -> Mask:
        """What was coming in stays out (rolled back or cancelled), d = q."""
        return self._abort(rows, epochs, Moving.RELOADING)

    def can_raise(self, rows: ArrayLike, bits: ArrayLike) -> Mask:
        """Which of `rows` may raise q to `bits` now: planes and table on the device, none moving.

        True after finish_reload, and for a lowered row whose pages were not retired yet.
        """
        picked, values = self._pick(rows, bits)
        planes = _count(self.plane_states[picked] == PageState.DEVICE) >= values
        table: Mask = self.table_states[picked, values - self.sizes.lowest] == PageState.DEVICE
        above: Mask = values > self.committed_bits[picked]
        return self._still(picked) & above & planes & table

    def raise_bits(self, rows: ArrayLike, bits: ArrayLike) -> None:
        """Commit q = `bits`; the old level's table is surplus from here on."""
        self._require(self.can_raise(rows, bits), rows, "raise")
        picked, values = self._pick(rows, bits)
        self.committed_bits[picked] = values
        self.goal_bits[picked] = values
        self.version += 1

    # -- invariants ------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError with every violated invariant, the rows named."""
        found = violations(self)
        if found:
            raise AssertionError("weight page table:\n  " + "\n  ".join(found))

    def recount(self) -> None:
        """Count slots by state afresh, after the columns were filled from outside (a snapshot)."""
        self._counts = self.count_slots()

    @property
    def counted(self) -> IntArray:
        """What the verbs kept count of; `count_slots()` afresh must agree."""
        return self._counts

    # -- inside ----------------------------------------------------------------------------------

    def _still(self, picked: IntArray) -> Mask:
        out: Mask = self.moving[picked] == Moving.NONE
        return out

    def _require_levels(self, bits: BitsArray) -> None:
        low, high = self.sizes.lowest, self.sizes.planes
        bad = np.unique(bits[(bits < low) | (bits > high)])
        if bad.size:
            raise ValueError(f"bits {listing(bad.tolist())} are outside the levels {low}..{high}")

    def _rows(self, rows: ArrayLike) -> IntArray:
        picked = np.atleast_1d(np.asarray(rows, np.int64))
        if picked.size and (picked.min() < 0 or picked.max() >= self.rows):
            raise ValueError(f"rows {picked.min()}..{picked.max()} of a table of {self.rows}")
        if np.bincount(picked).max(initial=0) > 1:
            raise ValueError("a row is named twice in one call")
        return picked

    def _pick(self, rows: ArrayLike, bits: ArrayLike) -> tuple[IntArray, BitsArray]:
        picked = self._rows(rows)
        values = np.array(np.broadcast_to(bits, picked.shape), np.int32)
        self._require_levels(values)
        return picked, values

    def _require(self, allowed: Mask, rows: ArrayLike, verb: str) -> None:
        if not allowed.all():
            bad = np.atleast_1d(np.asarray(rows, np.int64))[~allowed]
            names = listing(
                f"{self.index.name(r)} (q {self.committed_bits[r]}, "
                f"{Moving(int(self.moving[r])).name.lower()})"
                for r in bad.tolist()
            )
            raise ValueError(f"cannot {verb}: {names}")

    def _begin(self, rows: ArrayLike, bits: ArrayLike, what: Moving) -> IntArray:
        picked, goal = self._pick(rows, bits)
        planes: Mask = np.arange(self.sizes.planes) < goal[:, None]
        tables: Mask = np.array(self.sizes.levels) == goal[:, None]
        self._shift(picked, planes, tables, PageState.HOST, PageState.IN_TRANSFER)
        return self._opened(picked, goal, what)

    def _shift(
        self, picked: IntArray, planes: Mask, tables: Mask, old: PageState, new: PageState
    ) -> None:
        """Of the pages that `planes` [n, planes] and `tables` [n, levels] name, those in state
        `old` go to `new`."""
        moved = []
        for column, named in ((self.plane_states, planes), (self.table_states, tables)):
            part = column[picked]
            moved.append(named & (part == old))
            part[moved[-1]] = new
            column[picked] = part
        kinds = picked % len(KINDS)
        for kind in range(len(KINDS)):
            of_planes, of_tables = (mask[kinds == kind] for mask in moved)
            count = np.append(np.count_nonzero(of_planes), of_tables.sum(0))
            self._counts[old, kind] -= count
            self._counts[new, kind] += count

    def _opened(self, picked: IntArray, goal: BitsArray, what: Moving) -> IntArray:
        self.moving[picked] = what
        self.goal_bits[picked] = goal
        self.epoch[picked] += 1
        self.version += 1
        return self.epoch[picked]

    def _current(self, rows: ArrayLike, epochs: ArrayLike, what: Moving) -> tuple[IntArray, Mask]:
        picked = self._rows(rows)
        stamps = np.broadcast_to(np.asarray(epochs, np.int64), picked.shape)
        current = (self.epoch[picked] == stamps) & (self.moving[picked] == what)
        return picked[current], current

    def _land(self, picked: IntArray, state: PageState) -> None:
        every = np.ones((1, 1), np.bool_)
        self._shift(picked, every, every, PageState.IN_TRANSFER, state)
        self.moving[picked] = Moving.NONE
        self.version += 1

    def _abort(self, rows: ArrayLike, epochs: ArrayLike, what: Moving) -> Mask:
        picked, current = self._current(rows, epochs, what)
        self._land(picked, PageState.HOST)
        self.goal_bits[picked] = self.committed_bits[picked]
        self.desired_bits[picked] = self.committed_bits[picked]
        return current


def _taken(counts: IntArray) -> SlotCounts:
    taken = counts[PageState.IN_TRANSFER] + counts[PageState.DEVICE]
    return SlotCounts(taken[:, 0].copy(), taken[:, 1:].copy())


def _count(mask: Mask) -> IntArray:
    """True entries of each row, int64 [rows]."""
    out: IntArray = mask.sum(1, dtype=np.int64)
    return out
