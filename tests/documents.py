"""Markdown that is to be true: its code, run block after block as a reader would."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from kvfold.cache import CACHE_KEYWORD

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def fences(text: str) -> list[tuple[str, str]]:
    """Language and content of every block of code."""
    return _FENCE.findall(text)


def blocks(text: str, language: str) -> list[str]:
    """The blocks of one language."""
    return [content for kind, content in fences(text) if kind == language]


def for_this_transformers(code: str) -> str:
    """Documents show the newest name of the argument that takes a cache."""
    return code.replace("cache=", f"{CACHE_KEYWORD}=") if CACHE_KEYWORD != "cache" else code


def run_python(text: str) -> Iterator[tuple[str, str | None]]:
    """Run the blocks of Python one after the other, in one namespace.

    Yields:
        What each printed, and the block of `text` that follows it, None where another does.
    """
    names: dict[str, object] = {"__name__": "document"}
    found = [*fences(text), ("", "")]
    for (kind, content), (following, expected) in itertools.pairwise(found):
        if kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(for_this_transformers(content), names)
            yield printed.getvalue(), expected if following == "text" else None
