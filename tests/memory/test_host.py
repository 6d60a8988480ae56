"""The host backend gives memory back for real, guards it, and refuses what is not there."""

import subprocess
import sys

import numpy as np
import pytest

from pagedweight.errors import Transient, UserError
from pagedweight.memory import limits
from pagedweight.memory.host import HostDevice
from pagedweight.memory.interface import Copy

PAGE = 64 << 10
MIB = 1 << 20


@pytest.mark.parametrize("page", [PAGE, 2 * MIB])
def test_resident_memory_rises_with_contents_and_falls_with_unmap(page):
    device, count = HostDevice(page), 64 * MIB // page
    device.create(count)
    span = device.reserve(256 * MIB, "weights")
    before = limits.resident_anonymous_bytes()
    device.map(span, 3, range(count))
    device.fill(span.base + 3 * page, 64 * MIB, 1)
    assert limits.resident_anonymous_bytes() - before > 60 * MIB
    device.unmap(span, 3 + count // 2, count - count // 2)
    half = limits.resident_anonymous_bytes() - before
    assert 28 * MIB < half < 36 * MIB
    device.unmap(span, 3, count // 2)
    assert limits.resident_anonymous_bytes() - before < 4 * MIB
    device.close()


READ = """
import ctypes
from pagedweight.memory.host import HostDevice
device = HostDevice()
device.create(2)
span = device.reserve(4 * device.page_bytes, "planes")
device.map(span, 0, [0, 1])
device.fill(span.base, 2 * device.page_bytes, 9)
print(ctypes.c_uint8.from_address(span.base).value, flush=True)
device.unmap(span, 0, 1)
print(ctypes.c_uint8.from_address(span.base + device.page_bytes).value, flush=True)
print(ctypes.c_uint8.from_address(span.base).value, flush=True)
"""


def test_reading_an_unmapped_page_kills_the_process():
    ran = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True)
    assert ran.returncode == -11, ran.stderr
    assert ran.stdout.split() == ["9", "9"]


def test_more_than_the_machine_has_is_refused_with_both_numbers():
    device = HostDevice(2 * MIB)
    have = limits.machine_available()
    with pytest.raises(UserError, match=r"needs \d+ bytes .* may take \d+: lower"):
        device.create(2 * have // (2 * MIB))


def test_a_page_size_that_the_system_cannot_free_is_refused():
    with pytest.raises(UserError, match="1000 bytes is no multiple"):
        HostDevice(1000)


def test_an_upload_that_breaks_off_is_transient():
    device = HostDevice()
    device.create(1)
    span = device.reserve(PAGE, "a")
    device.map(span, 0, [0])

    class Lost(np.ndarray):
        def __array_function__(self, *arguments):
            raise OSError("input/output error")

    copy = Copy(span.base, np.zeros(8, np.uint8).view(Lost))
    done = device.upload([copy])
    with pytest.raises(Transient, match="input/output error"):
        done.wait()
    with pytest.raises(Transient):
        done.done()
    device.close()


def test_the_tightest_control_group_counts(tmp_path, monkeypatch):
    inner = tmp_path / "service"
    inner.mkdir()
    monkeypatch.setattr(limits, "_group", lambda root: inner)
    assert limits.group_available(tmp_path) is None
    for folder, limit, used, cached in [(tmp_path, "1000", 900, 0), (inner, "max", 400, 0)]:
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    assert limits.group_available(tmp_path) == 100
    (inner / "memory.max").write_text("430")
    (inner / "memory.stat").write_text("inactive_file 20\n")
    assert limits.group_available(tmp_path) == 50
