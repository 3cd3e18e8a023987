"""Moments that stream, ridge and joint codes, against one solve over all rows in float64."""

import pytest
import torch

from kvfold.errors import ConfigError
from kvfold.ops.ridge import Moments, explained, joint_svd, reduced_rank, ridge, square_root

P, Q = 6, 5


def pair(count: int = 400, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows A `[N, P]` and B `[N, Q]` that are related, with means far from zero."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    a = draw(count, P) * torch.arange(1, P + 1) ** -0.7 @ draw(P, P) + 20
    return a, a @ draw(P, Q) + 0.3 * draw(count, Q) - 5


def streamed(a: torch.Tensor, b: torch.Tensor, chunk: int) -> Moments:
    moments = Moments(a.shape[1] + b.shape[1])
    for rows in torch.cat([a, b], 1).split(chunk):
        moments.add(rows)
    return moments


def centred(rows: torch.Tensor) -> torch.Tensor:
    return rows - rows.mean(0)


def blocks(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = streamed(a, b, 37).covariance
    return found[:P, :P], found[:P, P:]


def missed(codes: torch.Tensor, b: torch.Tensor) -> float:
    """Mean squared error of the best linear prediction of B, one solve over all rows."""
    best = torch.linalg.lstsq(centred(codes), centred(b)).solution
    return float((centred(b) - centred(codes) @ best).square().sum() / len(b))


@pytest.mark.parametrize("chunk", [1, 7, 400])
def test_streamed_moments_equal_those_of_all_rows(chunk: int):
    a, b = pair()
    rows, moments = torch.cat([a, b], 1), streamed(a, b, chunk)
    assert moments.count == 400
    torch.testing.assert_close(moments.mean, rows.mean(0))
    torch.testing.assert_close(moments.covariance, torch.cov(rows.T, correction=0))


def test_rows_that_are_no_numbers_or_of_another_width_are_refused():
    moments = Moments(3)
    for rows in (torch.zeros(2, 4), torch.zeros(3), torch.full((1, 3), torch.nan)):
        with pytest.raises(ConfigError):
            moments.add(rows)
    assert moments.count == 0


def test_pooled_moments_are_those_of_the_heads_rows():
    heads, width = 3, 4
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(50, 2, heads, width, generator=generator, dtype=torch.float64) + 1
    moments = Moments(2 * heads * width)
    moments.add(rows.flatten(1))
    expected = Moments(2 * width)
    expected.add(rows.transpose(1, 2).reshape(50 * heads, 2 * width))
    found = moments.pooled(2, heads)
    assert found.count == expected.count == 150
    torch.testing.assert_close(found.total, expected.total)
    torch.testing.assert_close(found.gram, expected.gram)


@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0])
def test_ridge_is_the_solution_over_all_rows_with_a_price(strength: float):
    a, b = pair()
    xx, xy = blocks(a, b)
    price = (strength * xx.diagonal().mean() * len(a)).sqrt()
    padded = torch.cat([centred(a), price * torch.eye(P, dtype=a.dtype)])
    targets = torch.cat([centred(b), torch.zeros(P, Q, dtype=a.dtype)])
    expected = torch.linalg.lstsq(padded, targets).solution
    torch.testing.assert_close(ridge(xx, xy, strength), expected)


def test_ridge_gives_no_weight_to_what_never_varies():
    a, b = pair()
    a = torch.cat([a[:, : P - 1], a[:, :1]], 1)
    xx, xy = blocks(a, b)
    weights = ridge(xx, xy, 0.0)
    best = torch.linalg.lstsq(centred(a[:, : P - 1]), centred(b)).solution
    torch.testing.assert_close(
        centred(a) @ weights, centred(a[:, : P - 1]) @ best, rtol=1e-5, atol=1e-5
    )


def test_a_map_from_nothing_has_no_weights():
    assert ridge(torch.zeros(0, 0), torch.zeros(0, 3), 1e-6).shape == (0, 3)


