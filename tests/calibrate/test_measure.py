"""Sensitivities, moments and signals against brute force through transformers' whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_stream import CONFIGS, saved_model
from torch.nn import functional

from pagedweight.calibrate import buffer as buffer_module
from pagedweight.calibrate import sensitivity as sensitivity_module
from pagedweight.calibrate.experts import ACTIVATE
from pagedweight.calibrate.head import HeadLoss
from pagedweight.calibrate.measure import Measured, MeasureOptions, measure
from pagedweight.calibrate.measurements import SEGMENTS
from pagedweight.calibrate.stream import StreamedModel
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import KINDS
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.reference.kernel import add_stats
from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint

BITS = (2, 3, 4)
TOKENS = torch.randint(0, 96, (3, 21), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class World:
    """A random model, whole in transformers and quantized."""

    model: Any
    source: SourceCheckpoint
    checkpoint: Checkpoint
    folder: Path

    def measured(self, **options: Any) -> Measured:
        how = MeasureOptions(**options)
        return measure(self.source, self.checkpoint, TOKENS, how, self.folder, lambda *_: None)


def world(name: str, folder: Path) -> World:
    model = saved_model(name, folder / "model")
    source = SourceCheckpoint.open(folder / "model")
    quantize_checkpoint(source, folder / "out", QuantizeOptions(bits=BITS), lambda *_: None)
    return World(model, source, Checkpoint.open(folder / "out"), folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world("qwen2_moe", tmp_path_factory.mktemp("qwen"))


def brute_force(world: World, position: int, expert: int, kind: str, bits: int) -> torch.Tensor:
    """-delta^T dW x of every position, [sequences, T], zero where it was not routed here.

    The block's output at each token is moved towards the quantized one by a variable of its own;
    autograd through the whole model gives the loss's derivative by it. The loss is the sum of
    -log p(next token of the text).
    """
    layer = world.source.moe_layers[position]
    weight = world.source.expert(position, expert, kind).float()
    moved = world.checkpoint.dequantize(position, expert, kind, bits) - weight
    module = next(
        m
        for m in world.model.model.layers[layer].modules()
        if m._parameters.get("gate_up_proj") is not None and m.gate_up_proj.ndim == 3
    )
    own, rows = module.forward, []
    for tokens in TOKENS:
        towards = torch.zeros(len(tokens), requires_grad=True)

        def apply(of: str, x: torch.Tensor, e: int, at: torch.Tensor, by=towards) -> torch.Tensor:
            y = functional.linear(x, world.source.expert(position, e, of).float())
            if (e, of) == (expert, kind):
                y = y + by[at][:, None] * functional.linear(x, moved)
            return y

        def forward(hidden, ids, routing):
            out = torch.zeros_like(hidden)
            for e in range(world.source.shape.experts):
                at, choice = torch.where(ids == e)
                gate, up = apply("gate_up", hidden[at], e, at).chunk(2, dim=-1)
                inner = ACTIVATE[world.source.activation](gate) * up
                y = apply("down", inner, e, at) * routing[at, choice][:, None]
                out = out.index_add(0, at, y)
            return out

        module.forward = forward
        logits = world.model(input_ids=tokens[None], use_cache=False).logits[0]
        loss = functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        rows.append(torch.autograd.grad(loss, towards)[0])
        module.forward = own
    return torch.stack(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_per_token_sensitivity_is_the_derivative_of_the_whole_model(
    name: str, tmp_path: Path
) -> None:
    """A stream of layers, forward and backward, against one graph of the model: every family."""
    here = world(name, tmp_path)
    found = here.measured(labels="text")
    for position in range(len(here.source.moe_layers)):
        for expert, kind, level in ((0, "gate_up", 0), (2, "down", 2)):
            moved = brute_force(here, position, expert, kind, BITS[level])
            wanted = moved.double().square()
            at = (position, expert, KINDS.index(kind), level)
            sensitivity = found.arrays["sensitivity"][at]
            assert sensitivity == pytest.approx(float(wanted.sum()), rel=2e-3, abs=1e-12)
            parts = found.measurements.damage[(slice(None), slice(None), *at)]
            assert float(parts.sum()) == pytest.approx(float(sensitivity), rel=1e-5, abs=1e-12)


def test_perplexity_is_the_whole_models(qwen: World) -> None:
    logits = qwen.model(input_ids=TOKENS, use_cache=False).logits[:, :-1]
    nll = functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    assert qwen.measured().perplexity == pytest.approx(float(nll.detach().exp()), rel=1e-4)


def test_moments_mass_and_signals_are_what_kernels_count(qwen: World) -> None:
    """The sums over segments are those of `LayerStats`; the moments are those of quantize."""
    found = qwen.measured()
    arrays, measured = found.arrays, found.measurements
    for position, layer in enumerate(qwen.source.moe_layers):
        stats = LayerStats.empty(6)
        module = qwen.model.model.layers[layer].mlp.experts
        for x, ids, routing in calls_of(qwen, module):
            for expert in range(6):
                token, choice = torch.where(ids == expert)
                pre = x[token] @ module.gate_up_proj[expert].detach().T
                inner = functional.silu(pre[:, :24]) * pre[:, 24:]
                add_stats(stats, expert, routing[token, choice], (x[token], inner))
        whole = measured.signals(0), measured.signals(1), measured.signals(2)
        mass = np.sum([one.mass[position] for one in whole], axis=0)
        np.testing.assert_allclose(mass, stats.mass.numpy(), rtol=1e-4)
        np.testing.assert_allclose(arrays["mass"][position], mass / mass.sum(), rtol=1e-4)
        features = np.stack([one.features[position] for one in whole])
        sums, top = features[..., :2].sum(0), features[..., 2].max(0)
        np.testing.assert_allclose(sums, stats.features[..., :2].numpy(), rtol=1e-3)
        np.testing.assert_allclose(top, stats.features[..., 2].numpy(), rtol=1e-3)
        assert (arrays["tokens"][position] == stats.tokens.numpy()).all()
        assert (measured.routed.sum((0, 1))[position] == stats.tokens.numpy()).all()
    assert measured.length.sum() == TOKENS.numel()


def calls_of(world: World, module: Any) -> list[tuple[torch.Tensor, ...]]:
    """What the whole model calls one layer's experts with, sequence by sequence."""
    seen: list[tuple[torch.Tensor, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args))
    with torch.no_grad():
        for tokens in TOKENS:
            world.model(input_ids=tokens[None], use_cache=False)
    hook.remove()
    return seen


