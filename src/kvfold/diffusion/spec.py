"""Caches and samplers as they are written in one word, such as `spa:ratio=0.25:rank=32`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvfold.diffusion.caches import PRESETS, DiffusionCache, make_cache
from kvfold.diffusion.calibrate import Calibration
from kvfold.diffusion.samplers import Sampler, make_sampler
from kvfold.errors import ConfigError
from kvfold.registry import Registry


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """A name and its options, as in `spa:ratio=0.2:curve=uniform`.

    Raises:
        ConfigError: It is written otherwise.
    """
    name, *parts = (part.strip() for part in text.split(":"))
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not name or not key or not equals or not value or key in options:
            raise ConfigError(
                f"cannot read {text!r} at {part!r}: write a name and each option once, as in "
                "spa:ratio=0.2:rank=32"
            )
        options[key] = _value(value)
    return name, options


def cache_of(spec: str, fitted: Calibration | None = None) -> DiffusionCache:
    """The cache that a word names, such as `dual` or `spa:preset=paper:ratio=0.2`.

    Args:
        spec: As `parse_spec` reads it; `preset`, of spa, is one of `PRESETS`.
        fitted: Settings for spa; options go before them.

    Raises:
        ConfigError: A name, option or value is none.
    """
    name, options = parse_spec(spec)
    if name != "spa":
        return make_cache(name, **options)
    presets: Registry[Mapping[str, Any]] = Registry("preset of spa")
    for preset, settings in PRESETS.items():
        presets.register(preset, settings)
    if "preset" in options:
        options = {**presets[str(options.pop("preset"))], **options}
    if fitted is not None:
        options = {"curve": fitted.curve, "rank": fitted.rank, "ratio": fitted.ratio, **options}
    return make_cache(name, **options)


def sampler_of(spec: str, given: Mapping[str, object]) -> Sampler:
    """The sampler that a word names, such as `dream:algorithm=entropy`.

    Args:
        spec: As `parse_spec` reads it.
        given: More of its options.

    Raises:
        ConfigError: There is none of that name, or it cannot take the options.
    """
    name, options = parse_spec(spec)
    twice = sorted(set(options) & set(given))
    if twice:
        raise ConfigError(
            f"{twice[0]} is given twice, in the sampler {spec} and by itself: give one"
        )
    return make_sampler(name, **options, **given)


def _value(text: str) -> object:
    """A number, true, false or none, else the text."""
    words: Mapping[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text
