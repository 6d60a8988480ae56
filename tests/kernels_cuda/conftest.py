"""The CUDA kernel's tests need a GPU; elsewhere each is skipped with a sentence."""

from __future__ import annotations

import pytest
import torch

from pagedweight.kernels.cuda.kernel import CudaKernel


class PoisonedKernel(CudaKernel):
    """The kernel with NaN in its scratch memory before every call."""

    def __call__(self, *args, **kwargs):
        for workspace in self._workspaces.values():
            workspace.fill(0xFF)
        super().__call__(*args, **kwargs)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("the CUDA kernels are tested on a machine with a GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def kernel(gpu) -> PoisonedKernel:
    return PoisonedKernel()
