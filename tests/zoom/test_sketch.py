"""The routing sketch: its scores are as near to the true ones as its codes allow."""

from __future__ import annotations

import pytest
import torch

from kvfold.zoom.sketch import Sketch

ROWS, GROUPS, WIDTH = 2, 3, 8
STEPS = 7
"""Largest code."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(count: int, seed: int = 0) -> torch.Tensor:
    """Keys `[B, G, N, D]` that are long in some directions, about a mean that is not zero."""
    mix = normal(ROWS, GROUPS, WIDTH, WIDTH, seed=seed + 1) * 0.6 ** torch.arange(WIDTH)[:, None]
    return normal(ROWS, GROUPS, count, WIDTH, seed=seed) @ mix + 2.0


def moment_of(query: torch.Tensor) -> torch.Tensor:
    return query.mT @ query


def everything(count: int) -> torch.Tensor:
    return torch.ones(ROWS, count, dtype=torch.bool)


def scores_of(sketch: Sketch, query: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Estimated products, `[B, G, Q, N]`."""
    scores, level = sketch.scores(query, codes)
    return scores + level


def bound(sketch: Sketch, query: torch.Tensor) -> torch.Tensor:
    """What half a step of each code is worth to a query, `[B, G, Q, 1]`."""
    coefficients = query @ sketch.look[..., :-1].float()
    low, high = coefficients.chunk(2, dim=-1)
    steps = torch.cat([low + high, 16 * high], dim=-1)
    return 0.5 * steps.abs().sum(-1, keepdim=True)


def test_codes_are_two_to_a_byte_and_factors_of_the_dtype():
    keys = correlated(20).half()
    sketch = Sketch.fit(keys, everything(20), moment_of(normal(ROWS, GROUPS, 9, WIDTH)), 6)
    codes = sketch.encode(keys, everything(20))
    assert codes.shape == (ROWS, GROUPS, 3, 20)
    assert codes.dtype == torch.uint8
    assert sketch.center.dtype == sketch.look.dtype == torch.float16
    assert sketch.bytes_fast == 2 * ROWS * GROUPS * WIDTH * 7
    assert sketch.bytes_slow == ROWS * GROUPS * WIDTH * (4 * 6 + 2)


def test_with_all_directions_only_rounding_is_lost():
    keys, query = correlated(60), normal(ROWS, GROUPS, 10, WIDTH, seed=5)
    sketch = Sketch.fit(keys, everything(60), moment_of(query), WIDTH)
    scores = scores_of(sketch, query, sketch.encode(keys, everything(60)))
    error = (scores - query @ keys.mT).abs()
    assert bool((error <= bound(sketch, query) * 1.001 + 1e-4).all())
    assert float(error.max()) > 1e-3, "four bits lose something"


