"""Prose as tokens, sentence by sentence, and windows of it that no sample shares with another."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import accumulate, chain

from transformers import PreTrainedTokenizerBase

from kvfold.evaluation.public_data import data_folder, wikitext
from kvfold.text import SHOWN, reference_text

_SHIFTS = (0.0, 0.5, 0.25, 0.75)
"""Windows of a text stand side by side; when these are used up, they are shifted by such shares."""


class Prose:
    """A text as tokens, sentence by sentence."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Divide a text.

        Args:
            tokenizer: Of the model.
            text: Any prose.
        """
        sentences = re.split(r"(?<=[.!?])(?=\s)", text)
        ids = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
        self.text = text
        self.starts = [0, *accumulate(map(len, ids))]
        self.tokens: list[int] = list(chain.from_iterable(ids))

    def sentence_near(self, place: float, begin: int, end: int) -> int:
        """Where a sentence begins, as near to a place as possible between two others."""
        inside = [start for start in self.starts if begin <= start <= end] or [round(place)]
        return min(inside, key=lambda start: abs(start - place))

    def windows(self, span: int, generator: random.Random) -> Iterator[int]:
        """Where windows begin, each once: first such that do not overlap."""
        for shift in _SHIFTS:
            begins = list(range(int(shift * span), len(self.tokens) - span + 1, span))
            generator.shuffle(begins)
            yield from begins


def built_in() -> str:
    """The part of Python's reference that training leaves out."""
    return reference_text(SHOWN)[:SHOWN]


def haystack() -> str:
    """What needles are hidden in: WikiText where there is a folder of data, else the built-in."""
    return built_in() if data_folder() is None else wikitext()
