"""What the CUDA kernel refuses, and its sources on architectures that are not here."""

import pytest
import torch
from cuda_calls import make_call

from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError
from pagedweight.kernels.cuda import driver
from pagedweight.kernels.cuda.compiler import machine_code
from pagedweight.kernels.cuda.shapes import Build, GroupBuild

SMALL = LayerShape(experts=3, hidden=64, intermediate=64)


def test_old_gpus_are_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"capability 7\.5.*8\.0"):
        driver.check_capability((7, 5), "Tesla T4")
    driver.check_capability((8, 0), "A100")


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(UserError, match="cuda-bindings"):
        driver.bindings()


@pytest.mark.gpu
def test_float32_is_refused(gpu, kernel):
    with pytest.raises(UserError, match="bfloat16 or float16"):
        make_call(gpu, SMALL, 2, 1, torch.float32).run(kernel)


@pytest.mark.gpu
def test_tensors_off_the_contract_are_named(gpu, kernel):
    call = make_call(gpu, SMALL, 2, 1)
    object.__setattr__(call, "weights", call.weights.double())
    with pytest.raises(ValueError, match="topk_weights"):
        call.run(kernel)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "source, build, capability",
    [("decode.cu", Build(8), c) for c in ((8, 0), (8, 9), (9, 0), (10, 0))]
    + [("decode_groups.cu", GroupBuild(8, 3), c) for c in ((8, 0), (10, 0))],
)
def test_sources_compile_for(gpu, source, build, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    defines = build.defines() | {"PW_BF16": 1, "PW_TABLE_BF16": 1}
    code = machine_code(source, defines, capability)
    assert code[:4] == b"\x7fELF"
    assert len(list((tmp_path / "pagedweight" / "cuda").iterdir())) == 1
