"""What does a shared expert beside the routed ones cost? Two streams in one captured graph, timed.

vLLM 0.26 queues a model's shared expert on a second stream, forked before the choice of experts and
joined behind their sum, up to 256 tokens. A kernel that fills every processor leaves it no room.
Orders, in microseconds a layer of Qwen1.5-MoE's shape with the router's product and the choice:

    routed, shared    each alone
    serial            one after the other
    vllm              on two streams as vLLM has them; vllm-N: N processors left to the shared one
    late              the second stream forks behind the choice of experts

    pagedweight bench shared_expert [--bits 4 mix4] [--marlin] [--json DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import functional

from pagedweight.bench.arguments import positive
from pagedweight.bench.gpu_time import replay_seconds
from pagedweight.bench.groups import layer_bits
from pagedweight.bench.kernel import DTYPE, TOLERANCE, call, token_sets
from pagedweight.bench.layers import SHAPES, ModelShape, Tokens, make_layer
from pagedweight.bench.record import machine, write_record
from pagedweight.errors import UserError
from pagedweight.kernels.cuda import decode
from pagedweight.kernels.cuda.kernel import CudaKernel

MODEL = "qwen1.5-moe"
WIDE = 5632
"""Intermediate size of its shared expert."""
BATCHES = (1, 4, 16, 64)
SPARED = (0, 4, 8, 12, 16)
RESULT = "shared_expert.json"
Routed = Callable[[Tokens], None]


class SharedExpert:
    """Random bfloat16 weights, called as vLLM does: four launches and a gate. x [T, hidden]."""

    def __init__(self, hidden: int, gen: torch.Generator) -> None:
        def weight(rows: int, cols: int) -> torch.Tensor:
            empty = torch.empty((rows, cols), dtype=torch.bfloat16, device=gen.device)
            return empty.normal_(std=cols**-0.5, generator=gen)

        self.gate_up, self.down = weight(2 * WIDE, hidden), weight(hidden, WIDE)
        self.gate = weight(1, hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = functional.linear(x, self.gate_up)
        middle = torch.empty((x.shape[0], WIDE), dtype=x.dtype, device=x.device)
        torch.ops._C.silu_and_mul(middle, both)
        out = functional.linear(middle, self.down)
        return torch.sigmoid(functional.linear(x, self.gate)) * out


def choose(x: torch.Tensor, router: torch.Tensor, top_k: int) -> None:
    """The router's product and vLLM's choice of experts, whose result nobody reads here."""
    from vllm import _custom_ops as ops

    logits, size = functional.linear(x, router), (x.shape[0], top_k)
    weights = torch.empty(size, dtype=torch.float32, device=x.device)
    ids, source = (torch.empty(size, dtype=torch.int32, device=x.device) for _ in range(2))
    ops.topk_softmax(weights, ids, source, logits, False)


@contextmanager
def sparing(processors: int) -> Iterator[None]:
    """Decode leaves so many processors to what is beside it."""
    with patch.object(decode, "spared_processors", lambda *_: processors):
        yield


class Layers:
    """Layers of routed experts, their shared experts and routers; `run` is one pass over all."""

    def __init__(self, model: ModelShape, routed: list[Routed], gen: torch.Generator) -> None:
        hidden, experts = model.layer.hidden, model.layer.experts
        self.model, self.routed = model, routed
        self.shared = [SharedExpert(hidden, gen) for _ in routed]
        self.routers = [
            torch.randn((experts, hidden), device=gen.device, generator=gen).to(torch.bfloat16)
            for _ in routed
        ]
        self.aside = torch.cuda.Stream()

    def run(self, order: str, sets: list[Tokens]) -> None:
        """One pass in `order` (see the module)."""
        for number, tokens in enumerate(sets):
            self._layer(order, number, tokens)

    def _layer(self, order: str, number: int, t: Tokens) -> None:
        routed, shared, router = self.routed[number], self.shared[number], self.routers[number]
        if order == "shared":
            shared(t.x)
            return
        if order in ("routed", "serial"):
            choose(t.x, router, self.model.top_k)
            routed(t)
            if order == "serial":
                t.out.add_(shared(t.x))
            return
        main = torch.cuda.current_stream()
        if order == "vllm":
            self.aside.wait_stream(main)
        choose(t.x, router, self.model.top_k)
        if order == "late":
            self.aside.wait_stream(main)
        routed(t)
        with torch.cuda.stream(self.aside):
            beside = shared(t.x)
        main.wait_stream(self.aside)
        t.out.add_(beside)


def measure(layers: Layers, batch: int, spared: Sequence[int]) -> dict[str, float]:
    """us by order. Raises UserError when an order's sums are not those of `serial`."""
    sets, us = token_sets(layers.model, batch, "uniform"), {}
    orders = [("routed", 0), ("shared", 0), ("serial", 0), ("late", 0)]
    whole = torch.empty_like(sets[0].out, dtype=torch.float64)
    for order, count in [*orders, *(("vllm", count) for count in spared)]:
        with sparing(count):
            seconds = replay_seconds(lambda order=order: layers.run(order, sets))  # type: ignore[misc]
        us[f"{order}-{count}" if count else order] = round(seconds * 1e6 / len(sets), 1)
        if order == "serial":
            whole.copy_(sets[0].out)
        elif order in ("vllm", "late"):
            off = float((sets[0].out.double() - whole).norm() / whole.norm())
            if not off <= TOLERANCE:
                raise UserError(f"{order} at batch {batch} is {off:.2e} off serial")
    return us


def routed_layers(name: str, model: ModelShape, gen: torch.Generator) -> list[Routed]:
    """Routed experts at `name` bits, or vLLM's Marlin."""
    if name == "marlin":
        from pagedweight.bench.peers import MarlinLayer

        return [MarlinLayer.make(model, gen) for _ in range(model.layers)]
    kernel = CudaKernel()
    made = [make_layer(model.layer, bits, DTYPE, gen) for bits in layer_bits(name, model)]
    return [lambda t, layer=layer: call(kernel, model, layer, t, beside=True) for layer in made]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with --json write shared_expert.json, row by row."""
    parser = argparse.ArgumentParser(
        prog="pagedweight bench shared_expert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bits", nargs="+", choices=("4", "mix4"), default=["4", "mix4"])
    parser.add_argument("--marlin", action="store_true", help="vLLM's int4 kernels too")
    parser.add_argument("--batch", nargs="+", type=positive, default=list(BATCHES), help="tokens")
    parser.add_argument("--json", type=Path, help="folder for the result")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("bench shared_expert measures the CUDA kernels and needs a GPU")
    import vllm._custom_ops  # noqa: F401  registers silu_and_mul

    about = {"gpu": torch.cuda.get_device_name(), **machine()}
    model, rows = SHAPES[MODEL], []
    for name in (*options.bits, *(["marlin"] if options.marlin else [])):
        gen = torch.Generator("cuda").manual_seed(3)
        layers = Layers(model, routed_layers(name, model, gen), gen)
        for batch in options.batch:
            us = measure(layers, batch, (0,) if name == "marlin" else SPARED)
            rows.append({"shape": MODEL, "routed": name, "batch": batch, "us": us})
            print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
            if options.json:
                write_record(options.json / RESULT, {"machine": about, "rows": rows})
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
