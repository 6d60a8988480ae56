"""Models that tests may use. This folder is on the import path: `from factory import ...`."""

from __future__ import annotations

from pathlib import Path

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
