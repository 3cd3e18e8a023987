"""The description of the machine that results carry."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from kvfold.environment import environment, source_commit
from kvfold.native.build import library
from kvfold.version import __version__

ROOT = Path(__file__).parents[1]


def test_environment_is_json_with_this_machines_facts() -> None:
    facts = environment()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["kvfold"] == __version__
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["omp_wait_policy"] == "PASSIVE"
    assert facts["thp_mem_alloc_enable"] == os.environ.get("THP_MEM_ALLOC_ENABLE")
    assert facts["mkl_cbwr"] == os.environ.get("MKL_CBWR")
    assert facts["cpu"]
    assert facts["kernels"] == (library("zoom") is not None)


def test_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    commit = source_commit()
    if head.returncode:
        assert commit is None
    else:
        assert commit is not None
        assert head.stdout.startswith(commit.removesuffix("-dirty"))


def test_citation_has_the_same_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]
