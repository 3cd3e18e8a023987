"""Eviction policies, one file each. Importing the folder registers them."""

from kvfold.evict.policies.distill import Distill
from kvfold.evict.policies.full import Full
from kvfold.evict.policies.h2o import H2O
from kvfold.evict.policies.knorm import KeyNorm
from kvfold.evict.policies.random import Random
from kvfold.evict.policies.snapkv import SnapKV
from kvfold.evict.policies.streaming import Streaming
from kvfold.evict.policies.tova import TOVA

__all__ = ["H2O", "TOVA", "Distill", "Full", "KeyNorm", "Random", "SnapKV", "Streaming"]
