"""The reply to a prompt whose prefix a producer has read, and how soon its first token came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from kvfold.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvfold.cache import KVCache
    from kvfold.transfer import Answer, Consumer


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and how it is answered."""

    prefix: str
    """Text whose codes are asked for."""
    prompt: str
    """What follows."""
    chat: bool | None
    """Whether the chat template is used."""
    method: str
    """Of the cache."""
    budget: str | None
    """Of the cache."""
    max_new_tokens: int
    """Most tokens of the answer."""
    temperature: float
    """How far the likeliest token is left to chance."""
    seed: int
    """Of the sampling."""
    rounds: int
    """In which the time to the first token is measured once more."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How soon it came over a prefix that was asked for."""

    source: str
    """Where the prefix's cache came from."""
    reason: str | None
    """Why the consumer read it itself."""
    bytes_received: int
    """Of the message."""
    prefix_seconds: float
    """From the question to the cache."""
    first_token_seconds: float
    """From the question to the first token."""
    stages: dict[str, float]
    """Seconds of each, one after the other; they make up nearly all of the time."""


@dataclass(frozen=True, slots=True)
class Round:
    """One first token with codes and, right after it, one without, in one process."""

    codes: FirstToken
    """Over the producer's codes."""
    own_seconds: float
    """To the first token when the consumer reads prefix and prompt in one go, and asks nobody."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a question."""

    text: str
    """The answer."""
    prefix_tokens: int
    """Tokens of the prefix."""
    prompt_tokens: int
    """Tokens that the consumer read itself in any case."""
    new_tokens: int
    """Tokens of the answer."""
    prefix: Answer
    """Where the cache came from."""
    first: FirstToken
    """Of the answer."""
    rounds: tuple[Round, ...]
    """What was measured after it."""


class Replier:
    """A question as tokens, and the model that replies to it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        consumer: Consumer,
        asked: Question,
    ) -> None:
        """Tokenize the question.

        Args:
            model: The consumer's, attached.
            tokenizer: The model's.
            consumer: Asks the producer.
            asked: The question.

        Raises:
            ConfigError: When it does not fit the model's positions, or there is no chat template.
        """
        import torch

        from kvfold.evaluation.prompt import require_positions

        first, then = _tokens(tokenizer, asked)
        advice = "shorten the prefix, or lower --max-new-tokens"
        require_positions(model, len(first) + len(then), asked.max_new_tokens, advice)
        self._model, self._tokenizer, self._consumer, self._asked = (
            model,
            tokenizer,
            consumer,
            asked,
        )
        self._prefix, self._prompt = (
            torch.tensor([ids], device=model.device) for ids in (first, then)
        )

    def reply(self, write: Callable[[str], None]) -> Reply:
        """Answer, then measure the rounds.

        Args:
            write: Is given the answer's text as it comes.
        """
        from kvfold.evaluation.generation import TextStream

        prefix, first, tokens = self._by_codes()
        stream = TextStream(self._tokenizer)
        for token in tokens:
            write(stream.feed(token))
        write(stream.finish())
        rounds = tuple(Round(self._by_codes()[1], self._alone()) for _ in range(self._asked.rounds))
        counts = self._prefix.shape[1], self._prompt.shape[1], len(stream.tokens)
        return Reply(stream.text, *counts, prefix, first, rounds)

    def _by_codes(self) -> tuple[Answer, FirstToken, Iterator[int]]:
        """Ask the producer; the tokens of the answer, of which the first was waited for."""
        from kvfold.cache import prefill

        into = None if self._asked.method == "full" else self._empty()
        start = time.perf_counter()
        prefix = asyncio.run(self._consumer.ask(self._prefix, into=into))
        there = time.perf_counter()
        tokens = self._begun(prefix.cache, prefill(self._model, self._prompt, prefix.cache))
        end = time.perf_counter()
        stages = {**prefix.stages.to_dict(), "first_token": end - there}
        told = (prefix.source, prefix.reason, prefix.bytes_received, prefix.seconds)
        return prefix, FirstToken(*told, end - start, stages), tokens

    def _alone(self) -> float:
        """Seconds to the first token when nobody is asked."""
        import torch

        from kvfold.cache import prefill

        cache = self._empty()
        start = time.perf_counter()
        whole = torch.cat([self._prefix, self._prompt], dim=1)
        self._begun(cache, prefill(self._model, whole, cache))
        return time.perf_counter() - start

    def _empty(self) -> KVCache:
        from kvfold.api import make_cache
        from kvfold.transfer.assemble import full_cache

        if self._asked.method == "full":
            return full_cache(self._model)
        return make_cache(self._model, self._asked.method, budget=self._asked.budget)

    def _begun(self, cache: KVCache, logits: torch.Tensor) -> Iterator[int]:
        """The tokens of an answer, of which the first is there already."""
        from kvfold.evaluation.generation import generate, sampler, stop_tokens

        tokens = generate(
            self._model,
            cache,
            logits,
            max_new_tokens=self._asked.max_new_tokens,
            stop=stop_tokens(self._model, self._tokenizer),
            choose=sampler(self._asked.temperature, seed=self._asked.seed),
        )
        return chain([token for token in [next(tokens, None)] if token is not None], tokens)


def _tokens(tokenizer: PreTrainedTokenizerBase, asked: Question) -> tuple[list[int], list[int]]:
    """The prefix and what follows it, as tokens."""
    from kvfold.evaluation.document import Document
    from kvfold.evaluation.prompt import build_prompt
    from kvfold.text import encode, leading_tokens

    has_template = tokenizer.chat_template is not None
    if asked.chat and not has_template:
        raise ConfigError("this model has no chat template: leave --chat out, or give --raw")
    prefix = encode(tokenizer, asked.prefix)
    if has_template if asked.chat is None else asked.chat:
        built = build_prompt(tokenizer, Document("prefix", prefix, asked.prompt))
        return built.document, built.question
    return [*leading_tokens(tokenizer), *prefix], encode(tokenizer, asked.prompt)
