"""The CUDA kernel against the float64 reference, and bit for bit against itself."""

import pytest
import torch
from cuda_calls import make_call

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.cuda import decode
from pagedweight.kernels.cuda import kernel as binding
from pagedweight.kernels.cuda.kernel import CudaKernel, describe
from pagedweight.kernels.cuda.shapes import MANY

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
SMALL = LayerShape(experts=5, hidden=130, intermediate=70)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_precision(gpu, kernel, bits):
    make_call(gpu, SMALL, 7, 2, low=bits, planes=bits).check(kernel)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 17, 64])
@pytest.mark.parametrize(
    "hidden, intermediate", [(64, 64), (130, 70), (1, 1), (200, 33), (2048, 96)]
)
def test_odd_widths_and_batches(gpu, kernel, tokens, hidden, intermediate):
    shape = LayerShape(7, hidden, intermediate)
    make_call(gpu, shape, tokens, 3, seed=tokens).check(kernel)


@pytest.mark.parametrize("dtype, table", [(BF16, BF16), (FP16, FP16), (BF16, FP16), (FP16, BF16)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_types_and_activations(gpu, kernel, dtype, table, activation):
    make_call(gpu, SMALL, 9, 2, dtype, table, activation, planes=8).check(kernel)


@pytest.mark.parametrize("tokens, top_k", [(1, 4), (5, 4), (64, 2)])
@pytest.mark.parametrize(
    "shape", [(4, 2048, 1408), (8, 2816, 704), (2, 4096, 4160), (5, 4160, 4096)]
)
def test_shapes_of_models(gpu, kernel, shape, tokens, top_k):
    shape = LayerShape(*shape)
    top_k = min(top_k, shape.experts)
    make_call(gpu, shape, tokens, top_k, seed=tokens).check(kernel)


def test_blocks_of_mixed_bits_are_claimed_in_order_of_bits(gpu, kernel):
    call = make_call(gpu, LayerShape(40, 256, 128), 64, 4, planes=8)
    first = call.check(kernel)
    for _ in range(10):
        assert torch.equal(call.run(kernel), first)


@pytest.mark.parametrize("routing", ["zipf", "hot"])
def test_a_hot_expert_and_experts_without_tokens(gpu, kernel, routing):
    make_call(gpu, LayerShape(40, 128, 64), 64, 3, routing=routing).check(kernel)


def test_top_1_on_one_expert(gpu, kernel):
    make_call(gpu, LayerShape(3, 128, 64), 40, 1, routing="hot").check(kernel)


def test_more_pairs_than_decode_plans(gpu, kernel, monkeypatch):
    call = make_call(gpu, LayerShape(16, 192, 128), 700, 4)
    call.check(kernel)
    monkeypatch.setattr(binding, "is_prefill", lambda *_: False)  # decode, in slices
    call.check(kernel)


@pytest.mark.parametrize("tokens, experts", [(1, 3), (9, 5), (145, 2), (300, 9)])
@pytest.mark.parametrize("planes", [5, 6, 8])
def test_prefill_at_any_size(gpu, kernel, monkeypatch, tokens, experts, planes):
    monkeypatch.setattr(binding, "is_prefill", lambda *_: True)
    call = make_call(gpu, LayerShape(experts, 200, 136), tokens, 2, planes=planes)
    first = call.check(kernel)
    for _ in range(5):
        assert torch.equal(call.run(kernel), first)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(
    "groups", [(0, 0), (0, 2), (1, 1), (2, 3), (3, 3), (1, 0), (2, 1), (3, 0), (3, 2)]
)
def test_groups_of_warps_share_units(gpu, kernel, monkeypatch, groups, few):
    monkeypatch.setattr(decode, "group_table", lambda *_: ((MANY, groups),))
    monkeypatch.setattr(decode, "is_few", lambda *_: few)
    monkeypatch.setattr(decode, "choose_token_groups", lambda *_: 1)
    for shape in (SMALL, LayerShape(20, 512, 320)):
        call = make_call(gpu, shape, 21, 3, planes=8)
        first = call.check(kernel)
        for _ in range(5):
            assert torch.equal(call.run(kernel), first)


def _by_kind(alike, mixed):
    return lambda *args: ((MANY, mixed if args[-1] else alike),)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("alike, mixed", [((0, 1), (2, 3)), ((3, 0), (1, 2))])
@pytest.mark.parametrize("others", [(0, 0), (4, 0), (0, 4), (4, 4), (3, 24)])
def test_a_phase_takes_its_groups_by_its_blocks(
    gpu, kernel, monkeypatch, few, alike, mixed, others
):
    """24 experts have a block of tokens each, of which `others` by kind are not at 4 bits: mixed
    from one block in eight on. What 16 experts without tokens have does not count."""
    monkeypatch.setattr(decode, "is_few", lambda *_: few)
    monkeypatch.setattr(decode, "choose_token_groups", lambda *_: 1)
    bits = torch.full((40, 2), 4, dtype=torch.int32)
    bits[: others[0], 0], bits[: others[1], 1], bits[30:] = 5, 3, 6
    call = make_call(gpu, LayerShape(40, 1024, 704), 48, 2, FP16, bits=bits)
    call.ids[:] = torch.arange(96, device=gpu).reshape(48, 2) % 24
    pair = tuple((mixed if others[kind] == 4 else alike)[kind] for kind in (0, 1))
    outs = []
    for at_alike, at_mixed in ((alike, mixed), (pair, pair), (mixed, alike)):
        monkeypatch.setattr(decode, "group_table", _by_kind(at_alike, at_mixed))
        outs.append(call.check(kernel))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])  # another order of sums shows in float16


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("hit, pair", [(9, (0, 1)), (10, (2, 3)), (29, (2, 3)), (30, (1, 0))])
def test_groups_are_taken_by_the_blocks_that_there_are(gpu, kernel, monkeypatch, few, hit, pair):
    """The host does not know which experts the tokens reach."""
    monkeypatch.setattr(decode, "is_few", lambda *_: few)
    monkeypatch.setattr(decode, "choose_token_groups", lambda *_: 1)
    bits = torch.full((40, 2), 4, dtype=torch.int32)
    call = make_call(gpu, LayerShape(40, 1024, 704), 30, 2, FP16, bits=bits)
    call.ids[:] = torch.arange(60, device=gpu).reshape(30, 2) % hit
    outs = []
    for table in (
        ((10, (0, 1)), (30, (2, 3)), (MANY, (1, 0))),
        ((MANY, pair),),
        ((MANY, (3, 1)),),
    ):
        monkeypatch.setattr(decode, "group_table", lambda *_, table=table: table)
        outs.append(call.check(kernel))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])  # another order of sums shows in float16


