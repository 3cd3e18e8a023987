"""The documents are true: their code runs, prints what they say, and their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path, PurePosixPath
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from bench.docs.links import without_outside_links
from bench.docs.pictures import METHODS as PICTURED
from bench.docs.pictures import kept
from kvfold.cache import METHODS, prefill
from kvfold.evict import POLICIES
from tests.documents import ROOT, for_this_transformers, run_python
from tests.tiny import tiny_ids, tiny_model
from tests.tiny_folder import byte_tokenizer

DOCS, SOURCE = ROOT / "docs", ROOT / "src"
PAGES = sorted(DOCS.rglob("*.md"))
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
SMALLEST_EXAMPLES = 15
MOST_BYTES = 150_000

OPTIONAL = "lm_eval"
"""What is not installed everywhere, and fetches what it measures on."""
WITH_EXAMPLES = sorted(
    path
    for path in (SOURCE / "kvfold").rglob("*.py")
    if ">>> " in path.read_text("utf-8") and OPTIONAL not in path.read_text("utf-8")
)
STAND_INS = {
    'from_pretrained("GSAI-ML/LLaDA-8B-Instruct"': 'from_pretrained("arithmetic"',
    "length=64": "length=16",
    "built_in_document(tokenizer)": "built_in_document(tokenizer, length=512)",
    "compare(model, tokenizer, document)": "compare(model, tokenizer, document, QUICK)",
    "fitted.cache())": "fitted.cache(), length=16)",
    "samples=4)": "samples=1, lengths=(256,), tokens=2)",
}
"""What an example says that takes long or a network, and what the tests run in its place."""


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Code ---------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for registry in (METHODS, POLICIES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    compared = 0
    for printed, expected in run_python(read(page)):
        if expected is not None:
            assert printed == expected
            compared += 1
    assert compared >= 2


class Checker(doctest.OutputChecker):
    """Lets an example be silent about what it gives."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    """What examples take for granted."""
    from kvfold.evaluation import Settings
    from kvfold.evaluation.settings import Timing

    model: PreTrainedModel = tiny_model(vocab_size=259, max_position_embeddings=4096)
    kvfold.attach(model)
    tokenizer = byte_tokenizer()
    quick = Settings(methods=("streaming",), max_new_tokens=2, timing=Timing(1, 1, 1))
    return {
        "kvfold": kvfold,
        "torch": torch,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": tokenizer("A text of some words, " * 4, return_tensors="pt"),
        "prompts": [[1, 2, 3]],
        "show": lambda *_: None,
        "QUICK": quick,
    }


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_a_module_run(
    path: Path, names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kvfold, "load", lambda name: (names["model"], names["tokenizer"]))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("Some words of a note. " * 400)
    module = importlib.import_module(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    )
    runner = doctest.DocTestRunner(Checker(), verbose=False)
    said: list[str] = []
    tests = doctest.DocTestFinder().find(module, globs=granted(module, names))
    # Those that are marked to be skipped count, too.
    assert sum(len(test.examples) for test in tests) == path.read_text("utf-8").count(">>> ")
    for test in tests:
        for example in test.examples:
            for said_so, instead in STAND_INS.items():
                example.source = example.source.replace(said_so, instead)
            if path.parent.name != "diffusion":
                example.source = for_this_transformers(example.source)
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


def granted(module: ModuleType, names: dict[str, object]) -> dict[str, object]:
    """What the examples of a module may use without saying where it is from."""
    room = importlib.import_module(".".join(module.__name__.split(".")[:2]))
    public = {name: getattr(room, name) for name in getattr(room, "__all__", ())}
    found = {**vars(module), **public, **names}
    if room.__name__ == "kvfold.diffusion":
        found["model"] = room.DiffusionModel.from_pretrained("arithmetic")
    return found


def test_there_are_examples_to_run() -> None:
    assert len(WITH_EXAMPLES) >= SMALLEST_EXAMPLES
    assert len(TUTORIALS) == 5


# Figures ------------------------------------------------------------------------------------------

FIGURE = re.compile(r"(?<![\d.,])(?:\d*\.\d+|\d+ %)(?![\d,]*\d)")
"""A fraction or a percentage."""
SOURCES = ("README.md", "docs/distillcache.md", "docs/sekv.md", "docs/diffusion.md")
SOURCES = (*SOURCES, "docs/transfer.md")


def without_published(text: str) -> str:
    """A page without the columns of its tables whose title begins with "published"."""
    lines, left_out = [], set[int]()
    for line in text.split("\n"):
        cells = line.split("|")
        if not lines or not lines[-1].startswith("|"):
            left_out = {n for n, cell in enumerate(cells) if cell.strip().startswith("published")}
        is_row = line.startswith("|")
        kept = (cell for n, cell in enumerate(cells) if not (is_row and n in left_out))
        lines.append("|".join(kept))
    return "\n".join(lines)


def test_published_columns_are_left_out_and_others_are_not() -> None:
    text = "published .1\n\n| a | published | b |\n|---|---|---|\n| .2 | .3 | .4 |\n\n| c |\n| .5 |"
    assert FIGURE.findall(without_published(text)) == [".1", ".2", ".4", ".5"]


@pytest.mark.parametrize("name", ["choosing", "limits", "papers"])
def test_figures_stand_in_the_pages_they_are_from(name: str) -> None:
    known = {figure for source in SOURCES for figure in FIGURE.findall(read(ROOT / source))}
    told = set(FIGURE.findall(without_published(read(DOCS / f"{name}.md"))))
    assert len(told) > 10
    assert told - known == set()


# Links and pictures -------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", read(page))
    local = [each.partition("#")[0] for each in targets if "://" not in each]
    assert [each for each in local if each and not (page.parent / each).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- [^\n]+: (\S+\.md)$", read(ROOT / "mkdocs.yml"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_pictures_are_small_and_all_are_shown() -> None:
    pictures = sorted(DOCS.glob("pictures/*.png"))
    shown = re.findall(r"\]\(pictures/(\S+)\)", read(DOCS / "concepts.md"))
    assert sorted(shown) == [picture.name for picture in pictures]
    assert {f"{method}.png" for method in (*PICTURED, "sekv")} <= set(shown)
    assert max(picture.stat().st_size for picture in pictures) < MOST_BYTES


def test_every_method_has_its_place_among_the_concepts() -> None:
    titles = re.findall(r"^### (\w+)$", read(DOCS / "concepts.md"), flags=re.MULTILINE)
    assert sorted(titles) == sorted(kvfold.methods())


def test_a_picture_shows_what_a_cache_holds() -> None:
    model = tiny_model()
    kvfold.attach(model)
    cache = kvfold.make_cache(model, "streaming", budget=16)
    prefill(model, tiny_ids(1, 40), cache)
    expected = np.zeros(40)
    expected[[*range(4), *range(28, 40)]] = 1
    assert kept(cache, 40).tolist() == [expected.tolist()] * 3

    own = kvfold.make_cache(model, "random", budget=16)
    prefill(model, tiny_ids(1, 40), own)
    shares = kept(own, 40)
    assert set(np.unique(shares)) == {0.0, 0.5, 1.0}
    assert shares.sum(axis=1).tolist() == [16.0] * 3


def test_links_out_of_the_site_become_names() -> None:
    page = PurePosixPath("api/a.md")
    text = "[a](../../tests/test_a.py) [b](../limits.md#x) [c](b.md) [d](https://e.org/f)"
    kept_as_they_are = "[b](../limits.md#x) [c](b.md) [d](https://e.org/f)"
    assert without_outside_links(text, DOCS, page) == f"`tests/test_a.py` {kept_as_they_are}"


# Reference ----------------------------------------------------------------------------------------


def directives() -> list[str]:
    text = "\n".join(map(read, sorted(DOCS.glob("api/*.md"))))
    return re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)


def resolved(dotted: str) -> object:
    """The module, or the name in one."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        home, _, name = dotted.rpartition(".")
        return getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("dotted", directives())
def test_what_the_reference_names_exists_and_says_what_it_is(dotted: str) -> None:
    assert (resolved(dotted).__doc__ or "").strip()


def test_the_reference_has_every_room_and_every_public_name() -> None:
    named = set(directives())
    packages = {path.parent for path in (SOURCE / "kvfold").glob("*/__init__.py")}
    rooms = {f"kvfold.{room.name}" for room in packages if "__all__" in read(room / "__init__.py")}
    assert rooms - {"kvfold.cli"} <= named
    shown = {name.rpartition(".")[2] for name in named} | set(
        importlib.import_module("kvfold.cache").__all__
    )
    assert set(kvfold.__all__) - {"__version__"} <= shown
