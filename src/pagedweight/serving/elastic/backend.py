"""What differs between a rank on the CPU and one on a GPU: pages, host tier, reserve."""

from __future__ import annotations

import logging

import torch

from pagedweight.core.size_table import SizeTable
from pagedweight.memory.host import SMALL_PAGE, HostDevice
from pagedweight.memory.host_tier import HostTier
from pagedweight.memory.interface import Device
from pagedweight.memory.pinned_tier import PinnedTier, tier_bytes
from pagedweight.runtime.startup import reserve_pages
from pagedweight.serving.options import ServeOptions

logger = logging.getLogger("vllm.pagedweight")
GPU_PAGE, LARGEST_GPU_PAGE = 2 << 20, 16 << 20
"""The driver's smallest page on every GPU that the kernels run on, and the largest one taken by
default."""
LEAST_PAGES = 768
"""Pages that a budget on a GPU is divided into at least, where pages may be larger than the
smallest: mapping and unmapping cost the host time by the page, not by the byte (bench movement)."""
GPU_PAGES_PER_STEP = 24
"""Pages that go, and that come, between two steps on a GPU: some four milliseconds of the host's
time with all else that moving takes (bench movement), while a step of five runs ahead."""
GPU_RESERVE_SHARE = 64
"""One page in so many is kept for lowering on a GPU: there memory comes back a few steps after it
was asked for, so that a batch of rows must be large for a burst to be met in time."""


def on_gpu() -> bool:
    """Whether this machine's ranks are on GPUs; the same answer in every process of a server."""
    return torch.cuda.is_available()


def default_page_bytes(memory: int) -> int:
    """Page size for a budget of `memory` bytes, when the user names none."""
    return gpu_page_bytes(memory) if on_gpu() else SMALL_PAGE


def gpu_page_bytes(memory: int) -> int:
    """Page size for a budget of `memory` bytes on a GPU."""
    page = GPU_PAGE
    while page < LARGEST_GPU_PAGE and memory >= 2 * page * LEAST_PAGES:
        page *= 2
    return page


def pages_per_step() -> int | None:
    """See `runtime.worker.MemoryWorker`."""
    return GPU_PAGES_PER_STEP if on_gpu() else None


def lowering_reserve(sizes: SizeTable, page_bytes: int, pages: int) -> int:
    """Pages of a pool of `pages` that are kept for lowering."""
    least = reserve_pages(sizes, page_bytes)
    return least if page_bytes < GPU_PAGE else max(least, pages // GPU_RESERVE_SHARE)


def open_device(page_bytes: int, where: torch.device) -> Device:
    """The memory of the device that the model is on."""
    if where.type == "cpu":
        return HostDevice(page_bytes)
    from pagedweight.memory.cuda.device import CudaDevice

    return CudaDevice(page_bytes, where.index)


def open_host_tier(tier: HostTier, device: Device, options: ServeOptions) -> HostTier:
    """What reloads read: on a GPU pinned memory, unless the user wants the checkpoint's files or
    bits never change.

    UserError when that is more than `--host-memory` or than the machine has.
    """
    if isinstance(device, HostDevice) or (options.still and options.replay is None):
        return tier
    if options.pageable:
        logger.warning(
            "the host tier is not pinned (--pageable): precision is restored from the checkpoint's "
            "files, at the speed of the disk or of its cache; %d bytes of pinned memory are saved",
            tier_bytes(tier),
        )
        return tier
    from pagedweight.memory.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice)
    return PinnedTier(tier, device.host_memory, options.host_memory)
