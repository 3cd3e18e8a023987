"""The application: which commands there are, and how one is run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console

from kvfold.cli.console import quiet_libraries
from kvfold.cli.failures import guarded
from kvfold.version import __version__

COMMANDS = (
    "compare",
    "generate",
    "diffuse",
    "transfer",
    "train",
    "eval",
    "bench",
    "models",
    "info",
)
"""Each stands in the module `kvfold.cli.NAME`: a typer application `app`, or a function NAME."""

DEBUG = "--debug"
HELP = """Make the KV cache of language models small, and see what that costs.

Start with `kvfold compare`: one long document and a question, answered with the full cache and
with smaller ones, side by side.
"""
EPILOG = f"{DEBUG}, before or after the command, shows the traceback of an error."


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code (see `kvfold.cli.main`)."""
    given, debug = take_debug(arguments)
    given = given or ["--help"]
    quiet_libraries(debug=debug)

    def invoke() -> None:
        command = typer.main.get_command(build_app(given[0]))
        with command.make_context("kvfold", list(given)) as context:
            command.invoke(context)

    return guarded(invoke, given, debug=debug)


def take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--debug` out of the arguments, wherever it stands before a lone `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != DEBUG]
    return [*options, *arguments[end:]], len(options) < end


def build_app(first: str) -> typer.Typer:
    """The typer application with the command named by the first argument, else with all."""
    app = typer.Typer(
        name="kvfold", help=HELP, epilog=EPILOG, add_completion=False, rich_markup_mode="markdown"
    )
    app.callback()(_options)
    for name in [first] if first in COMMANDS else COMMANDS:
        module = import_module(f"kvfold.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, epilog=EPILOG)
        else:
            app.command(name, epilog=EPILOG)(getattr(module, name))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"kvfold {__version__}", highlight=False)
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the traceback of an error; allowed anywhere.")
    ] = False,
) -> None:
    """Options before the command; `--debug` is taken out before parsing and stands for its help."""
