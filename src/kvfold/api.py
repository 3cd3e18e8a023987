"""The few calls most people need: load a model, make a cache, read one back."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold.evict
import kvfold.zoom  # noqa: F401 - both register their methods
from kvfold.attention import attach
from kvfold.budget import Budget
from kvfold.cache import METHODS, CacheSpec, KVCache, storage
from kvfold.models import load_model


def load(
    name: str = "default",
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, attached and ready for kvfold's caches.

    Args:
        name: `default` for SmolLM2-135M-Instruct, a Hub name, or a folder.
        dtype: Of the weights, a torch dtype or its name; by default float32 on the CPU and the
            checkpoint's own elsewhere.
        device: Where to put the model; by default CUDA where there is one, else the CPU.

    Returns:
        The model and its tokenizer.

    Raises:
        ConfigError: For a name, dtype or device that cannot be used.
        UnsupportedModelError: When the model keeps its own attention.

    Example:
        >>> model, tokenizer = kvfold.load("default")
    """
    model, tokenizer = load_model(name, dtype=dtype, device=device)
    attach(model)
    return model, tokenizer


def make_cache(
    model: PreTrainedModel,
    method: str = "full",
    *,
    budget: Budget | float | str | None = None,
    **options: object,
) -> KVCache:
    """Make an empty cache for a model; pass it to `generate` or to the model.

    Args:
        model: A model from `kvfold.load`, or one that is attached.
        method: One of `kvfold.methods()`.
        budget: A share (0.25), tokens (512) or bytes ("64MiB"); a quarter by default.
        **options: The method's own; for eviction `scope`, `sinks`, `recent` and the policy's.

    Raises:
        ConfigError: When the model is not attached, or an option is unknown.
        BudgetError: When the budget cannot be kept.

    Example:
        >>> cache = kvfold.make_cache(model, "snapkv", budget=0.25)
        >>> output = model.generate(**inputs, cache=cache)
    """
    parsed = None if budget is None else Budget.parse(budget)
    return METHODS[method].build(model, method, parsed, options)


def methods() -> list[str]:
    """Names that `make_cache` takes, `full` first."""
    return sorted(METHODS, key=lambda name: (name != "full", name))


def load_cache(path: str | Path, model: PreTrainedModel, **options: object) -> KVCache:
    """Read a cache that `KVCache.save` wrote.

    Args:
        path: The file.
        model: The model it was made with, attached.
        **options: Of the method, in place of those that the cache was made with: where a file of
            weights is now, or, with `disk=None`, everything in memory.

    Raises:
        ArtifactError: When the file is missing, damaged, or belongs to another model.
        ConfigError: When an option that the cache was made with cannot be used here.
    """
    return storage.load_cache(path, model, _build, options)


def _build(model: PreTrainedModel, spec: CacheSpec) -> KVCache:
    options = dict(spec.options)
    if spec.scope is not None:
        options["scope"] = spec.scope
    return make_cache(model, spec.method, budget=spec.budget, **options)
