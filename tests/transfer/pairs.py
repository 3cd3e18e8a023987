"""Pairs of tiny models: a base, and a copy that was pushed away from it, as by fine-tuning."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache
from tests.tiny import tiny_ids, tiny_model


def tiny_pair(
    kind: str = "llama", *, drift: float = 0.1, theta: float | None = None, **overrides: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A base and a copy with other weights and, where `theta` is given, another RoPE."""
    base = tiny_model(kind, **overrides)
    if theta is None:
        other = copy.deepcopy(base)
    else:
        rope = {"rope_type": "default", "rope_theta": theta}
        other = tiny_model(kind, rope_parameters=rope, **overrides)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim >= 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(drift * weight.std() * noise)
    for model in (base, other):
        kvfold.attach(model)
    return base, other


def tiny_texts(count: int, length: int = 64) -> list[torch.Tensor]:
    """Texts of random tokens, `[T]` each."""
    return [tiny_ids(1, length, seed=100 + index)[0] for index in range(count)]


@torch.no_grad()
def continued(model: PreTrainedModel, held: KVCache, follow: torch.Tensor) -> torch.Tensor:
    """Logits `[1, N, V]` of tokens `[1, N]` that follow what an unpadded cache has seen."""
    start = held.get_seq_length()
    positions = torch.arange(start, start + follow.shape[1])[None]
    return model(follow, position_ids=positions, **{CACHE_KEYWORD: held}).logits
