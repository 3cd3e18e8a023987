"""`kvfold diffuse bench`: caches of masked diffusion side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.artifacts import format_bytes
from kvfold.cli.checks import check_counts
from kvfold.cli.console import JsonOption, note, print_json, stdout, table
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
    ThresholdOption,
    check_writing,
    choice_of,
    make_caches,
    open_model,
    prompts_of,
)
from kvfold.cli.files import output_folder
from kvfold.cli.options import DeviceOption, DtypeOption, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvfold.bench.spread import Spread
    from kvfold.diffusion import DiffusionCache, DiffusionModel, Following, Runner
    from kvfold.diffusion.arithmetic import Exam

CACHES = "none,spa,dllm,prefix,dual,dkv"
NAME = "bench-diffusion"
"""Of the files, before their endings."""

PromptsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Prompts, as they are; without any, held-out additions for a model of additions and "
        "else the beginning of Python's reference.",
        show_default=False,
    ),
]
PromptsFileOption = Annotated[
    Path | None,
    typer.Option("--file", help="Read prompts from a file, one a line.", show_default=False),
]
CachesOption = Annotated[
    str,
    typer.Option(
        "--caches",
        help="Comma-separated, options after colons, as in none,spa:ratio=0.2,dual; `none` is "
        "always measured.",
        show_default=CACHES.replace(",", ", "),
    ),
]

PromptTokensOption = Annotated[
    int, typer.Option(help="Tokens of a prompt from Python's reference.")
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow",
        help="Compare predictions too, at every step of the text that `none` writes: texts that "
        "once differ go their own ways.",
    ),
]
OutOption = Annotated[
    str | None, typer.Option(help="Folder for the result as JSON and as a chart.", metavar="DIR")
]


@dataclass(frozen=True, slots=True)
class Task:
    """What is written after."""

    prompts: list[list[int]]
    """As tokens."""
    what: str
    """For the title."""
    exam: Exam | None = None
    """What should follow, where that is known."""


def bench(
    prompts: PromptsArgument = None,
    file: PromptsFileOption = None,
    model: DiffusionOption = "arithmetic",
    caches: CachesOption = CACHES,
    calibration: CalibrationOption = None,
    rows: Annotated[int, typer.Option(help="Prompts at once, where none are given.")] = 1,
    prompt_tokens: PromptTokensOption = 64,
    length: LengthOption = 16,
    sampler: SamplerOption = None,
    steps: StepsOption = None,
    block_length: BlockOption = None,
    threshold: ThresholdOption = None,
    factor: FactorOption = None,
    rounds: Annotated[int, typer.Option(help="Timed generations of each cache.")] = 3,
    followed: FollowOption = False,
    threads: Annotated[int | None, typer.Option(help="Of torch.", show_default="all cores")] = None,
    seed: SeedOption = 0,
    mask_token_id: MaskOption = None,
    prediction: PredictionOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure caches side by side: tokens a second, and agreement with no cache.

    All write after the same prompts, in turns of 32 steps (A B C A B C), so that a busy machine
    slows all of them alike. On a CPU a second table says where the time of a step goes. Additions
    are also marked right or wrong.
    """
    folder = None if out is None else output_folder(out)
    check_writing(locals())
    check_counts(rows=rows, prompt_tokens=prompt_tokens, rounds=rounds, threads=threads)
    texts = prompts_of(prompts, file, optional=True)
    choice = choice_of(locals())
    names = listed(caches)
    made = make_caches(names if "none" in names else ("none", *names), calibration)
    loaded, tokenizer = _open(locals())
    task = _task(tokenizer, texts, rows, prompt_tokens, seed)
    runners = _race(loaded, task, made, choice, locals())
    along = _follow(loaded, task, made, choice, locals()) if followed else {}
    title = f"{_public(model)}, {task.what}, {length} tokens to write"
    _show(runners, along, task, title, _settings(locals()), folder, json_output=json_output)


