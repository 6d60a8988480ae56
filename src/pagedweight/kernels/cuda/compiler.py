"""CUDA sources to machine code at first use, kept on disk by content, options and architecture."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from pagedweight.kernels.cuda.driver import bindings, check

SOURCES = Path(__file__).parent / "csrc"


def cache_directory() -> Path:
    """Folder of compiled kernels, outside the package: under XDG_CACHE_HOME, else ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pagedweight" / "cuda"


def options(defines: dict[str, int], capability: tuple[int, int]) -> tuple[str, ...]:
    """The compiler's command line. Hopper is addressed with its own instructions (sm_90a)."""
    suffix = "a" if capability[0] >= 9 else ""
    return (
        f"-arch=sm_{capability[0]}{capability[1]}{suffix}",
        "-std=c++17",
        f"-I{SOURCES}",
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    )


@lru_cache(maxsize=1)
def _sources_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.digest()


def machine_code(source: str, defines: dict[str, int], capability: tuple[int, int]) -> bytes:
    """A cubin of `csrc/<source>`, from the cache or compiled (some seconds) and cached.

    Raises UserError without a compiler, RuntimeError with its log where the source is refused.
    """
    _, nvrtc = bindings()
    flags = options(defines, capability)
    version = check(nvrtc.nvrtcVersion())
    key = hashlib.sha256(_sources_digest())
    # The folder's place must not matter, so that a cache moves with its user.
    key.update(repr((source, version, [f for f in flags if not f.startswith("-I")])).encode())
    path = cache_directory() / f"{Path(source).stem}-{key.hexdigest()[:24]}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compile(source, flags)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)
    return code


def _compile(source: str, flags: tuple[str, ...]) -> bytes:
    _, nvrtc = bindings()
    text = (SOURCES / source).read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    encoded = [flag.encode() for flag in flags]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(status) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source} does not compile ({' '.join(flags)}):\n{log.decode()}")
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    check(nvrtc.nvrtcDestroyProgram(program))
    return code
