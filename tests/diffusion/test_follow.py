"""Caches that follow a text: none of their own decisions counts, and what they keep is theirs."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.diffusion import (
    DiffusionCache,
    DiffusionModel,
    follow,
    make_cache,
    make_sampler,
    stream,
)
from kvfold.diffusion.caches import CacheState
from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.flow import Outputs
from kvfold.errors import ConfigError
from tests.diffusion.checkpoints import prompts_of, tiny_diffusion

CACHES = {
    "all": make_cache("spa", ratio=1.0),
    "renewed": make_cache("dual", refresh=1),
    "few": make_cache("spa", ratio=0.1, kv_refresh="selected"),
    "frozen": make_cache("dual"),
}
SAMPLERS = {
    "llada": make_sampler("llada", block_length=5),
    "dream": make_sampler("dream", steps=4, temperature=0.7),
}


@pytest.mark.parametrize("style", ["llada", "dream"])
def test_what_is_exact_never_differs(style: str) -> None:
    model = tiny_diffusion(style)
    found = follow(model, prompts_of(5, 8), CACHES, length=10, sampler=SAMPLERS[style])
    assert [each.name for each in found] == list(CACHES)
    for each in found[:2]:
        assert max(each.divergences) < 1e-5
        assert all(each.same)
    for each in found[2:]:
        assert each.divergences[0] < 1e-5, "everything is computed in the first step"
        assert max(each.divergences) > 1e-3


def test_rows_that_end_leave_the_followers_too() -> None:
    model = tiny_diffusion("llada")
    sampler = make_sampler("llada", block_length=5, cfg_scale=0.5)
    together = follow(model, prompts_of(5, 8), CACHES, length=10, sampler=sampler)
    alone = [
        follow(model, [prompt], CACHES, length=10, sampler=sampler) for prompt in prompts_of(5, 8)
    ]
    for number, each in enumerate(together):
        assert len(each.same) == sum(len(rows[number].same) for rows in alone)
        assert sum(each.same) == sum(sum(rows[number].same) for rows in alone)


class BlindState(CacheState):
    """Sees nothing: every token is as likely as every other."""

    @property
    def nbytes(self) -> int:
        return 0

    def step(self, canvas: Canvas) -> Outputs:
        return Outputs(torch.zeros(*canvas.ids.shape, self.model.shape.hidden))

    def keep(self, rows: torch.Tensor) -> None:
        pass


class Blind(DiffusionCache):
    """Describes it."""

    summary = "sees nothing"

    def start(self, model: DiffusionModel, canvas: Canvas) -> CacheState:
        return BlindState(model)


def test_the_divergence_is_of_the_undecided_places_on_the_leaders_canvas() -> None:
    model, prompts = tiny_diffusion("llada"), prompts_of(6)
    sampler = make_sampler("llada", stop_at_eos=False)
    steps = list[int]()
    (found,) = follow(
        *(model, prompts, {"blind": Blind()}), length=6, sampler=sampler, on_step=steps.append
    )
    assert steps == [1, 2, 3, 4, 5, 6]
    frames = list(stream(model, prompts, "none", length=6, sampler=sampler))
    blank = torch.full_like(frames[0].ids, model.traits.mask_id)
    for step, written in enumerate([blank, *(frame.ids for frame in frames[:-1])]):
        canvas = torch.cat([torch.tensor(prompts), written], dim=1)
        hidden = model.decoder(canvas, torch.arange(canvas.shape[1])[None])
        logits = model.decoder.logits(hidden[canvas == model.traits.mask_id])
        logits[:, model.traits.never] = -torch.inf
        spread = torch.distributions.Categorical(logits=logits).entropy().mean()
        count = int(logits[0].isfinite().sum())
        assert found.divergences[step] == pytest.approx(math.log(count) - float(spread), abs=1e-4)
    assert len(found.same) == 6


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="the length is 0"):
        follow(tiny_diffusion("llada"), prompts_of(4), CACHES, length=0)
