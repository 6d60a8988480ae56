"""What the CPU kernel is compiled for, and where compiled code is kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import llvmlite
import numba
from numba.core import config
from numba.core.registry import cpu_target

from pagedweight.errors import UserError

LANES = 16
"""Partial sums of a dot product, on every machine: results do not depend on the vector width."""


def _target_features() -> list[str]:
    """The features LLVM compiles for: the host's, or what NUMBA_CPU_FEATURES says."""
    _triple, _cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return str(features).split(",")


WIDE = "+avx512f" in _target_features()
"""512-bit registers and their table lookups (vpermps, vpermi2ps) can be used."""
AVX2 = "+avx2" in _target_features()
"""256-bit registers and their table lookup (vpermps) can be used."""
BLOCK_ROWS = 8 if WIDE else 2
"""Weight rows in one register block of the matrix product; with 3 tokens it fills the registers."""
BLOCK_TOKENS = 3
PRODUCT_BYTES = BLOCK_TOKENS * LANES * 4
"""Products of one tile of 16 rows with a block of tokens."""


def check_machine() -> None:
    """Raise UserError where the processor lacks fused multiply-add or 16-bit float conversion."""
    needed = ["+avx2", "+fma", "+f16c"] if platform.machine().lower() in ("x86_64", "amd64") else []
    if missing := [name[1:] for name in needed if name not in _target_features()]:
        raise UserError(
            f"the CPU kernel needs a processor with AVX2, FMA and F16C; {', '.join(missing)} "
            "missing here (NUMBA_CPU_FEATURES can hide them: unset it)"
        )


def cache_directory() -> Path:
    """Folder of compiled kernels, outside the package, named by the content of the sources.

    Numba's own key covers one file and the machine; ours also covers the files that file uses.
    `NUMBA_CACHE_DIR` moves it, else it is under `XDG_CACHE_HOME` or ~/.cache.
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        base = Path(chosen)
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedweight"
    return base / "numba" / digest.hexdigest()[:16]


@contextlib.contextmanager
def cached_here() -> Iterator[None]:
    """Functions that numba decorates with `cache=True` inside are cached in `cache_directory()`.

    Numba reads the setting when it decorates, so it is put back for everybody else.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_directory())
    try:
        yield
    finally:
        config.CACHE_DIR = before
