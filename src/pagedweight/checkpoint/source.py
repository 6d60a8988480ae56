"""An unquantized Hugging Face MoE checkpoint, checked from its headers and read tensor by tensor.

`SourceCheckpoint.open` reads config.json and file headers only, and refuses what it cannot turn
into a whole quantized checkpoint. `check_values` then streams every weight once. Both come before
anything is written.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pagedweight.checkpoint import names
from pagedweight.checkpoint.experts import ExpertIndex, index_experts
from pagedweight.checkpoint.shards import open_shards, read_json
from pagedweight.checkpoint.tensorfile import TensorFile
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import CheckpointError, listing

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""
READERS = 8
"""Tensors that are checked at a time."""

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Types whose values are checked; the experts must have one of the first three."""
OTHER_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class SourceCheckpoint:
    """A source that has passed every check a header allows. Reads hold one tensor at a time.

    `moe_layers` are decoder layer numbers; `layer_pos` below is a position in that tuple.
    """

    path: Path
    config: Mapping[str, Any]
    architecture: names.Architecture
    shape: LayerShape
    moe_layers: tuple[int, ...]
    num_hidden_layers: int
    activation: str
    top_k: int
    tied: bool
    dtype: torch.dtype
    files: Mapping[str, TensorFile]
    experts: ExpertIndex

    @staticmethod
    def open(path: str | Path) -> SourceCheckpoint:
        """Check config.json and all headers; raises CheckpointError naming what is wrong."""
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; download the checkpoint first")
        config = read_json(folder / "config.json")
        architecture = names.architecture_of(config)
        _refuse_quantized(folder, config)
        facts = architecture.facts(config)
        files = open_shards(folder)
        experts = index_experts(architecture, facts, files)
        source = SourceCheckpoint(
            path=folder,
            config=config,
            architecture=architecture,
            shape=facts.shape,
            moe_layers=facts.moe_layers,
            num_hidden_layers=facts.num_hidden_layers,
            activation=facts.activation,
            top_k=facts.top_k,
            tied=facts.tied,
            dtype=TORCH_DTYPES[experts.dtype],
            files=files,
            experts=experts,
        )
        source._check_heads()
        return source

    @property
    def table_dtype(self) -> str:
        """Type of the centroids by default: the source's when it has 16 bits, else bfloat16."""
        return "float16" if self.dtype == torch.float16 else "bfloat16"

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's routed experts in the source."""
        weights = 3 * self.shape.experts * self.shape.hidden * self.shape.intermediate
        return weights * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors; what `check_values` reports as done in the end."""
        return sum(self.nbytes(name) for name in self.files)

    @cached_property
    def _plain(self) -> tuple[str, ...]:
        return tuple(name for name in self.files if name not in self.experts.names)

    def plain_names(self) -> tuple[str, ...]:
        """Tensors that are not routed experts, in file order: they are copied as they are."""
        return self._plain

    def nbytes(self, name: str) -> int:
        return self.files[name].tensors[name].entry.nbytes

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its own type, in memory of its own."""
        file = self.files[name]
        entry = file.tensors[name].entry
        dtype = {**TORCH_DTYPES, **OTHER_DTYPES}.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {name} has type {entry.dtype}, which torch cannot hold")
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(file.read(name), dtype=dtype).reshape(entry.shape)

    def expert(self, layer_pos: int, expert: int, kind: str) -> torch.Tensor:
        """The [N, K] matrix of one linear block: gate rows then up rows, or down.

        Reads this expert's bytes only, whichever layout the source has.
        """
        parts = [self._matrix(*place) for place in self._places(layer_pos, expert, kind)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_expert(
        self, layer_pos: int, expert: int, kind: str, out: torch.Tensor, staging: torch.Tensor
    ) -> None:
        """`expert` into `out`, [N, K] of the source's type, contiguous, on any device.

        Bytes go through `staging`, uint8 on the CPU, as many at a time as it holds: memory that is
        used again has no pages to find, and page-locked memory is what a GPU copies fast from.
        """
        if self.experts.transposed:
            out.copy_(self.expert(layer_pos, expert, kind))
            return
        into, done, view = out.view(torch.uint8).flatten(), 0, memoryview(staging.numpy())
        for name, start, nbytes in self._places(layer_pos, expert, kind):
            for at in range(0, nbytes, len(staging)):
                count = min(len(staging), nbytes - at)
                self.files[name].read_into(name, view[:count], start + at)
                into[done : done + count].copy_(staging[:count])
                done += count

    def _places(self, layer_pos: int, expert: int, kind: str) -> Iterator[tuple[str, int, int]]:
        """Where a linear block's bytes are: tensor, first byte, bytes; gate before up."""
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is not gate_up or down")
        whole = kind == "down" or self.experts.fused
        for part in (kind,) if whole else ("gate", "up"):
            name = self.experts.name(layer_pos, expert, part)
            nbytes = self.nbytes(name) // (self.shape.experts if self.experts.fused else 1)
            yield name, expert * nbytes if self.experts.fused else 0, nbytes

    def _matrix(self, name: str, start: int, nbytes: int) -> torch.Tensor:
        """An expert's part of a tensor as [N, K], in memory of its own."""
        file = self.files[name]
        data = file.read(name, start, nbytes)
        size = file.tensors[name].entry.shape[-2:]
        matrix = torch.frombuffer(data, dtype=self.dtype).reshape(size)
        return matrix.t().contiguous() if self.experts.transposed else matrix

    def check_values(self, progress: Progress | None = None) -> None:
        """Read every weight once; raises CheckpointError naming each tensor with a NaN or Inf.

        Memory stays at READERS pieces of tensors. An infinity alone in its tensor is a bound
        (Gemma 4 stores the clipping range of its towers so) and passes. With tied embeddings and a
        stored head, the two must be equal: loaders that tie would drop the head without a word.
        """
        lock = threading.Lock()

        def tell(done: int) -> None:
            if progress:
                with lock:
                    progress(done)

        with ThreadPoolExecutor(READERS) as pool:
            found = list(pool.map(lambda name: self._first_bad_value(name, tell), self.files))
        if bad := [text for text in found if text]:
            raise CheckpointError(f"{self.path}: values that are not finite: {listing(bad)}")
        self._check_tied_head()

    def _first_bad_value(self, name: str, progress: Progress) -> str:
        """Name, index and value of a tensor's first NaN or Inf, or an empty string."""
        file = self.files[name]
        entry = file.tensors[name].entry
        dtype = TORCH_DTYPES.get(entry.dtype)
        position, text = 0, ""
        for chunk in file.chunks(name):
            if dtype is not None:
                values = torch.frombuffer(chunk, dtype=dtype)
                at = _first_bad(values, alone=math.prod(entry.shape) == 1) if not text else None
                if at is not None:
                    index = torch.unravel_index(torch.tensor(position + at), entry.shape)
                    text = f"{name}{[int(i) for i in index]} is {float(values[at])}"
                position += values.numel()
            progress(len(chunk))
        return text

    def _check_heads(self) -> None:
        embeddings = [n for n in self.files if f".{n}".endswith(".embed_tokens.weight")]
        heads = [n for n in self.files if f".{n}".endswith(".lm_head.weight")]
        if not embeddings:
            raise CheckpointError(f"{self.path} has no embed_tokens.weight")
        if not heads and not self.tied:
            raise CheckpointError(
                f"{self.path} has no lm_head.weight, and its config.json does not tie it to the "
                f"embeddings (tie_word_embeddings)"
            )

    def _check_tied_head(self) -> None:
        heads = [n for n in self.files if f".{n}".endswith(".lm_head.weight")]
        if not (self.tied and heads):
            return
        embedding = next(n for n in self.files if f".{n}".endswith(".embed_tokens.weight"))
        head = heads[0]
        mine, theirs = (self.files[n].tensors[n].entry for n in (head, embedding))
        same = (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and all(
            a == b
            for a, b in zip(
                self.files[head].chunks(head), self.files[embedding].chunks(embedding), strict=True
            )
        )
        if not same:
            raise CheckpointError(
                f"config.json ties the embeddings, but {head} differs from {embedding}; set "
                f"tie_word_embeddings to false to keep it, or remove it"
            )


def _first_bad(values: torch.Tensor, alone: bool) -> int | None:
    """Where the first NaN or infinity is (a NaN, where the value is `alone`), or None."""
    if bool(torch.isfinite(torch.stack(values.aminmax())).all()):  # a NaN is passed on
        return None
    bad = values.isnan() if alone else ~values.isfinite()
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    found = config.get("quantization_config")
    if isinstance(found, Mapping):
        method = found.get("quant_method", "an unnamed method")
        raise CheckpointError(
            f"{folder} is already quantized ({method}); start from the unquantized checkpoint"
        )
