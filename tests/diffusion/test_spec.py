"""Caches and samplers written in one word."""

from __future__ import annotations

import pytest

from kvfold.diffusion import BudgetCurve, Calibration, LLaDASampler, SpaCache
from kvfold.diffusion.spec import cache_of, parse_spec, sampler_of
from kvfold.errors import ConfigError


def test_specs() -> None:
    assert parse_spec("spa") == ("spa", {})
    found = parse_spec("spa: ratio=0.2:rank=4:curve=uniform:x=true:y=none")
    expected = {"ratio": 0.2, "rank": 4, "curve": "uniform", "x": True, "y": None}
    assert found == ("spa", expected)
    for wrong in ("spa:ratio", "spa:=1", "spa:ratio=", ":ratio=1", "spa:rank=1:rank=2"):
        with pytest.raises(ConfigError, match="cannot read"):
            parse_spec(wrong)


def test_caches_of_specs() -> None:
    assert cache_of("spa:ratio=0.2:rank=4") == SpaCache(ratio=0.2, rank=4)
    assert cache_of("dual").name == "dual"
    with pytest.raises(ConfigError, match="unknown preset of spa 'none such'"):
        cache_of("spa:preset=none such")


def test_what_was_fitted_is_for_spa_and_options_go_before_it() -> None:
    curve = BudgetCurve(first=0.3, peak=0.4, last=0.3)
    fitted = Calibration(drift=(0.1,), overlap={4: 0.9}, curve=curve, rank=4, ratio=0.3)
    assert cache_of("spa:rank=8", fitted) == SpaCache(curve=curve, rank=8, ratio=0.3)
    assert cache_of("dllm", fitted) == cache_of("dllm")


def test_samplers_of_specs() -> None:
    assert sampler_of("llada:block_length=4", {"steps": 8}) == LLaDASampler(block_length=4, steps=8)
    with pytest.raises(ConfigError, match="steps is given twice, in the sampler llada:steps=3"):
        sampler_of("llada:steps=3", {"steps": 3})
