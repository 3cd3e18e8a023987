"""Caches for masked diffusion, one file each. Importing the folder registers them."""

from kvfold.diffusion.caches.cache import (
    CACHES,
    CacheState,
    DiffusionCache,
    make_cache,
    register_cache,
)
from kvfold.diffusion.caches.dkv import DelayedCache
from kvfold.diffusion.caches.dllm import ValueCache
from kvfold.diffusion.caches.dual import DualCache
from kvfold.diffusion.caches.none import NoCache
from kvfold.diffusion.caches.prefix import PrefixCache
from kvfold.diffusion.caches.spa import PRESETS, SpaCache

__all__ = [
    "CACHES",
    "PRESETS",
    "CacheState",
    "DelayedCache",
    "DiffusionCache",
    "DualCache",
    "NoCache",
    "PrefixCache",
    "SpaCache",
    "ValueCache",
    "make_cache",
    "register_cache",
]
