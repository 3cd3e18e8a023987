"""What the tests of caches share: which caches there are, and how tokens are run through one."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import KVCache, prefill
from kvfold.evict import POLICIES
from kvfold.evict.layer import EvictingLayer
from kvfold.evict.policies.distill import FeaturePolicy
from tests.tiny import tiny_model

EVICTING = [
    (name, scope) for name in POLICIES if POLICIES[name].evicts for scope in POLICIES[name].scopes
]
"""Every policy that evicts, with every scope it is defined for."""

BASIC = [(name, POLICIES[name].scopes[0]) for name in POLICIES if POLICIES[name].evicts]
"""Every policy that evicts, with its default scope."""


@cache
def attached(kind: str = "llama") -> PreTrainedModel:
    """A tiny model that stays attached; shared, so not to be changed."""
    model = tiny_model(kind)
    kvfold.attach(model)
    return model


def teacher_forced(
    model: PreTrainedModel,
    held: KVCache,
    prompt: torch.Tensor,
    follow: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Run a prompt `[B, T]`, then given tokens `[B, N]` one by one.

    Args:
        model: An attached model.
        held: The cache.
        prompt: New tokens.
        follow: The tokens that follow, whatever the model says.
        mask: Tokens and padding so far, the prompt included.
        chunk_size: Of the prompt.

    Returns:
        Logits after the prompt and after each token, `[B, N + 1, V]`.
    """
    logits = [prefill(model, prompt, held, attention_mask=mask, chunk_size=chunk_size)]
    for step in range(follow.shape[1]):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits.append(prefill(model, follow[:, step : step + 1], held, attention_mask=mask))
    return torch.stack(logits, dim=1)


def left_padded(tokens: list[int], total: int) -> torch.Tensor:
    """An attention mask of rows that hold so many tokens, `[B, total]`."""
    return (torch.arange(total) >= total - torch.tensor(tokens)[:, None]).long()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Finite, and nowhere further apart than a share of the largest number expected."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    error = (actual - expected).abs().max() / expected.abs().max().clamp_min(1e-9)
    assert error <= tolerance, f"relative error {error:.2e}"


def held_positions(held: KVCache) -> list[list[list[list[int]]]]:
    """Positions held, in order, by layer (or its parts), row and head."""
    layers = [layer.slots.positions.tolist() for layer in held.parts]
    return [
        [[sorted(p for p in head if p >= 0) for head in row] for row in rows] for rows in layers
    ]


def held_tensors(held: KVCache) -> list[torch.Tensor]:
    """Every tensor that the layers' slots own."""
    found: list[torch.Tensor] = []
    for layer in held.parts:
        layer.slots.map(lambda tensor: found.append(tensor) or tensor)
    return found


def features_of(held: KVCache) -> torch.Tensor:
    """The features that a learned policy sees of the tokens that all layers hold, `[B, T, 5]`."""
    layers = [part for part in held.parts if isinstance(part, EvictingLayer)]
    policy = layers[0].eviction.policy
    assert isinstance(policy, FeaturePolicy)
    return policy.features([layer.slots for layer in layers])
