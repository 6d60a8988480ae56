"""The device that a command's `--device` names."""

from __future__ import annotations

import torch

from pagedweight.errors import UserError


def device_of(name: str) -> torch.device:
    """cpu or cuda. UserError for another name, and for cuda where torch finds no device."""
    if name not in ("cpu", "cuda"):
        raise UserError(f"--device is cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; use --device cpu"
        )
    return torch.device(name)
