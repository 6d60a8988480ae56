"""Fixtures of the kernel tests."""

import pytest
from kernel_calls import PoisonedKernel

from pagedweight.kernels.contract import LayerStats


@pytest.fixture(scope="session")
def cpu_kernel():
    return PoisonedKernel()


@pytest.fixture
def stats_for():
    return lambda call: LayerStats.empty(call.layer.shape.experts)