def _open(given: Mapping[str, Any]) -> tuple[DiffusionModel, PreTrainedTokenizerBase]:
    import torch

    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    return open_model(given)


def _race(
    model: DiffusionModel,
    task: Task,
    caches: Mapping[str, DiffusionCache],
    choice: Choice,
    given: Mapping[str, Any],
) -> list[Runner]:
    from kvfold.diffusion import race

    rounds = given["rounds"]
    return race(
        model,
        task.prompts,
        caches,
        length=given["length"],
        sampler=choice.make(model),
        rounds=rounds,
        seed=given["seed"],
        on_turn=lambda name, number, turn: note(f"round {number} of {rounds}, turn {turn}: {name}"),
    )


def _follow(
    model: DiffusionModel,
    task: Task,
    caches: Mapping[str, DiffusionCache],
    choice: Choice,
    given: Mapping[str, Any],
) -> dict[str, Following]:
    """By cache."""
    from kvfold.diffusion import follow

    others = {name: cache for name, cache in caches.items() if name != "none"}
    found = follow(
        model,
        task.prompts,
        others,
        length=given["length"],
        sampler=choice.make(model),
        seed=given["seed"],
        on_step=lambda step: note(f"followed for {step} steps") if step % 32 == 0 else None,
    )
    return {each.name: each for each in found}


def _task(
    tokenizer: PreTrainedTokenizerBase,
    texts: tuple[str, ...],
    rows: int,
    prompt_tokens: int,
    seed: int,
) -> Task:
    from kvfold.diffusion.arithmetic import Exam, is_arithmetic
    from kvfold.text import encode, text_tokens

    if texts:
        return Task([encode(tokenizer, text) for text in texts], f"{len(texts)} prompts")
    if is_arithmetic(tokenizer):
        exam = Exam.draw(rows, seed=seed)
        return Task(exam.prompts, f"{rows} held-out additions", exam)
    tokens = text_tokens(tokenizer, rows * prompt_tokens)
    starts = range(0, rows * prompt_tokens, prompt_tokens)
    prompts = [tokens[start : start + prompt_tokens] for start in starts]
    return Task(prompts, f"{rows} prompts of {prompt_tokens} tokens")


def _public(model: str) -> str:
    from kvfold.home import public_name

    return public_name(model)