def test_a_key_whose_codes_are_whole_is_scored_exactly():
    """The center and one step along each direction."""
    keys = correlated(60)
    sketch = Sketch.fit(keys, everything(60), moment_of(normal(ROWS, GROUPS, 9, WIDTH)), WIDTH)
    steps = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0], [1, -2, 3, -4, 5, -6, 7, 0]]).float()
    whole = sketch.center + steps @ torch.linalg.inv(sketch.write)
    query = normal(ROWS, GROUPS, 4, WIDTH, seed=8)
    scores = scores_of(sketch, query, sketch.encode(whole, everything(2)))
    torch.testing.assert_close(scores, query @ whole.mT, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_more_directions_are_not_worse(seed: int):
    keys = correlated(200, seed)
    query = normal(ROWS, GROUPS, 40, WIDTH, seed=seed + 9) @ normal(WIDTH, WIDTH, seed=seed + 3)
    errors = []
    for directions in (1, 2, 4, 6, 8):
        sketch = Sketch.fit(keys, everything(200), moment_of(query), directions)
        scores = scores_of(sketch, query, sketch.encode(keys, everything(200)))
        errors.append(float((scores - query @ keys.mT).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


def test_directions_without_queries_cost_nothing():
    """Queries of a subspace need as many directions as it has, however long keys are elsewhere."""
    rank, count = 3, 100
    basis = torch.linalg.qr(normal(ROWS, GROUPS, WIDTH, WIDTH, seed=2)).Q
    query = normal(ROWS, GROUPS, 50, rank, seed=3) @ basis[..., :rank].mT
    across = torch.tensor([1.0] * rank + [3.0] * (WIDTH - rank))
    keys = (normal(ROWS, GROUPS, count, WIDTH, seed=4) * across) @ basis.mT
    true = query @ keys.mT

    def error(moment: torch.Tensor) -> float:
        sketch = Sketch.fit(keys, everything(count), moment, rank)
        scores = scores_of(sketch, query, sketch.encode(keys, everything(count)))
        return float((scores - true).square().mean() / true.square().mean())

    assert error(moment_of(query)) < 0.02
    assert error(torch.eye(WIDTH).expand(ROWS, GROUPS, -1, -1)) > 0.3


def test_queries_of_a_subspace_within_the_bound():
    rank, count = 4, 100
    basis = torch.linalg.qr(normal(ROWS, GROUPS, WIDTH, WIDTH, seed=2)).Q
    query = normal(ROWS, GROUPS, 50, rank, seed=3) @ basis[..., :rank].mT
    keys = normal(ROWS, GROUPS, count, WIDTH, seed=4)
    sketch = Sketch.fit(keys, everything(count), moment_of(query), rank)
    scores = scores_of(sketch, query, sketch.encode(keys, everything(count)))
    # The moment's small regular part turns the directions a little out of the subspace.
    slack = 0.1 * query.norm(dim=-1, keepdim=True)
    assert bool(((scores - query @ keys.mT).abs() <= bound(sketch, query) + slack).all())


def test_padding_does_not_matter():
    keys, moment = correlated(30), moment_of(normal(ROWS, GROUPS, 9, WIDTH))
    tokens = everything(30)
    tokens[1, 20:] = False
    noisy = keys.clone()
    noisy[1, :, 20:] = 1e3
    expected = Sketch.fit(keys[1:, :, :20], tokens[1:, :20], moment[1:], 4)
    actual = Sketch.fit(noisy, tokens, moment, 4)
    query = normal(ROWS, GROUPS, 5, WIDTH, seed=6)
    alone = scores_of(expected, query[1:], expected.encode(keys[1:, :, :20], tokens[1:, :20]))
    together = scores_of(actual, query, actual.encode(noisy, tokens))
    torch.testing.assert_close(together[1:, ..., :20], alone, atol=1e-3, rtol=1e-3)
    level = query @ actual.center.mT
    torch.testing.assert_close(together[1, :, :, 20:], level[1].expand(-1, -1, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("directions", [1, 3, WIDTH])
@pytest.mark.parametrize(
    "what", ["equal", "huge and equal", "zero", "one token", "no token", "no query", "one query"]
)
def test_degenerate(what: str, directions: int, dtype: torch.dtype):
    """Nothing to find directions in: finite, later keys too, and the mean key's score is right."""
    count = 1 if what == "one token" else 12
    keys, tokens = correlated(count), everything(count)
    query = normal(ROWS, GROUPS, 1, WIDTH, seed=6)
    moment = moment_of(query if what == "one query" else normal(ROWS, GROUPS, 20, WIDTH))
    if "equal" in what:
        keys = keys[:, :, :1].expand(-1, -1, count, -1) * (2000.0 if "huge" in what else 1.0)
    elif what == "zero":
        keys = torch.zeros_like(keys)
    elif what == "no token":
        tokens[0] = False
    elif what == "no query":
        moment = torch.zeros_like(moment)
    keys = keys.to(dtype)
    sketch = Sketch.fit(keys, tokens, moment, directions)
    scores = scores_of(sketch, query, sketch.encode(keys, tokens))
    assert torch.isfinite(scores).all()
    later = sketch.encode(correlated(5, seed=9).to(dtype), everything(5))
    assert torch.isfinite(scores_of(sketch, query, later)).all()
    if what in ("equal", "zero", "one token"):
        torch.testing.assert_close(scores, query @ keys.float().mT, atol=0.1, rtol=0.02)
