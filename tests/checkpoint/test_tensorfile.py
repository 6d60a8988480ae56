"""Our safetensors reader and writer against the safetensors package, and against damage."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from pagedweight.checkpoint.tensorfile import (
    ALIGNMENT,
    Entry,
    TensorFile,
    file_bytes,
    write_tensors,
)
from pagedweight.core.atomic_file import write_atomic
from pagedweight.errors import CheckpointError

once = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5)


@once
@given(shapes=shapes, text=st.text(max_size=20))
def test_files_that_we_write_are_read_by_the_package(tmp_path, shapes, text):
    arrays = {f"t.{i}": np.random.default_rng(i).normal(size=s) for i, s in enumerate(shapes)}
    entries = [Entry(name, "F64", array.shape) for name, array in arrays.items()]
    path = tmp_path / "a.safetensors"
    data = [array.tobytes() for array in arrays.values()]
    digest = write_tensors(path, entries, data, {"note": text})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_size == file_bytes(entries, {"note": text})
    with safe_open(path, "np") as theirs:
        assert theirs.metadata() == {"note": text}
        for name, array in arrays.items():
            assert np.array_equal(theirs.get_tensor(name), array)
    ours = TensorFile.open(path)
    assert [stored.entry for stored in ours.tensors.values()] == entries
    assert min(stored.offset for stored in ours.tensors.values()) % ALIGNMENT == 0


def test_files_of_the_package_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("pagedweight.checkpoint.tensorfile.CHUNK_BYTES", 64)
    tensors = {"b": torch.randn(7, 11), "a": torch.arange(5), "e": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "a.safetensors")
    file = TensorFile.open(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert bytes(file.read(name)) == tensor.numpy().tobytes()
        assert b"".join(file.chunks(name)) == tensor.numpy().tobytes()
    assert bytes(file.read("a", 8, 16)) == tensors["a"].numpy().tobytes()[8:24]
    with pytest.raises(ValueError, match="past the end"):
        file.read("a", 32, 16)


@once
@given(at=st.integers(0, 399), byte=st.integers(0, 255), length=st.integers(0, 600))
def test_no_damage_escapes_as_another_exception(tmp_path, at, byte, length):
    """One changed byte and a cut anywhere: refused with CheckpointError, or still consistent."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(8, 8), "b": torch.zeros(3)}, path)
    data = bytearray(path.read_bytes())
    whole = len(data)
    data[at % whole] = byte
    path.write_bytes(data[:length])
    message, size = "", 0
    try:
        size = sum(s.entry.nbytes for s in TensorFile.open(path).tensors.values())
    except CheckpointError as error:
        message = str(error)
    if length < whole:
        assert "a.safetensors" in message
    assert size <= whole


@pytest.mark.parametrize(
    "header, says",
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "needs 8 bytes and has 4"),
        ({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, "unknown type 'F31'"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, r"shape \[-1\]"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "starts at byte"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, "truncated"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "longer than"),
        ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, "'shape'"),
        ([1], "cannot be read"),
    ],
)
def test_headers_that_lie(tmp_path, header, says):
    raw = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(CheckpointError, match=says):
        TensorFile.open(path)


def test_nothing_is_left_when_writing_fails(tmp_path):
    def pieces():
        yield b"abc"
        raise KeyboardInterrupt

    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", pieces())
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"
    with pytest.raises(ValueError, match="wrote"):
        write_tensors(tmp_path / "b", [Entry("t", "F32", (2,))], [b"1234"])
    assert not (tmp_path / "b").exists()
