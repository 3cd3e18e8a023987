"""Hands the samples of an evaluation to other libraries, and puts their answers into its tables.

    kvfold eval --protocol agnostic ... --out OUT
    python bench/peers/exchange.py ask OUT       # writes OUT/questions.jsonl
    PEERS/bin/python bench/peers/run.py OUT      # writes OUT/answers.jsonl
    python bench/peers/exchange.py merge OUT     # writes the report of OUT anew

`PEERS` is an environment that `bench/peers/setup.sh PEERS` makes. Run in kvfold's own environment,
with the same KVFOLD_DATA as the evaluation. May be called again at any time, with more answers or
after `kvfold eval --resume`, which writes a report without them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.fidelity import Fidelity
from kvfold.evaluation.fidelity_export import write_report
from kvfold.evaluation.fidelity_record import read_fidelity
from kvfold.evaluation.fidelity_report import report_of
from kvfold.evaluation.fidelity_tables import by_group
from kvfold.evaluation.peers import add_answers, same_as_full, write_questions
from kvfold.home import default_path
from kvfold.models import load_model

REFERENCE = "transformers:dynamic"
"""The peer that keeps everything: its answers have to be the full cache's."""


def main() -> None:
    """Ask or merge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=("ask", "merge"))
    parser.add_argument("folder", type=Path, help="of an evaluation")
    options = parser.parse_args()
    try:
        fidelity = read_fidelity(options.folder)
        subject = fidelity.subject
        loaded = load_model(subject.model, dtype=subject.dtype, device=subject.device)
        (_ask if options.step == "ask" else _merge)(options.folder, fidelity, loaded)
    except KVFoldError as error:
        sys.exit(f"{Path(__file__).name}: {error}")


def _ask(
    folder: Path, fidelity: Fidelity, loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    name = fidelity.subject.model
    source = default_path() if name == "default" else Path(name)
    if source.is_dir():
        name = str(source.resolve())
    _say(f"wrote {write_questions(folder, *loaded, fidelity, source=name)}")


def _merge(
    folder: Path, fidelity: Fidelity, loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    whole = add_answers(folder, loaded[1], fidelity)
    report = report_of(whole)
    paths = write_report(report, folder)
    for group, summaries in by_group(report.summaries).items():
        fewer = [e for e in summaries if e.samples < summaries[0].samples]
        counts = [f"{e.method} at {e.budget} {e.samples}" for e in fewer]
        if counts:
            _say(f"{group}: of {summaries[0].samples} samples have {', '.join(counts)}")
    same = same_as_full(whole, REFERENCE)
    if same is not None:
        _say(f"{REFERENCE} answers {same.right} of {same.count} as full does")
    _say("wrote " + ", ".join(map(str, paths)))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main()
