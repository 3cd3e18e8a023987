"""A policy of one's own becomes a method by its decorator alone."""

from dataclasses import dataclass

import pytest
import torch

import kvfold
from kvfold.cache import METHODS, Slots
from kvfold.errors import ConfigError
from kvfold.evict import POLICIES, Policy, register_policy
from tests.contract import attached
from tests.tiny import tiny_ids


def test_a_policy_of_ones_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    monkeypatch.setattr(POLICIES, "_entries", dict(POLICIES._entries))

    @register_policy("oldest")
    @dataclass(frozen=True)
    class Oldest(Policy):
        """Keeps what came first."""

        summary = "the oldest tokens"

        def score(self, slots: Slots) -> torch.Tensor:
            return -slots.positions.float()

    held = kvfold.make_cache(attached(), "oldest", budget=12, recent=0)
    kvfold.prefill(attached(), tiny_ids(1, 40), held)
    assert held.own_layers[0].slots.positions[0, 0].tolist() == list(range(12))
    assert "oldest" in kvfold.methods()
    with pytest.raises(ConfigError, match="registered twice"):
        register_policy("oldest")(Oldest)
