"""Both ways to draw without replacement, against loops and against all outcomes of a small case."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.ops.sampling import (
    choice_entropy,
    conditional_poisson_log_prob,
    conditional_poisson_sample,
    gumbel,
    plackett_luce_log_prob,
    plackett_luce_sample,
)

TOKENS, COUNT, DRAWS = 6, 3, 40_000
SCORES = torch.tensor([0.3, -1.2, 1.5, 0.0, 0.7, -0.4], dtype=torch.float64)
CANDIDATES = torch.tensor([True, True, False, True, True, True])

PAIRS = {
    "plackett-luce": (plackett_luce_sample, plackett_luce_log_prob, itertools.permutations),
    "conditional-poisson": (
        conditional_poisson_sample,
        conditional_poisson_log_prob,
        itertools.combinations,
    ),
}
"""Sampler, its law, and what enumerates its outcomes."""

Pair = tuple[Callable, Callable, Callable]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return PAIRS[request.param]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outcomes(pair: Pair, candidates: torch.Tensor | None) -> torch.Tensor:
    """All that can be drawn of the toy, `[outcomes, COUNT]`."""
    tokens = range(TOKENS) if candidates is None else candidates.nonzero().flatten().tolist()
    return torch.tensor(list(pair[2](tokens, COUNT)))


def reference(law: Callable, scores: torch.Tensor, drawn: list[int], allowed: list[int]) -> float:
    """The law of one draw by its definition."""
    weights = scores.double().exp()
    if law is plackett_luce_log_prob:
        left, total = list(allowed), 0.0
        for token in drawn:
            total += math.log(weights[token] / weights[left].sum())
            left.remove(token)
        return total
    sets = itertools.combinations(allowed, len(drawn))
    normaliser = sum(math.prod(float(weights[token]) for token in each) for each in sets)
    return math.log(math.prod(float(weights[token]) for token in drawn) / normaliser)


def value(chosen: torch.Tensor) -> torch.Tensor:
    """A made-up reward that depends on which tokens are chosen together, `[...]`."""
    gains = torch.tensor([1.0, -0.5, 0.2, 2.0, -1.0, 0.4], dtype=torch.float64)
    together = (chosen == 0).any(-1) & (chosen == 4).any(-1)
    return gains[chosen].sum(-1) + 3.0 * together


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "masked"])
def test_probabilities_sum_to_one(pair: Pair, candidates: torch.Tensor | None) -> None:
    every = outcomes(pair, candidates)
    scores = SCORES.expand(len(every), -1)
    mask = None if candidates is None else candidates.expand(len(every), -1)
    total = pair[1](scores, every, mask).exp().sum()
    assert abs(float(total) - 1) < 1e-12


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "masked"])
def test_frequencies_are_the_law(pair: Pair, candidates: torch.Tensor | None) -> None:
    """Pearson's statistic of all outcomes, within 4 standard deviations of its mean."""
    sample, law, _ = pair
    every = outcomes(pair, candidates)
    mask = None if candidates is None else candidates.expand(DRAWS, -1)
    scores = SCORES.expand(DRAWS, -1)
    drawn = sample(scores, COUNT, generator=seeded(1), candidates=mask)
    code = TOKENS ** torch.arange(COUNT)
    found = (drawn * code).sum(-1)[:, None] == (every * code).sum(-1)
    assert found.any(-1).all()
    same = None if candidates is None else candidates.expand(len(every), -1)
    expected = DRAWS * law(SCORES.expand(len(every), -1), every, same).exp()
    statistic = float(((found.sum(0) - expected) ** 2 / expected).sum())
    freedom = len(every) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_score_function_gradient_is_that_of_the_expectation(pair: Pair) -> None:
    """E[f(S) grad log p(S)] within 3 standard errors of grad E[f(S)], by enumeration."""
    sample, law, _ = pair
    every = outcomes(pair, None)
    exact = SCORES.clone().requires_grad_()
    (value(every) * law(exact.expand(len(every), -1), every).exp()).sum().backward()
    scores = SCORES.repeat(DRAWS, 1).requires_grad_()
    drawn = sample(scores, COUNT, generator=seeded(2))
    (value(drawn) * law(scores, drawn)).sum().backward()
    mean, error = scores.grad.mean(0), scores.grad.std(0) / math.sqrt(DRAWS)
    assert exact.grad.abs().max() > 0.1
    assert error.max() < 0.02
    assert ((mean - exact.grad).abs() < 3 * error).all(), (mean - exact.grad) / error