def test_error_is_the_weighted_square_of_every_level(qwen: World) -> None:
    found = qwen.measured()
    for at in ((0, 3, 0, 1), (1, 5, 1, 2)):
        position, expert, kind, level = at
        name = KINDS[kind]
        off = qwen.source.expert(position, expert, name).float() - qwen.checkpoint.dequantize(
            position, expert, name, BITS[level]
        )
        moment = torch.from_numpy(found.arrays[f"second_moment.{name}"][position, expert])
        wanted = float((off.square() * moment).sum())
        assert found.arrays["error"][at] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("method", ("factored", "per-token"))
def test_factored_sensitivity_is_its_formula(qwen: World, method: str) -> None:
    """n sum_rc E[delta_r^2] E[x_c^2] dW_rc^2 over all tokens; segments vary as theirs do, whichever
    the method."""
    seen: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
    original = sensitivity_module.LayerSensitivity._work_off

    def spy(self, expert: int, kind: str, errors: torch.Tensor) -> None:
        if len(self._waiting.get((expert, kind), [])) and errors.shape[1:] == (48, 32):
            seen.setdefault((expert, kind), []).extend(self._waiting[expert, kind])
        original(self, expert, kind, errors)

    patch = pytest.MonkeyPatch()
    patch.setattr(sensitivity_module.LayerSensitivity, "_work_off", spy)
    found = qwen.measured(method=method, labels="text")
    patch.undo()
    last = len(qwen.source.moe_layers) - 1  # backward begins there, so it comes first in `seen`
    parts = seen[4, "gate_up"][:3]
    x, delta, piece = (torch.cat([part[i] for part in parts]).double() for i in range(3))
    weight = qwen.source.expert(last, 4, "gate_up").double()
    off = weight - qwen.checkpoint.dequantize(last, 4, "gate_up", 3).double()

    def formula(rows: torch.Tensor) -> float:
        x2, d2 = x[rows].square().mean(0), delta[rows].square().mean(0)
        return float(rows.sum() * (d2 @ off.square() @ x2))

    at = (last, 4, 0, 1)
    sensitivity = found.arrays["sensitivity"][at]
    if method == "factored":
        whole = formula(torch.ones(len(x), dtype=torch.bool))
        assert sensitivity == pytest.approx(whole, rel=1e-3)
    numbers = piece.unique().long().tolist()
    parts = np.array([formula(piece == number) for number in numbers])
    measured = [found.measurements.damage[(*divmod(number, SEGMENTS), *at)] for number in numbers]
    np.testing.assert_allclose(measured, parts / parts.sum() * sensitivity, rtol=1e-3)


