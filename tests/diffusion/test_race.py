"""Caches are measured on the same texts, in turns, and pictures hold what was measured."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from matplotlib.axes import Axes

from kvfold.diffusion import (
    BudgetCurve,
    Calibration,
    LLaDASampler,
    generate,
    make_cache,
    make_sampler,
    race,
)
from kvfold.diffusion.parts import Stopwatch, part, running
from kvfold.diffusion.picture import draw_calibration, draw_race
from kvfold.diffusion.race import time_generation
from kvfold.errors import ConfigError
from tests.diffusion.checkpoints import EOS, prompts_of, tiny_diffusion

CACHES = {
    "none": make_cache("none"),
    "few": make_cache("spa", ratio=0.1),
    "dual": make_cache("dual"),
}
SAMPLER = LLaDASampler(block_length=5, steps=8)


def test_all_write_the_same_prompts_in_turns() -> None:
    model, prompts, told = tiny_diffusion("llada"), prompts_of(5, 8), list[tuple[str, int, int]]()
    runners = race(
        *(model, prompts, CACHES),
        length=10,
        sampler=SAMPLER,
        rounds=2,
        on_turn=lambda *turn: told.append(turn),
    )
    assert told == [(name, number, 1) for number in (1, 2) for name in CACHES]
    assert [runner.name for runner in runners] == list(CACHES)
    plain = generate(model, prompts, "none", length=10, sampler=SAMPLER)
    for runner, cache in zip(runners, CACHES.values(), strict=True):
        alone = generate(model, prompts, cache, length=10, sampler=SAMPLER)
        assert torch.equal(runner.generation.ids, alone.ids)
        assert runner.report == alone.report
        same = (alone.ids == plain.ids).float().mean()
        assert runner.agreement == pytest.approx(float(same))
        tokens = [token for row in alone.tokens for token in row]
        assert runner.new_tokens == len(tokens) - tokens.count(EOS)
        assert [len(runner.seconds), len(runner.first_seconds)] == [2, 2]
        assert all(a < b for a, b in zip(runner.first_seconds, runner.seconds, strict=True))
        speeds = [runner.new_tokens / seconds for seconds in runner.seconds]
        assert list(runner.tokens_per_second) == pytest.approx(speeds)
        assert runner.tokens_per_step == runner.new_tokens / alone.report.steps
        assert sum(runner.turns) == pytest.approx(sum(runner.seconds))
        step = sum(runner.seconds) / 2 / alone.report.steps
        assert sum(runner.step_seconds.values()) == pytest.approx(step)
        assert min(runner.step_seconds.values()) > 0
    assert ["selection" in runner.parts for runner in runners] == [False, True, False]
    assert runners[0].agreement == 1
    assert min(runner.agreement for runner in runners) < 1, "the caches tell apart"


def test_caches_alternate_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("kvfold.diffusion.race"), "TURN", 4)
    model, told = tiny_diffusion("llada"), list[tuple[str, int, int]]()
    runners = race(
        *(model, prompts_of(5), {"none": CACHES["none"], "few": CACHES["few"]}),
        length=10,
        sampler=LLaDASampler(steps=8, stop_at_eos=False),
        rounds=1,
        on_turn=lambda *turn: told.append(turn),
    )
    assert told == [(name, 1, turn) for turn in (1, 2) for name in ("none", "few")]
    assert [len(runner.turns) for runner in runners] == [2, 2]
    alone = generate(
        *(model, prompts_of(5), CACHES["few"]),
        length=10,
        sampler=LLaDASampler(steps=8, stop_at_eos=False),
    )
    assert torch.equal(runners[1].generation.ids, alone.ids), "a turn's end changes nothing"


def test_a_part_is_told_without_those_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 10.0, 20.0, 20.5])
    monkeypatch.setattr("kvfold.diffusion.parts.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    with running(watch):
        with part("outer"), part("inner"):
            pass
        with part("inner"):
            pass
    with part("inner"):
        pass
    assert watch.seconds == {"inner": 3.5, "outer": 7.0}


def test_a_timed_generation_shows_its_frames() -> None:
    model, steps = tiny_diffusion("dream"), list[int]()
    lap = time_generation(
        *(model, prompts_of(4), make_cache("spa")),
        length=6,
        sampler=make_sampler("dream", steps=3, stop_at_eos=False),
        on_frame=lambda frame: steps.append(frame.step),
    )
    assert steps == [1, 2, 3]
    assert lap.generation.report.steps == 3


@pytest.mark.parametrize(("caches", "rounds"), [({"few": CACHES["few"]}, 1), (CACHES, 0)])
def test_a_race_needs_a_reference_and_a_round(caches: dict, rounds: int) -> None:
    with pytest.raises(ConfigError, match="give none and others, and one round or more"):
        race(tiny_diffusion("llada"), prompts_of(4), caches, length=4, rounds=rounds)


@pytest.mark.parametrize(("name", "option"), [("dream", "block_length"), ("llada", "top_k")])
def test_a_sampler_has_its_own_options(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no option '{option}': choose from "):
        make_sampler(name, **{option: 4})
    with pytest.raises(ConfigError, match="unknown sampler"):
        make_sampler("best")


def test_pictures_hold_the_numbers() -> None:
    model = tiny_diffusion("llada")
    runners = race(model, prompts_of(5), CACHES, length=6, rounds=1)
    speed, agreement, parts = axes_of(draw_race(runners, "a $ title"))
    widths = [patch.get_width() for patch in speed.patches]  # type: ignore[attr-defined]
    assert widths == [runner.tokens_per_second[0] for runner in runners]
    widths = [patch.get_width() for patch in agreement.patches]  # type: ignore[attr-defined]
    assert widths == [100 * runner.agreement for runner in runners]

    bars = [patch.get_width() for patch in parts.patches]  # type: ignore[attr-defined]
    wanted = 1e3 * sum(sum(runner.step_seconds.values()) for runner in runners)
    assert sum(bars) == pytest.approx(wanted)

    drift, curve = (0.02, 0.04, 0.01), BudgetCurve(0.2, 0.4, 0.1, at=0.5)
    found = Calibration(drift, {1: 0.5, 4: 0.95}, curve, 4, 0.23)
    left, right, budget = axes_of(draw_calibration(found))
    assert list(left.lines[0].get_ydata()) == list(drift)  # type: ignore[arg-type]
    shares = budget.lines[0].get_ydata()
    assert list(shares) == curve.shares(3)  # type: ignore[arg-type]
    assert list(right.lines[0].get_ydata()) == [50, 95]  # type: ignore[arg-type]
    low, high = left.get_ylim()
    assert [low / 0.1, high / 0.1] == pytest.approx(budget.get_ylim()), "a tenth of every share"
    still = Calibration((0.0, 0.0), {1: 1.0}, BudgetCurve(0.2, 0.2, 0.2), 1, 0.2)
    assert len(axes_of(draw_calibration(still))) == 3


def axes_of(figure: object) -> list[Axes]:
    return figure.axes  # type: ignore[attr-defined]
