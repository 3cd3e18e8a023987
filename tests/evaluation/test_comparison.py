"""Comparisons as a whole, on a tiny random model."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread
from transformers import PreTrainedModel

import kvfold
from kvfold.budget import Budget
from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.evaluation import (
    Comparison,
    Document,
    Settings,
    built_in_document,
    compare,
    document_from_text,
    write_comparison,
)
from kvfold.evaluation.chart import draw
from kvfold.evaluation.comparison import contains
from kvfold.evaluation.settings import Timing
from kvfold.zoom.report import ZoomReport
from tests.tiny import tiny_model
from tests.tiny_folder import byte_tokenizer

TOKENIZER = byte_tokenizer()
QUICK = Settings(
    methods=("snapkv", "streaming"),
    max_new_tokens=6,
    timing=Timing(rounds=2, warm_up=1, timed=2),
)


def run(document: Document | None = None, settings: Settings = QUICK, **options: int) -> Comparison:
    model = tiny_model(vocab_size=259, **options)
    kvfold.attach(model)
    return compare(model, TOKENIZER, document or built_in(), settings)


def built_in() -> Document:
    return built_in_document(TOKENIZER, length=400)


@pytest.fixture(scope="module")
def found() -> Comparison:
    return run()


def test_full_is_added_and_is_at_no_distance_from_itself(found: Comparison) -> None:
    assert [result.method for result in found.results] == ["full", "snapkv", "streaming"]
    full = found.results[0]
    assert full.on_answer is not None
    assert full.on_continuation is not None
    assert (full.on_answer.kl.mean, full.on_continuation.kl.high) == (0.0, 0.0)
    assert (full.on_answer.agreement, full.on_continuation.agreement) == (1.0, 1.0)
    assert full.on_continuation.kl.count == 64
    assert full.times_full.samples == (1.0, 1.0)


def test_methods_keep_to_the_budget_and_differ_from_full(found: Comparison) -> None:
    tokens = found.subject.prompt_tokens
    for result in found.results[1:]:
        assert result.report.tokens_seen == tokens
        assert result.report.tokens_kept == [Budget.parse("0.25").tokens(tokens)] * 3
        # Positions and statistics weigh more in a tiny model.
        assert 0.25 < result.share_of_full < 0.35
        assert result.on_continuation is not None
        assert result.on_continuation.kl.mean > 1e-3


def test_the_whole_budget_gives_the_full_answer() -> None:
    found = run(settings=replace(QUICK, methods=("h2o",), budget="1.0"))
    full, h2o = found.results
    assert h2o.answer == full.answer
    assert h2o.on_continuation is not None
    assert h2o.on_continuation.kl.mean < 1e-6


def test_the_question_can_come_after_the_cut() -> None:
    agnostic = replace(QUICK, methods=("full", "tova"), protocol="query-agnostic")
    early, late = run(settings=agnostic), run(settings=replace(agnostic, protocol="query-aware"))
    assert early.results[0].answer == late.results[0].answer
    assert early.results[1].on_continuation != late.results[1].on_continuation
    assert early.results[1].report.tokens_kept == late.results[1].report.tokens_kept


def test_the_same_again_gives_the_same(found: Comparison) -> None:
    again = run()
    for before, after in zip(found.results, again.results, strict=True):
        assert after.answer == before.answer
        assert after.on_answer == before.on_answer
        assert after.on_continuation == before.on_continuation


def test_progress_goes_from_start_to_end() -> None:
    model, shares = tiny_model(vocab_size=259), []
    kvfold.attach(model)
    compare(model, TOKENIZER, built_in(), QUICK, progress=lambda _, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.9 < shares[-1] <= 1


def test_a_short_document_has_no_continuation() -> None:
    found = run(document_from_text(TOKENIZER, "Bread is baked at dawn.", "When?", name="x"))
    assert [result.on_continuation for result in found.results] == [None] * 3
    assert [result.is_right for result in found.results] == [None] * 3
    assert imread(io.BytesIO(draw(found))).std() > 0.1


def test_a_prompt_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="300 positions: give a shorter document"):
        run(max_position_embeddings=300)


def test_a_model_without_a_fingerprint_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(model: PreTrainedModel) -> str:
        raise UnsupportedModelError("no rotary positions")

    monkeypatch.setattr("kvfold.evaluation.comparison.fingerprint", refuse)
    model, stages = tiny_model(vocab_size=259), []
    kvfold.attach(model)
    with pytest.raises(UnsupportedModelError):
        compare(model, TOKENIZER, built_in(), QUICK, progress=lambda *stage: stages.append(stage))
    assert stages == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("nonsense",)}, "unknown method 'nonsense'"),
        ({"methods": ()}, "no method"),
        ({"methods": ("h2o", "h2o")}, "named twice"),
        ({"budget": "2.5"}, "more than the whole cache"),
        ({"max_new_tokens": 0}, "new tokens: 0 is below 1"),
        ({"chunk_size": -1}, "chunk size: -1 is below 1"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is 1234567.", True),
        ("1,234,567", True),
        ("It is 12345678.", False),
        ("91234567", False),
        ("1234 567", False),
        ("", False),
    ],
)
def test_numbers_are_found_whole(answer: str, right: bool) -> None:
    assert contains("1234567", answer) is right


def test_what_moved_between_tiers_is_told_after_the_answer() -> None:
    settings = replace(QUICK, methods=("sekv", "streaming"))
    _, sekv, streaming = run(settings=settings, eos_token_id=None).results
    assert isinstance(sekv.report.details, ZoomReport)
    assert isinstance(sekv.after_answer, ZoomReport)
    assert sekv.report.details.bytes_moved == 0, "reading a prompt at once expands nothing"
    assert sekv.after_answer.bytes_moved > 0
    assert streaming.after_answer is None
    document = sekv.to_dict()["after_answer"]
    assert document["bytes_moved"] == sekv.after_answer.bytes_moved  # type: ignore[index]


def test_files_say_what_was_found(found: Comparison, tmp_path: Path) -> None:
    numbers, chart = write_comparison(found, tmp_path / "new" / "folder")
    document = json.loads(numbers.read_text(encoding="utf-8"))
    assert document["settings"]["budget"] == "0.25"
    assert document["environment"]["kvfold"] == kvfold.__version__
    assert len(document["subject"]["fingerprint"]) == 64
    assert document["subject"]["document"]["tokens"] == 400
    assert [result["method"] for result in document["results"]] == ["full", "snapkv", "streaming"]
    report = document["results"][1]["report"]
    assert report["bytes_fast"] == found.results[1].report.bytes_fast
    rates = document["results"][2]["tokens_per_second"]
    assert rates["samples"] == list(found.results[2].tokens_per_second.samples)
    assert (rates["low"], rates["high"]) == (min(rates["samples"]), max(rates["samples"]))
    assert rates["low"] <= rates["median"] <= rates["high"]
    assert rates["count"] == 2
    pixels = imread(chart)
    assert min(pixels.shape[:2]) > 600
    assert sorted(path.name for path in numbers.parent.iterdir()) == ["compare.json", "compare.png"]
