"""`kvfold diffuse generate`: one text, written by a masked diffusion model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.console import JsonOption, note, print_json, stderr
from kvfold.cli.diffuse_options import (
    BlockOption,
    CalibrationOption,
    Choice,
    DiffusionOption,
    FactorOption,
    LengthOption,
    MaskOption,
    PredictionOption,
    SamplerOption,
    SeedOption,
    StepsOption,
    TemperatureOption,
    ThresholdOption,
    check_writing,
    choice_of,
    make_caches,
    open_model,
    prompt_of,
)
from kvfold.cli.generate import ChatOption, FileOption, PromptArgument
from kvfold.cli.options import DeviceOption, DtypeOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from kvfold.diffusion import DiffusionCache, DiffusionModel, Frame, Generation

BLANK = "░"
"""An undecided token on the canvas."""

CacheOption = Annotated[
    str,
    typer.Option(
        "--cache",
        help="none, spa, dllm, prefix, dual or dkv, options after colons, as in "
        "spa:ratio=0.2:preset=paper.",
    ),
]
StreamOption = Annotated[
    bool, typer.Option("--stream", help="Show the canvas after each step, on standard error.")
]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be written, and how."""

    prompt: str
    """As text."""
    cache: DiffusionCache
    """Made."""
    choice: Choice
    """Of the sampler."""
    length: int
    """Tokens to write."""
    seed: int
    """Of the sampling."""
    chat: bool | None
    """Whether to use the chat template; None where there is one."""


@dataclass(frozen=True, slots=True)
class Written:
    """A text, and what it took."""

    text: str
    """Without special tokens."""
    prompt_tokens: int
    """Tokens of the prompt."""
    new_tokens: int
    """Tokens of the text, without one that ends it."""
    generation: Generation
    """Tokens and report."""
    seconds: float
    """In all."""
    first_seconds: float
    """To the first tokens decided."""


def generate(
    prompt: PromptArgument = None,
    file: FileOption = None,
    model: DiffusionOption = "arithmetic",
    cache: CacheOption = "spa",
    calibration: CalibrationOption = None,
    length: LengthOption = 16,
    sampler: SamplerOption = None,
    steps: StepsOption = None,
    block_length: BlockOption = None,
    threshold: ThresholdOption = None,
    factor: FactorOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    chat: ChatOption = None,
    stream: StreamOption = False,
    mask_token_id: MaskOption = None,
    prediction: PredictionOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write a text after a prompt by filling masks.

    The text goes to standard output, what was computed and held to standard error.

    For example: `kvfold diffuse generate 123+456= --cache spa:ratio=0.25 --stream`
    """
    text = prompt_of(prompt, file)
    check_writing(locals())
    choice = choice_of(locals())
    made = make_caches((cache,), calibration)[cache]
    loaded, tokenizer = open_model(locals())
    request = Request(text, made, choice, length, seed, chat)
    with _canvas(tokenizer, loaded, shown=stream) as show:
        written = _write(loaded, tokenizer, request, show)
    if json_output:
        print_json(_document(written, model, cache, made))
        return
    sys.stdout.write(f"{written.text}\n")
    sys.stdout.flush()
    rate = written.new_tokens / written.seconds
    note(
        f"{written.generation.report}; first tokens after {written.first_seconds:.2f} s, "
        f"{rate:.1f} tokens/s"
    )


def _write(
    model: DiffusionModel,
    tokenizer: PreTrainedTokenizerBase,
    request: Request,
    show: Callable[[Frame], None],
) -> Written:
    from kvfold.diffusion.race import count_new, time_generation
    from kvfold.evaluation.prompt import chat_tokens

    tokens = chat_tokens(tokenizer, request.prompt, chat=request.chat)
    lap = time_generation(
        model,
        [tokens],
        request.cache,
        length=request.length,
        sampler=request.choice.make(model),
        seed=request.seed,
        on_frame=show,
    )
    found = lap.generation
    answer = str(tokenizer.decode(found.tokens[0], skip_special_tokens=True))
    new = count_new(model, found)
    return Written(answer, len(tokens), new, found, lap.seconds, lap.first_seconds)


@contextmanager
def _canvas(
    tokenizer: PreTrainedTokenizerBase, model: DiffusionModel, *, shown: bool
) -> Iterator[Callable[[Frame], None]]:
    """What shows a frame: in place on a terminal, else a line a step; nothing if not wanted."""
    from rich.live import Live
    from rich.text import Text

    console = stderr()
    if not shown:
        yield lambda frame: None
        return
    if not console.is_terminal:
        yield lambda frame: note(
            f"{frame.step:4} {''.join(part for part, _ in pieces(tokenizer, model, frame))}"
        )
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(frame: Frame) -> None:
            parts = pieces(tokenizer, model, frame)
            styled = [(part, "bold green" if new else "") for part, new in parts]
            live.update(Text.assemble(f"step {frame.step}\n", *styled), refresh=True)

        yield show


def pieces(
    tokenizer: PreTrainedTokenizerBase, model: DiffusionModel, frame: Frame
) -> list[tuple[str, bool]]:
    """The canvas of the first prompt as texts, and whether each was decided in this step."""
    ids, changed = frame.ids[0].tolist(), frame.changed[0].tolist()
    mask, known = model.traits.mask_id, ""
    found, decided = [], list[int]()
    for token, new in zip(ids, changed, strict=True):
        if token == mask:
            found.append((BLANK, False))
            decided, known = [], ""
            continue
        # Decoded with what stands before it, so that spaces and joined characters are right.
        decided.append(token)
        now = str(tokenizer.decode(decided, skip_special_tokens=False))
        found.append((now[len(known) :].replace("\n", "⏎"), new))
        known = now
    return found


def _document(written: Written, model: str, cache: str, made: DiffusionCache) -> dict[str, object]:
    from kvfold.environment import environment

    return {
        "text": written.text,
        "model": model,
        "cache": cache,
        "options": repr(made),
        "prompt_tokens": written.prompt_tokens,
        "new_tokens": written.new_tokens,
        "seconds": written.seconds,
        "first_tokens_seconds": written.first_seconds,
        "tokens_per_second": written.new_tokens / written.seconds,
        "report": written.generation.report.to_dict(),
        "environment": environment(),
    }
