"""Compensated codes: nested, never worse than plain ones by what they are for, repeatable."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_rows import values
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.quantize import compensated as module
from pagedweight.quantize import numba_descent, torch_descent
from pagedweight.quantize.compensated import Compensated, compensate, fitting_product
from pagedweight.quantize.refit import Systems, refit
from pagedweight.quantize.rows import RowCodes, quantize_rows

BACKENDS = ("numba", "torch")


def correlated(cols: int, tokens: int, seed: int, rank: int = 4) -> torch.Tensor:
    """E[x x^T] of inputs that mostly lie in a few directions, float32 [K, K]."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn((tokens, rank), generator=random) @ torch.randn(
        (rank, cols), generator=random
    )
    inputs = mixed + 0.3 * torch.randn((tokens, cols), generator=random)
    return inputs.T @ inputs / tokens


def block(rows: int, cols: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn((rows, cols), generator=random).bfloat16().float()


def plain(weights: torch.Tensor, product: torch.Tensor, levels=(2, 3, 4), dtype="bfloat16"):
    return quantize_rows(weights, product.diagonal(), levels, dtype)


def losses(rows: RowCodes, weights: torch.Tensor, product: torch.Tensor, dtype="bfloat16"):
    """d H d^T of every row and level in float64, from the prefixes of the codes."""
    top, found = max(rows.tables), []
    for level, table in rows.tables.items():
        code = (rows.codes >> (top - level)).astype(int)
        apart = np.take_along_axis(values(table, dtype), code, 1).astype(np.float64)
        apart -= weights.numpy()
        found.append(np.einsum("rk,kl,rl->r", apart, product.double().numpy(), apart))
    return np.stack(found, 1)


def one(weights, product, tokens=500, levels=(2, 3, 4), backend="numba") -> Compensated:
    start = plain(weights, product, levels)
    return compensate(weights[None], product[None], [tokens], [start], "bfloat16", backend)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 40),
    tokens=st.integers(1, 60),
    levels=st.sampled_from(((2,), (2, 3), (3, 4, 5), (2, 3, 4, 5, 6))),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_never_worse_than_plain_at_any_level_and_sound(
    backend: str, rows: int, cols: int, tokens: int, levels: tuple[int, ...], seed: int
) -> None:
    """The levels' codes are prefixes of one code, and each by itself is at least as good."""
    weights, product = block(rows, cols, seed), correlated(cols, tokens, seed)
    start = plain(weights, product, levels)
    found = compensate(weights[None], product[None], [tokens], [start], "bfloat16", backend)[0]
    assert found.rows.codes.shape == (rows, cols)
    assert found.rows.codes.dtype == np.uint8
    assert int(found.rows.codes.max()) < 1 << max(levels)
    for level, table in found.rows.tables.items():
        assert table.shape == (rows, 1 << level)
        assert np.isfinite(values(table, "bfloat16")).all()
    before, after = (losses(r, weights, product) for r in (start, found.rows))
    energy = float((weights.double() ** 2 @ product.diagonal().double()).sum())
    assert (after.sum(0) <= before.sum(0) + 1e-6 * energy).all()
    np.testing.assert_allclose(found.rows.row_error, after, rtol=1e-3, atol=1e-6 * energy)
    if found.kept_plain:
        np.testing.assert_array_equal(found.rows.codes, start.codes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_correlated_inputs_let_errors_cancel(backend: str) -> None:
    weights, product = block(24, 96, 1), correlated(96, 2000, 1)
    found = one(weights, product, 2000, (2, 3, 4, 5, 6), backend)
    assert not found.kept_plain
    before = losses(plain(weights, product, (2, 3, 4, 5, 6)), weights, product).sum(0)
    after = losses(found.rows, weights, product).sum(0)
    assert (after < before).all()
    assert after[1] < 0.6 * before[1]


def test_without_correlation_the_plain_seed_is_the_optimum_and_stays() -> None:
    """Nothing can cancel, and a change for the sake of 3 bits would cost at 2: plain is kept."""
    weights, product = block(16, 80, 2), torch.eye(80)
    start = plain(weights, product)
    found = one(weights, product, 10**6)
    assert found.kept_plain
    np.testing.assert_array_equal(found.rows.codes, start.codes)
    assert all((found.rows.tables[b] == start.tables[b]).all() for b in start.tables)
    np.testing.assert_allclose(found.rows.row_error, losses(start, weights, product), rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_twice_is_the_same_and_neighbours_do_not_matter(backend: str) -> None:
    weights = torch.stack([block(12, 50, seed) for seed in (3, 4)])
    products = torch.stack([correlated(50, 300, seed) for seed in (5, 6)])
    start = [plain(w, h) for w, h in zip(weights, products, strict=True)]
    first, again = (
        compensate(weights, products, [300, 300], start, "bfloat16", backend) for _ in range(2)
    )
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.rows.codes, b.rows.codes)
        assert all((a.rows.tables[n] == b.rows.tables[n]).all() for n in a.rows.tables)
    alone = compensate(weights[1:], products[1:], [300], start[1:], "bfloat16", backend)[0]
    loss = losses(first[1].rows, weights[1], products[1]).sum(0)
    np.testing.assert_allclose(losses(alone.rows, weights[1], products[1]).sum(0), loss, rtol=0.02)


def test_backends_are_equally_good() -> None:
    """Stated tolerance: a decision turned by rounding turns later ones, losses agree to 3%."""
    weights, product = block(60, 70, 7), correlated(70, 800, 7)
    numba, torch_ = (
        losses(one(weights, product, 800, backend=b).rows, weights, product) for b in BACKENDS
    )
    np.testing.assert_allclose(numba.sum(0), torch_.sum(0), rtol=0.03)


def settle(backend: str, weights, product, tables, pull, trust, codes) -> torch.Tensor:
    """Codes [N, K] after enough passes to settle."""
    codes = codes.clone()
    if backend == "numba":
        numba_descent.descend(weights, product, tables, pull, trust, codes, 50)
    else:
        batch = [table[None] for table in tables]
        torch_descent.descend(
            weights[None], product[None], batch, pull[None], trust, codes[None], 50
        )
    return codes


def objective(weights, product, tables, pull, trust, codes) -> torch.Tensor:
    total = torch.zeros(len(weights), dtype=torch.float64)
    for level, table in enumerate(tables):
        code = (codes >> (len(tables) - 1 - level)).long()
        apart = (table.gather(1, code) - weights).double()
        believed = product.double() * trust[level]
        believed.diagonal().copy_(product.diagonal())
        total += float(pull[level]) * ((apart @ believed) * apart).sum(1)
    return total


@pytest.mark.parametrize("backend", BACKENDS)
def test_descent_ends_where_no_single_code_can_improve(backend: str) -> None:
    cols, rows = 17, 5
    weights, product = block(rows, cols, 8), correlated(cols, 200, 8)
    start = plain(weights, product, (2, 3, 4))
    tables = [torch.from_numpy(values(start.tables[b], "bfloat16").copy()) for b in (2, 3, 4)]
    pull, trust = torch.tensor([0.3, 1.0, 0.5]), torch.tensor([1.0, 0.9, 0.4])
    codes = torch.from_numpy(start.codes.copy())
    settled = settle(backend, weights, product, tables, pull, trust, codes)
    least = objective(weights, product, tables, pull, trust, settled)
    assert (least < objective(weights, product, tables, pull, trust, codes)).all()
    for c in range(cols):
        for code in range(16):
            other = settled.clone()
            other[:, c] = code
            assert (
                objective(weights, product, tables, pull, trust, other) >= least * (1 - 1e-5)
            ).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_are_the_exact_least_squares_fit(backend: str) -> None:
    """Against numpy's least squares on a square root of H; two clusters are empty."""
    rows, cols = 3, 40
    weights, product = block(rows, cols, 9), fitting_product(correlated(cols, 100, 9), 100)
    codes = torch.randint(0, 16, (rows, cols), generator=torch.Generator().manual_seed(9))
    codes[codes == 5] = 6
    codes[codes == 12] = 13
    codes = codes.to(torch.uint8)
    tables = [torch.full((rows, 1 << b), 0.25) for b in (2, 3, 4)]
    trust = torch.tensor([1.0, 0.7, 0.0])
    if backend == "numba":
        systems = numba_descent.systems(weights, product, tables, trust, codes)
    else:
        batch = [table[None] for table in tables]
        halved = torch_descent.halves(product[None])
        found = torch_descent.systems(
            weights[None], product[None], halved, batch, trust, codes[None]
        )
        systems = Systems(*(part[0] for part in found))
    fitted = refit(tables, systems, trust, torch.float32)
    for level, table in enumerate(fitted):
        believed = product.double() * trust[level]
        believed.diagonal().copy_(product.diagonal())
        root = np.linalg.cholesky(believed.numpy()).T
        for row in range(rows):
            code = (codes[row] >> (2 - level)).numpy().astype(int)
            member = np.eye(table.shape[1])[code]
            filled = member.any(0)
            best = np.linalg.lstsq(root @ member[:, filled], root @ weights[row].double().numpy())
            np.testing.assert_allclose(table[row].numpy()[filled], best[0], rtol=1e-3, atol=1e-4)
            assert (table[row].numpy()[~filled] == 0.25).all()
    assert (fitted[2][:, [5, 12]] == 0.25).all()


def test_few_tokens_count_little_and_the_product_is_definite() -> None:
    inputs = torch.randn((3, 30), generator=torch.Generator().manual_seed(10))
    product = inputs.T @ inputs / 3
    drawn = fitting_product(product, 3)
    mean = product.diagonal().mean()
    np.testing.assert_allclose(
        drawn.diagonal(), product.diagonal() + module.DAMPING * mean, rtol=1e-5
    )
    apart = ~torch.eye(30, dtype=torch.bool)
    share = 3 / (3 + 30)
    np.testing.assert_allclose(drawn[apart], share * product[apart], rtol=1e-5)
    assert torch.linalg.eigvalsh(drawn.double()).min() > 0


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_degenerate_rows_stay_exact(backend: str, dtype: str) -> None:
    """Rows with at most four values lose nothing at 2 bits, and must not by being improved."""
    weights = torch.stack(
        [torch.zeros(32), torch.full((32,), 0.5), torch.tensor([-1.0, 0.25, 2.0, 0.0] * 8)]
    )
    product = correlated(32, 100, 11)
    start = plain(weights, product, dtype=dtype)
    found = compensate(weights[None], product[None], [100], [start], dtype, backend)[0]
    assert (losses(found.rows, weights, product, dtype) == 0).all()
