"""How many warps should share a unit of work? Every pair of groups on one MoE layer, timed.

Decode gives each phase, gate_up and down, a group of 1, 2, 4 or 8 warps for a unit
(`kernels/cuda/shapes.py`, `group_table`, whose numbers come from this). Timed as `bench kernel`
times, at uniform 4 bits, at bench decode's mix of 3 to 6 bits with the same bytes (mix4), and with
one linear block in N at 3 or 5 bits (4+N); and at uniform 3 bits beside a mix of 2 to 6 bits with
the same bytes (mix3). Every pair's output is compared with float64.

    pagedweight bench groups [--shape qwen1.5-moe] [--bits 4 mix4] [--json DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pagedweight.bench.arguments import positive
from pagedweight.bench.decode import engine_plan
from pagedweight.bench.kernel import (
    DTYPE,
    ROUTINGS,
    float64_output,
    relative_error,
    time_ours,
    token_sets,
)
from pagedweight.bench.layers import SHAPES, ModelShape, RandomLayer, make_layer
from pagedweight.bench.record import machine, write_record
from pagedweight.errors import UserError
from pagedweight.kernels.cuda import decode
from pagedweight.kernels.cuda.kernel import CudaKernel, describe
from pagedweight.kernels.cuda.shapes import (
    MANY,
    Build,
    Device,
    GroupBuild,
    choose_build,
    choose_group_build,
    choose_token_groups,
    is_few,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64)
BITS = ("4", "mix4", "4+2", "4+4", "4+8", "4+16", "3", "mix3")
PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 3))
"""log2 of the warps that share a unit of gate_up and of down."""
RESULT = "kernel_groups.json"
ABOUT = (
    "Microseconds a layer by pair: log2 of the warps that share a unit of gate_up, then of down; "
    "auto is the choice of the time. Bits mix3, mix4: of bench decode; 4+N: one linear block "
    "in N at 3 or 5. relative_error: the largest of any pair."
)


def layer_bits(name: str, model: ModelShape) -> list[torch.Tensor]:
    """int32 [E, 2] on the CPU for each layer of a replay."""
    if name.startswith("mix"):
        plan = engine_plan(name, model.layers, model.layer)
        return list(torch.from_numpy(plan.astype("int32")))
    usual, _, rare = name.partition("+")
    found = []
    for layer in range(model.layers):
        gen = torch.Generator().manual_seed(1000 + layer)
        size = (model.layer.experts, 2)
        bits = torch.full(size, int(usual), dtype=torch.int32)
        if rare:
            others = torch.rand(size, generator=gen) < 1 / int(rare)
            up = torch.rand(size, generator=gen) < 0.5
            bits += torch.where(others, torch.where(up, 1, -1), 0).to(torch.int32)
        found.append(bits)
    return found


def build_for(model: ModelShape, batch: int, device: Device) -> Build | GroupBuild:
    """The thread block that serves such a call of decode."""
    call = (model.layer, batch, model.top_k)
    if is_few(*call):
        return choose_build(device)
    return choose_group_build(device, choose_token_groups(*call))


def pairs_for(model: ModelShape, batch: int, device: Device) -> list[tuple[int, int]]:
    """Those of PAIRS that divide the warps of that thread block."""
    warps = build_for(model, batch, device).warps
    return [pair for pair in PAIRS if warps % (1 << max(pair)) == 0]


def measure(
    kernel: CudaKernel, model: ModelShape, layers: list[RandomLayer], batch: int, routing: str
) -> dict[str, Any]:
    """us by pair, and the largest relative error. Raises UserError beyond bench kernel's."""
    sets, us, worst = token_sets(model, batch, routing), {}, 0.0
    truth = float64_output(model, layers[0], sets[0])
    for pair in (None, *pairs_for(model, batch, describe(0))):
        forced: Callable[..., Any] = (
            decode.group_table if pair is None else lambda *_, pair=pair: ((MANY, pair),)
        )
        with patch.object(decode, "group_table", forced):
            worst = max(worst, relative_error(kernel, model, layers[0], sets[0], truth))
            key = "auto" if pair is None else f"{pair[0]}{pair[1]}"
            us[key] = round(time_ours(kernel, model, layers, sets), 1)
    return {"us": us, "relative_error": float(f"{worst:.2e}")}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with --json write kernel_groups.json, row by row."""
    parser = argparse.ArgumentParser(prog="pagedweight bench groups", description=__doc__)
    parser.add_argument(
        "--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPES), help="default: all"
    )
    parser.add_argument("--bits", nargs="+", choices=BITS, default=list(BITS), help="default: all")
    parser.add_argument(
        "--batch", nargs="+", type=positive, default=list(BATCHES), help="tokens (%(default)s)"
    )
    parser.add_argument(
        "--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="(%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="folder for the result")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("bench groups measures the CUDA kernels and needs a GPU")
    about = {"gpu": torch.cuda.get_device_name(), **machine()}
    kernel, rows = CudaKernel(), []
    for shape in options.shape:
        model = SHAPES[shape]
        for bits in options.bits:
            gen = torch.Generator("cuda").manual_seed(1)
            layers = [make_layer(model.layer, b, DTYPE, gen) for b in layer_bits(bits, model)]
            for batch in options.batch:
                for routing in options.routing:
                    row = {"shape": shape, "bits": bits, "batch": batch, "routing": routing}
                    rows.append(row | measure(kernel, model, layers, batch, routing))
                    print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
                    if options.json:
                        record = {"machine": about, "about": ABOUT, "rows": rows}
                        write_record(options.json / RESULT, record)
            del layers
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
