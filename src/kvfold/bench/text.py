"""Tokens to measure on: English prose that every Python brings along."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from transformers import PreTrainedTokenizerBase

_CHARACTERS = 16
"""Characters read for each token wanted; English takes about four."""


def text_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> torch.Tensor:
    """The first tokens of Python's reference, from its beginning again where it is too short.

    Args:
        tokenizer: The model's.
        count: Tokens wanted.

    Returns:
        Token ids `[1, count]`.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))[: _CHARACTERS * count]
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    return ids.repeat(-(-count // len(ids)))[:count][None]
