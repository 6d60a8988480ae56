"""Which kernel serves a device type."""

from __future__ import annotations

from functools import cache

from pagedweight.errors import UserError
from pagedweight.kernels.contract import MoEKernel


@cache
def get_kernel(device_type: str) -> MoEKernel:
    """The MoE kernel for tensors of `device_type`; UserError where there is none."""
    if device_type == "cpu":
        from pagedweight.kernels.cpu.kernel import CpuKernel

        return CpuKernel()
    raise UserError(f"there is no pagedweight kernel for device {device_type!r}")
