"""The weight page table: verbs, epochs, bytes, snapshots; every invariant after random steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedweight.core.geometry import LayerShape
from pagedweight.core.page_table import Moving, PageState, WeightPageTable
from pagedweight.core.size_class import SizeClassPages
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.core.snapshot import TableSnapshot

LEVELS = (2, 3, 4, 5, 6)
SHAPE = LayerShape(experts=3, hidden=128, intermediate=80)
INDEX = BlockIndex(layers=2, experts=3)


def table_at(bits: int) -> WeightPageTable:
    return WeightPageTable(INDEX, SizeTable.of(SHAPE, LEVELS), bits)


def lower(table: WeightPageTable, rows: list[int], bits: int) -> None:
    assert table.lower(rows, table.begin_lower(rows, bits)).all()


def retire(table: WeightPageTable, rows: list[int]) -> None:
    assert table.finish_retire(rows, table.begin_retire(rows)).all()


def reload(table: WeightPageTable, rows: list[int], bits: int) -> None:
    assert table.finish_reload(rows, table.begin_reload(rows, bits)).all()
    table.raise_bits(rows, bits)


def test_rows_run_layer_expert_kind() -> None:
    assert INDEX.row(1, 2, 1) == (1 * 3 + 2) * 2 + 1 == 11
    assert [INDEX.block(row) for row in (0, 1, 2, 11)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 2, 1),
    ]
    assert INDEX.name(11) == "layer 1 expert 2 down"


def test_sizes_are_equation_3() -> None:
    sizes = SizeTable.of(SHAPE, LEVELS)
    for kind, block in enumerate(SHAPE.blocks):
        for bits in LEVELS:
            assert sizes.bytes_at(kind, bits) == block.resident_bytes(bits)
    assert sizes.delta(1, 5, 3) == SHAPE.down.resident_bytes(5) - SHAPE.down.resident_bytes(3)
    bits = np.array([2, 6] * 6, np.int32)
    assert sizes.total(bits) == 6 * (SHAPE.gate_up.resident_bytes(2) + SHAPE.down.resident_bytes(6))


@pytest.mark.parametrize("levels", [(), (2, 4), (1, 2), (8, 9), (3, 2)])
def test_levels_must_be_contiguous(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        SizeTable.of(SHAPE, levels)


def test_offload_lowers_q_before_pages_go() -> None:
    table = table_at(6)
    full = table.bytes_in(PageState.DEVICE)
    epochs = table.begin_lower([3], 4)
    assert table.committed_bits[3] == 6
    assert table.bytes_in(PageState.IN_TRANSFER) == SHAPE.down.table_bytes(4)
    table.lower([3], epochs)
    assert table.committed_bits[3] == 4
    assert (table.plane_states[3] == PageState.DEVICE).all()  # a running step may still read them
    epochs = table.begin_retire([3])
    held = SHAPE.down.resident_bytes(6) + SHAPE.down.table_bytes(4)
    assert table.device_bytes_by_row()[3] == held  # leaving, not yet free
    table.finish_retire([3], epochs)
    released = full - table.bytes_in(PageState.DEVICE)
    assert released == table.sizes.delta(1, 6, 4)
    table.check_integrity()


def test_reload_raises_q_after_pages_came() -> None:
    table = table_at(3)
    epochs = table.begin_reload([0, 1], [5, 6])
    assert not table.can_raise([0, 1], [5, 6]).any()
    assert table.committed_bits[:2].tolist() == [3, 3]
    table.finish_reload([0, 1], epochs)
    assert table.committed_bits[:2].tolist() == [3, 3]
    table.raise_bits([0, 1], [5, 6])
    retire(table, [0, 1])  # the 3-bit tables
    assert table.device_bytes_by_row()[:2].tolist() == [
        SHAPE.gate_up.resident_bytes(5),
        SHAPE.down.resident_bytes(6),
    ]
    table.check_integrity()


def test_slots_are_counted_by_state_kind_and_level() -> None:
    table, rng = table_at(4), np.random.default_rng(0)
    table.plane_states[:] = rng.integers(0, 3, table.plane_states.shape)
    table.table_states[:] = rng.integers(0, 3, table.table_states.shape)
    for rows in (None, np.array([7]), np.array([0, 3, 4, 11]), np.empty(0, np.int64)):
        wanted = np.zeros((3, 2, 1 + len(LEVELS)), np.int64)
        for row in range(table.rows) if rows is None else rows.tolist():
            for state in table.plane_states[row].tolist():
                wanted[state, row % 2, 0] += 1
            for level, state in enumerate(table.table_states[row].tolist()):
                wanted[state, row % 2, 1 + level] += 1
        assert table.count_slots(rows).tolist() == wanted.tolist()


def test_stale_completions_change_nothing() -> None:
    table = table_at(3)
    old = table.begin_reload([0], 5)
    assert table.abort_reload([0], old).tolist() == [True]
    new = table.begin_reload([0], 6)
    before = table.plane_states.copy()
    assert table.finish_reload([0], old).tolist() == [False]
    assert table.abort_reload([0], old).tolist() == [False]
    assert table.finish_retire([0], new).tolist() == [False]  # right epoch, another transition
    assert np.array_equal(table.plane_states, before)
    assert table.finish_reload([0], new).tolist() == [True]
    assert table.finish_reload([0], new).tolist() == [False]
    table.check_integrity()


def test_lowered_row_may_rise_again_until_retired() -> None:
    table = table_at(6)
    lower(table, [0], 3)
    assert table.can_raise([0], 6).all()
    assert not table.can_raise([0], 5).any()  # its table is not on the device
    table.raise_bits([0], 6)
    retire(table, [0])
    assert table.settled().all()


def test_illegal_verbs_name_the_row() -> None:
    table = table_at(4)
    with pytest.raises(ValueError, match=r"cannot lower: layer 0 expert 1 gate_up \(q 4"):
        table.begin_lower([2], 5)
    with pytest.raises(ValueError, match="cannot retire"):
        table.begin_retire([2])
    table.begin_reload([2], 6)
    with pytest.raises(ValueError, match="reloading"):
        table.begin_lower([2], 3)
    with pytest.raises(ValueError, match="twice"):
        table.begin_lower([1, 1], 3)
    with pytest.raises(ValueError, match="outside the levels"):
        table.set_desired([1], 7)
    with pytest.raises(ValueError, match="rows"):
        table.set_desired([12], 3)


def test_mean_bits_weighs_kinds_by_weights() -> None:
    table = table_at(6)
    lower(table, list(range(1, 12, 2)), 3)
    gate_up, down, both = table.mean_bits()
    weights = SHAPE.gate_up.plane_bytes, SHAPE.down.plane_bytes
    assert (gate_up, down) == (6.0, 3.0)
    assert both == (6 * weights[0] + 3 * weights[1]) / sum(weights)


@pytest.mark.parametrize(
    "column, row, value, told",
    [
        ("committed_bits", 4, 9, "committed bits outside 2..6"),
        ("desired_bits", 4, 1, "desired bits outside 2..6"),
        ("committed_bits", 4, 5, "a plane below q is not DEVICE"),
        ("moving", 4, 9, "unknown transition"),
        ("moving", 4, Moving.RELOADING, "reloading to a level that is not above q"),
        ("goal_bits", 4, 6, "neither there nor coming"),
        ("table_states", 4, PageState.HOST, "lookup table is not DEVICE"),
        ("plane_states", 4, PageState.IN_TRANSFER, "the row is not moving"),
    ],
)
def test_integrity_names_what_is_broken(column: str, row: int, value: int, told: str) -> None:
    table = table_at(4)
    getattr(table, column)[row] = value
    with pytest.raises(AssertionError) as caught:
        table.check_integrity()
    assert told in str(caught.value)
    assert table.index.name(row) in str(caught.value)


def test_integrity_lists_every_broken_rule() -> None:
    table = table_at(4)
    table.plane_states[0, 1] = PageState.HOST
    table.table_states[5] = PageState.HOST
    with pytest.raises(AssertionError) as caught:
        table.check_integrity()
    message = str(caught.value)
    assert "plane below q" in message
    assert "lookup table is not DEVICE" in message
    assert "slots by state kept" in message


def test_snapshot_survives_the_wire() -> None:
    table = table_at(5)
    lower(table, [0, 3], 2)
    table.begin_retire([3])
    table.begin_reload([4], 6)
    table.set_desired([7], 3)
    back = TableSnapshot.from_bytes(TableSnapshot.of(table).to_bytes()).restore()
    for name in ("committed_bits", "desired_bits", "goal_bits", "moving", "epoch"):
        assert np.array_equal(getattr(back, name), getattr(table, name)), name
    assert np.array_equal(back.plane_states, table.plane_states)
    assert np.array_equal(back.table_states, table.table_states)
    assert back.version == table.version
    assert [back.bytes_in(s) for s in PageState] == [table.bytes_in(s) for s in PageState]


def test_snapshot_refuses_what_it_cannot_read() -> None:
    data = TableSnapshot.of(table_at(5)).to_bytes()
    with pytest.raises(ValueError, match="not a snapshot"):
        TableSnapshot.from_bytes(b"NOPE" + data[4:])
    with pytest.raises(ValueError, match="format 9"):
        TableSnapshot.from_bytes(data[:4] + b"\x09\0\0\0" + data[8:])
    with pytest.raises(ValueError, match="its header means"):
        TableSnapshot.from_bytes(data[:-1])


class TableMachine(RuleBasedStateMachine):
    """Random verbs, completions late or twice: no invariant breaks, bytes always add up."""

    @initialize(bits=st.sampled_from(LEVELS))
    def start(self, bits: int) -> None:
        self.table = table_at(bits)
        self.open: list[tuple[str, int, int]] = []

    @rule(data=st.data(), verb=st.sampled_from(["lower", "reload", "retire"]))
    def begin(self, data: st.DataObject, verb: str) -> None:
        rows = np.array(sorted(data.draw(st.sets(st.integers(0, INDEX.rows - 1), min_size=1))))
        bits = np.array(data.draw(st.lists(st.sampled_from(LEVELS), min_size=12, max_size=12)))
        bits = bits[rows]
        table = self.table
        allowed = {
            "lower": lambda: table.can_lower(rows, bits),
            "reload": lambda: table.can_reload(rows, bits),
            "retire": lambda: table.can_retire(rows),
        }[verb]()
        rows, bits = rows[allowed], bits[allowed]
        begun = {
            "lower": lambda: table.begin_lower(rows, bits),
            "reload": lambda: table.begin_reload(rows, bits),
            "retire": lambda: table.begin_retire(rows),
        }[verb]()
        self.open += [(verb, int(row), int(epoch)) for row, epoch in zip(rows, begun, strict=True)]

    @rule(data=st.data(), abort=st.booleans(), keep=st.booleans())
    def complete(self, data: st.DataObject, abort: bool, keep: bool) -> None:
        if not self.open:
            return
        at = data.draw(st.integers(0, len(self.open) - 1))
        verb, row, epoch = self.open[at]
        if not keep:  # kept ones come a second time, stale
            self.open.pop(at)
        table = self.table
        current = bool(table.epoch[row] == epoch and table.moving[row] != Moving.NONE)
        done = {
            ("lower", False): table.lower,
            ("lower", True): table.abort_lower,
            ("reload", False): table.finish_reload,
            ("reload", True): table.abort_reload,
            ("retire", False): table.finish_retire,
            ("retire", True): table.finish_retire,
        }[verb, abort]([row], [epoch])
        assert done.tolist() == [current]

    @rule(data=st.data())
    def raise_bits(self, data: st.DataObject) -> None:
        rows = np.arange(INDEX.rows)
        bits = np.full(INDEX.rows, data.draw(st.sampled_from(LEVELS)))
        allowed = self.table.can_raise(rows, bits)
        self.table.raise_bits(rows[allowed], bits[allowed])

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        held = self.table.device_bytes_by_row()
        assert int(held.sum()) == SizeClassPages.of(self.table.sizes).held_by(self.table.slots())
        assert int(held.sum()) == self.table.bytes_in(PageState.DEVICE) + self.table.bytes_in(
            PageState.IN_TRANSFER
        )
        assert (held >= self.table.sizes.by_row(self.table.committed_bits)).all()


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
