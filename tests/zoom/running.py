"""What the tests of the cache share: running tokens through it, and the plain model's word."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import KVCache, prefill
from kvfold.zoom.layer import ZoomLayer
from tests.tiny import tiny_model


@cache
def wide() -> PreTrainedModel:
    """A tiny model of head dim 32, so that the sketch is small beside the keys; shared."""
    model = tiny_model("llama", head_dim=32, num_hidden_layers=2)
    kvfold.attach(model)
    return model


def layers_of(held: KVCache) -> list[ZoomLayer]:
    """The layers that zoom."""
    return [part for part in held.parts if isinstance(part, ZoomLayer)]


def has_folded(held: KVCache) -> bool:
    """Whether every such layer holds spans."""
    return all(not layer.spans.is_empty for layer in layers_of(held))


def run(
    model: PreTrainedModel,
    held: KVCache,
    pieces: list[torch.Tensor],
    mask: torch.Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Run pieces of a text `[B, N]` one after the other.

    Args:
        model: An attached model.
        held: The cache; what it has seen before is in the mask.
        pieces: New tokens.
        mask: Tokens and padding, over all that was seen and the first piece at least; later tokens
            are not padding where it ends.
        chunk_size: Of the pieces.

    Returns:
        Logits after each, `[B, len(pieces), V]`.
    """
    logits = []
    for piece in pieces:
        total = held.get_seq_length() + piece.shape[1]
        if mask is not None and mask.shape[1] < total:
            mask = torch.cat([mask, mask.new_ones(len(mask), total - mask.shape[1])], dim=1)
        now = None if mask is None else mask[:, :total]
        logits.append(prefill(model, piece, held, attention_mask=now, chunk_size=chunk_size))
    return torch.stack(logits, dim=1)


def one_by_one(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Tokens `[B, N]` as pieces of one."""
    return list(tokens.split(1, dim=1)) if tokens.shape[1] else []


@torch.no_grad()
def plain_logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The model's own logits of a whole text without any cache, `[B, T, V]`."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the kernel off, until `monkeypatch` is undone."""
    monkeypatch.setattr("kvfold.zoom.attention.attend_natively", lambda *arguments: None)
