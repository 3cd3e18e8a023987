"""Methods against the full cache: one prompt, one budget, every number measured here and now."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.api import make_cache
from kvfold.bench.rounds import seconds_now
from kvfold.bench.spread import Spread, divide
from kvfold.cache import Details, KVCache, prefill
from kvfold.environment import environment
from kvfold.evaluation.divergence import divergence, forced_logits
from kvfold.evaluation.document import Document
from kvfold.evaluation.generation import generate, stop_tokens
from kvfold.evaluation.prompt import Prompt, build_prompt, require_positions
from kvfold.evaluation.results import Comparison, Divergence, MethodResult, Subject
from kvfold.evaluation.settings import Settings
from kvfold.evaluation.speed import decode_rates
from kvfold.models import fingerprint

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of all that is done, 0 to 1."""

_WARM_UP = 64
_PROMPT_TOKENS_A_STEP = 30
"""Prompt tokens that take about as long as one decode step, for the progress bar alone."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One method after the prompt: what it holds and what it answers."""

    cache: KVCache
    logits: torch.Tensor
    seconds: float
    answer: list[int]
    details: Details | None
    """What the method says of its cache after the answer."""


@dataclass(frozen=True, slots=True)
class _Forced:
    """Tokens, and the full cache's logits after each."""

    tokens: Sequence[int]
    logits: list[torch.Tensor]


class _Meter:
    """Counts decode steps, and prompts as so many steps, for the progress bar."""

    def __init__(self, progress: Progress | None, total: float) -> None:
        self._progress, self._total, self._done = progress, total, 0.0

    def advance(self, stage: str, steps: float) -> None:
        """Say that a stage has done some steps more."""
        self._done += steps
        if self._progress is not None:
            self._progress(stage, min(self._done / self._total, 1.0))


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    settings: Settings | None = None,
    *,
    name: str = "model",
    command: str = "kvfold.evaluation.compare",
    progress: Progress | None = None,
) -> Comparison:
    """Ask one question about one document with every method.

    Args:
        model: A model from `kvfold.load`, or one that is attached.
        tokenizer: Its tokenizer.
        document: The document and the question.
        settings: Methods, budget and how to measure.
        name: What the model was loaded by, for the record.
        command: What makes this result again, for the record.
        progress: Told about each stage.

    Returns:
        What was found, `full` included.

    Raises:
        UnsupportedModelError: For a model that is no decoder with rotary positions.
        ConfigError: When the prompt and the answer are longer than the model, or a budget cannot
            be kept.

    Example:
        >>> document = built_in_document(tokenizer)
        >>> compare(model, tokenizer, document).results[0].method
        'full'
    """
    settings = settings or Settings()
    identity = fingerprint(model)
    prompt = build_prompt(tokenizer, document)
    most = max(settings.max_new_tokens, settings.timing.steps, len(document.continuation))
    require_positions(model, len(prompt), most, "give a shorter document, or fewer new tokens")
    with torch.no_grad():
        results = _measure(model, tokenizer, document, prompt, settings, progress)
    subject = Subject(
        model=name,
        fingerprint=identity,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        prompt_tokens=len(prompt),
        document=document,
    )
    return Comparison(command, subject, settings, environment(), tuple(results))


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    prompt: Prompt,
    settings: Settings,
    progress: Progress | None,
) -> list[MethodResult]:
    meter = _Meter(progress, _steps(prompt, document, settings))
    stop = stop_tokens(model, tokenizer)
    caches = {name: _make(model, name, settings) for name in settings.all_methods}
    runs = {
        name: _run(model, cache, prompt, settings, stop, meter) for name, cache in caches.items()
    }
    full = runs["full"]
    texts = [_force(model, full, text, meter) for text in (full.answer, document.continuation)]
    states = {name: (run.cache, run.logits) for name, run in runs.items()}
    rates = decode_rates(model, states, settings.timing, meter.advance)
    results = []
    for name, run in runs.items():
        distances = [
            divergence(model, run.cache, text.tokens, text.logits, seed=settings.seed)
            for text in texts
        ]
        meter.advance(f"{name}: distance to full", sum(len(text.tokens) for text in texts))
        answer = str(tokenizer.decode(run.answer, skip_special_tokens=True)).strip()
        pace = (rates[name], rates["full"])
        results.append(_result(run, answer, document.expected, distances, pace))
    return results


