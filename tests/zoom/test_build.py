"""What `sekv` cannot do is refused in one clear sentence, before anything is stored."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.budget import Budget
from kvfold.cache import CacheLayer
from kvfold.errors import BudgetError, ConfigError
from kvfold.zoom.layer import ZoomLayer
from tests.contract import assert_close, attached
from tests.tiny import tiny_ids
from tests.zoom.running import layers_of, one_by_one, plain_logits, run, wide


@pytest.mark.parametrize("budget", [512, "512", "512 tokens", "64MiB", Budget(4096, "bytes")])
def test_tokens_and_bytes_are_refused(budget: Budget | int | str):
    with pytest.raises(BudgetError, match=r"takes a share of the full cache's bytes.*such as 0\.1"):
        kvfold.make_cache(attached(), "sekv", budget=budget)


@pytest.mark.parametrize("budget", [0.049, "1%", 1e-9])
def test_a_budget_below_the_sketch_is_refused(budget: float | str):
    with pytest.raises(BudgetError, match="give at least 5%"):
        kvfold.make_cache(attached(), "sekv", budget=budget)


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, "150%", "much", float("nan"), True])
def test_what_is_no_budget_is_refused(budget: float | str):
    with pytest.raises(BudgetError, match="budget"):
        kvfold.make_cache(attached(), "sekv", budget=budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strength": 3},
            "no option 'strength': choose from deviations, digest, directions, disk, factors",
        ),
        ({"scope": "head"}, "no option 'scope'"),
        ({"longest": 7}, "longest is 7: give from shortest, 8, to 1024"),
        ({"longest": 10**9}, "longest is 1000000000: give from"),
        ({"shortest": 17}, "longest is 16: give from shortest, 17"),
        ({"shortest": 0}, "shortest is 0, give a whole number of at least 1"),
        ({"longest": 1, "shortest": 1}, "longest is 1, give a whole number of at least 2"),
        ({"directions": 0}, "directions is 0, give a whole number of at least 2"),
        ({"directions": -4}, "directions is -4"),
        ({"directions": 33}, "directions is 33, more than the 32 dims of a key"),
        ({"directions": True}, "directions is True, give a whole number"),
        ({"directions": 8.0}, "directions is 8.0, give a whole number"),
        ({"directions": None}, "directions is None, give a whole number"),
        ({"sinks": -1}, "sinks is -1, give a whole number of at least 0"),
        ({"sinks": True}, "sinks is True"),
        ({"shortest": True}, "shortest is True"),
        ({"longest": "32"}, "longest is '32'"),
        ({"deviations": "1"}, "deviations is '1', give a number"),
        ({"deviations": True}, "deviations is True, give a number"),
        ({"deviations": float("nan")}, "deviations is nan, give a number"),
        ({"slow": "x"}, "slow is 'x', give half or exact"),
        ({"slow": None}, "slow is None, give half or exact"),
        ({"slow": ["half"]}, "give half or exact"),
    ],
)
@pytest.mark.parametrize("budget", [0.25, 1.0])
def test_options(budget: float, options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        kvfold.make_cache(wide(), "sekv", budget=budget, **options)
    assert "\n" not in str(caught.value)


def test_no_more_directions_than_a_key_has_dims():
    """By default as many as there are, in a small head."""
    held = kvfold.make_cache(attached(), "sekv")
    assert layers_of(held)[0].resolution.directions == 16
    assert layers_of(kvfold.make_cache(wide(), "sekv"))[0].resolution.directions == 24
    assert (
        layers_of(kvfold.make_cache(wide(), "sekv", directions=32))[0].resolution.directions == 32
    )


@pytest.mark.parametrize("directions", [2, 7, 32])
def test_any_number_of_directions(directions: int):
    held = kvfold.make_cache(wide(), "sekv", budget=0.4, directions=directions)
    logits = run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 20))])
    assert torch.isfinite(logits).all()
    assert layers_of(held)[0].spans.router.codes.shape[2] == (directions + 1) // 2


def test_a_quarter_by_default():
    held = kvfold.make_cache(attached(), "sekv")
    assert layers_of(held)[0].resolution.share == 0.25
    assert held.spec.budget == str(Budget(0.25, "ratio"))


def test_the_options_arrive():
    held = kvfold.make_cache(
        wide(), "sekv", budget="30%", directions=6, shortest=8, longest=24, slow="exact"
    )
    how = layers_of(held)[0].resolution
    assert (how.share, how.directions, how.step) == (0.3, 6, 8)
    assert layers_of(held)[0].spans.slow.longest == 24
    assert how.dtype is None
    assert layers_of(kvfold.make_cache(wide(), "sekv"))[0].resolution.dtype == torch.float16
    assert len(layers_of(held)) == 2


def test_the_whole_budget_is_a_plain_cache():
    held, ids = kvfold.make_cache(wide(), "sekv", budget=1.0), tiny_ids(1, 200)
    assert {type(part) for part in held.parts} == {CacheLayer}
    logits = run(wide(), held, [ids[:, :180], *one_by_one(ids[:, 180:])])
    assert_close(logits, plain_logits(wide(), ids)[:, 179:])
    held.crop(-3)
    assert held.get_seq_length() == 197


def test_sliding_layers_stay_what_they_are():
    held = kvfold.make_cache(attached("gemma3"), "sekv")
    kinds = [isinstance(layer, ZoomLayer) for layer in held.layers]
    assert 0 < sum(kinds) < len(kinds)
    first = next(layer for layer in held.layers if isinstance(layer, ZoomLayer))
    assert first.slots.fields == ("surprisal",)
    assert [layer.slots.fields for layer in layers_of(held)[1:]] == [()] * (sum(kinds) - 1)


def test_it_is_a_method():
    assert "sekv" in kvfold.methods()
