"""What `pagedweight serve` asks of the plugin, carried by vLLM's `--additional-config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from pagedweight.errors import UserError

KEY = "pagedweight"
PREFIX_POLICIES = ("keep", "reset")
MOST_BYTES = 1 << 60
"""More than any machine has; sums of such sizes still fit 64 bits."""

_UNITS = {"": 1, "B": 1, **{f"{p}iB": 1 << 10 * n for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 24GiB, 512 MiB, 3e9 or 1.5GB; UserError when it is none, is negative
    or beyond MOST_BYTES."""
    number = text.strip().rstrip("".join(sorted(set("".join(_UNITS))))).strip()
    unit = text.strip()[len(number) :].strip()
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        known = ", ".join(sorted(filter(None, _UNITS)))
        raise UserError(f"{text!r} is not a size; write a number and one of {known}") from error
    if not 0 <= size <= MOST_BYTES:
        raise UserError(f"{text!r} is {size:.3g} bytes; a size is 0 to {MOST_BYTES:.2g}")
    return size


@dataclass(frozen=True)
class ServeOptions:
    """Options of the plugin; all are plain JSON values.

    Static precision:
    bits:   uniform level of every linear block; None means the highest that is stored.
    plan:   path of a plan file with a level for every linear block, or POLICY:BUDGET[:SEED].

    Elastic precision, when `memory` is given (with `bits` or `plan` too: static in that budget):
    memory:        bytes for routed experts and KV cache together, on each rank.
    gpu_memory:    bytes for everything on each rank's GPU; `memory` follows from it at launch. 0:
                   what vLLM's --gpu-memory-utilization says.
    gpu_reserve:   bytes of that for activations, graphs and the driver; None: a share of it.
    page_bytes:    size of a page of the pool; None: the device's own.
    policy:        path of a policy file; None: the defaults.
    freeze:        no transitions: the plan of the start stays (repeatable runs).
    prefix_policy: "keep" cached KV that was computed at other bits, or "reset" the prefix cache
                   when bits have changed.
    timeline:      path of a file to write a line to at every step.
    trace:         path of a folder to record observations, plans and bits in.
    replay:        path of a recorded bit trace to follow instead of planning.
    poison:        fill retired memory with a pattern that shows (for tests).
    host_memory:   most bytes of pinned host memory that a rank on a GPU may take; None: what is
                   there.
    pageable:      a rank on a GPU reloads from the checkpoint's files, not from pinned memory.
    """

    bits: int | None = None
    plan: str | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    gpu_reserve: int | None = None
    page_bytes: int | None = None
    policy: str | None = None
    freeze: bool = False
    prefix_policy: str = "keep"
    timeline: str | None = None
    trace: str | None = None
    replay: str | None = None
    poison: bool = False
    host_memory: int | None = None
    pageable: bool = False

    def __post_init__(self) -> None:
        if self.bits is not None and self.plan is not None:
            raise UserError("--bits and --plan exclude each other: give one of them")
        if self.prefix_policy not in PREFIX_POLICIES:
            raise UserError(
                f"--prefix-policy is {self.prefix_policy!r}, not one of "
                f"{', '.join(PREFIX_POLICIES)}"
            )
        for name in ("memory", "page_bytes", "host_memory"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: give at least a byte, or "
                    "leave it out"
                )
        if self.gpu_reserve is not None and self.gpu_memory is None:
            raise UserError("--gpu-reserve only means something together with --gpu-memory")
        if not self.budgeted:
            needs = ("page_bytes", "policy", "freeze", "timeline", "trace", "replay", "poison")
            needs += ("host_memory", "pageable")
            given = [f"--{name.replace('_', '-')}" for name in needs if getattr(self, name)]
            if given:
                raise UserError(f"{', '.join(given)} only means something together with --memory")

    @property
    def budgeted(self) -> bool:
        """Whether experts and KV share one budget."""
        return self.memory is not None or self.gpu_memory is not None

    @property
    def still(self) -> bool:
        """Whether precision stays as it is at the start."""
        return not self.budgeted or self.freeze or self.bits is not None or self.plan is not None

    def additional_config(self) -> dict[str, Any]:
        """The value for vLLM's `additional_config`: options that differ from their defaults."""
        defaults = asdict(ServeOptions())
        return {KEY: {n: v for n, v in asdict(self).items() if v != defaults[n]}}

    @staticmethod
    def of(additional_config: Any) -> ServeOptions:
        """Options out of vLLM's `additional_config`; UserError names unknown keys."""
        values = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
        known = {field.name for field in fields(ServeOptions)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(
                f"additional_config[{KEY!r}] has unknown options {unknown}; "
                f"known are {sorted(known)}"
            )
        return ServeOptions(**values)
