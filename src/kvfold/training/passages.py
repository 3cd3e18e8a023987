"""A text as tokens, cut into blocks of which some are for validation only."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Iterable
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.training.words import SPLITS, Split

SHORTEST = 64
"""Tokens of the shortest excerpts."""
BLOCK = 2048
"""Tokens of a block, unless excerpts are longer or the text is short."""
BLOCKS = 10
"""One block of so many is for validation; a text is cut into so many where it can be."""

_BATCH = 256
"""Pieces that are tokenized at once."""

Run = tuple[int, int]
"""First token of neighbouring blocks of one split, and the token after their last."""


class Passages:
    """Tokens of a text in contiguous blocks; about a tenth of the blocks is for validation.

    Attributes:
        tokens: The text, int32 `[T]`.
        starts: Where its pieces begin, in order.
        block: Tokens of a block; the last one has the remainder too.
        runs: Of each split, its blocks, neighbours joined.
    """

    def __init__(self, tokens: torch.Tensor, starts: list[int], block: int) -> None:
        self.tokens = tokens
        self.starts = starts
        self.block = block
        self.runs = _runs(len(tokens), block)

    def window(self, generator: random.Random, split: Split, count: int) -> Run:
        """Choose neighbouring tokens of one split, every place being as likely as another.

        Args:
            generator: Chooses.
            split: Which blocks.
            count: Tokens wanted.

        Returns:
            The first token and the one after the last: `count` tokens, or a whole run of blocks
            where none is as long.
        """
        runs = [(begin, end) for begin, end in self.runs[split] if end - begin >= count]
        if not runs:
            return generator.choice(self.runs[split])
        places = [end - begin - count + 1 for begin, end in runs]
        index = generator.choices(range(len(runs)), places)[0]
        begin = runs[index][0] + generator.randrange(places[index])
        return begin, begin + count

    def aligned(self, generator: random.Random, split: Split, count: int) -> Run:
        """The same, moved back to the beginning of a piece where there is one in the run."""
        begin, end = self.window(generator, split, count)
        first = next(run for run, limit in self.runs[split] if run <= begin < limit)
        start = (self.pieces(first, begin + 1) or [begin])[-1]
        return start, start + end - begin

    def pieces(self, begin: int, end: int) -> list[int]:
        """Where pieces begin among some neighbouring tokens."""
        return self.starts[
            bisect.bisect_left(self.starts, begin) : bisect.bisect_left(self.starts, end)
        ]

    def take(self, begin: int, end: int) -> list[int]:
        """Some neighbouring tokens."""
        return self.tokens[begin:end].tolist()


def read_passages(
    tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str], *, excerpt: int, name: str
) -> Passages:
    """Tokenize a text piece by piece and cut it into blocks.

    Args:
        tokenizer: Of the model.
        pieces: The text in order; each piece is tokenized by itself.
        excerpt: Tokens that a block has to hold; 0 when windows may be shorter than asked for.
        name: Of the text, for messages.

    Returns:
        The tokens and their blocks.

    Raises:
        ConfigError: When the text is empty or too short for one block of each split.
    """
    parts: list[torch.Tensor] = []
    starts, total = [], 0
    waiting = iter(pieces)
    while batch := list(islice(waiting, _BATCH)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            starts.append(total)
            total += len(ids)
            parts.append(torch.tensor(ids, dtype=torch.int32))
    if total == 0:
        raise ConfigError(f"{name} has no text: give a source that has some")
    block = max(excerpt, min(BLOCK, total // BLOCKS), 1)
    if total < 2 * block:
        shorter = f", or a length of at most {total // 2}" if total // 2 >= SHORTEST else ""
        raise ConfigError(
            f"{name} has {total} tokens, too few for excerpts of {excerpt} tokens to train and to "
            f"validate on: give at least {2 * block} tokens{shorter}"
        )
    return Passages(torch.cat(parts), starts, block)


def _runs(total: int, block: int) -> dict[Split, list[Run]]:
    """Neighbouring blocks of the same split as one run each."""
    count = total // block
    held_out = _held_out(count)
    runs: dict[Split, list[Run]] = {split: [] for split in SPLITS}
    for index in range(count):
        runs_here = runs["validation" if index in held_out else "train"]
        begin, end = index * block, total if index == count - 1 else (index + 1) * block
        if runs_here and runs_here[-1][1] == begin:
            begin = runs_here.pop()[0]
        runs_here.append((begin, end))
    return runs


def _held_out(count: int) -> set[int]:
    """The blocks for validation: those with the smallest hashes, at least one."""
    order = sorted(range(count), key=lambda index: hashlib.sha256(b"%d" % index).digest())
    return set(order[: max(1, round(count / BLOCKS))])
