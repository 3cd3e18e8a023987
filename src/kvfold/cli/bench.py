"""`kvfold bench`: speed and memory, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.artifacts import format_bytes
from kvfold.cli.checks import check_budget, check_counts, check_methods, check_model
from kvfold.cli.console import JsonOption, note, print_json, stdout, table
from kvfold.cli.files import output_folder
from kvfold.cli.options import BudgetOption, DeviceOption, DtypeOption, ModelOption, listed

if TYPE_CHECKING:
    from kvfold.bench import BenchResult, Comparison

HELP = """Measure speed and memory of methods side by side.

Every measurement is a process of its own, and methods take turns (A B C A B C), so that a busy
machine slows all of them alike. `dynamic` is transformers' own cache on its own attention, `full`
is kvfold's with everything kept.
"""

app = typer.Typer(help=HELP)

METHODS, BUDGET = "dynamic,full,streaming,snapkv", "0.25"
MethodsOption = Annotated[
    str,
    typer.Option(
        "--methods",
        help="What to measure, comma-separated.",
        show_default=METHODS.replace(",", ", "),
    ),
]
ContextOption = Annotated[str, typer.Option("--context", help="Tokens; several comma-separated.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="In each process.", show_default="all cores")
]
RoundsOption = Annotated[int, typer.Option("--rounds", help="Measurements of each method.")]
OutOption = Annotated[
    str | None,
    typer.Option("--out", help="Folder for the result as JSON and as a chart.", metavar="DIR"),
]


@app.command()
def decode(
    model: ModelOption = "default",
    methods: MethodsOption = METHODS,
    budget: BudgetOption = None,
    context: ContextOption = "512,4096",
    batch: Annotated[str, typer.Option(help="Rows; several comma-separated.")] = "1,8",
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 24,
    read: Annotated[
        int | None,
        typer.Option(
            help="Tokens that are really read; a longer context repeats their states.",
            show_default="all",
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    rounds: RoundsOption = 3,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure decode throughput, for every context and batch given.

    Each context is prefilled once for each method; the rows of a batch repeat it. Where a method
    does not pay is said below the tables. By default that is 48 measurements: minutes, not seconds.
    """
    folder = _check(model, methods, budget, dtype, out)
    numbers = _numbers("--context", context), _numbers("--batch", batch)
    from kvfold.bench import DecodeSettings, bench_decode

    device, dtype = _place(device, dtype)
    settings = DecodeSettings(
        model=model,
        subjects=listed(methods),
        budget=BUDGET if budget is None else budget,
        contexts=numbers[0],
        batches=numbers[1],
        warmup=warmup,
        steps=steps,
        read=read,
        dtype=dtype,
        device=device,
        threads=_threads(threads),
        rounds=rounds,
    )
    _show(bench_decode(settings, progress=note), folder, json_output=json_output)


@app.command()
def prefill(
    model: ModelOption = "default",
    methods: MethodsOption = METHODS,
    budget: BudgetOption = None,
    context: ContextOption = "4096",
    chunk_size: Annotated[int, typer.Option(help="Most tokens a forward.")] = 512,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    rounds: RoundsOption = 3,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure time to the first token and peak memory of a prompt that goes in chunks.

    Below the table stand two checks: whether the peak stays within the model, the budget and one
    chunk, and what looking at attention costs a method.
    """
    folder = _check(model, methods, budget, dtype, out)
    contexts = _numbers("--context", context)
    check_counts(chunk_size=chunk_size)
    from kvfold.bench import PrefillSettings, bench_prefill

    device, dtype = _place(device, dtype)
    settings = PrefillSettings(
        model=model,
        subjects=listed(methods),
        budget=BUDGET if budget is None else budget,
        contexts=contexts,
        chunk_size=chunk_size,
        dtype=dtype,
        device=device,
        threads=_threads(threads),
        rounds=rounds,
    )
    _show(bench_prefill(settings, progress=note), folder, json_output=json_output)


def _check(
    model: str, methods: str, budget: str | None, dtype: str | None, out: str | None
) -> Path | None:
    """Refuse what can be refused before torch is imported; returns the output folder."""
    folder = None if out is None else output_folder(out)
    check_methods(listed(methods), besides=["dynamic"])
    check_budget(budget)
    check_model(model, dtype)
    return folder


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from kvfold.errors import ConfigError

    try:
        return tuple(map(int, listed(text)))
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r} is not a list of whole numbers: write it as in 512,4096"
        ) from error


def _place(device: str | None, dtype: str | None) -> tuple[str, str]:
    """Where the model runs and in what, spelled out for the record as a load would choose it."""
    from kvfold.models import parse_device

    place = parse_device(device)
    return str(place), dtype or ("float32" if place.type == "cpu" else "auto")


def _threads(given: int | None) -> int:
    import torch

    return torch.get_num_threads() if given is None else given


def _show(result: BenchResult, out: Path | None, *, json_output: bool) -> None:
    from kvfold.bench.output import write_result

    if out is not None:
        for path in write_result(result, out):
            note(f"wrote {path}")
    if json_output:
        print_json(result.to_dict())
        return
    for comparison in result.comparisons:
        title = f"{result.kind}, {comparison.title}"
        stdout().print(table(_COLUMNS[result.kind], _rows(result.kind, comparison), title=title))
        _say(_tiers(comparison))
        _say(_ratios(comparison))
        if result.kind == "prefill":
            _say(_parts(comparison))
    _say(str(finding) for finding in result.findings)
    _say(f"note: {text}" for text in result.notes)


_COLUMNS = {
    "decode": ("method", "tokens/s", "ms a step", "cache", "of full", "peak memory"),
    "prefill": ("method", "tokens/s", "s to first token", "cache", "of full", "peak memory"),
}


def _rows(kind: str, comparison: Comparison) -> Iterable[tuple[object, ...]]:
    for each in comparison.outcomes:
        peak = each.rss_peak
        yield (
            each.subject,
            f"{each.tokens_per_second:.1f}",
            f"{each.seconds.times(1000):.1f}" if kind == "decode" else f"{each.seconds:.2f}",
            format_bytes(each.last.cache_bytes),
            f"{each.last.cache_bytes / each.last.full_bytes:.0%}",
            None if peak is None else format_bytes(peak),
        )


def _tiers(comparison: Comparison) -> Iterable[str]:
    """What stands on a slow tier, of the methods that have one."""
    for each in comparison.outcomes:
        if slow := each.last.slow_bytes:
            fast = format_bytes(each.last.cache_bytes - slow)
            moved = format_bytes(each.last.moved_bytes)
            yield f"{each.subject}: {fast} fast, {format_bytes(slow)} slow, {moved} moved"


def _parts(comparison: Comparison) -> Iterable[str]:
    """What a prefill's seconds went to beside the model's own, in the last round."""
    for each in comparison.outcomes:
        if parts := each.last.parts:
            whole = sum(each.last.seconds)
            named = ", ".join(f"{name} {took / whole:.1%}" for name, took in parts.items())
            yield f"{each.subject}: of its {whole:.2f} s, {named}"


def _ratios(comparison: Comparison) -> Iterable[str]:
    """Throughput against the full caches, the ratios that matter most."""
    for each in comparison.ratios():
        if each.over in ("dynamic", "full"):
            yield f"{each.subject} / {each.over}: {each.spread:.2f} times the tokens/s"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        stdout().print(line, markup=False, soft_wrap=True)
