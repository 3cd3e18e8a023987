"""Text to measure on: English prose that every Python brings along."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

_CHARACTERS = 16
"""Characters read for each token wanted; English takes about four."""


def reference_text(count: int) -> str:
    """The beginning of Python's reference, long enough for any tokenizer where it can be.

    Args:
        count: Tokens wanted.

    Returns:
        The text, all of it where it is too short.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))[: _CHARACTERS * count]


def text_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> torch.Tensor:
    """The first tokens of Python's reference, from its beginning again where it is too short.

    Args:
        tokenizer: The model's.
        count: Tokens wanted.

    Returns:
        Token ids `[1, count]`.
    """
    ids = torch.tensor(tokenizer.encode(reference_text(count), add_special_tokens=False))
    return ids.repeat(-(-count // len(ids)))[:count][None]
