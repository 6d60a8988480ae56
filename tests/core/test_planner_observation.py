"""O_t: eq. 7 with pending and growth, the null block, and merging requests by KV blocks."""

from __future__ import annotations

import numpy as np
import pytest
from planner_world import arrays, pressure, with_heads

from pagedweight.core.calibration import Calibration
from pagedweight.core.observation import (
    KVPressure,
    RequestSignals,
    blocks_for,
    decayed,
    merge_signals,
)
from pagedweight.core.planner.target import (
    emergency_bytes,
    pressure_triggered,
    spare_bytes,
    target_bytes_from_kv_pressure,
)
from pagedweight.core.residual import log_features, predict_residual, prompt_factor

LEVELS = (2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "free, blocks", [(0, 5), (3, 2), (4, 1), (5, 0), (900, 0)]
)  # T_blk = 4: at 4 free blocks it asks for one, at 5 for none
def test_equation_7(free: int, blocks: int) -> None:
    kv = pressure(free)
    assert target_bytes_from_kv_pressure(kv, 4) == blocks * 4096
    assert pressure_triggered(kv, 4) == (blocks > 0)


def test_waiting_prompts_and_growth_count_in_full() -> None:
    kv = pressure(10, pending=30, growth_blocks=2)
    assert kv.expected_free_blocks == -22
    assert target_bytes_from_kv_pressure(kv, 4) == (4 + 1 + 22) * 4096
    assert blocks_for([1, 16, 17, 0], 16) == 1 + 1 + 2 + 0


def test_bytes_on_their_way_are_not_asked_for_twice() -> None:
    kv = pressure(0, headroom_bytes=4096)
    assert target_bytes_from_kv_pressure(kv, 4) == 4 * 4096
    assert target_bytes_from_kv_pressure(kv, 4, on_way_bytes=3 * 4096) == 4096
    assert target_bytes_from_kv_pressure(kv, 4, on_way_bytes=10 * 4096) == 0
    assert target_bytes_from_kv_pressure(kv, 4, on_way_bytes=-4096) == 5 * 4096


def test_the_null_block_is_never_usable() -> None:
    whole = KVPressure(block_bytes=1, total_blocks=10, usable_blocks=9, free_blocks=9)
    assert whole.unbacked_blocks == 0
    with pytest.raises(ValueError, match="null block"):
        KVPressure(block_bytes=1, total_blocks=10, usable_blocks=10, free_blocks=9)
    with pytest.raises(ValueError, match="do not fit"):
        KVPressure(block_bytes=1, total_blocks=10, usable_blocks=5, free_blocks=6)


def test_no_more_than_the_scheduler_knows_is_asked_for() -> None:
    kv = KVPressure(
        block_bytes=10, total_blocks=101, usable_blocks=97, free_blocks=0, pending_blocks=50
    )
    assert target_bytes_from_kv_pressure(kv, 4) == 3 * 10


def test_kv_grows_and_shrinks_by_whole_granules() -> None:
    kv = pressure(3, granule_blocks=16)
    assert target_bytes_from_kv_pressure(kv, 4) == 16 * 4096
    assert spare_bytes(pressure(12 + 1 + 15, granule_blocks=16), 12) == 0
    assert spare_bytes(pressure(12 + 1 + 33, granule_blocks=16), 12) == 32 * 4096


def test_spare_bytes_leave_more_than_the_reload_threshold_free() -> None:
    assert spare_bytes(pressure(12, headroom_bytes=999), 12) == 0
    assert spare_bytes(pressure(13, headroom_bytes=999), 12) == 999
    assert spare_bytes(pressure(15, headroom_bytes=999), 12) == 999 + 2 * 4096
    assert spare_bytes(pressure(15, pending=2), 12) == 0
    assert spare_bytes(pressure(15), 12, on_way_bytes=-5000) == 2 * 4096 - 5000


def test_emergency_counts_the_head_of_the_queue_only() -> None:
    kv = pressure(3, pending=100, head_blocks=7, growth_blocks=1)
    assert emergency_bytes(kv) == (0 + 1 - (3 - 1 - 7)) * 4096
    assert emergency_bytes(pressure(9, pending=100, head_blocks=7, growth_blocks=1)) == 0


def calibration(heads: bool = True) -> Calibration:
    data = arrays(1)
    return Calibration.from_arrays(with_heads(data) if heads else data, LEVELS)


def request(blocks: int, seed: int, tokens: float = 100.0) -> RequestSignals:
    rng = np.random.default_rng(seed)
    return RequestSignals(
        kv_blocks=blocks,
        tokens=tokens,
        mass=rng.uniform(1, 9, (2, 4)).astype(np.float32),
        features=rng.lognormal(3, 1, (2, 4, 2, 3)).astype(np.float32),
    )


