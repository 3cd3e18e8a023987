"""`kvfold generate`: answer a prompt from a full or a smaller cache, streamed as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.checks import (
    check_budget,
    check_counts,
    check_methods,
    check_model,
    check_temperature,
)
from kvfold.cli.console import JsonOption, note, print_json
from kvfold.cli.explain import ExplainOption, check_explain, explainer_of, write_explanation
from kvfold.cli.files import read_text
from kvfold.cli.options import (
    BudgetOption,
    ChunkOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    load,
)
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvfold.cache import KVCache

PromptArgument = Annotated[
    str | None, typer.Argument(help="The prompt, or - for standard input.", show_default=False)
]
FileOption = Annotated[
    Path | None, typer.Option("--file", help="Read the prompt from a file.", show_default=False)
]
MethodOption = Annotated[str, typer.Option(help="How the cache is kept; see `kvfold compare`.")]
NewTokensOption = Annotated[int, typer.Option(help="Most tokens of the answer.")]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Put the prompt into the model's chat template, or give it as it is.",
        show_default="--chat where there is a template",
    ),
]
TemperatureOption = Annotated[
    float, typer.Option(help="0 for the likeliest token, more for chance.")
]
SeedOption = Annotated[int, typer.Option(help="Of the sampling.")]


@dataclass(frozen=True, slots=True)
class Request:
    """How a prompt is to be answered."""

    method: str
    """Registered name."""
    budget: str | None
    """What the method may keep."""
    max_new_tokens: int
    """Most tokens of the answer."""
    chunk_size: int | None
    """Tokens a forward of the prefill."""
    temperature: float
    """How far the likeliest token is left to chance."""
    seed: int
    """Of the sampling."""
    explain: Path | None
    """PNG file for what the method does with the prompt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated, and how long it took."""

    text: str
    """The answer."""
    prompt_tokens: int
    """Tokens of the prompt."""
    new_tokens: int
    """Tokens of the answer."""
    first_token_seconds: float
    """From the prompt to the first logits."""
    decode_seconds: float
    """For the tokens after the first."""
    cache: KVCache
    """What is held in the end."""

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed; None for fewer than two tokens."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None


def generate(
    prompt: PromptArgument = None,
    file: FileOption = None,
    model: ModelOption = "default",
    method: MethodOption = "full",
    budget: BudgetOption = None,
    max_new_tokens: NewTokensOption = 128,
    chat: ChatOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    chunk_size: ChunkOption = None,
    explain: ExplainOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Answer a prompt, with the KV cache kept whole or small.

    The answer goes to standard output as it comes, what the cache holds to standard error.

    For example: `kvfold generate --file report.txt --method snapkv --budget 25%`
    """
    text = _prompt(prompt, file)
    check_methods([method])
    check_budget(budget)
    check_counts(max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    check_temperature(temperature)
    check_explain(explain, method)
    check_model(model, dtype)
    request = Request(method, budget, max_new_tokens, chunk_size, temperature, seed, explain)
    loaded, tokenizer = load(model, dtype, device)
    answer = _answer(
        loaded, tokenizer, text, chat, request, (lambda part: None) if json_output else _write
    )
    if json_output:
        print_json(_document(answer, model, request))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    rate = answer.tokens_per_second
    speed = "" if rate is None else f"; {rate:.1f} tokens/s"
    note(f"{answer.cache.report()}; first token after {answer.first_token_seconds:.2f} s{speed}")
    if explain is not None:
        note(f"wrote {explain}")


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        given = "no prompt" if prompt is None else "a prompt and a --file"
        raise ConfigError(f"{given} was given: give one prompt, as text, as - or with --file")
    if file is not None:
        return read_text(file)
    text = prompt or ""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"standard input is not UTF-8 text (byte {error.start}): convert it to UTF-8 first"
            ) from error
    if not text.strip():
        raise ConfigError("the prompt is empty: give some text")
    return text


def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    chat: bool | None,
    request: Request,
    write: Callable[[str], None],
) -> Answer:
    import torch

    from kvfold.api import make_cache
    from kvfold.cache import prefill
    from kvfold.evaluation.generation import TextStream, generate, sampler, stop_tokens
    from kvfold.evaluation.prompt import chat_tokens, require_positions

    tokens = chat_tokens(tokenizer, text, chat=chat)
    advice = "shorten the prompt, or lower --max-new-tokens"
    require_positions(model, len(tokens), request.max_new_tokens, advice)
    cache = make_cache(model, request.method, budget=request.budget)
    explainer = explainer_of(cache, request.explain)
    stream, stop = TextStream(tokenizer), stop_tokens(model, tokenizer)
    start = time.perf_counter()
    ids = torch.tensor([tokens], device=model.device)
    logits = prefill(model, ids, cache, chunk_size=request.chunk_size)
    if explainer is not None:
        explainer.start_counting()
    answer = generate(
        model,
        cache,
        logits,
        max_new_tokens=request.max_new_tokens,
        stop=stop,
        choose=sampler(request.temperature, seed=request.seed),
    )
    first = None
    for token in answer:
        first = first or time.perf_counter()
        write(stream.feed(token))
    write(stream.finish())
    end = time.perf_counter()
    first = first or end
    if explainer is not None and request.explain is not None:
        write_explanation(explainer, tokenizer, tokens, request.explain)
    count = len(stream.tokens)
    return Answer(stream.text, len(tokens), count, first - start, end - first, cache)


def _write(part: str) -> None:
    if part:
        sys.stdout.write(part)
        sys.stdout.flush()


def _document(answer: Answer, model: str, request: Request) -> dict[str, object]:
    from kvfold.environment import environment

    return {
        "text": answer.text,
        "model": model,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "first_token_seconds": answer.first_token_seconds,
        "decode_seconds": answer.decode_seconds,
        "tokens_per_second": answer.tokens_per_second,
        "explanation": None if request.explain is None else str(request.explain),
        "cache": answer.cache.report().to_dict(),
        "environment": environment(),
    }
