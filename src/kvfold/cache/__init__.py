"""The cache core: slots, logical positions, padding, bytes, forks and files."""

from kvfold.cache.cache import CacheSpec, KVCache, Outcome
from kvfold.cache.layer import CacheLayer
from kvfold.cache.methods import METHODS, Method
from kvfold.cache.prefill import CACHE_KEYWORD, prefill
from kvfold.cache.report import CacheReport, Details
from kvfold.cache.slots import Slots

__all__ = [
    "CACHE_KEYWORD",
    "METHODS",
    "CacheLayer",
    "CacheReport",
    "CacheSpec",
    "Details",
    "KVCache",
    "Method",
    "Outcome",
    "Slots",
    "prefill",
]
