"""vLLM's quantization config of the method `pagedweight`: routed experts only.

vLLM finds it from `quantization_config.quant_method` in config.json. Everything that is not a
routed expert keeps the source's type and vLLM's own unquantized method.
Tested with vLLM 0.26 and 0.32. Relies on: register_quantization_config, QuantizationConfig,
RoutedExperts, LinearBase, UnquantizedLinearMethod.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from pagedweight.checkpoint.manifest import FORMAT_VERSION
from pagedweight.errors import CheckpointError
from pagedweight.serving.plugin import announce

NAME = "pagedweight"


@register_quantization_config(NAME)
class PagedWeightConfig(QuantizationConfig):
    """`quantization_config` of a pagedweight checkpoint (docs/format.md)."""

    def __init__(self, bits: tuple[int, ...], table_dtype: str):
        super().__init__()
        self.bits = bits
        self.table_dtype = table_dtype

    def __repr__(self) -> str:
        return f"PagedWeightConfig(bits={self.bits}, table_dtype={self.table_dtype})"

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # everything is in config.json

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PagedWeightConfig:
        """Read the `quantization_config`; CheckpointError on a format that is not ours to read."""
        announce()
        found = config.get("format_version")
        if found != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint has pagedweight format version {found}; this release reads "
                f"{FORMAT_VERSION}: quantize again or install a matching release"
            )
        return cls(tuple(config["bits"]), config["table_dtype"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            from pagedweight.serving.moe_method import PagedWeightMoEMethod

            return PagedWeightMoEMethod(layer.moe_config, prefix)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None
