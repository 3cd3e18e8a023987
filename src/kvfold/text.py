"""Text that is on every machine, the prose that Python brings along, and text as tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 40_000
"""Characters at the beginning of the reference that documents for evaluation are made of; what
learns leaves them out. About eight thousand tokens."""

_TOLD = 12
"""Words in a row that are not to be told twice."""

_CHARACTERS = 16
"""Characters read for each token wanted; English takes about four."""


def reference_text(count: int) -> str:
    """The beginning of Python's reference, long enough for any tokenizer where it can be.

    Args:
        count: Tokens wanted.

    Returns:
        The text, all of it where it is too short.
    """
    return _reference()[: _CHARACTERS * count]


def unseen_paragraphs() -> list[str]:
    """The paragraphs of Python's reference that stand after its beginning and repeat nothing.

    The reference tells many things in several topics. A paragraph is left out when as many words
    in a row as `_TOLD`, or all of its words, have stood before, be it in the first `SHOWN`
    characters, so that a part that is held out cannot be known from another.

    Returns:
        Paragraphs with the empty line that follows them.
    """
    told: set[tuple[str, ...]] = set()
    found, position = [], 0
    for paragraph in re.split(r"\n{2,}", _reference()):
        words = paragraph.split()
        rows = {tuple(words[at : at + _TOLD]) for at in range(max(1, len(words) - _TOLD + 1))}
        if position >= SHOWN and told.isdisjoint(rows):
            found.append(f"{paragraph}\n\n")
        told |= rows
        position += len(paragraph) + 2
    return found


def text_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The first tokens of Python's reference, from its beginning again where it is too short.

    Args:
        tokenizer: The model's.
        count: Tokens wanted.

    Returns:
        `count` token ids.
    """
    ids = encode(tokenizer, reference_text(count))
    return (ids * -(-count // len(ids)))[:count]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """A piece of text as tokens, nothing put before or after it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that begins a text, where the tokenizer puts one."""
    first, some = tokenizer.bos_token_id, tokenizer("a")["input_ids"]
    return [first] if isinstance(first, int) and some[:1] == [first] else []


def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))