def test_a_joint_code_is_the_truncated_svd_predicted_from_a():
    a, b = pair()
    x = centred(torch.cat([a, b], 1))
    encoder = joint_svd(streamed(a, b, 50).covariance, P, 0.0)
    right = torch.linalg.svd(x, full_matrices=False)[2][:P].T
    expected = torch.linalg.lstsq(x[:, :P], x @ right).solution
    signs = (expected * encoder).sum(0).sign()
    torch.testing.assert_close(encoder * signs, expected, rtol=1e-6, atol=1e-8)


def test_the_error_of_a_truncated_svd_is_the_energy_of_its_tail():
    a, b = pair()
    x = centred(torch.cat([a, b], 1))
    covariance = streamed(a, b, 50).covariance
    values, vectors = torch.linalg.eigh(covariance)
    for rank in range(1, P + Q):
        kept = vectors[:, -rank:]
        error = (x - x @ kept @ kept.T).square().sum() / len(x)
        torch.testing.assert_close(error, values[:-rank].sum())


@pytest.mark.parametrize("form", [joint_svd, reduced_rank])
def test_what_columns_explain_is_what_the_error_loses(form):
    a, b = pair()
    covariance = streamed(a, b, 50).covariance
    encoder = form(covariance, P, 0.0)
    zz = encoder.T @ covariance[:P, :P] @ encoder
    gains = explained(zz, encoder.T @ covariance[:P, P:])
    total = float(centred(b).square().sum() / len(b))
    assert bool((gains >= 0).all())
    for rank in range(1, encoder.shape[1] + 1):
        expected = missed(a @ encoder[:, :rank], b)
        assert total - float(gains[:rank].sum()) == pytest.approx(expected, rel=1e-6)


def test_no_code_of_a_rank_says_more_of_b_than_the_reduced_rank_one():
    a, b = pair()
    covariance = streamed(a, b, 50).covariance
    best, other = reduced_rank(covariance, P, 0.0), joint_svd(covariance, P, 0.0)
    generator = torch.Generator().manual_seed(3)
    for rank in range(1, Q):
        error = missed(a @ best[:, :rank], b)
        assert error <= missed(a @ other[:, :rank], b) + 1e-9
        for _ in range(20):
            random = torch.randn(P, rank, generator=generator, dtype=a.dtype)
            assert error <= missed(a @ random, b) + 1e-9


def test_reduced_rank_codes_are_uncorrelated_and_fall_in_strength():
    a, b = pair()
    covariance = streamed(a, b, 50).covariance
    codes = centred(a @ reduced_rank(covariance, P, 0.0))
    found = codes.T @ codes / len(codes)
    torch.testing.assert_close(found, found.diagonal().diag(), rtol=1e-6, atol=1e-8)
    assert found.diagonal().tolist() == sorted(found.diagonal().tolist(), reverse=True)


def test_a_metric_decides_what_is_said_first():
    a, b = pair()
    covariance = streamed(a, b, 50).covariance
    metric = torch.diag(torch.tensor([1e4, 1.0, 1.0, 1.0, 1.0], dtype=a.dtype))
    code = a @ reduced_rank(covariance, P, 0.0, metric)[:, :1]
    assert missed(code, b[:, :1]) == pytest.approx(missed(a, b[:, :1]), rel=1e-2)
    root = square_root(metric)
    torch.testing.assert_close(root @ root, metric)


def test_columns_that_others_determine_explain_nothing():
    a, b = pair()
    covariance = streamed(a, b, 50).covariance
    encoder = torch.eye(P, dtype=a.dtype)[:, [0, 1, 1, 2]]
    zz = encoder.T @ covariance[:P, :P] @ encoder
    gains = explained(zz, encoder.T @ covariance[:P, P:])
    assert float(gains[2]) == 0.0
    assert float(gains[[0, 1, 3]].sum()) == pytest.approx(
        float(centred(b).square().sum() / len(b)) - missed(a[:, :3], b), rel=1e-6
    )
