"""What importing kvfold needs and brings in, seen from fresh interpreters."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.processes import SOURCE, environment

CORE_ONLY = """
import importlib, importlib.machinery, pkgutil, sys

blocked = set(sys.argv[1].split(","))


class Finder:
    # Another finder, blind to the blocked packages.
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            return None
        return self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
try:
    import pytest
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the blocker does not block")
import kvfold

names = ["kvfold"]
for module in pkgutil.walk_packages(kvfold.__path__, "kvfold."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        names.append(module.name)
print("\\n".join(names))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )


def core_requirements() -> list[str]:
    """The core dependencies as pyproject.toml lists them (Python 3.10 has no reader for it)."""
    text = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return re.findall(r'"([^"]+)"', listed[1])


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> set[str]:
    """The distributions that a list of requirements brings along on this machine."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = normalised(requirement.name)
        extras = requirement.extras or {""}
        marker = requirement.marker
        wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
        if not wanted or name in found:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        waiting.extend(Requirement(line) for line in lines if "extra" not in line)
    return found


def test_every_module_imports_with_core_dependencies_only() -> None:
    distributions = closure(core_requirements())
    assert {"torch", "transformers", "typer"} <= distributions
    assert not {"pytest", "hypothesis", "ruff"} & distributions
    others = {
        package
        for package, owners in metadata.packages_distributions().items()
        if not {normalised(owner) for owner in owners} & (distributions | {"kvfold"})
    }
    result = python("-c", CORE_ONLY, ",".join(sorted(others)))
    assert result.returncode == 0, result.stderr[-3000:]
    expected = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for path in Path(SOURCE, "kvfold").rglob("*.py")
        if path.stem != "__main__"
    }
    assert set(result.stdout.split()) == expected


def test_importing_kvfold_does_not_import_torch() -> None:
    result = python("-c", "import kvfold, sys; print('torch' in sys.modules)")
    assert (result.stdout.strip(), result.stderr) == ("False", "")


def test_help_imports_neither_torch_nor_transformers() -> None:
    result = python("-X", "importtime", "-m", "kvfold", "--help")
    assert result.returncode == 0, result.stderr[-3000:]
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not {"torch", "transformers", "matplotlib", "numpy"} & imported
