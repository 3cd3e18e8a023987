"""An evaluation by several processes: each does a part of the batches, and all write one file.

Every process loads the model for itself, on a GPU of its own where there are several, and with its
share of the processor's threads.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from kvfold.attention import attach
from kvfold.errors import ConfigError, KVFoldError
from kvfold.evaluation.fidelity import Part, Progress, evaluate_part
from kvfold.evaluation.fidelity_settings import FidelitySettings
from kvfold.models import load_model

_SECONDS = 0.5
"""From one look at the processes to the next."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where every process has its model from."""

    name: str
    """As `kvfold.load` takes it."""
    dtype: str | None = None
    """Of the weights."""
    device: str | None = None
    """Where to; of several GPUs each process takes one in turn if none is named."""

    def device_of(self, part: Part) -> str | None:
        """Where the model of one process goes."""
        if self.device in (None, "cuda") and torch.cuda.device_count() > 1:
            return f"cuda:{part.index % torch.cuda.device_count()}"
        return self.device


@dataclass(frozen=True, slots=True)
class _Task:
    """What one process is told."""

    source: Source
    settings: FidelitySettings
    folder: Path
    part: Part
    threads: int


@dataclass(frozen=True, slots=True)
class _News:
    """What it tells."""

    index: int
    stage: str = ""
    share: float = 0.0
    error: KVFoldError | None = None


def evaluate_parts(
    source: Source,
    settings: FidelitySettings,
    *,
    folder: Path,
    workers: int,
    on_progress: Progress | None = None,
) -> None:
    """Leave all rows of an evaluation, computed by several processes.

    Args:
        source: The model.
        settings: Methods, budgets, samples.
        folder: Where the rows are; those that are there are taken.
        workers: How many processes.
        on_progress: Told about each stage of each.

    Raises:
        ConfigError: For fewer than one process, and what a process finds cannot be had.
        KVFoldError: When one fails; rows that were left stay.
    """
    if workers < 1:
        raise ConfigError(f"workers: {workers} is below 1: give at least 1")
    context = multiprocessing.get_context("spawn")
    news: Queue[_News] = context.Queue()
    threads = max(1, torch.get_num_threads() // workers)
    processes = [
        context.Process(
            target=_work,
            args=(_Task(source, settings, folder, Part(index, workers), threads), news),
            daemon=True,
        )
        for index in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        _follow(processes, news, on_progress)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _follow(
    processes: Sequence[BaseProcess], news: Queue[_News], on_progress: Progress | None
) -> None:
    """Pass on what processes tell until all are done."""
    shares = [0.0] * len(processes)
    while any(process.is_alive() for process in processes) or not news.empty():
        try:
            told = news.get(timeout=_SECONDS)
        except queue.Empty:
            _require_alive(processes)
            continue
        if told.error is not None:
            raise told.error
        shares[told.index] = told.share
        if on_progress is not None:
            on_progress(told.stage, sum(shares) / len(shares))
    _require_alive(processes)


def _require_alive(processes: Sequence[BaseProcess]) -> None:
    """Refuse to go on without a process that ended before its part was done."""
    for number, process in enumerate(processes, start=1):
        if process.exitcode not in (None, 0):
            was_killed = process.exitcode == -signal.SIGKILL
            how = "was killed, most likely for memory" if was_killed else "failed, as it says above"
            raise KVFoldError(
                f"worker {number} of {len(processes)} {how} (exit code {process.exitcode}): what "
                "was found is kept; go on with --resume, and fewer workers if memory was short"
            )


def _work(task: _Task, news: Queue[_News]) -> None:
    """One process."""
    index = task.part.index

    def tell(stage: str, share: float) -> None:
        news.put(_News(index, stage, share))

    # What interrupts all is for the first process to hear, which ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(task.threads)
    try:
        source = task.source
        device = source.device_of(task.part)
        model, tokenizer = load_model(source.name, dtype=source.dtype, device=device)
        attach(model)
        evaluate_part(
            model, tokenizer, task.settings, folder=task.folder, part=task.part, on_progress=tell
        )
        tell("done", 1.0)
    except KVFoldError as error:
        news.put(_News(index, error=error))
