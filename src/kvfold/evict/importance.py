"""What each kv head is worth that keeps everything, when all others are pruned.

Between pruned (0) and whole (1) the output of a head is mixed, all heads alike; the gradient of the
divergence from the full cache with respect to each head's share, averaged along the way, says how
much of the divergence is that head's doing (integrated gradients, Sundararajan et al., arXiv
1703.01365). The keys and values of the continuation itself are held fixed.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvfold.attention import LazyMask, Scoring
from kvfold.attention.grouped import attention_probabilities, weigh_values
from kvfold.cache import CACHE_KEYWORD, CacheLayer, CacheSpec, KVCache
from kvfold.cache.replay import RecordingCache, replay
from kvfold.ops.divergence import kl_divergence

STEPS = (1 / 6, 3 / 6, 5 / 6)
"""Where between pruned and whole the gradient is taken."""


class _MixedLayer(CacheLayer):
    """Attends to everything and to the kept tokens, and mixes the two by kv head."""

    mixing: tuple[torch.Tensor, torch.Tensor] | None = None
    """Shares of the whole `[G]`, and which of the first slots are kept `[P]`."""

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        if self.mixing is None:
            return super().attend(query, mask, scoring)
        shares, kept = self.mixing
        self.awaits_attention = False
        count = query.shape[2]
        self._place(LazyMask(self.seen - count, count), count)
        positions = self.slots.positions[0, 0]
        visible = positions <= positions[-count:, None]
        pruned = visible.clone()
        pruned[:, : len(kept)] &= kept
        keys = self.slots.keys
        whole = attention_probabilities(query, keys, scoring, visible=visible[None, None])
        rest = attention_probabilities(query, keys, scoring, visible=pruned[None, None])
        return weigh_values(torch.lerp(rest, whole, shares.view(-1, 1, 1, 1)), self.slots.values)


def head_importance(
    model: PreTrainedModel,
    prompt: RecordingCache,
    continuation: torch.Tensor,
    expected: torch.Tensor,
    kept: torch.Tensor,
    *,
    clip: float,
) -> torch.Tensor:
    """The divergence that each kv head would take away by keeping everything.

    Args:
        model: An attached model.
        prompt: One row.
        continuation: Tokens that follow it, `[N]`.
        expected: Logits of the full cache after each, `[N, V]`.
        kept: Which prompt tokens the layers keep when pruned, `[L, P]`.
        clip: A token's divergence counts for at most so many nats.

    Returns:
        Nats a token, `[L, G]`; their sum is about the divergence of the pruned cache.
    """
    base = KVCache(model, CacheSpec("full"), _MixedLayer)
    replay(prompt, base)
    total = torch.zeros(())
    for step in STEPS:
        cache = base.fork()
        shares = _shares(cache, step)
        for layer, row, tokens in zip(cache.own_layers, shares, kept, strict=True):
            assert isinstance(layer, _MixedLayer)
            layer.mixing = (row, tokens)
        total = total - _gradient(model, cache, continuation, expected, shares, clip)
    return total / len(STEPS)


def _shares(cache: KVCache, share: float) -> list[torch.Tensor]:
    layers = [layer for layer in cache.own_layers if isinstance(layer, CacheLayer)]
    return [
        torch.full(
            (layer.slots.keys.shape[1],), share, device=layer.slots.keys.device, requires_grad=True
        )
        for layer in layers
    ]


def _gradient(
    model: PreTrainedModel,
    cache: KVCache,
    continuation: torch.Tensor,
    expected: torch.Tensor,
    shares: list[torch.Tensor],
    clip: float,
) -> torch.Tensor:
    start, count = cache.get_seq_length(), len(continuation)
    positions = torch.arange(start, start + count, device=continuation.device)[None]
    with torch.enable_grad():
        logits = model(
            input_ids=continuation[None],
            position_ids=positions,
            use_cache=True,
            **{CACHE_KEYWORD: cache},
        ).logits[0]
        divergence = kl_divergence(expected, logits).clamp(max=clip).mean()
        gradients = torch.autograd.grad(divergence, shares)
    return torch.stack([each.detach().float().cpu() for each in gradients])
