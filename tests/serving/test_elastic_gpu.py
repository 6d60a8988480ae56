"""A real vLLM engine with elastic memory on a GPU, CUDA graphs and asynchronous scheduling on.

Under both model runners, each in a process of its own, side by side: `gpu_cases.py`.

pytest tests/serving/test_elastic_gpu.py      on a machine with a GPU and vLLM 0.26
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
RUNNERS = {"runner-v2": "1", "runner-v1": "0"}
CASES = Path(__file__).with_name("gpu_cases.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What both runners said, and how their processes ended."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = tmp_path_factory.mktemp("elastic")
    subprocess.run([sys.executable, CASES, folder / "qwen"], check=True)
    processes = {}
    for name, number in RUNNERS.items():
        (folder / name).mkdir()
        processes[name] = subprocess.Popen(
            [sys.executable, CASES, folder / "qwen", folder / name],
            env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return {name: (p.communicate(timeout=400)[0], p.returncode) for name, p in processes.items()}


@pytest.mark.timeout(450)
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_case_passes_in_a_process_of_its_own(both, runner):
    said, code = both[runner]
    assert code == 0, said[-8000:]
    assert "all passed" in said
