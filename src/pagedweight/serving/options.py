"""What `pagedweight serve` asks of the plugin, carried by vLLM's `--additional-config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from pagedweight.errors import UserError

KEY = "pagedweight"


@dataclass(frozen=True)
class ServeOptions:
    """Options of the plugin; all are plain JSON values. `bits` and `plan` exclude each other.

    bits: uniform level of every linear block; None means the highest that is stored.
    plan: path of a plan file with a level for every linear block.
    """

    bits: int | None = None
    plan: str | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and self.plan is not None:
            raise UserError("--bits and --plan exclude each other: give one of them")

    def additional_config(self) -> dict[str, Any]:
        """The value for vLLM's `additional_config`: set options only."""
        return {KEY: {name: value for name, value in asdict(self).items() if value is not None}}

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
