"""A checkpoint of a model's real shape with random weights: what engine benchmarks serve.

    pagedweight bench synthetic qwen1.5-moe OUT [--layers N] [--bits 2 3 4 5 6]

Random planes are random codes; tables hold ascending centroids of about 1/sqrt(K); what each linear
block is said to lose at each level is spread as in a trained model. Made on the GPU where there is
one (seconds for 12 GB), written as `quantize` writes: the same layout, checksums and
manifest, and opened by the same reader. There is no tokenizer: serve it with --skip-tokenizer-init.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedweight.bench.arguments import positive
from pagedweight.bench.layers import random_centroids, random_words
from pagedweight.bench.models import MODELS, model_config
from pagedweight.checkpoint import calibration as cal
from pagedweight.checkpoint.layout import (
    PLAIN_METADATA,
    SHARD_BYTES,
    Shard,
    check_levels,
    index_json,
    layer_entries,
)
from pagedweight.checkpoint.manifest import (
    CALIBRATION,
    MANIFEST,
    FileRecord,
    Manifest,
    layer_file,
    quantization_config,
)
from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.shards import INDEX
from pagedweight.checkpoint.tensorfile import Entry, write_tensors
from pagedweight.core.atomic_file import write_atomic
from pagedweight.core.geometry import TILE_COLS, TILE_ROWS, LayerShape
from pagedweight.errors import UserError

WRITERS = 8
"""Files written and checksummed at a time; each is held in memory until it is."""
TYPES = {"bfloat16": "BF16", "float16": "F16"}
SPREAD = {"layer and kind": 0.43, "expert": 1.23, "block": 0.15}
STEP = 0.15
BIT_RATIO = 4.5
"""How damage is spread in a trained model: standard deviations of its logarithm over layers and
kinds, over the experts of a layer (gate_up and down of one expert go together: 0.98), between an
expert's two blocks, and of the ratio of neighbouring levels, whose mean it is. Measured on lab-moe
(6 layers of 12 experts, k-means codes, `calibrate` on 8 sequences of 2048 tokens of C4): 0.28 to
0.51, 1.21 to 1.32, 0.15, 0.15 to 0.25, and 4.2 to 4.7."""


def make_checkpoint(
    config: Mapping[str, Any], out: Path, bits: Sequence[int], device: str, seed: int = 0
) -> Checkpoint:
    """Write a checkpoint of `config` (a whole config.json) into `out` and open it.

    `bits`: levels to store. Raises UserError when `out` is not empty, or for experts whose sizes
    are not whole tiles (random words would fill the padding).
    """
    levels = check_levels(bits)
    facts = architecture_of(config).facts(config)
    if facts.shape.hidden % TILE_COLS or facts.shape.intermediate % TILE_COLS:
        raise UserError(f"experts of {facts.shape} are not whole tiles of {TILE_ROWS}x{TILE_COLS}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; choose another or empty it")
    try:
        (out / "experts").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.strerror}") from None
    gen = torch.Generator(device).manual_seed(seed)
    dtype = str(config["dtype"])
    with _Files(out) as files:
        shards = plain_shards(config)
        for shard in shards:
            data = [plain_values(entry, dtype, gen) for entry in shard.entries]
            files.write(shard.name, shard.entries, data, PLAIN_METADATA)
        for layer in facts.moe_layers:
            entries = layer_entries(facts.shape, levels, dtype)
            files.write(layer_file(layer), entries, layer_values(facts.shape, levels, dtype, gen))
        measured = calibration_values(facts.shape, len(facts.moe_layers), levels, seed)
        about = dict.fromkeys(cal.METADATA, "none: random weights")
        files.write(CALIBRATION, [*cal.entries_of(measured).values()], [*measured.values()], about)
        files.write_text(INDEX, index_json(shards))
        text = {**config, "quantization_config": quantization_config(levels, dtype)}
        files.write_text("config.json", (json.dumps(text, indent=1) + "\n").encode())
    manifest = Manifest(
        architecture=facts.architecture,
        activation=facts.activation,
        bits=levels,
        table_dtype=dtype,
        shape=facts.shape,
        top_k=facts.top_k,
        num_hidden_layers=facts.num_hidden_layers,
        moe_layers=facts.moe_layers,
        source={"name": "random weights", "tensors": 0, "bytes": 0},
        files=files.records,
        unseen_experts=(),
    )
    write_atomic(out / MANIFEST, [manifest.encode()])
    return Checkpoint.open(out)


def plain_shards(config: Mapping[str, Any]) -> list[Shard]:
    """Every tensor that is not a routed expert, named as published, in files of SHARD_BYTES."""
    architecture, stored = architecture_of(config), TYPES[str(config["dtype"])]
    groups: list[list[Entry]] = [[]]
    for name, shape in _module_tensors(config):
        published = name
        if architecture.name == "mixtral":
            published = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        if architecture.parse(name) is not None:
            continue
        entry = Entry(published, stored, shape)
        if sum(e.nbytes for e in groups[-1]) + entry.nbytes > SHARD_BYTES:
            groups.append([])
        groups[-1].append(entry)
    count = len(groups)
    return [
        Shard(f"model-{n:05d}-of-{count:05d}.safetensors", tuple(group))
        for n, group in enumerate(groups, 1)
    ]


def _module_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the transformers module's tensors; a tied head is left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "dtype")}
    with torch.device("meta"):
        described = AutoConfig.for_model(config["model_type"], **known)
        module = AutoModelForCausalLM.from_config(described)
    for name, tensor in module.state_dict().items():
        if name != "lm_head.weight" or not config["tie_word_embeddings"]:
            yield name, tuple(tensor.shape)


def plain_values(entry: Entry, dtype: str, gen: torch.Generator) -> np.ndarray:
    """Raw words of a tensor: matrices of about 1/sqrt(inputs), embeddings 1, norms 1, biases 0."""
    values = torch.ones(entry.shape, dtype=getattr(torch, dtype), device=gen.device)
    if len(entry.shape) == 2:
        values.normal_(generator=gen)
        values *= 1.0 if "embed_tokens" in entry.name else entry.shape[1] ** -0.5
    elif entry.name.endswith(".bias"):
        values.zero_()
    return _words(values)


def layer_values(
    shape: LayerShape, levels: Sequence[int], dtype: str, gen: torch.Generator
) -> list[np.ndarray]:
    """What `layer_entries` lists: planes of both kinds, then tables by kind and level."""
    planes = [random_words(block, max(levels), shape.experts, gen) for block in shape.blocks]
    found = [_words(p) for p in planes]
    for block in shape.blocks:
        for level in levels:
            tables = [
                random_centroids(block, level, getattr(torch, dtype), gen)
                for _ in range(shape.experts)
            ]
            found.append(_words(torch.stack(tables)))
    return found


def spread_damage(
    layers: int, experts: int, levels: Sequence[int], rng: np.random.Generator
) -> np.ndarray:
    """Damage of every block at every level as trained models have it, float64 [layers, experts, 2,
    levels]: `SPREAD` and `STEP` are drawn as normal numbers in natural logarithms."""
    log = (
        rng.normal(0.0, SPREAD["layer and kind"], (layers, 1, 2))
        + rng.normal(0.0, SPREAD["expert"], (layers, experts, 1))
        + rng.normal(0.0, SPREAD["block"], (layers, experts, 2))
    )
    steps = np.zeros((layers, experts, 2, len(levels)))
    mean = np.log(BIT_RATIO) * np.diff(levels)
    steps[..., 1:] = rng.normal(mean, STEP, (*log.shape, len(levels) - 1))
    found: np.ndarray = np.exp(log[..., None] - np.log(BIT_RATIO) * levels[0] - steps.cumsum(-1))
    return found


def calibration_values(
    shape: LayerShape, layers: int, levels: Sequence[int], seed: int = 0
) -> dict[str, np.ndarray]:
    """What was "measured": experts that are routed to alike, as random weights route, and harmed as
    differently as those of a trained model (`spread_damage`)."""
    size = (layers, shape.experts)
    moments = {
        f"second_moment.{kind}": np.ones((*size, block.cols), np.float32)
        for kind, block in zip(("gate_up", "down"), shape.blocks, strict=True)
    }
    error = spread_damage(*size, levels, np.random.default_rng(seed))
    return {
        "tokens": np.ones(size, np.int64),
        "mass": np.full(size, 1 / shape.experts, np.float32),
        **moments,
        "error": error.astype(np.float32),
    }


def _words(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32).cpu().numpy()


class _Files:
    """Writes files on threads, a bounded number at a time; their records once all is done."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.records: dict[str, FileRecord] = {}
        self._pool = ThreadPoolExecutor(WRITERS)
        self._pending: set[Future[None]] = set()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        with self._pool:
            for future in self._pending:
                future.result()

    def write(
        self,
        name: str,
        entries: Sequence[Entry],
        arrays: Sequence[np.ndarray],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Queue a file of tensors."""
        while len(self._pending) >= WRITERS:
            done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        self.records[name] = FileRecord(0, "")  # its place in the manifest's order
        self._pending.add(self._pool.submit(self._write, name, entries, arrays, metadata))

    def write_text(self, name: str, content: bytes) -> None:
        self.records[name] = FileRecord(*write_atomic(self.out / name, [content]))

    def _write(
        self,
        name: str,
        entries: Sequence[Entry],
        arrays: Sequence[np.ndarray],
        metadata: Mapping[str, str] | None,
    ) -> None:
        data = (memoryview(array).cast("B") for array in arrays)
        digest = write_tensors(self.out / name, entries, data, metadata)
        self.records[name] = FileRecord((self.out / name).stat().st_size, digest)


def main(argv: Sequence[str] | None = None) -> None:
    """Write a checkpoint and say what it is."""
    parser = argparse.ArgumentParser(prog="pagedweight bench synthetic", description=__doc__)
    parser.add_argument("model", choices=MODELS, help="whose shape")
    parser.add_argument("out", type=Path, help="folder to write; new or empty")
    parser.add_argument("--layers", type=positive, help="only so many of the model's layers")
    parser.add_argument(
        "--bits", type=positive, nargs="+", default=[2, 3, 4, 5, 6], help="levels to store"
    )
    parser.add_argument("--dtype", choices=TYPES, default="bfloat16", help="of all but planes")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = model_config(options.model, options.layers, options.dtype)
    made = make_checkpoint(config, options.out, options.bits, device)
    size = sum(record.bytes for record in made.manifest.files.values())
    layers = len(made.moe_layers)
    print(f"{options.out}: {options.model}, {layers} MoE layers, {size:,} bytes")


if __name__ == "__main__":
    main()
