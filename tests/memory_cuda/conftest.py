"""The CUDA backend's tests need a GPU; elsewhere each is skipped with a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))  # ranks


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("the CUDA backend is tested on a machine with a GPU")
    from pagedweight.memory.cuda.device import CudaDevice

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products on the host: other processes may have the cores
    made = CudaDevice()
    yield made
    made.close()
    torch.set_num_threads(threads)
