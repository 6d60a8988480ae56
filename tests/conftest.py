"""Models that tests may use. This folder is on the import path: `from factory import ...`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """The trained demo model of the repository."""
    return ROOT / "models" / "tiny-moe"


@pytest.fixture(scope="session")
def lab_moe() -> Path:
    """A larger trained model that lies beside the repository on some machines."""
    path = ROOT.parent / "shared" / "models" / "lab-moe"
    if not path.is_dir():
        pytest.skip("lab-moe is not beside the repository; its tests are left out")
    return path


@pytest.fixture(scope="session")
def tiny_quantized(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-moe at 2 to 6 bits, without calibration (what is served does not depend on it)."""
    from pagedweight.checkpoint.source import SourceCheckpoint
    from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint

    out = tmp_path_factory.mktemp("quantized") / "tiny-q"
    quantize_checkpoint(SourceCheckpoint.open(tiny_moe), out, QuantizeOptions(), lambda *_: None)
    return out


@pytest.fixture(scope="session")
def random_plan(tiny_quantized: Path) -> Path:
    """A plan file with random bits for every linear block of `tiny_quantized`."""
    from pagedweight.checkpoint.plan import save_plan
    from pagedweight.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint.open(tiny_quantized)
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    path = tiny_quantized.parent / "plan.json"
    save_plan(path, np.random.default_rng(7).choice(checkpoint.bits, shape))
    return path
