"""Decoding a token at a time from a cache: greedy, or sampled with a generator of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache import KVCache, prefill
from kvfold.errors import ConfigError
from kvfold.evaluation.answers import stop_place

Sampler = Callable[[torch.Tensor], torch.Tensor]
"""From logits `[B, V]` to the next tokens `[B]`."""

_UNFINISHED = "\ufffd"


def sampler(temperature: float = 0.0, *, seed: int = 0) -> Sampler:
    """How the next token is chosen.

    Args:
        temperature: 0 for the likeliest token, else the divisor of the logits.
        seed: Of the random choice.

    Returns:
        What chooses.

    Raises:
        ConfigError: For a negative temperature, or one that is not a number.
    """
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature {temperature:g} cannot be used: give 0 or more")
    if temperature == 0:
        return lambda logits: logits.argmax(dim=-1)
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        # Drawn on the CPU, so that a seed means the same on every device.
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)

    return draw


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer, as the model's generation settings and tokenizer name them."""
    settings = model.generation_config
    named = None if settings is None else settings.eos_token_id
    ends = named if isinstance(named, list) else [named]
    return frozenset(end for end in [*ends, tokenizer.eos_token_id] if end is not None)


def has_end(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stops: Sequence[str]
) -> bool:
    """Whether tokens of an answer have a string in them that ends it."""
    if not stops:
        return False
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    return stop_place(text, stops) is not None


def decode_step(model: PreTrainedModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    """Feed one token a row.

    Args:
        model: An attached model.
        cache: What came before.
        tokens: `[B]`.

    Returns:
        Logits of the tokens that follow, `[B, V]`.
    """
    return prefill(model, tokens[:, None], cache)


def generate(
    model: PreTrainedModel,
    cache: KVCache,
    logits: torch.Tensor,
    *,
    max_new_tokens: int,
    stop: frozenset[int] = frozenset(),
    choose: Sampler | None = None,
) -> Iterator[int]:
    """Continue a prompt that stands in a cache.

    Args:
        model: An attached model.
        cache: Holds the prompt, one row; the answer is added to it.
        logits: Of the prompt's last token, `[1, V]`.
        max_new_tokens: Most tokens to yield.
        stop: Tokens that end the answer; they are not yielded.
        choose: Chooses each token; the likeliest by default.

    Yields:
        Tokens of the answer.
    """
    choose = sampler() if choose is None else choose
    for left in range(max_new_tokens, 0, -1):
        tokens = choose(logits)
        token = int(tokens)
        if token in stop:
            return
        yield token
        if left > 1:
            logits = decode_step(model, cache, tokens)


class TextStream:
    """Turns tokens into text as they come, holding back characters that are not complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start empty.

        Args:
            tokenizer: Of the model.
        """
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        # Text up to `_shown` is out; decoding starts at `_context`, so that what a token looks
        # like after its neighbours (a space, a joined character) is right.
        self._context = self._shown = 0

    def feed(self, token: int) -> str:
        """Take a token and return the text that it completes."""
        self.tokens.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._advance(final=True)

    @property
    def text(self) -> str:
        """All of it."""
        return self._decode(self.tokens)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self.tokens[self._context : self._shown])
        now = self._decode(self.tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not final):
            return ""
        self._context, self._shown = self._shown, len(self.tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
