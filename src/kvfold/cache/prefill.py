"""Running a prompt into a cache, in chunks when memory matters."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.errors import ConfigError


def _cache_keyword() -> str:
    from transformers import LlamaForCausalLM

    parameters = inspect.signature(LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


CACHE_KEYWORD = _cache_keyword()
"""How this version of transformers calls the cache argument of a model and of `generate`."""


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    *,
    attention_mask: torch.Tensor | None = None,
    chunk_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Run new tokens through the model into a cache, evicting after each chunk.

    With a chunk size, peak memory is bounded by the budget and one chunk.

    Args:
        model: An attached model.
        input_ids: New tokens, `[B, N]`, left padded.
        cache: The cache, kvfold's or transformers' own; it may already hold earlier tokens.
        attention_mask: 1 for tokens and 0 for padding, `[B, seen + N]`: over all tokens, the
            earlier ones included.
        chunk_size: Most tokens a forward; all at once without it.
        on_progress: Told the number of tokens done after each chunk.

    Returns:
        Logits of the last token, `[B, V]`.

    Raises:
        ConfigError: For no tokens, a chunk size below 1, more tokens than the model has positions,
            or a mask that is of the wrong width or does not fit what the cache has stored.
    """
    seen, count = cache.get_seq_length(), input_ids.shape[1]
    _check(model, seen, count, attention_mask, chunk_size)
    logits = torch.empty(0)
    for start in range(0, count, chunk_size or count):
        end = min(start + (chunk_size or count), count)
        mask = None if attention_mask is None else attention_mask[:, : seen + end]
        logits = _run(model, input_ids[:, start:end], mask, seen + start, cache)
        if on_progress is not None:
            on_progress(end)
    return logits


def _run(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    start: int,
    cache: Cache,
) -> torch.Tensor:
    output = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=_positions(mask, start, start + input_ids.shape[1], input_ids.device),
        logits_to_keep=1,
        use_cache=True,
        **{CACHE_KEYWORD: cache},
    )
    return output.logits[:, -1]


def _positions(
    mask: torch.Tensor | None, start: int, end: int, device: torch.device
) -> torch.Tensor:
    if mask is None:
        return torch.arange(start, end, device=device)[None]
    return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, start:end]


def _check(
    model: PreTrainedModel,
    seen: int,
    count: int,
    attention_mask: torch.Tensor | None,
    chunk_size: int | None,
) -> None:
    if count == 0:
        raise ConfigError("the prompt has no tokens: give at least one")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk size {chunk_size} is below 1: give a positive number of tokens")
    if attention_mask is not None and attention_mask.shape[1] != seen + count:
        raise ConfigError(
            f"attention_mask has {attention_mask.shape[1]} columns, but the cache has seen {seen} "
            f"tokens and {count} are new: pass the mask over all {seen + count}"
        )
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and seen + count > limit:
        raise ConfigError(
            f"{seen + count} tokens are more than the model's {limit} positions: shorten the prompt"
        )
