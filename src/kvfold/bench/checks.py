"""All that can be wrong with settings, found before anything long starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.artifacts import format_bytes
from kvfold.attention import attach
from kvfold.bench.memory import available
from kvfold.bench.settings import DecodeSettings, PrefillSettings
from kvfold.bench.subjects import budget_of, empty_cache, require_subject
from kvfold.budget import Budget
from kvfold.errors import ConfigError
from kvfold.models import Anatomy, anatomy_of, parse_device, parse_dtype, skeleton
from kvfold.models.home import Progress


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What sizes follow from."""

    anatomy: Anatomy
    """The model."""
    dtype: torch.dtype
    """Of weights and cache."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of a full cache's keys and values of one row."""
        return self.anatomy.kv_bytes(tokens, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.anatomy.parameters * self.dtype.itemsize


def check(settings: DecodeSettings | PrefillSettings, progress: Progress) -> ModelFacts:
    """Refuse settings that cannot be measured.

    Args:
        settings: As the user gave them.
        progress: Told where the default model has to be fetched first.

    Returns:
        What sizes follow from.

    Raises:
        ConfigError: For an option that is out of range or does not fit the model.
        BudgetError: For a budget that cannot be kept.
        UnsupportedModelError: For a model that kvfold cannot work with.
    """
    _check_numbers(settings)
    _check_subjects(settings)
    facts = _facts(settings, progress)
    for context in settings.contexts:
        _check_context(settings, context, facts.anatomy)
    _check_sizes(settings, facts)
    return facts


def _check_numbers(settings: DecodeSettings | PrefillSettings) -> None:
    numbers = {"threads": [settings.threads], "rounds": [settings.rounds]}
    numbers["context"] = list(settings.contexts)
    if isinstance(settings, DecodeSettings):
        numbers["batch"] = list(settings.batches)
        numbers |= {"warmup": [settings.warmup], "steps": [settings.steps]}
        if settings.read is not None:
            numbers["read"] = [settings.read]
    else:
        numbers["chunk size"] = [settings.chunk_size]
    for name, values in numbers.items():
        if not values:
            raise ConfigError(f"no {name} is given: give at least one number")
        if min(values) < 1:
            raise ConfigError(f"{name} is {min(values)}: give a whole number of at least 1")


def _check_subjects(settings: DecodeSettings | PrefillSettings) -> None:
    if not settings.subjects:
        raise ConfigError("no method is given: give at least one, such as full,snapkv")
    Budget.parse(settings.budget)
    for subject in settings.subjects:
        require_subject(subject)
        if settings.subjects.count(subject) > 1:
            raise ConfigError(f"method {subject} is given twice: give each once")


def _facts(settings: DecodeSettings | PrefillSettings, progress: Progress) -> ModelFacts:
    """Build the model and its caches without weights: what does not fit shows itself."""
    parse_device(settings.device)
    dtype = parse_dtype(settings.dtype)
    model = skeleton(settings.model, progress=progress)
    anatomy = anatomy_of(model)
    with attach(model):
        for subject in settings.subjects:
            empty_cache(model, subject, budget_of(subject, settings.budget))
    return ModelFacts(anatomy, model.dtype if dtype is None else dtype)


def _check_context(
    settings: DecodeSettings | PrefillSettings, context: int, anatomy: Anatomy
) -> None:
    limit = anatomy.max_positions
    read = settings.read if isinstance(settings, DecodeSettings) else None
    if limit is not None and min(context, read or context) > limit:
        raise ConfigError(
            f"context {context} is longer than the model's {limit} positions: give at most {limit}"
            + (", or --read fewer" if isinstance(settings, DecodeSettings) else "")
        )
    if isinstance(settings, DecodeSettings) and settings.stored(context) < 1:
        steps = settings.warmup + settings.steps
        raise ConfigError(
            f"context {context} is used up by {settings.warmup} warm-up and {settings.steps} timed "
            f"steps: give more than {steps} tokens, or fewer steps"
        )


def _check_sizes(settings: DecodeSettings | PrefillSettings, facts: ModelFacts) -> None:
    batch = max(settings.batches) if isinstance(settings, DecodeSettings) else 1
    Budget.parse(settings.budget).tokens(min(settings.contexts), batch * facts.kv_bytes(1))
    free = available()
    if free is None or parse_device(settings.device).type != "cpu":
        return
    needed = batch * facts.kv_bytes(max(settings.contexts)) + facts.weight_bytes
    if needed > free:
        raise ConfigError(
            f"weights and full cache of batch {batch} at context {max(settings.contexts)} take "
            f"{format_bytes(needed)} and {format_bytes(free)} are free: "
            "give less context or a smaller batch"
        )
