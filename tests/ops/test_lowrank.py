"""Low-rank factors of many matrices, against one SVD each in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.ops.lowrank import factorise


def reference(matrices: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best approximation of each matrix and its singular values, one SVD at a time."""
    shape, rank = matrices.shape, min(rank, *matrices.shape[-2:])
    products, values = [], []
    for matrix in matrices.double().reshape(-1, *shape[-2:]):
        left, strengths, right = torch.linalg.svd(matrix, full_matrices=False)
        products.append(left[:, :rank] * strengths[:rank] @ right[:rank])
        values.append(strengths[:rank])
    return torch.stack(products).view(shape), torch.stack(values).view(*shape[:-2], rank)


def decaying(*shape: int, seed: int = 0) -> torch.Tensor:
    """Matrices like a span's keys: a common mean, and directions of decaying strength."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator)
    weights = torch.arange(1, shape[-1] + 1) ** -0.9
    basis = torch.linalg.qr(torch.randn(shape[-1], shape[-1], generator=generator)).Q
    return (noise * weights + torch.randn(shape[-1], generator=generator) * weights) @ basis


def errors(matrices: torch.Tensor, rank: int) -> torch.Tensor:
    """The norm of what the factors miss, relative to the matrix."""
    left, right = factorise(matrices, rank)
    missed = (left.double() @ right.double() - matrices.double()).norm(dim=(-2, -1))
    return missed / matrices.double().norm(dim=(-2, -1))


@pytest.mark.parametrize("shape", [(5, 16, 64), (2, 3, 32, 64), (3, 64, 48), (2, 33, 33), (7, 40)])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_best_approximation_and_its_singular_values(shape: tuple[int, ...], rank: int):
    matrices = decaying(*shape)
    left, right = factorise(matrices, rank)
    expected, values = reference(matrices, rank)
    rank = values.shape[-1]
    assert left.shape == (*shape[:-1], rank)
    assert right.shape == (*shape[:-2], rank, shape[-1])
    relative = (left @ right - expected).norm() / expected.norm()
    assert float(relative) < 1e-4
    torch.testing.assert_close(left.norm(dim=-2).double(), values, rtol=1e-4, atol=1e-5)
    identity = torch.eye(rank).expand(*shape[:-2], rank, rank)
    torch.testing.assert_close(right @ right.mT, identity, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("flat", [True, False])
def test_within_a_hundredth_of_the_least_error(rank: int, flat: bool):
    shape = (20, 32, 64)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    matrices = noise if flat else decaying(*shape)
    best = (reference(matrices, rank)[0] - matrices).norm(dim=(-2, -1))
    assert bool((errors(matrices, rank) <= 1.01 * best / matrices.norm(dim=(-2, -1))).all())


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(0, 40),
    st.integers(0, 9),
)
def test_any_size_and_true_rank(rows: int, columns: int, rank: int, true_rank: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(2, rows, true_rank, generator=generator) @ torch.randn(
        2, true_rank, columns, generator=generator
    )
    left, right = factorise(matrices, rank)
    kept = min(rank, rows, columns)
    assert left.shape == (2, rows, kept)
    assert right.shape == (2, kept, columns)
    assert bool(left.isfinite().all() & right.isfinite().all())
    assert bool((right.norm(dim=-1) < 1 + 1e-4).all())
    if kept == min(rows, columns) or true_rank == 0:
        size = matrices.norm(dim=(-2, -1), keepdim=True)
        assert bool(((left @ right - matrices).abs() <= 1e-5 * size).all())


@pytest.mark.parametrize("shape", [(4, 16, 64), (4, 64, 64), (4, 64, 24)])
def test_the_error_falls_with_the_rank_to_nothing(shape: tuple[int, ...]):
    matrices = decaying(*shape, seed=1)
    found = torch.stack([errors(matrices, rank) for rank in range(1, min(shape[-2:]) + 1)])
    assert bool((found[1:] <= found[:-1] + 1e-6).all())
    assert float(found[-1].max()) < 1e-5


@pytest.mark.parametrize("columns", [8, 64])
@pytest.mark.parametrize("true_rank", [3, 24])
def test_padding_rows_stay_zero(columns: int, true_rank: int):
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(20, 24, true_rank, generator=generator) @ torch.randn(
        20, true_rank, columns, generator=generator
    )
    padding = torch.rand(20, 24, generator=generator) < 0.3
    padding[1] = True
    matrices = matrices.masked_fill(padding.unsqueeze(-1), 0.0)
    left, right = factorise(matrices, 24)
    assert float(left[padding].abs().max()) == 0
    assert float(left[~padding].abs().max()) > 1
    torch.testing.assert_close(left @ right, matrices, rtol=1e-4, atol=1e-4)


def test_padding_rows_change_nothing():
    matrices = decaying(1, 24, 64)
    padded = torch.nn.functional.pad(matrices, (0, 0, 3, 5))
    (left, right), (alone, directions) = factorise(padded, 5), factorise(matrices, 5)
    torch.testing.assert_close((left @ right)[:, 3:-5], alone @ directions, rtol=0, atol=1e-4)


def test_equal_rows_are_one_direction():
    matrices = decaying(1, 1, 64).expand(2, 32, 64)
    left, right = factorise(matrices, 1)
    torch.testing.assert_close(left @ right, matrices, rtol=0, atol=1e-5)


@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e20, 1e30])
def test_any_magnitude(factor: float):
    matrices = decaying(3, 16, 32)
    left, right = factorise(matrices * factor, 16)
    torch.testing.assert_close(left / factor @ right, matrices, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    matrices = decaying(3, 16, 32).to(dtype)
    for actual, expected in zip(
        factorise(matrices, 6), factorise(matrices.float(), 6), strict=True
    ):
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected)


def test_no_matrices():
    left, right = factorise(torch.zeros(0, 8, 6), 4)
    assert left.shape == (0, 8, 4)
    assert right.shape == (0, 4, 6)


@pytest.mark.parametrize("hole", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(hole: float):
    matrices = decaying(3, 8, 8)
    matrices[1, 2, 3] = hole
    with pytest.raises(ConfigError, match="NaN or infinity"):
        factorise(matrices, 2)


def test_rank_zero_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        factorise(decaying(1, 4, 4), 0)
