"""The estimate of a likelihood agrees with masks filled by hand, and with all masks there are."""

from __future__ import annotations

from itertools import product
from math import comb

import pytest
import torch

from kvfold.diffusion import DiffusionModel, SpaCache, make_cache
from kvfold.diffusion.likelihood import draw_masks, estimate, is_greedy, weighted
from kvfold.errors import ConfigError
from tests.diffusion.checkpoints import MASK, prompts_of, tiny_diffusion

STYLES = ("llada", "dream")
[CONTEXT, TOKENS] = prompts_of(7, 4)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(
    model: DiffusionModel, context: list[int], tokens: list[int], mask: tuple[bool, ...]
) -> float:
    """T/n times the log-probability of the hidden tokens, from the model's plain logits."""
    hidden = [place for place, is_hidden in enumerate(mask) if is_hidden]
    seen = [MASK if place in hidden else token for place, token in enumerate(tokens)]
    logs = model.logits(torch.tensor([context + seen]))[0].double().log_softmax(dim=-1)
    total = sum(logs[len(context) + place, tokens[place]].item() for place in hidden)
    return total * len(tokens) / len(hidden)


@pytest.mark.parametrize("style", STYLES)
def test_a_mask_is_worth_what_its_tokens_are_by_hand(style: str) -> None:
    model = tiny_diffusion(style)
    masks = [(True,) * 4, (True, False, False, False), (False, True, True, False)]
    found = weighted(model, CONTEXT, TOKENS, torch.tensor(masks))
    expected = [by_hand(model, CONTEXT, TOKENS, mask) for mask in masks]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_one_draw_that_masks_all_is_one_plain_forward(style: str) -> None:
    model = tiny_diffusion(style)
    seed = next(seed for seed in range(99) if draw_masks(4, 1, seeded(seed)).all())
    found = estimate(model, CONTEXT, TOKENS, draws=1, generator=seeded(seed))
    assert found == pytest.approx(by_hand(model, CONTEXT, TOKENS, (True,) * 4), rel=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_the_estimate_comes_to_the_mean_over_all_masks(style: str) -> None:
    model, tokens = tiny_diffusion(style), TOKENS[:3]
    masks = [mask for mask in product((False, True), repeat=3) if any(mask)]
    values = {mask: by_hand(model, CONTEXT, tokens, mask) for mask in masks}
    chances = {mask: 1 / 3 / comb(3, sum(mask)) for mask in masks}
    expected = sum(chances[mask] * values[mask] for mask in masks)
    spread = sum(chances[mask] * (values[mask] - expected) ** 2 for mask in masks) ** 0.5
    draws = 3000
    found = estimate(model, CONTEXT, tokens, draws=draws, rows=500, generator=seeded(1))
    assert spread > 0.5
    assert abs(found - expected) < 4 * spread / draws**0.5


def test_masks_hide_every_number_of_tokens_and_every_token_alike() -> None:
    masks = draw_masks(5, 5000, seeded())
    counts = masks.sum(dim=1).bincount(minlength=6)
    assert counts.tolist() == [0, 1000, 1000, 1000, 1000, 1000]
    assert masks.float().mean(dim=0).tolist() == pytest.approx([0.6] * 5, abs=0.03)


@pytest.mark.parametrize(("length", "draws"), [(5, 1), (5, 3), (3, 7), (1, 4)])
def test_each_draw_by_itself_is_even(length: int, draws: int) -> None:
    generator = seeded()
    counts = torch.stack(
        [draw_masks(length, draws, generator).sum(dim=1) for _ in range(600 * length)]
    )
    assert (counts.min(), counts.max()) == (1, length)
    for column in counts.T:
        assert column.bincount(minlength=length + 1)[1:].tolist() == pytest.approx(
            [600] * length, abs=100
        )


def test_the_estimate_does_not_depend_on_what_is_computed_side_by_side() -> None:
    model = tiny_diffusion()
    one, all_ = (
        estimate(model, CONTEXT, TOKENS, draws=9, rows=rows, generator=seeded(2)) for rows in (1, 9)
    )
    assert one == pytest.approx(all_, rel=1e-6)
    other = estimate(model, CONTEXT, TOKENS, draws=9, generator=seeded(3))
    assert other != pytest.approx(one, rel=1e-3)


def test_one_token_is_exact() -> None:
    model = tiny_diffusion()
    expected = by_hand(model, CONTEXT, TOKENS[:1], (True,))
    found = [estimate(model, CONTEXT, TOKENS[:1], generator=seeded(seed)) for seed in range(2)]
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("style", STYLES)
def test_what_is_written_surest_place_first_is_greedy(style: str) -> None:
    model, cache = tiny_diffusion(style), make_cache("none")
    canvas = [MASK] * 4
    for _ in range(4):
        probabilities = model.logits(torch.tensor([CONTEXT + canvas]))[0, 7:].softmax(dim=-1)
        probabilities[:, model.traits.never] = 0
        sure, tokens = probabilities.max(dim=-1)
        left = [place for place in range(4) if canvas[place] == MASK]
        place = max(left, key=lambda place: sure[place].item())
        canvas[place] = int(tokens[place])
    assert is_greedy(model, CONTEXT, canvas, cache)
    for place in range(4):
        changed = [*canvas[:place], (canvas[place] + 1) % MASK, *canvas[place + 1 :]]
        assert not is_greedy(model, CONTEXT, changed, cache)
    assert is_greedy(model, CONTEXT, canvas, SpaCache(ratio=1.0))


@pytest.mark.parametrize(
    ("context", "tokens", "message"),
    [([], [1], "is empty"), ([1], [], "is empty"), ([1] * 200, [2] * 57, "256 positions")],
)
def test_what_cannot_be_scored_is_refused(
    context: list[int], tokens: list[int], message: str
) -> None:
    model = tiny_diffusion()
    with pytest.raises(ConfigError, match=message):
        estimate(model, context, tokens, generator=seeded())
    with pytest.raises(ConfigError, match=message):
        is_greedy(model, context, tokens, make_cache("none"))