def test_no_option_is_inert_and_a_run_repeats(qwen: World) -> None:
    usual = qwen.measured().arrays["sensitivity"]
    assert (qwen.measured().arrays["sensitivity"] == usual).all()
    for change in ({"method": "factored"}, {"labels": "text"}, {"seed": 1}):
        assert (qwen.measured(**change).arrays["sensitivity"] != usual).any()


@pytest.mark.parametrize("method", ("per-token", "factored"))
def test_little_memory_changes_nothing(
    qwen: World, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations in files, routed vectors worked off after every sequence, few tokens at once."""
    whole = qwen.measured(method=method)
    monkeypatch.setattr(buffer_module, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(sensitivity_module, "HOLD_BYTES", 0)
    monkeypatch.setattr(sensitivity_module, "TOKENS_AT_ONCE", 2)
    small = qwen.measured(method=method)
    for name, array in whole.arrays.items():
        np.testing.assert_allclose(small.arrays[name], array, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(
        small.measurements.damage, whole.measurements.damage, rtol=1e-3, atol=1e-9
    )
    assert not list(qwen.folder.glob(".activations*"))


def test_the_score_of_drawn_labels_has_mean_zero(qwen: World) -> None:
    """E[grad log p(y)] = 0 when y comes from p, which is what makes the squares Fisher's matrix;
    the text's labels have no such property."""
    model = StreamedModel(qwen.source, torch.device("cpu"))
    model.load_head()
    hidden = torch.randn((20, 32), generator=torch.Generator().manual_seed(3))
    tokens = TOKENS[0, :20]
    draws = [HeadLoss(model, "model", seed).gradient(hidden, tokens) for seed in range(400)]
    drawn = torch.stack(draws)
    assert float(drawn.mean(0).norm() / drawn.std(0).norm()) < 2 / 400**0.5
    text = HeadLoss(model, "text", 0).gradient(hidden, tokens)
    assert float(text.norm() / drawn.std(0).norm()) > 0.5
    assert not text[-1].any()  # nothing follows the last token


def test_memory_does_not_grow_with_sequences(qwen: World) -> None:
    """Vectors that were worked off are let go at once, not when the collector comes round."""
    import gc
    import weakref

    kept: list[weakref.ref[torch.Tensor]] = []
    original = sensitivity_module.LayerSensitivity._work_off

    def spy(self, expert: int, kind: str, errors: torch.Tensor) -> None:
        kept.extend(weakref.ref(x) for x, _, _ in self._waiting.get((expert, kind), []))
        original(self, expert, kind, errors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity_module.LayerSensitivity, "_work_off", spy)
        gc.disable()
        try:
            qwen.measured()
            alive = sum(one() is not None for one in kept)
        finally:
            gc.enable()
    assert kept
    assert alive == 0
