"""A quantized tiny-moe for the serving tests, made once a session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedweight.checkpoint.plan import save_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint


@pytest.fixture(scope="session")
def tiny_quantized(tiny_moe, tmp_path_factory) -> Path:
    """tiny-moe at 2 to 6 bits, without calibration (what is served does not depend on it)."""
    out = tmp_path_factory.mktemp("serving") / "tiny-q"
    source = SourceCheckpoint.open(tiny_moe)
    quantize_checkpoint(source, out, QuantizeOptions(), lambda *_: None)
    return out


@pytest.fixture(scope="session")
def random_plan(tiny_quantized) -> Path:
    """A plan file with random bits for every linear block."""
    checkpoint = Checkpoint.open(tiny_quantized)
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    path = tiny_quantized.parent / "plan.json"
    save_plan(path, np.random.default_rng(7).choice(checkpoint.bits, shape))
    return path