def test_the_gradients_law_tells_the_pairs_apart() -> None:
    """One pair's law with the other's sampler misses by far: the test above can fail."""
    every = torch.tensor(list(itertools.combinations(range(TOKENS), COUNT)))
    exact = SCORES.clone().requires_grad_()
    law = conditional_poisson_log_prob
    (value(every) * law(exact.expand(len(every), -1), every).exp()).sum().backward()
    scores = SCORES.repeat(DRAWS, 1).requires_grad_()
    drawn = plackett_luce_sample(scores, COUNT, generator=seeded(2))
    (value(drawn) * law(scores, drawn)).sum().backward()
    error = scores.grad.std(0) / math.sqrt(DRAWS)
    assert ((scores.grad.mean(0) - exact.grad).abs() > 6 * error).any()


def test_gradients_are_exact(pair: Pair) -> None:
    drawn = torch.tensor([[0, 4, 1], [5, 3, 4]])
    scores = SCORES.repeat(2, 1).requires_grad_()
    mask = CANDIDATES.expand(2, -1)
    assert torch.autograd.gradcheck(lambda s: pair[1](s, drawn), scores)
    assert torch.autograd.gradcheck(lambda s: pair[1](s, drawn, mask), scores)


def test_gradient_of_a_set_is_chosen_less_inclusion() -> None:
    every = torch.tensor(list(itertools.combinations(range(TOKENS), COUNT)))
    chances = conditional_poisson_log_prob(SCORES.expand(len(every), -1), every).exp()
    chosen = torch.zeros(len(every), TOKENS, dtype=torch.float64).scatter(-1, every, 1.0)
    inclusion = (chances[:, None] * chosen).sum(0)
    scores = SCORES.clone().requires_grad_()
    conditional_poisson_log_prob(scores, every[7]).backward()
    assert torch.allclose(scores.grad, chosen[7] - inclusion, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Scores with ties `[R, T]`, candidates, a count that every row can give, and a seed."""
    rows, total = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    grid = st.lists(st.integers(-3, 3), min_size=total, max_size=total)
    scores = torch.tensor([draw(grid) for _ in range(rows)]).double()
    flags = st.lists(st.booleans(), min_size=total, max_size=total)
    candidates = torch.tensor([draw(flags) for _ in range(rows)])
    count = draw(st.integers(0, int(candidates.sum(-1).min())))
    return scores, candidates, count, draw(st.integers(0, 2**32))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(PAIRS)), cases(), st.sampled_from([torch.float32, torch.float64]))
def test_draws_are_candidates_and_their_law_is_the_loops(
    name: str, case: tuple[torch.Tensor, torch.Tensor, int, int], dtype: torch.dtype
) -> None:
    sample, law, _ = PAIRS[name]
    scores, candidates, count, seed = case
    scores = scores.to(dtype).requires_grad_()
    drawn = sample(scores, count, generator=seeded(seed), candidates=candidates)
    found = law(scores, drawn, candidates)
    found.sum().backward()
    found = found.detach()
    assert drawn.shape == (len(scores), count)
    assert found.dtype == dtype
    assert torch.isfinite(scores.grad).all()
    assert (scores.grad[~candidates] == 0).all()
    for row, tokens in enumerate(drawn.tolist()):
        allowed = candidates[row].nonzero().flatten().tolist()
        assert len(set(tokens)) == count
        assert set(tokens) <= set(allowed)
        expected = reference(law, scores[row].detach(), tokens, allowed)
        assert float(found[row]) == pytest.approx(
            expected, abs=1e-5 if dtype == torch.float32 else 1e-10
        )


def test_rows_of_any_shape_are_independent(pair: Pair) -> None:
    sample, law, _ = pair
    scores = torch.randn(2, 3, 7, generator=seeded(3))
    drawn = sample(scores, 4, generator=seeded(4))
    found = law(scores, drawn)
    assert (drawn.shape, found.shape) == ((2, 3, 4), (2, 3))
    alone = torch.stack(
        [law(s, d) for s, d in zip(scores.view(6, 7), drawn.view(6, 4), strict=True)]
    )
    assert torch.allclose(found.view(6), alone)


def test_all_candidates_are_one_set_for_sure() -> None:
    drawn = conditional_poisson_sample(SCORES, TOKENS, generator=seeded(0))
    assert drawn.tolist() == list(range(TOKENS))
    assert abs(float(conditional_poisson_log_prob(SCORES, drawn))) < 1e-12
    order = plackett_luce_sample(SCORES, TOKENS, generator=seeded(0))
    # The last of an order is certain, so the law of all is that of all but the last.
    whole, part = (plackett_luce_log_prob(SCORES, order[:n]) for n in (TOKENS, TOKENS - 1))
    assert float(whole) == pytest.approx(float(part), abs=1e-12)


def test_equal_scores_over_many_tokens_are_binomials() -> None:
    """Single precision in, thousands in the exponent, and still right."""
    total, count = 1500, 400
    drawn = torch.arange(0, 1200, 3)
    scores = torch.full((total,), 2.5, requires_grad=True)
    found = conditional_poisson_log_prob(scores, drawn)
    choose = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    assert float(found.detach()) == pytest.approx(-choose, rel=1e-6)
    found.backward()
    others = torch.ones(total, dtype=torch.bool)
    others[drawn] = False
    assert torch.allclose(scores.grad[others], torch.tensor(-count / total), atol=1e-6)
    order = plackett_luce_log_prob(scores, drawn).detach()
    expected = math.lgamma(total - count + 1) - math.lgamma(total + 1)
    assert float(order) == pytest.approx(expected, rel=1e-6)


def test_far_scores_stay_finite(pair: Pair) -> None:
    scores = torch.tensor([4e3, -4e3, 0.0, 3e3], requires_grad=True)
    drawn = pair[0](scores, 2, generator=seeded(0))
    assert sorted(drawn.tolist()) == [0, 3]
    found = pair[1](scores, torch.tensor([0, 1]))  # next to impossible
    found.backward()
    assert float(found.detach()) == pytest.approx(-7e3)
    assert scores.grad.tolist() == pytest.approx([0.0, 1.0, 0.0, -1.0])


def test_half_precision_scores_get_a_law_in_single(pair: Pair) -> None:
    scores = SCORES.to(torch.bfloat16)
    drawn = torch.tensor([2, 0, 4])
    found = pair[1](scores, drawn)
    assert found.dtype == torch.float32
    assert torch.equal(found, pair[1](scores.float(), drawn))


def test_the_seed_decides(pair: Pair) -> None:
    scores = torch.randn(50, 20, generator=seeded(9))
    one, same, other = (pair[0](scores, 5, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_too_few_candidates_are_refused(pair: Pair) -> None:
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, False]])
    scores = SCORES.expand(2, -1)
    with pytest.raises(ConfigError, match="3 tokens were to be drawn where a row has 2 candidates"):
        pair[0](scores, 3, generator=seeded(0), candidates=mask)
    with pytest.raises(ConfigError, match="7 tokens were to be drawn where a row has 6"):
        pair[0](SCORES, 7, generator=seeded(0))
    with pytest.raises(ConfigError, match="-1 tokens"):
        pair[0](SCORES, -1, generator=seeded(0))
    with pytest.raises(ConfigError, match="a drawn token is not among the candidates"):
        pair[1](SCORES, torch.tensor([0, 2]), CANDIDATES)


def test_gumbel_noise_has_its_mean_and_variance() -> None:
    noise = gumbel(torch.empty(400, 500, dtype=torch.float64), seeded(5))
    assert (noise.dtype, noise.shape) == (torch.float32, (400, 500))
    assert torch.isfinite(noise).all()
    deviation = math.pi / math.sqrt(6)
    assert abs(float(noise.mean()) - 0.57722) < 4 * deviation / math.sqrt(noise.numel())
    assert float(noise.std()) == pytest.approx(deviation, rel=0.01)


def test_top_of_scores_plus_noise_is_the_sampler() -> None:
    scores = torch.randn(3, 11, generator=seeded(6))
    own = (scores + gumbel(scores, seeded(7))).topk(4).indices
    assert torch.equal(own, plackett_luce_sample(scores, 4, generator=seeded(7)))


def test_choice_entropy_is_a_share_of_the_largest() -> None:
    scores = torch.tensor([[1.0] * 6, [900.0, 0, 0, 0, 0, 0], [0.0, 0, 5, 0, 0, 0]])
    mask = torch.tensor([[True] * 6, [True] * 6, [True, False, False, True, False, False]])
    assert choice_entropy(scores, mask).tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-6)
    chances = SCORES[CANDIDATES].softmax(-1)
    expected = -float((chances * chances.log()).sum()) / math.log(5)
    assert float(choice_entropy(SCORES, CANDIDATES)) == pytest.approx(expected)
    assert choice_entropy(SCORES[:1]).item() == 0
    with pytest.raises(ConfigError, match="0 candidates"):
        choice_entropy(SCORES, torch.zeros(6, dtype=torch.bool))
    assert torch.autograd.gradcheck(
        lambda s: choice_entropy(s, CANDIDATES), SCORES.clone().requires_grad_()
    )
