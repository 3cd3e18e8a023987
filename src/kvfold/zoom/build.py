"""The method `sekv`: from its options to a cache."""

from __future__ import annotations

import itertools
import math
import os
from typing import cast

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache import METHODS, CacheSpec, KVCache, Method
from kvfold.cache.layer import CacheLayer
from kvfold.errors import BudgetError, ConfigError
from kvfold.models import decoder_layers, head_shape
from kvfold.zoom import gate_choice
from kvfold.zoom.fold import Segmenting, Weighting
from kvfold.zoom.folding import Folding
from kvfold.zoom.gate_choice import choose_gates
from kvfold.zoom.gates import Gates
from kvfold.zoom.layer import Resolution, Routing, ZoomLayer
from kvfold.zoom.slow import CHOICES, DEFAULTS, check_slow, slow_tiers

LONGEST = 1024
"""Tokens of the longest span that makes sense: one is expanded at least."""
DEFAULT_BUDGET = Budget(0.25, "ratio")
"""Share of a full cache's bytes on the fast tier when none is named."""
DIRECTIONS = 24
"""Of the routing sketch, when none are asked for, in at most a quarter of the budget."""
LEAST = 0.05
"""With less, too few directions are left to tell spans apart."""


def build_cache(
    model: PreTrainedModel, method: str, budget: Budget | None, options: dict[str, object]
) -> KVCache:
    """Build an empty cache at two resolutions.

    Args:
        model: An attached model.
        method: Its registered name.
        budget: Share of a full cache's bytes that may stand on the fast tier; a quarter without it.
        options: `routing` (`sketch`, or `summary`, as in the paper), `gates` of the latter (a file,
            folder or Hub repository; the shipped ones for the model they were trained on, `none`
            for none; `digest`, SHA-256 of their weights, to be warned of others), `directions` of
            the sketch (24, or fewer in a small budget), `shortest` and `longest` span in tokens
            (8, 16), `sinks` (4), `deviations` of surprisal above which a token is an anchor (1),
            `weighting` of a span's tokens in its means (`even`, or `surprisal` as in the paper),
            `slow` (`half` or `exact`: in what spans are held), `zoom` (whether spans are expanded
            at all), `factors`
            (`head` or `joint`: spans as low-rank factors of each kv head, or of all together, where
            that is smaller; `none`), their `rank` (half of `longest`, 32 at most) and `precision`
            (`half`: as spans are, or `int8`), `disk` (a folder: spans stand in files there, which
            go with the cache). With `factors=head`, gates say which components are used: the ones
            that routing has, or given ones.

    Raises:
        BudgetError: When the budget is no share, or too small for the sketch.
        ConfigError: For an unknown option, or a value it cannot use.
    """
    budget = budget or DEFAULT_BUDGET
    _check_budget(method, budget)
    given = _given(model, method, budget, options)
    gates, named = choose_gates(model, method, given)
    resolution, segmenting = _settings(model, method, budget, given, gates)
    if isinstance(disk := options.get("disk"), str | os.PathLike):
        named["disk"] = os.path.abspath(disk)
    spec = CacheSpec(method, str(budget), None, options | named)
    if budget.is_everything:
        return KVCache(model, spec, CacheLayer)
    numbers, folding = itertools.count(), Folding(model, segmenting)
    return KVCache(
        model,
        spec,
        lambda: ZoomLayer(resolution, next(numbers)),
        coordinator=folding,
        details=folding.report,
    )


def _check_budget(method: str, budget: Budget) -> None:
    if budget.unit != "ratio":
        raise BudgetError(
            f"{method} takes a share of the full cache's bytes, not {budget}: give one such as 0.1"
        )
    if budget.amount < LEAST:
        raise BudgetError(
            f"{method} cannot keep to {budget.amount:.1%} of the bytes: give at least {LEAST:.0%}"
        )


_DEFAULTS: dict[str, object] = {
    "routing": "sketch",
    "directions": DIRECTIONS,
    "shortest": 8,
    "longest": 16,
    "sinks": 4,
    "deviations": 1.0,
    "weighting": "even",
    "slow": "half",
    "zoom": True,
    **gate_choice.DEFAULTS,
    **DEFAULTS,
}
_CHOICES = {
    "routing": ("sketch", "summary"),
    "weighting": ("surprisal", "even"),
    "slow": ("half", "exact"),
    "zoom": (True, False),
    **CHOICES,
}


def _settings(
    model: PreTrainedModel,
    method: str,
    budget: Budget,
    given: dict[str, object],
    gates: Gates | None,
) -> tuple[Resolution, Segmenting]:
    width = _key_width(model)
    directions, shortest, longest, sinks = (
        _whole(method, name, given[name], least)
        for name, least in (("directions", 2), ("shortest", 1), ("longest", 2), ("sinks", 0))
    )
    deviations = given["deviations"]
    if (
        not isinstance(deviations, float | int)
        or isinstance(deviations, bool)
        or math.isnan(deviations)
    ):
        raise ConfigError(f"{method}: deviations is {deviations!r}, give a number")
    if not shortest <= longest <= LONGEST:
        raise ConfigError(
            f"{method}: longest is {longest}: give from shortest, {shortest}, to {LONGEST}"
        )
    if directions > width:
        raise ConfigError(
            f"{method}: directions is {directions}, more than the {width} dims of a key: give at "
            "most that"
        )
    check_slow(method, given)
    half = given["slow"] == "half" and model.dtype == torch.float32
    resolution = Resolution(
        share=budget.amount,
        routing=cast("Routing", given["routing"]),
        directions=directions,
        gates=gates,
        step=shortest,
        dtype=torch.float16 if half else None,
        zoom=bool(given["zoom"]),
        make_slow=slow_tiers(model, longest, given, gates),
    )
    weighting = cast("Weighting", given["weighting"])
    return resolution, Segmenting(sinks, float(deviations), shortest, longest, weighting)


def _given(
    model: PreTrainedModel, method: str, budget: Budget, options: dict[str, object]
) -> dict[str, object]:
    """Every option, those that were not given as they are by default."""
    unknown = sorted(set(options) - set(_DEFAULTS))
    if unknown:
        allowed = ", ".join(sorted(_DEFAULTS))
        raise ConfigError(f"{method} has no option {unknown[0]!r}: choose from {allowed}")
    width = _key_width(model)
    affordable = int(budget.amount * width * model.dtype.itemsize)
    given = _DEFAULTS | {"directions": max(min(DIRECTIONS, width, affordable), 2)} | options
    for name, choices in _CHOICES.items():
        if not any(given[name] is choice or given[name] == choice for choice in choices):
            named = " or ".join(str(choice) for choice in choices)
            raise ConfigError(f"{method}: {name} is {given[name]!r}, give {named}")
    return given


def _key_width(model: PreTrainedModel) -> int:
    return min(head_shape(model, index).head_dim for index in range(len(decoder_layers(model))))


def _whole(method: str, name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{method}: {name} is {value!r}, give a whole number of at least {least}")
    return value


def takes(budget: Budget) -> bool:
    """Whether a budget is a share that the sketch leaves room in."""
    return budget.unit == "ratio" and budget.amount >= LEAST


METHODS.register(
    "sekv", Method(build_cache, "two resolutions: zooms in where the query looks (SeKV)", takes)
)
