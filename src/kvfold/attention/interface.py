"""The one attention function and the one mask function that kvfold registers with transformers.

The attention function only dispatches: a cache layer of ours answers for itself, everything else
(sliding layers, no cache at all) goes to torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvfold.attention.grouped import Scoring, blockwise_attention
from kvfold.attention.mask import LazyMask, mask_function

IMPLEMENTATION = "kvfold"
"""Name of the attention implementation, as `set_attn_implementation` takes it."""

_ARGUMENT = "kvfold_layer"


class AttendingLayer(Protocol):
    """A cache layer that computes the attention over what it holds."""

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """From queries `[B, H, Q, D]` to outputs `[B, H, Q, D]`."""
        ...


def hand_over(
    layer: AttendingLayer, keys: torch.Tensor, keyword_arguments: dict[str, object]
) -> None:
    """Tell the attention call that follows a cache update which layer it is for.

    transformers 5.24 gives `update` the very dictionary that reaches the attention function; before
    it, the keys that `update` returns are the only thing that does.
    """
    shared = keyword_arguments.get("kwargs")
    if isinstance(shared, dict):
        shared[_ARGUMENT] = layer
    else:
        setattr(keys, _ARGUMENT, layer)


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LazyMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Returns:
        Output `[B, Q, H, D]`, and None: no weights.
    """
    layer = _layer_for(key, options)
    scoring = _scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, options)
    if layer is not None:
        output = layer.attend(query, attention_mask, scoring)
        return output.transpose(1, 2).contiguous(), None
    mask = attention_mask.dense if isinstance(attention_mask, LazyMask) else attention_mask
    if scoring.is_plain:
        # The options are what transformers gave for whichever function it called.
        forward: Callable[..., tuple[torch.Tensor, None]] = sdpa_attention_forward
        return forward(module, query, key, value, mask, dropout, scoring.scaling, **options)
    dense = _boolean(mask, query, key)
    output = blockwise_attention(
        query, key, value, scoring, lambda start, end: dense[:, :, start:end], causal=False
    )
    return output.transpose(1, 2).contiguous(), None


def _layer_for(key: torch.Tensor, options: dict[str, object]) -> AttendingLayer | None:
    layer = options.pop(_ARGUMENT, None) or getattr(key, _ARGUMENT, None)
    return cast("AttendingLayer | None", layer)


def _scoring(scaling: float, options: dict[str, object]) -> Scoring:
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    return Scoring(
        scaling,
        softcap=softcap if isinstance(softcap, float | int) else None,
        sinks=sinks if isinstance(sinks, torch.Tensor) else None,
    )


def _boolean(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A dense mask `[B, 1, Q, T]`, the causal one where transformers left it out."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask == 0
    queries, total = query.shape[2], key.shape[2]
    shape = (1, 1, queries, total)
    return torch.ones(shape, dtype=torch.bool, device=key.device).tril(total - queries)


def register() -> None:
    """Make the implementation known to transformers; doing it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, attention_function)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_function)
