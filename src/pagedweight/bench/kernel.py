"""How fast are the CUDA kernels, beside the memory's roofline and vLLM's Marlin int4 and bf16 MoE?

One MoE layer after routing, bf16 activations, CUDA-graph replays over several layers and token
sets so that the L2 does not answer. The roofline is a device-to-device copy in the same run; a
row's bytes are the planes and tables of the experts that its tokens reach, read once. The peers
(--peers marlin_int4 bf16, where vLLM is installed) run in the same process on the same routing.

    pagedweight bench kernel [--shape qwen1.5-moe] [--bits 3 4] [--refcheck] [--json DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedweight.bench.arguments import positive
from pagedweight.bench.gpu_time import copy_bandwidth, replay_seconds
from pagedweight.bench.layers import (
    SHAPES,
    ModelShape,
    RandomLayer,
    Tokens,
    bytes_read,
    choose_bits,
    make_layer,
    make_tokens,
)
from pagedweight.bench.peers import PEERS
from pagedweight.bench.record import machine, write_record
from pagedweight.errors import UserError
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.cuda.kernel import CudaKernel
from pagedweight.kernels.reference.kernel import ReferenceKernel

BATCHES = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
PREFILL = 256
"""Batches from here on are written to kernel_prefill.json."""
BITS = ("2", "3", "4", "5", "6", "mix")
ROUTINGS = ("uniform", "zipf")
CHECKED = (16, 256)
"""Batches that --refcheck compares with the float64 reference."""
TOLERANCE = 1e-2
DTYPE = torch.bfloat16


def token_sets(model: ModelShape, batch: int, routing: str) -> list[Tokens]:
    """One set of tokens a layer, the same in every measurement of this batch."""
    gen = torch.Generator("cuda").manual_seed(batch)
    return [make_tokens(model, batch, routing, gen) for _ in range(model.layers)]  # type: ignore[arg-type]


def call(
    kernel: Any,
    model: ModelShape,
    layer: RandomLayer,
    t: Tokens,
    stats: LayerStats | None = None,
    out: torch.Tensor | None = None,
    beside: bool = False,
) -> None:
    """One call of a `MoEKernel` on a layer."""
    args = (model.layer, layer.table, DTYPE, model.activation)
    to = t.out if out is None else out
    kernel(t.x, t.weights, t.ids, *args, to, stats, beside=beside)


def float64_output(model: ModelShape, layer: RandomLayer, t: Tokens) -> torch.Tensor:
    """[T, H] by the reference kernel in float64."""
    truth = torch.empty(t.x.shape, dtype=torch.float64, device=t.x.device)
    call(ReferenceKernel(torch.float64), model, layer, t, out=truth)
    return truth


def relative_error(
    kernel: Any, model: ModelShape, layer: RandomLayer, t: Tokens, truth: torch.Tensor
) -> float:
    """Euclidean, of the whole output, against `truth`. Raises UserError beyond TOLERANCE."""
    t.out.fill_(float("nan"))
    call(kernel, model, layer, t)
    error = float((t.out.double() - truth).norm() / truth.norm())
    if not error <= TOLERANCE:
        raise UserError(f"{model.name}: relative error {error:.2e} is more than {TOLERANCE:.0e}")
    return error


def time_ours(
    kernel: CudaKernel,
    model: ModelShape,
    layers: list[RandomLayer],
    sets: list[Tokens],
    with_stats: bool = False,
) -> float:
    """Microseconds a layer."""
    stats = LayerStats.empty(model.layer.experts, "cuda") if with_stats else None

    def work() -> None:
        for layer, tokens in zip(layers, sets, strict=True):
            call(kernel, model, layer, tokens, stats)

    return replay_seconds(work) * 1e6 / len(layers)


def measure_peers(
    model: ModelShape, names: Sequence[str], batches: Sequence[int], routings: Sequence[str]
) -> dict[tuple[int, str], dict[str, float]]:
    """Microseconds a layer of each peer, by batch and routing."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for name in names:
        make = PEERS[name]
        gen = torch.Generator("cuda").manual_seed(0)
        layers = [make(model, gen) for _ in range(model.layers)]
        for batch in batches:
            for routing in routings:
                sets = token_sets(model, batch, routing)

                def work(layers: Any = layers, sets: Any = sets) -> None:
                    for layer, tokens in zip(layers, sets, strict=True):
                        layer(tokens)

                us = replay_seconds(work) * 1e6 / model.layers
                found.setdefault((batch, routing), {})[f"{name}_us"] = round(us, 1)
        del layers
        torch.cuda.empty_cache()
    return found


