"""The CPU kernel against the float64 reference, and bit for bit against itself."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import make_call

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.cpu.kernel import CpuKernel
from pagedweight.kernels.cpu.machine import WIDE
from pagedweight.kernels.reference.kernel import ReferenceKernel

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
CALLS = st.builds(
    make_call,
    shape=st.builds(
        LayerShape,
        experts=st.integers(4, 7),
        hidden=st.sampled_from([1, 16, 63, 64, 100, 129]),
        intermediate=st.sampled_from([1, 15, 37, 64, 80]),
    ),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 17]),
    top_k=st.integers(1, 4),
    dtype=DTYPES,
    table_dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh"]),
    routing=st.sampled_from(["uniform", "zipf", "hot"]),
    seed=st.integers(0, 2**31),
    planes=st.integers(6, 8),
)
quick = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(CALLS)
def test_any_call_is_within_tolerance_of_float64(cpu_kernel, call):
    call.check(cpu_kernel)


@quick
@given(CALLS, st.data())
def test_statistics_count_real_tokens_and_local_experts(cpu_kernel, call, data):
    tokens = call.ids.shape[0]
    real = torch.tensor([data.draw(st.integers(0, tokens))])
    call.ids[data.draw(st.integers(0, tokens - 1))] = -1
    experts = call.layer.shape.experts
    got, want = LayerStats.empty(experts), LayerStats.empty(experts)
    got.features[:, :, 2] = want.features[:, :, 2] = 1e-3  # maxima that are raised, not written
    call.check(cpu_kernel, got, real)
    call.run(ReferenceKernel(torch.float64), want, real, out_dtype=torch.float64)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.allclose(got.mass, want.mass, rtol=1e-5)
    loose = 1e-5 if call.x.dtype == torch.float32 else 1e-2
    assert torch.allclose(got.features, want.features, rtol=loose, atol=loose * 1e-3)


@quick
@given(CALLS)
def test_a_token_has_the_same_bits_in_any_batch(cpu_kernel, call):
    whole = call.run(cpu_kernel)
    for token in range(call.x.shape[0]):
        alone = call.run(cpu_kernel, rows=slice(token, token + 1))
        assert torch.equal(alone[0], whole[token])


def test_threads_and_repeats_do_not_change_a_bit(cpu_kernel, stats_for):
    call = make_call(LayerShape(6, 200, 150), 40, 2, torch.bfloat16, routing="zipf")
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (threads, 1, 3, threads):
            torch.set_num_threads(count)
            stats = stats_for(call)
            results.append((call.run(cpu_kernel, stats), *vars(stats).values()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("tokens", [4, 300])
def test_one_expert_gets_everything(cpu_kernel, tokens):
    make_call(LayerShape(5, 96, 48), tokens, 1, routing="hot").check(cpu_kernel)


def test_tokens_without_an_expert_become_zero_and_ids_may_be_wide(cpu_kernel):
    call = make_call(LayerShape(4, 100, 37), 9, 2)
    call.ids[2], call.ids[5, 0] = -1, -7
    out = call.check(cpu_kernel)
    assert (out[2] == 0).all()
    wide = type(call)(call.layer, call.x, call.weights, call.ids.long())
    assert torch.equal(wide.run(cpu_kernel), out)


def test_statistics_do_not_change_the_output_and_add_up(cpu_kernel, stats_for):
    call = make_call(LayerShape(4, 64, 64), 12, 2, torch.bfloat16)
    once, twice = stats_for(call), stats_for(call)
    plain = call.run(cpu_kernel)
    assert torch.equal(call.run(cpu_kernel, once), plain)
    call.run(cpu_kernel, twice)
    call.run(cpu_kernel, twice)
    assert torch.allclose(2 * once.mass, twice.mass)
    assert torch.allclose(2 * once.features[..., :2], twice.features[..., :2])
    assert torch.equal(once.features[..., 2], twice.features[..., 2])


def test_planes_beyond_the_bits_and_rows_of_idle_experts_are_never_read(cpu_kernel):
    call = make_call(LayerShape(4, 64, 32), 6, 1)
    table, idle = call.layer.table, 3
    call.ids[call.ids == idle] = 0
    for expert in range(4):
        for kind in range(2):
            table.planes[expert, kind, int(table.bits[expert, kind]) :] = 1  # unmapped memory
    table.planes[idle], table.tables[idle] = 1, 1
    call.run(cpu_kernel)


def test_lowering_bits_is_one_write_to_the_table(cpu_kernel):
    call = make_call(LayerShape(4, 64, 32), 5, 2)
    lower = make_call(LayerShape(4, 64, 32), 5, 2, planes=6, seed=9)
    before = call.run(cpu_kernel)
    for field in ("bits", "planes", "tables"):
        getattr(call.layer.table, field).copy_(getattr(lower.layer.table, field))
    changed = call.run(cpu_kernel)
    assert not torch.equal(before, changed)
    other = type(call)(lower.layer, call.x, call.weights, call.ids)
    assert torch.equal(changed, other.run(cpu_kernel))


def test_what_does_not_fit_the_contract_is_refused(cpu_kernel):
    call = make_call(LayerShape(4, 64, 32), 3, 2)
    call.ids[1, 1] = 4
    with pytest.raises(ValueError, match=r"expert 4, and this layer has experts 0\.\.3"):
        call.run(cpu_kernel)
    call.ids[1, 1] = 2
    call.layer.table.bits[2, 1] = 0
    with pytest.raises(ValueError, match=r"down of expert 2 are not in 2\.\.8"):
        call.run(cpu_kernel)
    call.layer.table.bits[2, 1] = 2
    call.layer.table.tables[2, 1] = 0
    with pytest.raises(ValueError, match="down of expert 2 holds a null address"):
        call.run(cpu_kernel)
    narrow = type(call)(call.layer, call.x[:, :63], call.weights, call.ids)
    with pytest.raises(ValueError, match=r"x is torch\.float32 \(3, 63\)"):
        narrow.run(cpu_kernel)
    doubled = type(call)(call.layer, call.x, call.weights.double(), call.ids)
    with pytest.raises(ValueError, match=r"topk_weights is torch\.float64"):
        doubled.run(cpu_kernel)


def test_no_tokens_is_no_work(cpu_kernel):
    call = make_call(LayerShape(4, 64, 32), 3, 2)
    assert call.run(cpu_kernel, rows=slice(0, 0)).shape == (0, 64)


PRINT_BITS = """
import torch
from kernel_calls import make_call
from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.cpu.kernel import CpuKernel
from pagedweight.kernels.cpu.machine import WIDE
call = make_call(LayerShape(9, 100, 80), 23, 2, planes=8)
print(WIDE, call.run(CpuKernel()).numpy().tobytes().hex())
"""


@pytest.mark.skipif(not WIDE, reason="compares AVX-512 with AVX2, and this machine has no AVX-512")
def test_machines_without_wide_registers_give_the_same_bits():
    narrow = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2",
        "PYTHONPATH": os.path.dirname(__file__),
    }
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_BITS],
        env=os.environ | narrow,
        capture_output=True,
        text=True,
        check=True,
    )
    wide, bits = ran.stdout.split()
    assert wide == "False"
    call = make_call(LayerShape(9, 100, 80), 23, 2, planes=8)
    assert np.frombuffer(bytes.fromhex(bits), np.float32).reshape(23, 100).tolist() == (
        call.run(CpuKernel()).tolist()
    )
