"""Codes are optimal at the seed, best splits above it, nested, ascending and finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_rows import best_clusters, cluster_error, codes_error, values
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pagedweight.quantize.rows import RowCodes, quantize_rows

BACKENDS = ("numba", "torch")
SMALL = st.integers(1, 9)


def rows_of(width: int, elements: st.SearchStrategy[float]):
    return hnp.arrays(np.float32, (3, width), elements=elements)


def weights_and_importance():
    values_ = st.floats(-4, 4, width=16, allow_subnormal=False)
    # No column below the floor of 1e-6 of the mean: below it, the objective is another one.
    importance = st.floats(2**-10, 8, width=16)
    return SMALL.flatmap(
        lambda n: st.tuples(rows_of(n, values_), hnp.arrays(np.float32, n, elements=importance))
    )


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=weights_and_importance())
@settings(max_examples=60, deadline=None)
def test_seed_is_the_exact_optimum(backend: str, case: tuple[np.ndarray, np.ndarray]) -> None:
    weights, importance = case
    result = quantize_rows(weights, importance, (2, 3), backend=backend)
    x, h = weights.astype(np.float64), importance.astype(np.float64)
    for row in range(len(x)):
        found = codes_error(x[row], h, result.codes[row] >> 1)
        scale = float((h * x[row] ** 2).sum())
        assert found <= best_clusters(x[row], h, 4) + 1e-12 * scale


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=weights_and_importance())
@settings(max_examples=60, deadline=None)
def test_each_split_is_the_best_split(backend: str, case: tuple[np.ndarray, np.ndarray]) -> None:
    weights, importance = case
    result = quantize_rows(weights, importance, (2, 3, 4), backend=backend)
    x, h = weights.astype(np.float64), importance.astype(np.float64)
    for row in range(len(x)):
        scale = float((h * x[row] ** 2).sum())
        for below in (2, 1):  # a cluster of level 4 - below against its two halves
            parents = result.codes[row] >> below
            for parent in np.unique(parents):
                own = parents == parent
                halves = codes_error(x[row][own], h[own], result.codes[row][own] >> (below - 1))
                assert halves <= best_clusters(x[row][own], h[own], 2) + 1e-12 * scale


def check_sound(result: RowCodes, weights: np.ndarray, dtype: str) -> None:
    """What holds for every input: ascending finite tables, codes that follow the value."""
    top = max(result.tables)
    for level, table in result.tables.items():
        centroids = values(table, dtype)
        assert np.isfinite(centroids).all()
        assert (np.diff(centroids, axis=1) >= 0).all()
        assert centroids.shape == (len(weights), 1 << level)
    assert int(result.codes.max()) < 1 << top
    for row, codes in zip(weights, result.codes, strict=True):
        order = np.argsort(row, kind="stable")
        assert (np.diff(codes[order].astype(int)) >= 0).all()
        same = np.diff(row[order]) == 0
        assert (np.diff(codes[order].astype(int))[same] == 0).all()
    assert np.isfinite(result.row_error).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_centroids_are_rounded_means_and_error_counts_them(backend: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(5, 200)).astype(np.float32)
    importance = rng.chisquare(1, size=200).astype(np.float32) + 0.01
    levels = (3, 4, 5, 6, 7, 8)
    result = quantize_rows(weights, importance, levels, dtype, backend)
    check_sound(result, weights, dtype)
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11  # half a unit in the last place
    for position, level in enumerate(levels):
        centroids = values(result.tables[level], dtype)
        codes = result.codes >> (8 - level)
        for row in range(5):
            for code in np.unique(codes[row]):
                own = codes[row] == code
                mean = np.average(weights[row][own].astype(np.float64), weights=importance[own])
                assert abs(centroids[row, code] - mean) <= abs(mean) * step * 1.0001
        apart = weights.astype(np.float64) - np.take_along_axis(centroids, codes.astype(int), 1)
        expected = (importance.astype(np.float64) * apart**2).sum(1)
        np.testing.assert_allclose(result.row_error[:, position], expected, rtol=1e-12)
    np.testing.assert_allclose(result.error, result.row_error.sum(0))
    assert (np.diff(result.error) < 0).all()


DEGENERATE = {
    "zero": np.zeros(64),
    "negative zero": np.where(np.arange(64) % 2, 0.0, -0.0),
    "denormal": np.linspace(-1e-40, 1e-40, 64),
    "smallest": np.where(np.arange(64) % 2, 1e-45, -1e-45),
    "1e-23": np.random.default_rng(2).normal(size=64) * 1e-23,
    "constant": np.full(64, 0.3),
    "two values": np.where(np.arange(64) < 5, -1.0, 2.0),
    "five values": np.arange(64) % 5 - 2.0,
    "one outlier": np.where(np.arange(64) == 9, 1e4, 1e-4),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("importance", (None, "zero", "one alive", "tiny"))
def test_degenerate_rows_have_exact_finite_tables(
    backend: str, dtype: str, importance: str | None
) -> None:
    weights = np.stack(list(DEGENERATE.values())).astype(np.float32)
    h = {
        None: None,
        "zero": np.zeros(64),
        "one alive": (np.arange(64) == 3) * 1.0,
        "tiny": np.full(64, 1e-42),
    }[importance]
    result = quantize_rows(weights, h, (2, 3, 4, 5, 6), dtype, backend)
    check_sound(result, weights, dtype)
    for row, (name, exact) in enumerate(zip(DEGENERATE, weights, strict=True)):
        if len(np.unique(exact)) > 4:
            continue
        centroids = values(result.tables[2], dtype)[row]
        found = centroids[result.codes[row] >> 4]
        expected = np.float32(exact) if dtype == "bfloat16" else exact.astype(np.float16)
        tolerance = 2.0**-8 * np.abs(exact) + (1e-40 if dtype == "bfloat16" else 6e-8)
        assert (np.abs(found - expected) <= tolerance).all(), name


def test_representable_values_survive_exactly() -> None:
    """Five bfloat16 values a row: from 3 bits on nothing is lost, whatever the importance."""
    rng = np.random.default_rng(3)
    weights = rng.choice(np.float32([-1.5, -0.25, 0.0, 0.125, 3.0]), size=(20, 100))
    result = quantize_rows(weights, rng.chisquare(1, size=(20, 100)), (2, 3, 4))
    assert (result.row_error[:, 1:] == 0).all()


def test_all_zero_importance_counts_as_uniform() -> None:
    weights = np.random.default_rng(4).normal(size=(6, 50)).astype(np.float32)
    importance = np.ones((6, 50))
    importance[2] = 0
    zero, ones = quantize_rows(weights, importance), quantize_rows(weights, None)
    assert (zero.codes == ones.codes).all()
    np.testing.assert_array_equal(zero.row_error, ones.row_error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_can_be_measured_by_another_importance(backend: str) -> None:
    rng = np.random.default_rng(9)
    weights = rng.normal(size=(3, 70)).astype(np.float32)
    fitted, other = rng.chisquare(1, size=(2, 70))
    plain = quantize_rows(weights, fitted, (2, 3), backend=backend)
    result = quantize_rows(weights, fitted, (2, 3), backend=backend, measure=other)
    assert (result.codes == plain.codes).all()
    for position, level in enumerate((2, 3)):
        codes = (result.codes >> (3 - level)).astype(int)
        apart = weights - np.take_along_axis(values(result.tables[level], "bfloat16"), codes, 1)
        expected = (other * apart.astype(np.float64) ** 2).sum(1)
        np.testing.assert_allclose(result.row_error[:, position], expected, rtol=1e-6)


def test_importance_decides_where_the_clusters_lie() -> None:
    """Twice the importance on a column is the column twice."""
    rng = np.random.default_rng(5)
    weights = rng.normal(size=(4, 60)).astype(np.float32)
    importance = rng.integers(1, 4, size=60)
    repeated = quantize_rows(np.repeat(weights, importance, axis=1), None)
    weighted = quantize_rows(weights, importance.astype(np.float64))
    np.testing.assert_array_equal(np.repeat(weighted.codes, importance, axis=1), repeated.codes)
    np.testing.assert_allclose(weighted.row_error, repeated.row_error, rtol=1e-9)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    rng = np.random.default_rng(6)
    weights = rng.normal(size=(9, 80)).astype(np.float32)
    importance = rng.chisquare(1, size=(9, 80))
    together = quantize_rows(weights, importance)
    for row in range(9):
        alone = quantize_rows(weights[row : row + 1], importance[row])
        assert (alone.codes == together.codes[row]).all()


@pytest.mark.parametrize("width", (1, 3, 17, 500))
@pytest.mark.parametrize("source", ("float32", "bfloat16"))
def test_backends_find_the_same_codes(width: int, source: str) -> None:
    """Stated tolerance: codes differ only where two cuts tie, so row errors agree to 1e-9."""
    rng = np.random.default_rng(width)
    weights = rng.normal(size=(40, width)).astype(np.float32)
    if source == "bfloat16":
        weights = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    importance = rng.chisquare(1, size=(40, width))
    numba = quantize_rows(weights, importance, (2, 3, 4, 5, 6, 7, 8))
    batched = quantize_rows(weights, importance, (2, 3, 4, 5, 6, 7, 8), backend="torch")
    np.testing.assert_allclose(batched.row_error, numba.row_error, rtol=1e-9, atol=1e-300)
    assert (numba.codes == batched.codes).all(axis=1).mean() >= 0.95


def test_torch_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedweight.quantize import torch_rows

    weights = np.random.default_rng(7).normal(size=(23, 40)).astype(np.float32)
    whole = quantize_rows(weights, None, backend="torch")
    monkeypatch.setattr(torch_rows, "CHUNK_ELEMENTS", 200)
    pieces = quantize_rows(weights, None, backend="torch")
    assert (whole.codes == pieces.codes).all()
    np.testing.assert_array_equal(whole.row_error, pieces.row_error)


@pytest.mark.parametrize(
    "weights, importance, levels, dtype, message",
    (
        (np.float32([[np.nan]]), None, (2,), "bfloat16", "no finite"),
        (np.float32([[np.inf]]), None, (2,), "bfloat16", "no finite"),
        (np.float32([[7e4]]), None, (2,), "float16", "no finite"),
        (np.float32([[1.0]]), [-1.0], (2,), "bfloat16", "negative"),
        (np.float32([[1.0]]), [np.nan], (2,), "bfloat16", "finite"),
        (np.float32([[1.0]]), [1.0, 1.0], (2,), "bfloat16", "does not fit"),
        (np.float64([[1.0]]), None, (2,), "bfloat16", "float32"),
        (np.float32([[1.0]]), None, (2, 4), "bfloat16", "gap"),
        (np.float32([[1.0]]), None, (1, 2), "bfloat16", "within"),
        (np.float32([[1.0]]), None, (8, 9), "bfloat16", "within"),
        (np.float32([[1.0]]), None, (), "bfloat16", "gap"),
    ),
)
def test_bad_input_is_refused(weights, importance, levels, dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_rows(weights, np.asarray(importance) if importance else None, levels, dtype)


def test_the_references_agree_on_a_case_done_by_hand() -> None:
    x, h = np.array([0.0, 1.0, 10.0]), np.array([1.0, 1.0, 2.0])
    assert cluster_error(x[:2], h[:2]) == pytest.approx(0.5)
    assert best_clusters(x, h, 2) == pytest.approx(0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_finds_the_codes_of_the_cpu() -> None:
    rng = np.random.default_rng(8)
    weights = rng.normal(size=(300, 700)).astype(np.float32)
    importance = rng.chisquare(1, size=700)
    cpu = quantize_rows(weights, importance)
    gpu = quantize_rows(torch.from_numpy(weights).cuda(), importance, backend="torch")
    np.testing.assert_allclose(gpu.row_error, cpu.row_error, rtol=1e-9)
    assert (cpu.codes == gpu.codes.cpu().numpy()).all(axis=1).mean() >= 0.95
