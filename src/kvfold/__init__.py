"""kvfold: the KV cache of Hugging Face language models made small, and what that costs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvfold.version import __version__

if TYPE_CHECKING:
    from kvfold.api import load, load_cache, make_cache, methods
    from kvfold.attention import attach
    from kvfold.budget import Budget
    from kvfold.cache import KVCache, prefill

_HOMES = {
    "Budget": "kvfold.budget",
    "KVCache": "kvfold.cache",
    "attach": "kvfold.attention",
    "load": "kvfold.api",
    "load_cache": "kvfold.api",
    "make_cache": "kvfold.api",
    "methods": "kvfold.api",
    "prefill": "kvfold.cache",
}

__all__ = [
    "Budget",
    "KVCache",
    "__version__",
    "attach",
    "load",
    "load_cache",
    "make_cache",
    "methods",
    "prefill",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import kvfold` does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
