"""The CUDA driver and its run-time compiler, through `cuda.bindings`; knows nothing of torch.

Everything here works in the current context, which the caller has made (torch does).
"""

from __future__ import annotations

from typing import Any

from pagedweight.errors import UserError

OLDEST = (8, 0)
"""Compute capability that the sources need: bfloat16 tensor cores and asynchronous copies."""


def bindings() -> tuple[Any, Any]:
    """The modules `cuda.bindings.driver` and `.nvrtc`. Raises UserError where they are missing."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise UserError(
            "the CUDA kernels are compiled at first use through cuda.bindings, which does not "
            f"import here ({error}): pip install 'pagedweight[gpu]' (cuda-bindings)"
        ) from error
    return driver, nvrtc


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, which returns (status, value...); RuntimeError on a failure."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status}")
    return values[0] if len(values) == 1 else tuple(values)


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Raise UserError for a GPU that is too old."""
    if capability < OLDEST:
        raise UserError(
            f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need "
            f"{OLDEST[0]}.{OLDEST[1]} (A100) or newer"
        )


class Module:
    """Machine code on the current device; keeps it loaded."""

    def __init__(self, code: bytes) -> None:
        self._driver, _ = bindings()
        self._module = check(self._driver.cuModuleLoadData(code))

    def function(self, name: str, shared_bytes: int) -> Function:
        """The kernel `name`, allowed `shared_bytes` of dynamic shared memory."""
        handle = check(self._driver.cuModuleGetFunction(self._module, name.encode()))
        limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(self._driver.cuFuncSetAttribute(handle, limit, shared_bytes))
        return Function(self._driver, handle, shared_bytes)


class Function:
    """A kernel that can be launched."""

    def __init__(self, driver: Any, handle: Any, shared_bytes: int) -> None:
        self._driver, self._handle, self._shared = driver, handle, shared_bytes

    def blocks_per_processor(self, threads: int) -> int:
        """Thread blocks of `threads` that fit on one multiprocessor at a time."""
        occupancy = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(check(occupancy(self._handle, threads, self._shared)))

    def launch(self, blocks: int, threads: int, stream: int, arguments: int) -> None:
        """Queue on `stream`; `arguments` is the address of an array of argument addresses."""
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        launch = self._driver.cuLaunchKernel
        check(launch(self._handle, *grid, *block, self._shared, stream, arguments, 0))
