"""What a measurement was made on: versions, processor, memory, threads and device."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from kvfold.native.build import library
from kvfold.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "accelerate", "peft")
"""Distributions whose versions are reported."""


def environment() -> dict[str, object]:
    """Describe this machine and this installation.

    Importing torch is left to this call, so that whoever imports the module stays fast.

    Returns:
        JSON-ready values: `kvfold`, `commit` (of the checkout, None for an installed package),
        `python`, a version per name in `PACKAGES` (None if absent), `platform`, `cpu`, `cores`
        that this process may use, `memory_bytes`, `threads` and `device` of torch,
        `cpu_capability` (the widest instructions torch uses), `kernels` (whether kvfold's own run
        here), and the variables that decide how torch waits and allocates: `omp_wait_policy` and
        `thp_mem_alloc_enable`, `mkl_cbwr`.

    Example:
        >>> from kvfold.environment import environment
        >>> sorted(environment())[:3]
        ['accelerate', 'commit', 'cores']
    """
    return {
        "kvfold": __version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": _usable_cores(),
        "memory_bytes": _memory_bytes(),
        **_torch_facts(),
        "kernels": library("zoom") is not None,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "thp_mem_alloc_enable": os.environ.get("THP_MEM_ALLOC_ENABLE"),
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
    }


def source_commit() -> str | None:
    """The commit kvfold runs from, with `-dirty` if files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = [_output("sysctl", "-n", "machdep.cpu.brand_string") or ""]
    return (names or [""])[0] or platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _torch_facts() -> dict[str, object]:
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    elif torch.backends.mps.is_available():
        device = "mps"
    else:
        device = "cpu"
    return {
        "threads": torch.get_num_threads(),
        "device": device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
