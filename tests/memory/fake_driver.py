"""The part of the CUDA driver that `CudaPages` and a new `CudaDevice` call, with faults on demand.

It is as strict as the real one about what may be mapped and unmapped; contents do not exist. What
the real driver does is tested on a GPU (tests/memory_cuda).
"""

from enum import IntEnum
from types import SimpleNamespace

GRANULE = 2 << 20


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class FakeDriver:
    """`mapped[address]` is the handle behind a page; `readable` are those with access. `context`
    None: no context is current in this thread."""

    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, total_pages=64):
        self.total = self.free = total_pages * GRANULE
        self.context = 1
        self.fault = lambda number, name: False
        self.status = Status.CUDA_ERROR_OUT_OF_MEMORY
        self.calls = []
        self.handles, self.mapped, self.readable = {}, {}, set()
        self._next_handle, self._next_address = 1, 1 << 40

    @staticmethod
    def CUmemAllocationProp():  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def _call(self, name, *arguments):
        number = len(self.calls)
        self.calls.append((name, *arguments))
        return self.fault(number, name)

    def cuCtxGetCurrent(self):  # noqa: N802
        return Status.CUDA_SUCCESS, self.context

    def cuDriverGetVersion(self):  # noqa: N802
        return Status.CUDA_SUCCESS, 12_000

    def cuMemGetAllocationGranularity(self, properties, option):  # noqa: N802
        return Status.CUDA_SUCCESS, GRANULE

    def cuMemGetInfo(self):  # noqa: N802
        if self.context is None:
            return Status.CUDA_ERROR_INVALID_CONTEXT, 0, 0
        return Status.CUDA_SUCCESS, self.free, self.total

    def cuMemCreate(self, size, properties, flags):  # noqa: N802
        if self._call("create", size) or self.free < size:
            return self.status, None
        self.free -= size
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.handles[handle] = size
        return Status.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle):  # noqa: N802
        self.free += self.handles.pop(handle)
        return (Status.CUDA_SUCCESS,)

    def cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        if self._call("reserve", size):
            return self.status, None
        base = -(-self._next_address // alignment) * alignment
        self._next_address = base + size + GRANULE
        return Status.CUDA_SUCCESS, base

    def cuMemAddressFree(self, base, size):  # noqa: N802
        inside = [at for at in self.mapped if base <= at < base + size]
        return (Status.CUDA_ERROR_INVALID_VALUE if inside else Status.CUDA_SUCCESS,)

    def cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        if address in self.mapped or handle not in self.handles:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        if self._call("map", address):
            return (self.status,)
        self.mapped[address] = handle
        return (Status.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, access, count):  # noqa: N802
        pages = range(address, address + size, GRANULE)
        if any(page not in self.mapped for page in pages):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        if self._call("access", address, size):
            return (self.status,)
        self.readable.update(pages)
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, size):  # noqa: N802
        pages = range(address, address + size, GRANULE)
        if any(page not in self.mapped for page in pages):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        if self._call("unmap", address, size):
            return (self.status,)
        for page in pages:
            del self.mapped[page]
            self.readable.discard(page)
        return (Status.CUDA_SUCCESS,)
