"""A slow obvious twin of an evicting cache: everything is kept, and what was evicted is masked out.

The twin is a plain `DynamicCache` under an attention implementation of its own, which sees exactly
the positions that the evicting cache held, layer by layer and head by head.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from kvfold.cache import CACHE_KEYWORD, CacheLayer, KVCache, prefill
from kvfold.cache.split import SplitLayer
from kvfold.evict.build import kv_heads

NAME = "kvfold-oracle"
_seen_by_layer: dict[int, torch.Tensor] = {}


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Softmax over all keys, minus infinity where the twin says so, `[B, Q, H, D]`."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    seen = _seen_by_layer[module.layer_idx].repeat_interleave(repeats, 1)
    scores = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None


def _no_mask(**options: object) -> None:
    return None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)


def flags(held: KVCache, total: int) -> list[torch.Tensor]:
    """Which of the tokens seen each layer holds, `[B, G, total]` booleans a layer."""
    groups = kv_heads(held.model)
    found = []
    for layer in held.own_layers:
        heads = layer.heads if isinstance(layer, SplitLayer) else [list(range(groups))]
        flag = torch.zeros(1, groups, total, dtype=torch.bool)
        for part, own in zip(layer.parts, heads, strict=True):
            if not part.slots.is_empty:
                flag = flag.expand(len(part.slots.positions), -1, -1).clone()
                flag[:, own] = _flags_of(part, total)
        found.append(flag)
    return found


def _flags_of(part: CacheLayer, total: int) -> torch.Tensor:
    """`[B, P, total]`."""
    positions = part.slots.positions.long()
    # Empty slots fall on a column of their own, past the tokens.
    positions = torch.where(positions < 0, total, positions)
    flag = torch.zeros(*positions.shape[:2], total + 1, dtype=torch.bool)
    return flag.scatter_(2, positions, True)[..., :total]


class Twin:
    """Runs the same tokens through an evicting cache and through its masked full twin."""

    def __init__(self, model: PreTrainedModel, held: KVCache):
        self.model, self.held = model, held
        self.full = DynamicCache(config=model.config)
        self.attended: list[list[torch.Tensor]] = []

    def run(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward of new tokens `[B, Q]`: logits `[B, V]` of the cache and of its twin."""
        count, start = tokens.shape[1], self.held.get_seq_length()
        total = start + count
        before = flags(self.held, total)
        actual = prefill(self.model, tokens, self.held)
        after = flags(self.held, total)
        new = torch.arange(total) >= start
        # A prompt is attended whole and cut afterwards; one token takes its slot beforehand.
        seen = after if count == 1 and start else [flag | new for flag in before]
        causal = torch.ones(count, total, dtype=torch.bool).tril(start)
        groups = kv_heads(self.model)
        for index, flag in enumerate(seen):
            visible = flag[:, :, None].expand(len(tokens), groups, count, total)
            _seen_by_layer[index] = visible & causal
        return actual, self._masked(tokens, start)

    @torch.no_grad()
    def _masked(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            positions = torch.arange(start, start + tokens.shape[1])[None]
            output = self.model(tokens, position_ids=positions, **{CACHE_KEYWORD: self.full})
        finally:
            self.model.set_attn_implementation(before)
        return output.logits[:, -1]