def _result(
    run: _Run,
    answer: str,
    expected: str | None,
    distances: Sequence[Divergence | None],
    pace: tuple[Spread, Spread],
) -> MethodResult:
    """All that was measured of a method; `pace` is its own rates and the full cache's."""
    on_answer, on_continuation = distances
    mine, full = pace
    return MethodResult(
        method=run.cache.spec.method,
        report=run.cache.report(),
        first_token_seconds=run.seconds,
        answer=answer,
        answer_tokens=len(run.answer),
        after_answer=run.details,
        is_right=None if expected is None else contains(expected, answer),
        on_answer=on_answer,
        on_continuation=on_continuation,
        tokens_per_second=mine,
        times_full=divide(mine.samples, full.samples),
    )


def _steps(prompt: Prompt, document: Document, settings: Settings) -> float:
    """All that is to be done, in decode steps."""
    methods = len(settings.all_methods)
    forced = settings.max_new_tokens + len(document.continuation)
    each = len(prompt) / _PROMPT_TOKENS_A_STEP + settings.max_new_tokens + forced
    return methods * (each + settings.timing.rounds * settings.timing.steps) + forced


def _make(model: PreTrainedModel, method: str, settings: Settings) -> KVCache:
    return make_cache(model, method, budget=None if method == "full" else settings.budget)


def _run(
    model: PreTrainedModel,
    cache: KVCache,
    prompt: Prompt,
    settings: Settings,
    stop: frozenset[int],
    meter: _Meter,
) -> _Run:
    method = cache.spec.method
    meter.advance(f"{method}: reading the prompt", 0)
    _read(model, _make(model, method, settings), _shortened(prompt), settings)
    start = seconds_now(model.device)
    logits = _read(model, cache, prompt, settings)
    first = logits.argmax(dim=-1)
    seconds = seconds_now(first.device) - start
    meter.advance(f"{method}: answering", len(prompt) / _PROMPT_TOKENS_A_STEP)
    limit = settings.max_new_tokens
    used = cache.fork()
    answer = list(generate(model, used, logits, max_new_tokens=limit, stop=stop))
    meter.advance(f"{method}: answering", limit)
    return _Run(cache, logits, seconds, answer, used.report().details)


def _read(
    model: PreTrainedModel, cache: KVCache, prompt: Prompt, settings: Settings
) -> torch.Tensor:
    """Prefill, cutting before or after the question: the last logits `[1, V]`."""
    parts = [prompt.document, prompt.question]
    if settings.protocol == "query-aware":
        parts = [[*prompt.document, *prompt.question]]
    logits = torch.empty(0)
    for part in parts:
        tokens = torch.tensor([part], device=model.device)
        logits = prefill(model, tokens, cache, chunk_size=settings.chunk_size)
    return logits


def _shortened(prompt: Prompt) -> Prompt:
    return Prompt(prompt.document[:_WARM_UP], prompt.question[:_WARM_UP])


def _force(model: PreTrainedModel, full: _Run, tokens: Sequence[int], meter: _Meter) -> _Forced:
    logits = list(forced_logits(model, full.cache.fork(), tokens))
    meter.advance("full: what it expects", len(tokens))
    return _Forced(tokens, logits)


def contains(expected: str, answer: str) -> bool:
    """Whether an answer has the number, and not as a part of another; 1,234,567 will do."""
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    return re.search(rf"(?<!\d){re.escape(expected)}(?!\d)", plain) is not None
