"""Who takes part in `bench pressure`: one checkpoint at fixed or paged bits, and vLLM's own.

paged                 bits follow the load
static3, static6 ...  fixed bits, the KV cache gets the rest of the same budget
bf16, marlin_int4     stock vLLM with random weights of the same shape (int4: GPTQ through Marlin,
                      routed experts only) and what the budget leaves for KV
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedweight.bench.decode import PEERS, group_size, peer_config
from pagedweight.bench.service import stock_command
from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.errors import UserError


@dataclass(frozen=True)
class Budget:
    """memory: bytes of routed experts and KV together. gpu: of everything on the GPU, 0 where only
    `memory` was given. reserve: of `gpu`, for neither weights nor KV; None: what serve takes."""

    memory: int
    gpu: int = 0
    reserve: int | None = None

    @property
    def flags(self) -> list[str]:
        """Of `pagedweight serve`."""
        if not self.gpu:
            return ["--memory", str(self.memory)]
        kept = [] if self.reserve is None else ["--gpu-reserve", str(self.reserve)]
        return ["--gpu-memory", str(self.gpu), *kept]


def check_name(name: str) -> None:
    """UserError for what is no policy."""
    if name != "paged" and name not in PEERS and not (name[:6] == "static" and name[6:].isdigit()):
        raise UserError(
            f"policy {name!r} is neither paged nor static and a number, as static6, nor one of "
            f"{', '.join(PEERS)}"
        )


def own_flags(
    name: str, budget: Budget, timeline: Path, policy: Path | None, trace: Path | None
) -> list[str]:
    """Flags of `pagedweight serve` for "paged" or "staticB"."""
    flags = [*budget.flags, "--timeline", str(timeline)]
    if name != "paged":
        return [*flags, "--bits", name[6:]]
    return [
        *flags,
        *(["--policy", str(policy)] if policy else []),
        *(["--trace", str(trace)] if trace else []),
    ]


def expert_bytes(name: str, config: Mapping[str, Any]) -> int:
    """Bytes of a peer's routed experts, scales included."""
    facts = architecture_of(config).facts(config)
    shape = facts.shape
    weights = 3 * len(facts.moe_layers) * shape.experts * shape.hidden * shape.intermediate
    bits = 16.0 if name == "bf16" else 4 + 16 / group_size(shape)
    return int(weights * bits / 8)


def peer(
    name: str, checkpoint: Path, budget: Budget, folder: Path, vllm: Sequence[str]
) -> list[str]:
    """Writes the peer's config.json into `folder`, and the command that serves it.

    UserError when its experts leave nothing of the budget for KV.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    left = budget.memory - expert_bytes(name, config)
    if left <= 0:
        raise UserError(
            f"{name}: its experts take {expert_bytes(name, config)} bytes, and experts and KV have "
            f"{budget.memory} together"
        )
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(peer_config(name, config)))
    # vLLM's own check of free memory is about its share of the machine, not this budget.
    share = ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(left)]
    return stock_command(home, ["--load-format", "dummy", *share, *vllm])


def budget_of(
    checkpoint: Path, memory: int | None, gpu: int | None, reserve: int | None = None
) -> Budget:
    """From what the user gave, `memory` or `gpu`. Raises UserError."""
    if (memory is None) == (gpu is None):
        raise UserError("give one of --memory and --gpu-memory")
    if gpu is None and reserve is not None:
        raise UserError("--gpu-reserve only means something together with --gpu-memory")
    if gpu is None:
        return Budget(memory or 0)
    from pagedweight.serving.elastic.gpu_budget import memory_within

    found = Checkpoint.open(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    return Budget(memory_within(config, found.bits, gpu, reserve), gpu, reserve)
