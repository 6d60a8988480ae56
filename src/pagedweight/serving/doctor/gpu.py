"""The GPU: driver, compute capability, memory, and the granule that memory is mapped in."""

from __future__ import annotations

from pathlib import Path

import torch

from pagedweight.errors import UserError
from pagedweight.kernels.cuda.driver import bindings, check, check_capability
from pagedweight.serving.doctor.finding import Finding


def gpus() -> list[Finding]:
    """One finding for each GPU; one that says so where there is none."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        said = "none: the CPU backend serves" if built is None else "torch sees no GPU"
        way_out = "" if built is None else "nvidia-smi and CUDA_VISIBLE_DEVICES say more"
        return [Finding("gpu", "ok" if built is None else "note", said, way_out)]
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    values = {
        "name": properties.name,
        "capability": list(capability),
        "memory_bytes": properties.total_memory,
    }
    said = f"{properties.name}, capability {capability[0]}.{capability[1]}, "
    said += f"{properties.total_memory / (1 << 30):.1f} GiB"
    name = f"gpu {index}"
    try:
        check_capability(capability, properties.name)
        cuda, granule = _driver(index)
    except (UserError, RuntimeError) as error:
        said_first, _, way_out = str(error).partition(": ")
        return Finding(name, "wrong", f"{said}: {said_first}", way_out or "see the error", values)
    release = _driver_release()
    values |= {"driver": release, "driver_cuda": cuda, "granule_bytes": granule}
    said += f", driver {release or 'of unknown release'} (CUDA {cuda})"
    return Finding(name, "ok", f"{said}, granule {granule:,} bytes", values=values)


def _driver_release(path: str = "/sys/module/nvidia/version") -> str | None:
    """The kernel module's own number; None where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _driver(index: int) -> tuple[str, int]:
    """The driver's CUDA version, and the smallest piece of memory that it maps on a GPU, bytes."""
    driver, _ = bindings()
    check(driver.cuInit(0))
    number = int(check(driver.cuDriverGetVersion()))
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = index
    smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granule = int(check(driver.cuMemGetAllocationGranularity(wanted, smallest)))
    return f"{number // 1000}.{number % 1000 // 10}", granule
