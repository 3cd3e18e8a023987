"""How far a method's next-token distributions are from the full cache's, on the same tokens.

The tokens are forced, one at a time, so that both caches answer for the same text. The distribution
after the prompt itself is left out: it is computed while the prompt is still whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from kvfold.cache import KVCache
from kvfold.evaluation.generation import decode_step
from kvfold.evaluation.results import Divergence
from kvfold.evaluation.statistics import Interval
from kvfold.ops.divergence import kl_divergence


def forced_logits(
    model: PreTrainedModel, cache: KVCache, tokens: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Feed tokens to a cache that is used up by it.

    Args:
        model: An attached model.
        cache: What came before.
        tokens: N of them.

    Yields:
        Logits `[V]` after each token.
    """
    for token in tokens:
        yield decode_step(model, cache, torch.tensor([token], device=model.device))[0]


def divergence(
    model: PreTrainedModel,
    cache: KVCache,
    tokens: Sequence[int],
    reference: Sequence[torch.Tensor],
    *,
    seed: int,
) -> Divergence | None:
    """Compare a cache with what the full one said.

    Args:
        model: An attached model.
        cache: Holds the prompt; a fork of it is used.
        tokens: What is forced.
        reference: The full cache's logits after each token, `[V]` each.
        seed: Of the bootstrap.

    Returns:
        None when there are no tokens.
    """
    if not tokens:
        return None
    distances, agreements = [], []
    for expected, found in zip(reference, forced_logits(model, cache.fork(), tokens), strict=True):
        distances.append(kl_divergence(expected, found))
        agreements.append(expected.argmax() == found.argmax())
    agreement = torch.stack(agreements).double().mean()
    return Divergence(Interval.of(torch.stack(distances), seed=seed), float(agreement))
