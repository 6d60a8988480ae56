"""The machine: memory and its limits, the processor, folders that have to be writable."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pagedweight.kernels.cuda.compiler import cache_directory
from pagedweight.memory.limits import group_available, machine_available
from pagedweight.serving.doctor.finding import Finding

_GIB = 1 << 30
_LIMITS = {"locked memory": resource.RLIMIT_MEMLOCK, "address space": resource.RLIMIT_AS}


def memory() -> Finding:
    """RAM that is left, by the machine and by the control group, and what bounds a process."""
    group = group_available()
    values = {
        "available_bytes": machine_available(),
        "group_available_bytes": group,
        "overcommit": _overcommit(),
        **{name: _soft(limit) for name, limit in _LIMITS.items()},
    }
    parts = [f"{values['available_bytes'] / _GIB:.1f} GiB available"]
    parts.append("no control group limit" if group is None else f"group {group / _GIB:.1f} GiB")
    parts += [f"{name} {_text(values[name])}" for name in _LIMITS]
    parts.append(f"overcommit {values['overcommit']}")
    said = ", ".join(parts)
    if values["overcommit"] == 2:
        way_out = "sysctl vm.overcommit_memory=0: reserved address ranges count against the limit"
        return Finding("memory", "wrong", said, way_out, values)
    if values["address space"] is not None:
        way_out = "ulimit -v unlimited: address ranges larger than memory are reserved"
        return Finding("memory", "wrong", said, way_out, values)
    return Finding("memory", "ok", said, values=values)


def processor() -> Finding:
    """Cores that this process may use, and the vector instructions that vLLM's CPU build has
    kernels for."""
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags()
    widest = next((name for name in ("avx512f", "avx2", "asimd") if name in flags), None)
    values = {"cores": cores, "vectors": widest}
    said = f"{cores} cores, {widest or 'no AVX2'}"
    if widest is None:
        return Finding("processor", "note", said, "vLLM's CPU build needs AVX2 or better", values)
    return Finding("processor", "ok", said, values=values)


def folders() -> Finding:
    """Caches that are written at first use: compiled kernels, vLLM's, numba's."""
    refused = {name: path for name, path in _caches() if not _writable(path)}
    values = {name: str(path) for name, path in _caches()}
    if refused:
        said = ", ".join(f"{name}: cannot write {path}" for name, path in refused.items())
        way_out = "give the folder to this user, or set XDG_CACHE_HOME, VLLM_CACHE_ROOT and "
        return Finding("folders", "wrong", said, f"{way_out}NUMBA_CACHE_DIR elsewhere", values)
    return Finding("folders", "ok", f"{', '.join(values)} can be written", values=values)


def _caches() -> Iterator[tuple[str, Path]]:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    yield "kernels", cache_directory()
    yield "vllm", Path(os.environ.get("VLLM_CACHE_ROOT") or base / "vllm")
    beside = Path(__file__).parents[2] / "quantize"
    fallback = beside if _writable(beside) else base / "numba"
    yield "numba", Path(os.environ.get("NUMBA_CACHE_DIR") or fallback)
    yield "temporary", Path(tempfile.gettempdir())


def _writable(path: Path) -> bool:
    """Whether a file can be made there, or in the nearest folder above that exists."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there):
            return True
    except OSError:
        return False


def _overcommit() -> int | None:
    try:
        return int(Path("/proc/sys/vm/overcommit_memory").read_text())
    except (OSError, ValueError):
        return None


def _soft(limit: int) -> int | None:
    """The limit in force, bytes; None when there is none."""
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _text(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,} bytes"


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            return set(line.split(":", 1)[1].split())
    return set()
