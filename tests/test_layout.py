"""The house rules that a machine can check: who may import whom, sizes, and what is forbidden."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kvfold"

RANKS = (
    (
        "errors",
        "version",
        "budget",
        "registry",
        "artifacts",
        "tensorfile",
        "environment",
        "home",
        "native",
        "text",
    ),
    ("ops",),
    ("models",),
    ("attention",),
    ("cache", "training"),
    ("evict", "zoom", "transfer", "diffusion"),
    ("api",),
    ("evaluation", "bench"),
    ("engines", "serving"),
    ("cli",),
)
"""Rooms from the bottom up: a room may import rooms below it, never one above."""

RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
METHODS = RANKS[5]
FACADE = RANK["api"] + 1
"""Rank of the package's own names, as in `import kvfold`: for the rooms above `api`."""

ENTRANCES = ("__init__", "__main__")
"""The package itself and `python -m kvfold` may import any room."""

FILE_LINES, FUNCTION_LINES = 400, 50

FORBIDDEN_CALLS = {"torch.load", "torch.save", "torch.manual_seed", "torch.random.manual_seed"}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}

FILES = sorted(SOURCE.rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    parts = ("kvfold", *path.relative_to(SOURCE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def room_of(module: tuple[str, ...]) -> str:
    return module[1] if len(module) > 1 else "__init__"


def imports_of(path: Path, tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Every module, as its parts, that a file imports, wherever in the file."""
    package = module_of(path) if path.stem == "__init__" else module_of(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*base, alias.name) for alias in node.names)


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def complaint(importer: str, imported: str) -> str | None:
    """Why one room may not import another; None if it may."""
    if importer in ENTRANCES or importer == imported:
        return None
    if RANK.get(imported, FACADE) > RANK[importer]:
        return "stands above it"
    if importer in METHODS and imported in METHODS:
        return "is another method, and methods do not import one another"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_file_follows_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert [*import_faults(path, tree), *size_faults(text, tree), *call_faults(path, tree)] == []
    assert ast.get_docstring(tree) is not None, "a module says in its docstring what it holds"


def import_faults(path: Path, tree: ast.AST) -> Iterator[str]:
    importer = room_of(module_of(path))
    for module in imports_of(path, tree):
        if module[0] in FORBIDDEN_MODULES:
            yield f"imports {module[0]}, which runs code from files"
        reason = complaint(importer, room_of(module)) if module[0] == "kvfold" else None
        if reason:
            yield f"{importer} imports {'.'.join(module)}: {room_of(module)} {reason}"


def size_faults(text: str, tree: ast.AST) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        yield f"{lines} lines in a file, at most {FILE_LINES}: split it by noun"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{node.name} has {length} lines, at most {FUNCTION_LINES}"


def call_faults(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in FORBIDDEN_CALLS:
            yield f"line {node.lineno} calls {name}"
        if name == "print" and room_of(module_of(path)) != "cli":
            yield f"line {node.lineno} prints outside the command line"


def test_every_folder_and_file_has_a_room() -> None:
    rooms = {room_of(module_of(path)) for path in FILES} - set(ENTRANCES)
    assert rooms <= set(RANK)


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("ops/a.py", "from kvfold.models import x", "models stands above it"),
        ("ops/a.py", "def f():\n    import kvfold.cli.app", "cli stands above it"),
        ("ops/a.py", "from ..cache import x", "cache stands above it"),
        ("evict/a.py", "from kvfold.zoom.b import x", "zoom is another method"),
        ("budget.py", "from kvfold import load", "load stands above it"),
        ("api.py", "import kvfold", "stands above it"),
        ("cache/a.py", "import pickle", "imports pickle"),
    ],
)
def test_forbidden_imports_are_found(path: str, code: str, fault: str) -> None:
    assert fault in " ".join(import_faults(SOURCE / path, ast.parse(code)))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("cache/a.py", "from kvfold.errors import ConfigError"),
        ("cache/a.py", "from .report import x"),
        ("cli/a.py", "import kvfold"),
        ("bench/a.py", "from kvfold import load"),
        ("__init__.py", "from kvfold.api import load"),
        ("evict/policies/a.py", "from kvfold.evict.policy import x"),
        ("ops/a.py", "import torch"),
    ],
)
def test_allowed_imports_pass(path: str, code: str) -> None:
    assert list(import_faults(SOURCE / path, ast.parse(code))) == []


def test_forbidden_calls_are_found() -> None:
    tree = ast.parse("torch.load(p)\ntorch.manual_seed(0)\nprint(1)")
    assert len(list(call_faults(SOURCE / "ops/a.py", tree))) == 3
    assert len(list(call_faults(SOURCE / "cli/a.py", tree))) == 2
