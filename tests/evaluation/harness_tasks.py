"""Three local tasks of lm-evaluation-harness: YAML beside JSON, no network."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

NAMES = ("local_choice", "local_answer", "local_text")
"""One of each kind of request: continuations, generated texts, whole texts."""

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Peru": "Lima", "Egypt": "Cairo"}


def write_tasks(folder: Path, *, answer_tokens: int = 12) -> str:
    """Write the tasks and their data; returns the folder as text."""
    (folder / "data").mkdir(parents=True)
    for name, task in zip(NAMES, (_choice(), _answer(answer_tokens), _text()), strict=True):
        data = folder / "data" / f"{name}.json"
        data.write_text("".join(json.dumps(sample) + "\n" for sample in task.pop("samples")))
        source = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "metadata": {"version": 1.0},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(source | task))
    return str(folder)


def _question(country: str) -> str:
    return (
        "Every country has a capital. Tourists visit these cities in every season of the year, and "
        f"children learn their names at school. The capital of {country} is the city of"
    )


def _choice() -> dict[str, object]:
    choices = [*CAPITALS.values(), "a small town beside the river"]
    return {
        "output_type": "multiple_choice",
        "samples": [
            {"question": _question(country), "choices": choices, "gold": choices.index(capital)}
            for country, capital in CAPITALS.items()
        ],
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm")
        ],
    }


def _answer(tokens: int) -> dict[str, object]:
    return {
        "output_type": "generate_until",
        "samples": [
            {"question": _question(country), "answer": capital}
            for country, capital in CAPITALS.items()
        ],
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{answer}}",
        "generation_kwargs": {
            "until": ["\n", ".", ","],
            "max_gen_toks": tokens,
            "do_sample": False,
        },
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def _text() -> dict[str, object]:
    return {
        "output_type": "loglikelihood_rolling",
        "samples": [{"page": f"{_question('Norway')} Oslo."}, {"page": "Nobody knows why."}],
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [
            {"metric": name, "aggregation": aggregation, "higher_is_better": False}
            for name, aggregation in (
                ("word_perplexity", "weighted_perplexity"),
                ("byte_perplexity", "weighted_perplexity"),
                ("bits_per_byte", "bits_per_byte"),
            )
        ],
    }
