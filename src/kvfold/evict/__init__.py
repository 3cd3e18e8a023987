"""Eviction: keep B tokens of each layer, chosen by a policy."""

import kvfold.evict.policies  # noqa: F401 - registers the policies
from kvfold.evict.artifact import PolicyArtifact
from kvfold.evict.build import build_cache
from kvfold.evict.layer import EvictingLayer, Eviction
from kvfold.evict.policy import (
    POLICIES,
    NewTokens,
    Observation,
    Policy,
    Scope,
    register_policy,
)

__all__ = [
    "POLICIES",
    "EvictingLayer",
    "Eviction",
    "NewTokens",
    "Observation",
    "Policy",
    "PolicyArtifact",
    "Scope",
    "build_cache",
    "register_policy",
]
