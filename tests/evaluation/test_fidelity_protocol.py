"""Questions that come after the cut, several lengths and depths, on a tiny random model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import prefill
from kvfold.errors import ConfigError
from kvfold.evaluation.divergence import divergence, forced_logits
from kvfold.evaluation.fidelity import evaluate
from kvfold.evaluation.fidelity_batch import BatchRunner
from kvfold.evaluation.fidelity_found import Fidelity
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.generation import generate
from kvfold.evaluation.sample import Sample
from kvfold.evaluation.samples import draw_samples
from tests.evaluation.public import write_data
from tests.tiny import tiny_model
from tests.tiny_folder import byte_tokenizer

TOKENIZER = byte_tokenizer()
ANSWER = 6
SETTINGS = FidelitySettings(
    methods=tuple(map(MethodSpec.parse, ("snapkv", "sekv:shortest=4+longest=8"))),
    budgets=("0.3",),
    sets=("niah", "niah-multivalue"),
    samples=4,
    lengths=(800, 900),
    tokens=5,
    max_new_tokens=ANSWER,
    protocol="agnostic",
    depths=3,
    batch=3,
)


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVFOLD_DATA", str(write_data(tmp_path_factory.mktemp("data"))))
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = tiny_model(vocab_size=259)
    kvfold.attach(model)
    return model


@pytest.fixture(scope="module")
def evaluated(
    model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Fidelity, Path]:
    folder = tmp_path_factory.mktemp("agnostic")
    return evaluate(model, TOKENIZER, SETTINGS, folder=folder), folder


def samples(name: str, length: int) -> list[Sample]:
    return draw_samples(TOKENIZER, name, 4, length=length - ANSWER, depths=3)


def pick(rows: Sequence[Row], method: str, name: str, length: int) -> list[Row]:
    found = [row for row in rows if (row.method, row.set, row.length) == (method, name, length)]
    return sorted(found, key=lambda row: row.index)


def test_there_is_a_row_for_each_length_with_its_depth(evaluated: tuple[Fidelity, Path]) -> None:
    rows = evaluated[0].rows
    assert len(rows) == len({row.key for row in rows}) == 3 * 2 * 2 * 4
    for name in SETTINGS.sets:
        for length in SETTINGS.lengths:
            own = pick(rows, "snapkv", name, length)
            assert [row.depth for row in own] == [0.0, 0.5, 1.0, 0.0]
            assert {row.prompt_tokens for row in own} == {length - ANSWER}
            assert {row.protocol for row in own} == {"agnostic"}
            assert {row.found is None for row in own} == {name == "niah"}
    assert sorted(evaluated[0].subject.samples) == [
        *("niah at 800", "niah at 900", "niah-multivalue at 800", "niah-multivalue at 900"),
    ]


def test_bytes_are_told_by_tier(evaluated: tuple[Fidelity, Path]) -> None:
    for row in evaluated[0].rows:
        if row.method.startswith("sekv"):
            assert 0 < row.bytes_fast < row.bytes_held
            assert row.bytes_fast < 0.35 * row.bytes_full
        else:
            assert row.bytes_fast == row.bytes_held


@pytest.mark.parametrize("method", ["snapkv", "sekv:shortest=4+longest=8"])
def test_numbers_are_those_of_one_cache_that_reads_the_question_later(
    evaluated: tuple[Fidelity, Path], model: PreTrainedModel, method: str
) -> None:
    sample, spec = samples("niah", 800)[1], MethodSpec.parse(method)
    row = pick(evaluated[0].rows, method, "niah", 800)[1]
    parts = torch.tensor([sample.prompt]).split(
        [len(sample.prompt) - sample.question, sample.question], dim=1
    )
    full = kvfold.make_cache(model, "full")
    held = kvfold.make_cache(model, spec.method, budget=0.3, **spec.options)
    logits = [[prefill(model, part, cache) for part in parts][-1] for cache in (full, held)]
    report = held.report()
    said = list(generate(model, full.fork(), logits[0], max_new_tokens=ANSWER))
    own = list(generate(model, held.fork(), logits[1], max_new_tokens=ANSWER))
    expected = divergence(model, held, said, list(forced_logits(model, full, said)), seed=0)
    assert expected is not None
    assert row.kl == pytest.approx(expected.kl.mean, rel=1e-3)
    assert row.answer == str(TOKENIZER.decode(own, skip_special_tokens=True)).strip()
    assert (row.bytes_fast, row.bytes_full) == (report.bytes_fast, report.bytes_full)


def test_the_question_is_known_to_the_cut_by_the_other_protocol(
    evaluated: tuple[Fidelity, Path], model: PreTrainedModel, tmp_path: Path
) -> None:
    one = replace(SETTINGS, lengths=(800,), sets=("niah",), methods=SETTINGS.methods[:1])
    aware = replace(one, protocol="aware", lengths=(800 - ANSWER,))
    early = evaluate(model, TOKENIZER, aware, folder=tmp_path / "aware").rows
    late = evaluated[0].rows
    pairs = [
        (pick(early, name, "niah", 800 - ANSWER), pick(late, name, "niah", 800))
        for name in ("full", "snapkv")
    ]
    for own, other in pairs:
        assert {row.key for row in own}.isdisjoint(row.key for row in other)
        assert {row.protocol for row in own} == {"aware"}
    (full, snapkv) = pairs
    assert [row.answer for row in full[0]] == [row.answer for row in full[1]]
    assert [row.kl for row in snapkv[0]] != [row.kl for row in snapkv[1]]


def test_texts_have_no_question_and_leave_room_for_what_follows(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    one = replace(SETTINGS, lengths=(405,), sets=("wikitext",), methods=SETTINGS.methods[:1])
    late = evaluate(model, TOKENIZER, one, folder=tmp_path / "late").rows
    aware = replace(one, protocol="aware", lengths=(400,))
    early = evaluate(model, TOKENIZER, aware, folder=tmp_path / "early").rows
    assert {row.prompt_tokens for row in late} == {400}
    for row, other in zip(late, early, strict=True):
        assert row.divergences == pytest.approx(other.divergences, rel=1e-6)


def test_resume_takes_other_lengths_as_they_are(
    evaluated: tuple[Fidelity, Path],
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[list[int]] = []
    refer = BatchRunner.refer

    def count(self, batch, **options):
        batches.append([len(sample.prompt) for sample in batch])
        return refer(self, batch, **options)

    monkeypatch.setattr(BatchRunner, "refer", count)
    again = evaluate(model, TOKENIZER, SETTINGS, folder=evaluated[1], resume=True)
    assert (again.rows, batches) == (evaluated[0].rows, [])
    more = replace(SETTINGS, lengths=(800, 850))
    evaluate(model, TOKENIZER, more, folder=evaluated[1], resume=True)
    assert {length for batch in batches for length in batch} == {850 - ANSWER}


def test_one_batch_is_in_memory_at_a_time(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    others: list[int] = []
    refer = BatchRunner.refer

    def count(self, batch, **options):
        others.append(len(alive))
        reference = refer(self, batch, **options)
        alive.add(reference.prompts)
        return reference

    monkeypatch.setattr(BatchRunner, "refer", count)
    settings = replace(SETTINGS, batch=1, sets=("niah",), lengths=(800,), samples=3)
    evaluate(model, TOKENIZER, settings, folder=tmp_path / "one")
    assert others == [0, 0, 0]


def test_long_prompts_run_in_smaller_batches() -> None:
    sizes = [replace(SETTINGS, batch=8).batch_at(length) for length in (768, 2048, 8192, 32768)]
    assert sizes == [8, 4, 1, 1]


def test_the_answer_has_to_fit_into_the_length(model: PreTrainedModel, tmp_path: Path) -> None:
    fits = replace(SETTINGS, lengths=(2048,), samples=1, sets=("niah",))
    assert evaluate(model, TOKENIZER, fits, folder=tmp_path / "fits").rows[0].length == 2048
    with pytest.raises(ConfigError, match="2048 positions: give a smaller length"):
        evaluate(model, TOKENIZER, replace(fits, lengths=(800, 2049)), folder=tmp_path / "long")
    assert not (tmp_path / "long").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "later"}, "protocol 'later' is not one of aware, agnostic"),
        ({"depths": 1}, "depths: 1 is below 2"),
        ({"lengths": ()}, "no length is named"),
        ({"lengths": (800, 800)}, "length '800' is named twice"),
        ({"lengths": (800, 0)}, "length: 0 is below 1"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **options)  # pyright: ignore[reportArgumentType]


def test_a_length_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="length 6 leaves no room for a prompt before 6 more"):
        SETTINGS.prompt_length("niah", ANSWER)


def test_rows_of_before_are_read(evaluated: tuple[Fidelity, Path]) -> None:
    row = evaluated[0].rows[0]
    document = row.to_dict()
    for name in ("length", "depth", "protocol", "found", "bytes_fast"):
        del document[name]
    old = Row.from_dict(document)
    assert (old.depth, old.protocol, old.bytes_fast) == (None, "aware", row.bytes_held)
    with pytest.raises(KeyError):
        Row.from_dict({name: value for name, value in document.items() if name != "budget"})
