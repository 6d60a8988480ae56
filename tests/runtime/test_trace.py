"""A run in which everything overlaps leaves a trace that, played serially, computes the same."""

from functools import partial

import pytest
import torch
from ranks import RandomTier, kernel_output, rank_of
from test_transitions import TOKENS, Driver, behind

from pagedweight.errors import UserError
from pagedweight.memory.fake import FakeDevice
from pagedweight.runtime.integrity import check_worker
from pagedweight.runtime.trace import BitTrace


def test_overlapped_and_serial_schedules_compute_the_same_bits(tmp_path):
    steps, tier = 400, RandomTier(layers=2, experts=6)
    device = FakeDevice(4096, lazy=True)
    rank, trace = rank_of(device, pages=600, tier=tier), BitTrace()
    driver, overlapped, serial = Driver(rank, 11), [], []

    def step(of, outputs, number):
        outputs.append(kernel_output(of, number % 2, TOKENS, [number % 6, (number + 1) % 6]))

    for number in range(1, steps):
        before = rank.table.committed_bits.copy()
        rank.worker.apply(driver.plan())
        trace.record(number, before, rank.table.committed_bits)
        device.launch(partial(step, rank, overlapped, number))
        behind(device, driver.rng)
    device.run()
    trace.save(tmp_path / "bits.jsonl")
    again = BitTrace.load(tmp_path / "bits.jsonl")
    assert again.changes == trace.changes
    assert sum(len(rows) for rows, _ in trace.changes.values()) > 500

    plain = rank_of(FakeDevice(4096), pages=600, tier=tier)
    for number in range(1, steps):
        plain.worker.apply(again.plan(number, plain.table.committed_bits))
        check_worker(plain.worker)
        step(plain, serial, number)
    assert plain.table.committed_bits.tolist() == rank.table.committed_bits.tolist()
    assert all(torch.equal(a, b) for a, b in zip(overlapped, serial, strict=True))


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense", "line 2 is not a line of a bit trace"),
        ('{"step": 3, "rows": [1], "bits": "4"}', None),
        ('{"step": 3, "rows": [1, 2], "bits": [4]}', "2 rows with 1 bits"),
        ('{"step": 1, "rows": [], "bits": []}', "step 1 is there twice"),
        ('{"rows": [1], "bits": [4]}', "line 2 is not a line"),
    ],
)
def test_a_broken_trace_is_named_by_its_line(line, message):
    lines = ['{"step": 1, "rows": [0], "bits": [4]}', line]
    if message is None:
        assert BitTrace.of_lines(lines, "t").changes[3] == ((1,), (4,))
    else:
        with pytest.raises(UserError, match=message):
            BitTrace.of_lines(lines, "t")