def _groups_of(monkeypatch, token_groups):
    monkeypatch.setattr(decode, "is_few", lambda *_: False)
    monkeypatch.setattr(decode, "choose_token_groups", lambda *_: token_groups)
    monkeypatch.setattr(binding, "is_prefill", lambda *_: False)


@pytest.mark.parametrize("token_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [3, 40, 100])
def test_a_decoded_weight_serves_groups_of_tokens(gpu, kernel, monkeypatch, token_groups, tokens):
    _groups_of(monkeypatch, token_groups)
    for planes in (4, 6, 8):
        call = make_call(gpu, LayerShape(6, 520, 360), tokens, 2, planes=planes)
        first = call.check(kernel)
        for _ in range(3):
            assert torch.equal(call.run(kernel), first)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("hidden, intermediate", [(130, 70), (1, 1), (2048, 96), (4160, 4096)])
def test_groups_of_tokens_at_every_precision(gpu, kernel, monkeypatch, bits, hidden, intermediate):
    _groups_of(monkeypatch, 2)
    shape = LayerShape(3, hidden, intermediate)
    make_call(gpu, shape, 21, 2, low=bits, planes=bits).check(kernel)


@pytest.mark.parametrize("dtype, table", [(FP16, FP16), (BF16, FP16), (FP16, BF16)])
def test_groups_of_tokens_in_other_types(gpu, kernel, monkeypatch, dtype, table):
    _groups_of(monkeypatch, 1)
    make_call(gpu, SMALL, 9, 2, dtype, table, "gelu", planes=8).check(kernel)


@pytest.mark.parametrize("groups", [(0, 0), (1, 2), (2, 2)])
def test_groups_of_tokens_and_of_warps_together(gpu, kernel, monkeypatch, groups):
    _groups_of(monkeypatch, 3)
    monkeypatch.setattr(decode, "group_table", lambda *_: ((MANY, groups),))
    make_call(gpu, LayerShape(5, 700, 130), 60, 2, planes=8).check(kernel)


def test_experts_of_other_ranks_add_nothing(gpu, kernel):
    call = make_call(gpu, SMALL, 12, 3)
    call.ids[2, 1] = -1
    call.ids[5] = -1
    out = call.check(kernel)
    assert (out[5] == 0).all()
    call.ids[:] = -7
    assert (call.run(kernel) == 0).all()


def test_wide_ids(gpu, kernel):
    call = make_call(gpu, SMALL, 6, 2)
    narrow = call.run(kernel)
    wide = make_call(gpu, SMALL, 6, 2)
    object.__setattr__(wide, "ids", wide.ids.to(torch.int64))
    assert torch.equal(wide.run(kernel), narrow)


def test_repeats_and_statistics_do_not_change_a_bit(gpu, kernel):
    call = make_call(gpu, LayerShape(30, 256, 192), 50, 4, routing="zipf")
    first = call.run(kernel)
    for _ in range(20):
        assert torch.equal(call.run(kernel), first)
    assert torch.equal(call.run(kernel, call.stats()), first)


@pytest.mark.parametrize("tokens", [1, 30, 64, 300])
def test_work_beside_does_not_change_a_bit(gpu, kernel, tokens):
    call = make_call(gpu, LayerShape(30, 256, 192), tokens, 4)
    assert torch.equal(call.run(kernel, beside=True), call.run(kernel))


def test_processors_are_left_to_work_beside(gpu, kernel, monkeypatch):
    launched = []

    def launch(function, blocks, *arguments):
        launched.append(blocks)
        real(function, blocks, *arguments)

    real = decode.launch
    monkeypatch.setattr(decode, "launch", launch)
    call, processors = make_call(gpu, SMALL, 3, 2), describe(0).processors
    for beside in (False, True):
        call.run(kernel, beside=beside)
    assert launched[0] % processors == 0
    assert launched[1] == launched[0] // processors * (processors - processors // 32)


def test_a_token_has_the_same_bits_in_any_small_batch(gpu, kernel):
    call = make_call(gpu, LayerShape(6, 256, 192), 6, 2)
    whole = call.run(kernel)
    for token in range(6):
        assert torch.equal(call.run(kernel, rows=slice(token, token + 1))[0], whole[token])


@pytest.mark.parametrize("tokens, real", [(1, 1), (20, 13), (64, 0), (300, 251)])
def test_statistics_count_real_tokens(gpu, kernel, tokens, real):
    call = make_call(gpu, LayerShape(9, 200, 96), tokens, 3, routing="zipf")
    call.ids[0, 1] = -1
    got, want = call.stats(), call.stats()
    got.features[:, :, 2] = want.features[:, :, 2] = 1e-3
    count = torch.tensor([real], device=gpu)
    call.check(kernel, got, count)
    call.truth(want, count)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.allclose(got.mass, want.mass, rtol=1e-5)
    assert torch.allclose(got.features, want.features, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_a_graph_reads_new_bits_and_new_tokens(gpu, kernel, tokens):
    shape = LayerShape(6, 256, 192)
    first, second = (make_call(gpu, shape, tokens, 2, seed=s) for s in (1, 2))
    want = [c.run(kernel) for c in (first, second)]
    out = torch.empty_like(first.x)
    layer = first.layer
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        CudaKernel.__call__(  # without poison: the graph would hold it
            kernel,
            first.x,
            first.weights,
            first.ids,
            shape,
            layer.table,
            layer.table_dtype,
            "silu",
            out,
        )
    for _ in range(3):
        graph.replay()
    assert torch.equal(out, want[0])
    for name in ("bits", "planes", "tables"):
        getattr(layer.table, name).copy_(getattr(second.layer.table, name))
    for name in ("x", "weights", "ids"):
        getattr(first, name).copy_(getattr(second, name))
    graph.replay()
    assert torch.equal(out, want[1])