def measure(model: ModelShape, options: argparse.Namespace, bandwidth: float) -> list[dict]:
    """Rows of one shape."""
    kernel, rows = CudaKernel(), []
    peers = measure_peers(model, options.peers, options.batch, options.routing)
    for bits in options.bits:
        gen = torch.Generator("cuda").manual_seed(1)
        committed = choose_bits(bits, model.layer.experts)
        layers = [make_layer(model.layer, committed, DTYPE, gen) for _ in range(model.layers)]
        for batch in options.batch:
            for routing in options.routing:
                sets = token_sets(model, batch, routing)
                row: dict[str, Any] = {"shape": model.name, "bits": bits, "batch": batch}
                row |= {"routing": routing, "us": round(time_ours(kernel, model, layers, sets), 1)}
                size = sum(bytes_read(model.layer, committed, t.ids) for t in sets) / len(sets)
                row |= against(row["us"], size, bandwidth)
                if routing == "uniform" and bits == "4":
                    row["with_statistics_us"] = round(
                        time_ours(kernel, model, layers, sets, True), 1
                    )
                if options.refcheck and routing == "uniform" and batch in CHECKED:
                    truth = float64_output(model, layers[0], sets[0])
                    error = relative_error(kernel, model, layers[0], sets[0], truth)
                    row["relative_error"] = float(f"{error:.2e}")
                row |= peers.get((batch, routing), {})
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        del layers
        torch.cuda.empty_cache()
    return rows


def against(us: float, size: float, bandwidth: float) -> dict[str, float]:
    """A time against the roofline: GB/s achieved, the floor in microseconds, the fraction."""
    floor = size / bandwidth * 1e6
    return {
        "gb_s": round(size / us / 1e3, 0),
        "floor_us": round(floor, 1),
        "of_roofline": round(floor / us, 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with --json write kernel_decode.json and kernel_prefill.json."""
    parser = argparse.ArgumentParser(prog="pagedweight bench kernel", description=__doc__)
    parser.add_argument(
        "--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPES), help="default: all"
    )
    parser.add_argument(
        "--bits", nargs="+", choices=BITS, default=list(BITS), help="of all experts (default: all)"
    )
    parser.add_argument(
        "--batch", nargs="+", type=positive, default=list(BATCHES), help="tokens (%(default)s)"
    )
    parser.add_argument(
        "--routing",
        nargs="+",
        choices=(*ROUTINGS, "hot"),
        default=list(ROUTINGS),
        help="how tokens choose experts (%(default)s)",
    )
    parser.add_argument("--refcheck", action="store_true", help="compare with float64")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="vLLM's kernels too")
    parser.add_argument("--json", type=Path, help="folder for the results")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("bench kernel measures the CUDA kernels and needs a GPU")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows: list[dict] = []
    for name in options.shape:
        rows += measure(SHAPES[name], options, bandwidth)
        if options.json:
            write(options.json, rows, bandwidth)


def write(folder: Path, rows: list[dict], bandwidth: float) -> None:
    """The two result files."""
    about = {"gpu": torch.cuda.get_device_name(), **machine(), "copy_gb_s": round(bandwidth / 1e9)}
    for name, prefill in (("kernel_decode.json", False), ("kernel_prefill.json", True)):
        chosen = [row for row in rows if (row["batch"] >= PREFILL) == prefill]
        if chosen:
            write_record(folder / name, {"machine": about, "rows": chosen})


if __name__ == "__main__":
    main()
