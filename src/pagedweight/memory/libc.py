"""The four memory calls of Linux that the host backend needs, through ctypes.

Python's own mmap module can neither map without access nor change access later.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

from pagedweight.errors import Transient, UserError

PROT_NONE, PROT_READ_WRITE = 0, 3
MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
MADV_DONTNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE = 4, 14, 15
"""Values of <asm-generic/mman.h>, the same on x86-64 and arm64."""

_MAP_FAILED = ctypes.c_void_p(-1).value


def _library() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise UserError(f"the host memory backend needs Linux, this is {sys.platform}")
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        number,
        number,
        number,
        ctypes.c_long,
    )
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


_libc: ctypes.CDLL | None = None


def _call(name: str, *arguments: int | None) -> int | None:
    """Call a function of libc; Transient with the error's name when it fails."""
    global _libc
    _libc = _libc or _library()
    result: int | None = getattr(_libc, name)(*arguments)
    if result in (-1, _MAP_FAILED):
        code = ctypes.get_errno()
        raise Transient(f"{name}: {errno.errorcode.get(code, code)} ({os.strerror(code)})")
    return result


def map_without_access(nbytes: int) -> int:
    """Address of `nbytes` of anonymous memory that takes no memory and cannot be touched."""
    address = _call("mmap", None, nbytes, PROT_NONE, MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    assert address is not None
    return address


def unmap(address: int, nbytes: int) -> None:
    _call("munmap", address, nbytes)


def protect(address: int, nbytes: int, access: int) -> None:
    _call("mprotect", address, nbytes, access)


def advise(address: int, nbytes: int, advice: int) -> None:
    _call("madvise", address, nbytes, advice)
