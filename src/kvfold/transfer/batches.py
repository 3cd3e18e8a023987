"""Texts of any lengths in batches of one length each, so that none is cut or padded."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def batches(texts: Iterable[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Texts of one length together, in the order in which batches fill up, then what is left.

    Where lengths come in turn, so do the batches.

    Args:
        texts: Token ids, `[T]` each.
        size: Most texts of a batch, at least 1.

    Returns:
        Token ids, `[B, T]` each.
    """
    found: list[torch.Tensor] = []
    waiting: dict[int, list[torch.Tensor]] = {}
    for text in texts:
        batch = waiting.setdefault(len(text), [])
        batch.append(text)
        if len(batch) == size:
            found.append(torch.stack(waiting.pop(len(text))))
    return [*found, *map(torch.stack, waiting.values())]
