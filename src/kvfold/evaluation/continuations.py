"""How likely a cache finds given continuations of given contexts, a token after the other.

A context is read into the cache in one forward, and the cache then holds what its budget allows.
The last logits of it speak of the continuation's first token; every further one is scored when the
one before it was fed. So a continuation is judged from what was kept, and is itself kept within the
budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvfold.cache import KVCache, prefill
from kvfold.evaluation.batch_decoding import BatchDecoder, left_padded


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens, and those that come before them; both at least one."""

    context: tuple[int, ...]
    """Read at once."""
    tokens: tuple[int, ...]
    """Scored."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a continuation is."""

    log_probability: float
    """Summed over its tokens."""
    is_greedy: bool
    """Whether each of them is the likeliest."""


def batches(requests: Sequence[Continuation], size: int, width: int) -> Iterator[list[int]]:
    """Which requests to score together: long contexts first, the same ones next to each other.

    Args:
        requests: In any order.
        size: Most rows of a batch.
        width: Most columns, padding included.

    Yields:
        Places in `requests`; each comes once.
    """

    def order(place: int) -> tuple[int, tuple[int, ...], int]:
        request = requests[place]
        return -len(request.context), request.context, -len(request.tokens)

    batch: list[int] = []
    longest = 0
    for place in sorted(range(len(requests)), key=order):
        longest = max(longest, len(requests[place].tokens))
        # The first of a batch has the longest context; the last token is scored and not fed.
        columns = len(requests[batch[0]].context) + longest - 1 if batch else 0
        if len(batch) == size or columns > width:
            yield batch
            batch, longest = [], len(requests[place].tokens)
        batch.append(place)
    if batch:
        yield batch


def score(
    model: PreTrainedModel,
    cache: KVCache,
    requests: Sequence[Continuation],
    *,
    pad: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Likelihood]:
    """Score a batch of continuations; a context that several share is read once.

    Args:
        model: An attached model.
        cache: Empty. Afterwards it holds the rows of the longest continuations, less their last
            tokens.
        requests: At least one.
        pad: The token to pad contexts with.
        dtype: Of the probabilities.

    Returns:
        One likelihood a request, in their order.

    Raises:
        ConfigError: When they are longer than the model has positions.
    """
    order = sorted(range(len(requests)), key=lambda place: -len(requests[place].tokens))
    contexts = list(dict.fromkeys(requests[place].context for place in order))
    decoder = _read(model, cache, contexts, pad)
    places = {context: place for place, context in enumerate(contexts)}
    decoder.select([places[requests[place].context] for place in order])
    scored = _follow(decoder, [requests[place].tokens for place in order], dtype)
    found = dict(zip(order, scored, strict=True))
    return [found[place] for place in range(len(requests))]


def _read(
    model: PreTrainedModel, cache: KVCache, contexts: Sequence[Sequence[int]], pad: int
) -> BatchDecoder:
    """Let the cache read contexts, shorter ones padded on the left."""
    tokens, mask = left_padded(contexts, pad, model.device)
    return BatchDecoder(model, cache, prefill(model, tokens, cache, attention_mask=mask), mask)


def _follow(
    decoder: BatchDecoder, rows: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Likelihood]:
    """Score given tokens, the longest row first, and let rows go that are at their end."""
    device = decoder.logits.device
    totals = torch.zeros(len(rows), device=device)
    greedy = torch.ones(len(rows), dtype=torch.bool, device=device)
    tokens = torch.empty(0, dtype=torch.long, device=device)
    for step in range(len(rows[0])):
        alive = sum(len(row) > step for row in rows)
        if step > 0:
            if alive < len(tokens):
                decoder.select(range(alive))
            decoder.feed(tokens[:alive])
        tokens = torch.tensor([row[step] for row in rows[:alive]], device=device)
        logs = torch.log_softmax(decoder.logits, dim=-1, dtype=dtype)
        totals[:alive] += logs.gather(1, tokens[:, None])[:, 0].float()
        greedy[:alive] &= decoder.logits.argmax(dim=-1) == tokens
    pairs = zip(totals.tolist(), greedy.tolist(), strict=True)
    return [Likelihood(total, is_greedy) for total, is_greedy in pairs]
