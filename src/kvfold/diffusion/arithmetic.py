"""Additions for a small diffusion model: `123+456=` is followed by `0579;321654` and ends.

The sum takes four digits, and both numbers follow backwards, so that there are twelve places to
decide (and a few to end with) whose order matters: digits with their carries, copies, and the end.
A tenth of all pairs of numbers, chosen by a hash, is held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvfold.diffusion.caches import DiffusionCache
from kvfold.diffusion.decoder import Decoder
from kvfold.diffusion.generate import generate
from kvfold.diffusion.learner import Batch
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.samplers import Sampler
from kvfold.diffusion.shape import DecoderShape, Prediction, Traits
from kvfold.training.words import SPLITS, Split

LETTERS = "0123456789+=;"
"""What has a token of its own, in this order."""
SPECIALS = ("<end>", "<mask>", "<unknown>")
"""Tokens after the letters."""
END, MASK = len(LETTERS), len(LETTERS) + 1
PROMPT, LENGTH = 8, 16
"""Tokens before what is generated, and generated ones with all ends."""
SHAPE = DecoderShape(
    vocabulary=len(LETTERS) + len(SPECIALS),
    hidden=128,
    layers=4,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    mlp=256,
    positions=128,
)
"""Of the model: 0.6 million weights."""

_NUMBERS = 1000
_EVERY = 10
_MULTIPLIER, _WORD = 2654435761, 2**32


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; what is no letter is `<unknown>`."""
    vocabulary = {token: index for index, token in enumerate([*LETTERS, *SPECIALS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unknown>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        mask_token="<mask>",
        unk_token="<unknown>",
        model_max_length=SHAPE.positions,
    )


def is_arithmetic(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it is the tokenizer of additions."""
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__) == [
        *LETTERS,
        *SPECIALS,
    ]


def arithmetic_model(
    prediction: Prediction, *, seed: int = 0, device: torch.device | None = None
) -> DiffusionModel:
    """A model with random weights.

    Args:
        prediction: Where tokens are predicted.
        seed: Of the weights.
        device: Where to; the CPU without it.
    """
    decoder, generator = Decoder(SHAPE), torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    traits = Traits(mask_id=MASK, prediction=prediction, eos_ids=frozenset({END}))
    return DiffusionModel(decoder.to(device or "cpu"), traits, source="arithmetic")


class Sums:
    """Additions, as `MaskedLearner` takes them.

    Args:
        seed: Of the drawing.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        pairs = torch.arange(_NUMBERS**2)
        held_out = (pairs * _MULTIPLIER % _WORD >> 16) % _EVERY == 0
        self._pairs: dict[Split, torch.Tensor] = {
            "train": pairs[~held_out],
            "validation": pairs[held_out],
        }

    def batch(self, index: int, rows: int, split: Split) -> Batch:
        """So many additions, of which all but the prompt may be masked."""
        source = torch.Generator().manual_seed(
            (self._seed * len(SPLITS) + SPLITS.index(split)) * 1_000_003 + index
        )
        pool = self._pairs[split]
        drawn = pool[torch.randint(len(pool), (rows,), generator=source)]
        ids = torch.tensor([addition(*divmod(pair, _NUMBERS)) for pair in drawn.tolist()])
        return ids, (torch.arange(ids.shape[1]) >= PROMPT).expand(ids.shape)

    def describe(self) -> Mapping[str, object]:
        """What they are."""
        return {"task": "addition", "numbers": _NUMBERS, "held_out": 1 / _EVERY, "seed": self._seed}


def addition(first: int, second: int) -> list[int]:
    """One addition as tokens, prompt and all: `PROMPT + LENGTH` of them."""
    one, other = f"{first:03d}", f"{second:03d}"
    text = f"{one}+{other}={first + second:04d};{one[::-1]}{other[::-1]}"
    ids = [LETTERS.index(letter) for letter in text]
    return ids + [END] * (PROMPT + LENGTH - len(ids))


@dataclass(frozen=True, slots=True)
class Exam:
    """Held-out additions."""

    prompts: list[list[int]]
    """Up to the equals sign."""
    answers: list[list[int]]
    """What should follow, up to the end and with it."""

    @classmethod
    def draw(cls, count: int, *, seed: int = 0) -> Exam:
        """So many of those that no training sees."""
        ids, _ = Sums(seed).batch(0, count, "validation")
        rows = ids.tolist()
        answers = [row[PROMPT : row.index(END) + 1] for row in rows]
        return cls([row[:PROMPT] for row in rows], answers)

    def right(self, tokens: list[list[int]]) -> float:
        """The share of answers that are right to the last token."""
        hits = [given == wanted for given, wanted in zip(tokens, self.answers, strict=True)]
        return sum(hits) / len(hits)

    def take(
        self, model: DiffusionModel, cache: str | DiffusionCache, sampler: Sampler | None = None
    ) -> float:
        """The share that a model gets right with a cache."""
        found = generate(model, self.prompts, cache, length=LENGTH, sampler=sampler)
        return self.right(found.tokens)
