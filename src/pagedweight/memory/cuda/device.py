"""The CUDA backend: `memory/interface.py` on one GPU, in torch's own context.

At once is the driver's virtual memory (`cuda/pages.py`); in order is torch's current stream, the
one that the model's steps are launched on; beside is a copy stream. No method waits for the GPU
but `read`, `close` and the `wait` of what was returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from pagedweight.errors import Transient, UserError
from pagedweight.memory.cuda.batch_copy import BatchCopy
from pagedweight.memory.cuda.dlpack import tensor_at
from pagedweight.memory.cuda.driver import bindings, check
from pagedweight.memory.cuda.pages import CudaPages
from pagedweight.memory.cuda.streams import Marked, Staging, Submitting, contiguous, pinned_array
from pagedweight.memory.interface import AddressRange, Bytes, Completion, Copy, PinnedCopies

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE


class CudaDevice:
    """GPU `index` (None: torch's current one); `page_bytes` None: the driver's 2 MiB.

    Used by one thread, with its GPU current, as torch has it.
    """

    def __init__(self, page_bytes: int | None = None, index: int | None = None) -> None:
        """UserError without a GPU, without cuda.bindings, or for a page size that does not fit."""
        if not torch.cuda.is_available():
            raise UserError("there is no CUDA GPU here, or this torch was built without CUDA")
        self._driver = bindings()
        ordinal = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", ordinal)
        with torch.cuda.device(self.torch_device):
            torch.cuda.current_stream().synchronize()  # makes the context
            self._context = check(self._driver.cuCtxGetCurrent(), "the GPU's context")
            self._copies = torch.cuda.Stream(self.torch_device)
            self._moves = torch.cuda.Stream(self.torch_device)
        self.pages = CudaPages(self._driver, ordinal, page_bytes)
        self.page_bytes = self.pages.page_bytes
        self._batch = BatchCopy(self._driver)
        self._staging = Staging(self.host_memory)
        self._host: list[int] = []
        self._thread: ThreadPoolExecutor | None = None
        self._last: torch.cuda.Stream | None = None

    # -- at once ---------------------------------------------------------------------------------

    def create(self, count: int) -> None:
        self.pages.create(count)

    def reserve(self, nbytes: int, name: str, tolerant: bool = False) -> AddressRange:
        return self.pages.reserve(nbytes, name, tolerant)

    def map(self, span: AddressRange, first: int, pages: Sequence[int]) -> None:
        self.pages.map(span, first, pages)

    def unmap(self, span: AddressRange, first: int, count: int) -> None:
        self.pages.unmap(span, first, count)

    def host_memory(self, nbytes: int) -> Bytes:
        """uint8 [nbytes] of pinned host memory, for the life of the device. Raises UserError."""
        what = f"{nbytes} bytes of pinned host memory"
        try:
            address = int(check(self._driver.cuMemHostAlloc(nbytes, _PORTABLE), what))
        except Transient as error:
            raise UserError(f"{error}: the host refuses to pin so much") from error
        self._host.append(address)
        return pinned_array(address, nbytes)

    # -- in order --------------------------------------------------------------------------------

    def _stream(self) -> torch.cuda.Stream:
        """The stream of the model's steps. Another one than last time first waits for that one."""
        stream = torch.cuda.current_stream(self.torch_device)
        if self._last is not None and stream.cuda_stream != self._last.cuda_stream:
            stream.wait_stream(self._last)
        self._last = stream
        return stream

    def move(self, target: int, source: int, nbytes: int) -> None:
        stream = self._stream().cuda_stream
        check(self._driver.cuMemcpyDtoDAsync(target, source, nbytes, stream), f"move {nbytes}")

    def move_slots(self, targets: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
        if len(targets) == 1:
            self.move(targets[0], sources[0], nbytes)
            return
        # A batch may not be put on the legacy default stream, which torch's current one may be.
        stream = self._stream()
        self._moves.wait_stream(stream)
        sizes = np.full(len(targets), nbytes, np.int64)
        try:
            self._batch.submit(
                np.array(targets, np.int64),
                np.array(sources, np.int64),
                sizes,
                self._moves.cuda_stream,
            )
        finally:
            stream.wait_stream(self._moves)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        stream = self._stream().cuda_stream
        what = f"fill {nbytes} bytes"
        check(self._driver.cuMemsetD8Async(address, byte, nbytes, stream), what)

    def write(self, address: int, data: Bytes) -> None:
        stream, nbytes = self._stream(), data.nbytes
        buffer = self._staging.fill(data)
        source = buffer.ctypes.data
        try:
            check(
                self._driver.cuMemcpyHtoDAsync(address, source, nbytes, stream.cuda_stream),
                f"write {nbytes} bytes",
            )
        finally:
            self._staging.lend(buffer, stream)

    def fence(self) -> Completion:
        return Marked(self._stream())

    def after(self, completion: Completion) -> None:
        if isinstance(completion, Marked | Submitting):
            completion.hold(self._stream())
        else:
            completion.wait()

    # -- beside ----------------------------------------------------------------------------------

    def upload(self, copies: Sequence[Copy]) -> Completion:
        begin = Marked(self._stream())
        if isinstance(copies, PinnedCopies):
            return self._pinned(begin, copies)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pagedweight-upload", self._use_context)
        return Submitting(self._thread.submit(self._pageable, begin, list(copies)))

    def _pinned(self, begin: Marked, copies: PinnedCopies) -> Completion:
        begin.hold(self._copies)
        stream = self._copies.cuda_stream
        try:
            self._batch.submit(copies.targets, copies.sources, copies.nbytes, stream)
        except Transient:
            # Some may be under way: whoever is given the same memory next comes after them.
            self._stream().wait_stream(self._copies)
            raise
        return Marked(self._copies, copies)

    def _use_context(self) -> None:
        check(self._driver.cuCtxSetCurrent(self._context), "the GPU's context in a thread")

    def _pageable(self, begin: Marked, copies: list[Copy]) -> Marked:
        """On the thread: the driver copies pageable memory through its own buffers, and waits."""
        begin.hold(self._copies)
        packed = contiguous(copies)
        for target, source in packed:
            check(
                self._driver.cuMemcpyHtoDAsync(
                    target, source.ctypes.data, source.nbytes, self._copies.cuda_stream
                ),
                f"upload of {source.nbytes} bytes",
            )
        return Marked(self._copies, packed)

    # -- looking ---------------------------------------------------------------------------------

    def read(self, address: int, nbytes: int) -> Bytes:
        self._stream().synchronize()
        out = np.empty(nbytes, np.uint8)
        check(self._driver.cuMemcpyDtoH(out.ctypes.data, address, nbytes), f"read {nbytes} bytes")
        return out

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_at(address, nbytes, self.torch_device.index)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        torch.cuda.synchronize(self.torch_device)
        self.pages.close()
        while self._host:
            check(self._driver.cuMemFreeHost(self._host.pop()), "giving pinned memory back")
