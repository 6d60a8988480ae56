"""The CUDA driver through `cuda.bindings`, and its refusals as ours.

A call that the driver refuses is a `Transient` that names the call, its numbers and the status. A
status after which the context itself is broken is `DeviceLost`: nothing can go on.
"""

from __future__ import annotations

from typing import Any

from pagedweight.errors import PagedWeightError, Transient, UserError

LOST = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""`CUresult` values that break the context: uncorrectable ECC error, illegal address, launch time
out, destroyed context, assertion, hardware stack, illegal instruction, misaligned address, invalid
address space, invalid program counter, failed launch, unknown (CUDA driver API, enum CUresult)."""


class DeviceLost(PagedWeightError):
    """The GPU's context is broken; the process has to end."""


def bindings() -> Any:
    """The module `cuda.bindings.driver`; UserError where it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UserError(
            f"GPU memory is managed through cuda.bindings, which does not import here ({error}): "
            "pip install 'pagedweight[gpu]'"
        ) from error
    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, which returns (status, value...).

    Raises Transient or DeviceLost; `what` says in words what was asked.
    """
    status, *values = result
    number = int(status)
    if number:
        name = getattr(status, "name", "CUDA error")
        raise (DeviceLost if number in LOST else Transient)(f"{what}: {name} ({number})")
    return values[0] if len(values) == 1 else tuple(values)