def _settings(given: Mapping[str, Any]) -> dict[str, object]:
    """What was asked, as plain data, without the folders of this machine."""
    import torch

    names = (
        *("caches", "rows", "prompt_tokens", "length", "sampler", "steps"),
        *("block_length", "threshold", "factor", "rounds", "followed", "seed"),
    )
    calibration, loaded = given["calibration"], given["loaded"]
    return {
        **{name: given[name] for name in names},
        "model": _public(given["model"]),
        "calibration": None if calibration is None else calibration.name,
        "threads": torch.get_num_threads(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
    }


def _show(
    runners: Sequence[Runner],
    along: Mapping[str, Following],
    task: Task,
    title: str,
    settings: dict[str, object],
    folder: Path | None,
    *,
    json_output: bool,
) -> None:
    document = _document(runners, along, task, settings)
    if folder is not None:
        _write(runners, title, document, folder)
    if json_output:
        print_json(document)
        return
    columns = ["cache", "tokens/s", "times none", "agrees", "steps", "computed", "held"]
    columns += (["right"] if task.exam else []) + (["KL, nats", "same token"] if along else [])
    stdout().print(table(columns, _rows(runners, along, task), title=title))
    if parts := runners[0].step_seconds:
        names = ["part", *(runner.name for runner in runners)]
        stdout().print(table(names, _parts(runners, parts), title="milliseconds of a step"))


def _rows(
    runners: Sequence[Runner], along: Mapping[str, Following], task: Task
) -> Iterable[list[object]]:
    base = _base(runners)
    for runner in runners:
        row: list[object] = [
            runner.name,
            f"{_spread(runner.tokens_per_second):.1f}",
            _told_times(runner, base),
            f"{runner.agreement:.1%}",
            runner.report.steps,
            f"{runner.report.share:.0%}",
            format_bytes(runner.report.bytes_held),
        ]
        row += [f"{task.exam.right(runner.generation.tokens):.1%}"] if task.exam else []
        if along and (found := along.get(runner.name)):
            row += [f"{fmean(found.divergences):.4f}", f"{fmean(found.same):.1%}"]
        elif along:
            row += [None, None]
        yield row


def _document(
    runners: Sequence[Runner],
    along: Mapping[str, Following],
    task: Task,
    settings: dict[str, object],
) -> dict[str, object]:
    from kvfold.environment import environment

    base = _base(runners)
    outcomes = [
        {
            "cache": runner.name,
            "tokens_per_second": _spread(runner.tokens_per_second).to_dict(),
            "times_none": None if (times := _times(runner, base)) is None else times.to_dict(),
            "times_none_by_turn": None if (by := _by_turn(runner, base)) is None else by.to_dict(),
            "step_seconds": runner.step_seconds,
            "followed": asdict(along[runner.name]) if runner.name in along else None,
            "seconds": _spread(runner.seconds).to_dict(),
            "first_tokens_seconds": _spread(runner.first_seconds).to_dict(),
            "agreement": runner.agreement,
            "new_tokens": runner.new_tokens,
            "tokens_per_step": runner.tokens_per_step,
            "right": task.exam.right(runner.generation.tokens) if task.exam else None,
            "report": runner.report.to_dict(),
        }
        for runner in runners
    ]
    return {
        "kind": "diffusion",
        "task": task.what,
        "settings": settings,
        "outcomes": outcomes,
        "environment": environment(),
    }


def _write(
    runners: Sequence[Runner], title: str, document: dict[str, object], folder: Path
) -> None:
    from kvfold.artifacts import json_text, write_files
    from kvfold.diffusion.picture import draw_race

    text = json_text(document)
    files = {
        f"{NAME}.json": lambda path: path.write_text(text, encoding="utf-8"),
        f"{NAME}.png": lambda path: draw_race(runners, title).savefig(path, format="png", dpi=130),
    }
    for path in write_files(folder, files):
        note(f"wrote {path}")


def _base(runners: Sequence[Runner]) -> Runner:
    return next(runner for runner in runners if runner.name == "none")


def _times(runner: Runner, base: Runner) -> Spread | None:
    """Tokens a second over those of no cache, round by round; None if that wrote none."""
    from kvfold.bench.spread import divide

    if not base.new_tokens:
        return None
    return divide(runner.tokens_per_second, base.tokens_per_second)


def _by_turn(runner: Runner, base: Runner) -> Spread | None:
    """The same turn by turn; None if the two have not decided alike many tokens in each."""
    from kvfold.bench.spread import divide

    if runner.report.steps != base.report.steps:
        return None
    return divide(base.turns, runner.turns)


def _told_times(runner: Runner, base: Runner) -> str | None:
    """Times no cache, of all rounds, with the range of the turns or else of the rounds."""
    times = _times(runner, base)
    if times is None:
        return None
    by = _by_turn(runner, base) or times
    if len(by.samples) == 1:
        return f"{times.median:.2f}"
    return f"{times.median:.2f} ({by.lowest:.2f} to {by.highest:.2f})"


def _parts(runners: Sequence[Runner], names: Iterable[str]) -> Iterable[list[object]]:
    """Milliseconds of a step, a row a part."""
    found = [runner.step_seconds for runner in runners]
    for name in dict.fromkeys([*names, *(name for each in found for name in each)]):
        yield [name, *(f"{1e3 * each.get(name, 0.0):.2f}" for each in found)]
    yield ["all", *(f"{1e3 * sum(each.values()):.2f}" for each in found)]


def _spread(samples: tuple[float, ...]) -> Spread:
    from kvfold.bench.spread import Spread

    return Spread(samples)
