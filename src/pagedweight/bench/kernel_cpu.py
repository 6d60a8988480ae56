"""How fast is the CPU kernel, beside torch's dense matrix products on the same experts?

One MoE layer after routing, uniform routing, bf16 activations. The peer runs in the same process on
the same threads: expert by expert, gate_up, SwiGLU, down and the weighted sum, with weights
dequantized to bf16 or float32 beforehand. Every result is checked against the float64 reference.

    python -m pagedweight.bench.kernel_cpu [-o benchmarks/results/kernel_cpu.json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from pagedweight.bench.record import machine, write_record
from pagedweight.core.geometry import DOWN, GATE_UP, LayerShape
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.cpu.kernel import CpuKernel
from pagedweight.kernels.reference.kernel import ReferenceKernel
from pagedweight.kernels.synthetic import SyntheticLayer, random_layer, random_routing

SHAPES = {
    "tiny-moe": (LayerShape(16, 256, 256), 2),
    "lab-moe": (LayerShape(12, 640, 512), 2),
    "Qwen1.5-MoE, 16 of 60 experts": (LayerShape(16, 2048, 1408), 4),
}
BITS = (3, 4, 6)
TOKENS = (1, 8, 64, 512)
BUDGET = 1.0
"""Seconds for the times of one row."""
TOLERANCE = 2.0**-6
"""Largest error accepted, of the largest output: a few roundings to bf16."""


def dense_layer(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, dense: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The peer: torch's matrix products, expert by expert. dense: gate_up and down [E, N, K]."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (x[token] @ dense[GATE_UP][expert].T).chunk(2, dim=1)
        hidden = functional.silu(gate) * up
        part = (hidden @ dense[DOWN][expert].T).float()
        out.index_add_(0, token, weights[token, choice, None] * part)
    return out.to(x.dtype)


def shortest(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Shortest time of each, in microseconds: turn by turn, so that other load hits all alike.

    In a turn each runs three times, the first to bring its own data into the caches. At least 3
    turns and BUDGET seconds.
    """
    best = dict.fromkeys(works, float("inf"))
    began, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - began < BUDGET:
        for name, work in works.items():
            work()
            for _ in range(2):
                start = time.perf_counter()
                work()
                best[name] = min(best[name], 1e6 * (time.perf_counter() - start))
        turns += 1
    return {name: round(value, 1) for name, value in best.items()}


def measure(layer: SyntheticLayer, top_k: int, tokens: int) -> dict[str, Any]:
    """Times in microseconds of one call on `tokens` tokens, and rates from them."""
    shape, gen = layer.shape, torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, shape.hidden), generator=gen).to(torch.bfloat16)
    weights, ids = random_routing(tokens, shape.experts, top_k, generator=gen)
    stats, out, kernel = LayerStats.empty(shape.experts), torch.empty_like(x), CpuKernel()
    args = (x, weights, ids, shape, layer.table, layer.table_dtype, "silu")
    error = _check(kernel, args, out)
    both = [tuple(layer.dense(k).to(t) for k in (GATE_UP, DOWN)) for t in (x.dtype, torch.float32)]
    times = shortest(
        {
            "us": lambda: kernel(*args, out),
            "us_with_statistics": lambda: kernel(*args, out, stats),
            "us_torch_bf16": lambda: dense_layer(x, weights, ids, both[0]),
            "us_torch_float32": lambda: dense_layer(x.float(), weights, ids, both[1]),
        }
    )
    flop = 2 * tokens * top_k * 3 * shape.hidden * shape.intermediate
    read = sum(
        shape.blocks[k].resident_bytes(int(layer.bits[e, k]))
        for e in ids.unique().tolist()
        for k in (GATE_UP, DOWN)
    )
    seconds = times["us"] / 1e6
    return {
        "experts_hit": int(ids.unique().numel()),
        **times,
        "gflops": round(flop / seconds / 1e9, 1),
        "weight_gb_s": round(read / seconds / 1e9, 2),
        "tokens_s": round(tokens / seconds),
        "error": float(f"{error:.1e}"),
    }


def _check(kernel: CpuKernel, args: tuple[Any, ...], out: torch.Tensor) -> float:
    """The kernel's error against float64, of the largest output; ends when it is too large."""
    truth = torch.empty(out.shape, dtype=torch.float64)
    kernel(*args, out)
    ReferenceKernel(torch.float64)(*args, truth)
    error = float((out.double() - truth).abs().max() / truth.abs().max())
    if error > TOLERANCE:
        raise SystemExit(f"wrong result: off by {error:.2e} of the largest output")
    return error


def run(shapes: list[str]) -> list[dict[str, Any]]:
    """All rows for the named shapes, printed as they come."""
    rows = []
    for name in shapes:
        shape, top_k = SHAPES[name]
        for bits in BITS:
            layer = random_layer(shape, torch.full((shape.experts, 2), bits))
            for tokens in TOKENS:
                found = measure(layer, top_k, tokens)
                row = {"shape": name, "bits": bits, "tokens": tokens, **found}
                rows.append(row)
                print(
                    f"{name}, {bits} bits, {tokens} tokens: {row['us']:.0f} us "
                    f"({row['gflops']} GFLOP/s, planes {row['weight_gb_s']} GB/s), statistics "
                    f"{row['us_with_statistics'] / row['us'] - 1:+.1%}, torch bf16 "
                    f"{row['us_torch_bf16'] / row['us']:.2f}x, float32 "
                    f"{row['us_torch_float32'] / row['us']:.2f}x the time",
                    flush=True,
                )
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("-o", type=Path, default=Path("benchmarks/results/kernel_cpu.json"))
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    options = parser.parse_args()
    rows = run(options.shape or list(SHAPES))
    question = "CPU kernel of one MoE layer against torch's dense products, bf16 activations"
    write_record(options.o, {"question": question, "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
