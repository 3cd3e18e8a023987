"""What is refused without a model, and that it takes neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import kvfold
from kvfold.cli.checks import DTYPES, check_counts, check_methods, check_model, method_names
from kvfold.errors import ConfigError
from kvfold.models import parse_dtype
from tests.processes import environment

REFUSED = [
    ["compare", "--budget", "abc"],
    ["compare", "--methods", "foo"],
    ["compare", "--methods", ","],
    ["compare", "--dtype", "int8"],
    ["compare", "--max-new-tokens", "-3"],
    ["compare", "--chunk-size", "0"],
    ["compare", "--length", "0"],
    ["compare", "--model", ""],
    ["compare", "--out", ""],
    ["generate", "Hi", "--temperature", "-1"],
    ["generate", "Hi", "--temperature", "nan"],
    ["generate", "Hi", "--method", "foo"],
    ["generate", "Hi", "--model", " "],
    ["bench", "decode", "--methods", "foo"],
    ["bench", "decode", "--context", "a"],
    ["bench", "prefill", "--budget", "2.0"],
    ["bench", "prefill", "--chunk-size", "0"],
    ["models", "path"],
]
"""Command lines that end with code 2."""

LIGHT = """
import json, sys
from kvfold.cli.app import run
codes = [run(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([codes, sorted({"torch", "transformers", "numpy"} & set(sys.modules))]))
"""


def test_refused_without_torch(tmp_path: object) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps([*REFUSED, ["models", "list"]])],
        capture_output=True,
        text=True,
        env=environment(KVFOLD_HOME=str(tmp_path)),
        timeout=300,
        check=True,
    )
    codes, heavy = json.loads(result.stdout.splitlines()[-1])
    assert codes == [2] * len(REFUSED) + [0]
    assert heavy == []
    assert result.stderr.count("\n") == len(REFUSED)


def test_method_names_are_the_methods() -> None:
    assert method_names() == sorted(kvfold.methods())


def test_unknown_methods_are_refused_as_the_registry_does() -> None:
    check_methods(["dynamic", *kvfold.methods()], besides=["dynamic"])
    with pytest.raises(ConfigError, match=r"unknown method 'dynamic': choose one of .*tova"):
        check_methods(["full", "dynamic"])


def test_dtypes_are_those_of_a_load() -> None:
    for dtype in DTYPES:
        found = parse_dtype(dtype)
        assert isinstance(found, torch.dtype) or dtype == "auto"
        check_model("default", dtype.upper())
    with pytest.raises(ConfigError) as given:
        parse_dtype("int8")
    with pytest.raises(ConfigError) as light:
        check_model("default", "int8")
    assert str(light.value) == str(given.value)
    assert set(DTYPES) == {word.strip("(),") for word in str(given.value).split()[6:]}


def test_counts_are_named_as_options() -> None:
    check_counts(chunk_size=None, length=1)
    with pytest.raises(ConfigError, match="--chunk-size -2 is below 1"):
        check_counts(length=1, chunk_size=-2)