def test_merge_by_hand() -> None:
    """Two requests with 3 and 1 KV blocks: everything is 3/4 of one and 1/4 of the other."""
    known = calibration()
    assert known.heads is not None
    own_clip = np.tile(np.float32([-1.0, 0.5]), (2, 4, 1))
    own_confidence = np.full((2, 4), 0.25, np.float32)
    first = RequestSignals(
        kv_blocks=3,
        tokens=4.0,
        mass=np.float32([[1, 1, 2, 0], [4, 0, 0, 0]]),
        features=np.ones((2, 4, 2, 3), np.float32),
        confidence=own_confidence,
        clip=own_clip,
    )
    second = RequestSignals(
        kv_blocks=1,
        tokens=2.0,
        mass=np.float32([[0, 0, 1, 1], [1, 1, 0, 0]]),
        features=np.full((2, 4, 2, 3), 8.0, np.float32),
    )
    idle = request(0, seed=9)
    merged = merge_signals([first, second, idle], known)
    assert merged is not None
    assert merged.mass[0].tolist() == [3 / 16, 3 / 16, 3 / 8 + 1 / 8, 1 / 8]
    assert merged.mass[1].tolist() == [3 / 4 + 1 / 8, 1 / 8, 0, 0]
    one = predict_residual(known.heads, log_features(first.features, 4.0, known.heads.center))
    two = predict_residual(known.heads, log_features(second.features, 2.0, known.heads.center))
    np.testing.assert_allclose(merged.rho, 0.75 * one + 0.25 * two, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        merged.confidence, 0.75 * own_confidence + 0.25 * known.heads.confidence, rtol=1e-6
    )
    np.testing.assert_allclose(merged.clip, 0.75 * own_clip + 0.25 * known.heads.clip, rtol=1e-6)


def test_one_request_alone_is_itself() -> None:
    known, only = calibration(), request(5, seed=2)
    merged = merge_signals([only], known)
    assert merged is not None
    np.testing.assert_allclose(merged.mass, only.mass / only.mass.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(merged.mass.sum(1), 1.0)


def test_merge_without_blocks_or_heads_or_features() -> None:
    known = calibration()
    assert merge_signals([request(0, seed=1)], known) is None
    assert merge_signals([], known) is None
    bare = RequestSignals(kv_blocks=1, tokens=1.0, mass=np.ones((2, 4), np.float32))
    without = merge_signals([request(2, seed=1), bare], known)
    assert without is not None
    assert without.rho is None
    headless = merge_signals([request(2, seed=1)], calibration(heads=False))
    assert headless is not None
    assert headless.rho is None


def test_prior_tokens_pull_short_prompts_to_calibration() -> None:
    known = calibration()
    usual = known.mass / known.mass.sum(1, keepdims=True)
    one_sided = np.zeros((2, 4), np.float32)
    one_sided[:, 0] = 10.0
    distances = []
    for tokens in (10.0, 1000.0):
        signal = RequestSignals(1, tokens, one_sided * np.float32(tokens / 10))
        merged = merge_signals([signal], known, prior_tokens=100.0)
        assert merged is not None
        np.testing.assert_allclose(merged.mass.sum(1), 1.0)
        distances.append(np.abs(merged.mass - usual).sum())
    assert distances[0] < 0.2 * distances[1]
    nothing = RequestSignals(1, 0.0, np.zeros((2, 4), np.float32))
    merged = merge_signals([nothing], known)
    assert merged is not None
    np.testing.assert_allclose(merged.mass, usual)


def test_features_at_the_calibration_mean_are_zero() -> None:
    known = calibration()
    assert known.heads is not None
    center = known.heads.center
    tokens = 50.0
    mean = np.exp(center)
    mean[..., :2] *= tokens
    np.testing.assert_allclose(log_features(mean, tokens, center), 0.0, atol=1e-5)
    unseen = np.zeros_like(mean)
    phi = log_features(unseen, tokens, center, prior_tokens=tokens)
    np.testing.assert_allclose(phi[..., :2], np.log(0.5), atol=1e-5)
    assert (phi[..., 2] == 0).all()


def test_equation_6_clips_and_scales() -> None:
    rho = np.float32([[-9.0, 0.5], [0.1, 9.0]])  # T = 2, one expert
    confidence = np.float32([[0.5, 1.0], [0.25, 1.0]])
    clip = np.float32([[[-2, 2], [-2, 2]], [[-1, 1], [-1, 3]]])
    eta = prompt_factor(rho, confidence, clip, alpha=2.0)
    np.testing.assert_allclose(
        eta, np.exp([[2 * 0.5 * -2, 2 * 0.25 * 0.5], [2 * 1 * 0.1, 2 * 1 * 3]]), rtol=1e-6
    )


def test_decayed_window() -> None:
    old, new = request(4, seed=1), request(6, seed=2)
    window = decayed(old, new, keep=0.5)
    assert (window.kv_blocks, window.tokens) == (6, 150.0)
    np.testing.assert_allclose(window.mass, 0.5 * old.mass + new.mass, rtol=1e-6)
    assert old.features is not None
    assert new.features is not None
    assert window.features is not None
    np.testing.assert_allclose(
        window.features[..., :2], 0.5 * old.features[..., :2] + new.features[..., :2], rtol=1e-6
    )
    np.testing.assert_allclose(
        window.features[..., 2], np.maximum(0.5 * old.features[..., 2], new.features[..., 2])
    )
