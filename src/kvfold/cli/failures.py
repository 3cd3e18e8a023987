"""From an exception to one line on standard error and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from kvfold.errors import ArtifactError, ConfigError, KVFoldError, UnsupportedModelError

OK, FAILURE, USER_ERROR, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
"""What typer raises for arguments it cannot take; it exports only their child BadParameter."""

USER_ERRORS = (ConfigError, ArtifactError, UnsupportedModelError)


def guarded(action: Callable[[], object], arguments: Sequence[str], *, debug: bool) -> int:
    """Run an action; report what it raises on standard error and return the exit code.

    Args:
        action: Called without arguments.
        arguments: The user's, to tell files that the user named from others.
        debug: Print the traceback too.
    """
    try:
        action()
        sys.stdout.flush()
    except typer.Exit as end:
        return _flushed(end.exit_code)
    except (BrokenPipeError, SystemExit):  # rich raises SystemExit when its reader went away
        _forget_output()
        return NO_READER
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted", debug=debug)
        return INTERRUPTED
    except Exception as error:
        code, text = explain(error, arguments)
        _say(text, debug=debug)
        return code
    return OK


def explain(error: Exception, arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code for an error, and the line that says what happened and what to do."""
    if isinstance(error, CommandLineError):
        return USER_ERROR, _usage(error)
    if isinstance(error, USER_ERRORS):
        return USER_ERROR, str(error)
    if isinstance(error, KVFoldError):
        return FAILURE, str(error)
    if isinstance(error, OSError) and error.filename and _named(error.filename, arguments):
        reason = error.strerror or type(error).__name__
        return USER_ERROR, f"cannot use {str(error.filename)!r}: {reason}; give another path"
    kind = type(error).__name__
    text = f"{kind}: {error}" if str(error) else kind
    return FAILURE, f"failed: {text.rstrip('.')}; run with --debug for the traceback"


def _usage(error: Exception) -> str:
    message = getattr(error, "format_message", error.__str__)().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "kvfold"
    join = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{join} `{path} --help`"


def _named(filename: str | bytes | int, arguments: Sequence[str]) -> bool:
    if isinstance(filename, int):
        return False
    path = Path(os.path.abspath(os.fsdecode(filename)))
    given = [part for argument in arguments for part in (argument, argument.partition("=")[2])]
    roots = [Path(os.path.abspath(part)) for part in given if part and not part.startswith("-")]
    return any(path == root or root in path.parents for root in roots)


def _say(text: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"kvfold: {' '.join(text.split())}\n")


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
        return NO_READER
    return code


def _forget_output() -> None:
    """Let the interpreter's last flush of standard output go nowhere instead of failing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
