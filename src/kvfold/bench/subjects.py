"""The caches under measurement: transformers' own, and every method of kvfold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvfold import api
from kvfold.attention import attach
from kvfold.bench.request import Request, Task
from kvfold.bench.settings import DYNAMIC, Settings
from kvfold.cache import METHODS, CacheLayer, KVCache
from kvfold.errors import ConfigError
from kvfold.evict import POLICIES
from kvfold.zoom.report import ZoomReport


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens and bytes of a cache."""

    tokens_seen: int
    """Logical length."""
    tokens_kept: list[int]
    """Most tokens that a row holds, one number a layer."""
    cache_bytes: int
    """All tensors."""
    full_bytes: int
    """Keys and values that a full cache would hold."""
    slow_bytes: int = 0
    """The part of all tensors that is on the slow tier."""
    moved_bytes: int = 0
    """Brought from there to the fast tier so far."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds that the method itself took of all, by part, where it counts them."""


def require_subject(name: str) -> None:
    """Refuse a name that is neither `dynamic` nor a method.

    Raises:
        ConfigError: With the names there are.
    """
    if name != DYNAMIC and name not in METHODS:
        choices = ", ".join((DYNAMIC, *METHODS))
        raise ConfigError(f"unknown method {name!r}: choose from {choices}")


def request_for(settings: Settings, task: Task, subject: str, context: int) -> Request:
    """What to ask of a process, as far as it is common to all tasks."""
    return Request(
        task=task,
        model=settings.model,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        subject=subject,
        budget=budget_of(subject, settings.budget),
        context=context,
    )


def evicts(subject: str) -> bool:
    """Whether a subject has a budget; the others keep everything."""
    return subject != DYNAMIC and (subject not in POLICIES or POLICIES[subject].evicts)


def budget_of(subject: str, budget: str) -> str | None:
    """The budget that a subject takes: none if it keeps everything."""
    return budget if evicts(subject) else None


def needs_statistics(subject: str) -> bool:
    """Whether a method looks at the attention of a prompt's last queries."""
    return subject in POLICIES and POLICIES[subject]().window > 0


def prepare(model: PreTrainedModel, subject: str) -> None:
    """Put a freshly loaded model on the attention that a subject runs on."""
    if subject != DYNAMIC:
        attach(model)


def empty_cache(model: PreTrainedModel, subject: str, budget: str | None) -> Cache:
    """A cache with nothing in it, for a prepared model."""
    if subject == DYNAMIC:
        return DynamicCache(config=model.config)
    return api.make_cache(model, subject, budget=budget)


def stored_cache(model: PreTrainedModel, subject: str, path: str | Path) -> Cache:
    """Read a stored cache; for `dynamic`, that of method full, put into transformers' own.

    Args:
        model: Prepared for the subject.
        subject: `dynamic` or the method that the file was written with.
        path: The file.
    """
    if subject != DYNAMIC:
        return api.load_cache(path, model)
    with attach(model):
        stored = api.load_cache(path, model)
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(stored.layers):
        if isinstance(layer, CacheLayer):
            cache.update(layer.slots.keys, layer.slots.values, index)
        else:
            cache.layers[index] = layer
    return cache


def held_by(cache: Cache) -> Held:
    """Count what a cache holds now."""
    if isinstance(cache, KVCache):
        report = cache.report()
        held = report.bytes_fast + report.bytes_slow
        details = report.details
        return Held(
            report.tokens_seen,
            report.tokens_kept,
            held,
            report.bytes_full,
            slow_bytes=report.bytes_slow,
            moved_bytes=details.bytes_moved if isinstance(details, ZoomReport) else 0,
            parts=details.seconds if isinstance(details, ZoomReport) else {},
        )
    tensors = [
        (layer.keys, layer.values)
        for layer in cache.layers
        if isinstance(layer, CacheLayerMixin)
        and layer.keys is not None
        and layer.values is not None
    ]
    held = sum(keys.nbytes + values.nbytes for keys, values in tensors)
    return Held(cache.get_seq_length(), [keys.shape[2] for keys, _ in tensors], held, held)
