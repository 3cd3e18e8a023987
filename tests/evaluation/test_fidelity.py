"""Evaluations of fidelity on a tiny random model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.bench.memory import peak_resident
from kvfold.cache import prefill
from kvfold.errors import ArtifactError, ConfigError
from kvfold.evaluation.batch_decoding import answer_greedily
from kvfold.evaluation.divergence import divergence, forced_logits
from kvfold.evaluation.fidelity import evaluate
from kvfold.evaluation.fidelity_batch import BatchRunner
from kvfold.evaluation.fidelity_costs import costs
from kvfold.evaluation.fidelity_found import Fidelity
from kvfold.evaluation.fidelity_rows import FILE, LOCK, Row, RowStore
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.generation import generate
from kvfold.evaluation.prompt_batch import PromptBatch
from kvfold.evaluation.samples import draw_samples
from tests.evaluation.public import write_data
from tests.tiny import tiny_model
from tests.tiny_folder import byte_tokenizer

TOKENIZER = byte_tokenizer()
METHODS = ("streaming", "snapkv", "short=h2o:recent=8+scope=token", "same=full")
SETTINGS = FidelitySettings(
    methods=tuple(map(MethodSpec.parse, METHODS)),
    budgets=("0.25", "64"),
    sets=("hotpotqa", "wikitext"),
    samples=3,
    lengths=(280,),
    tokens=6,
    max_new_tokens=8,
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
    folder = tmp_path_factory.mktemp("evaluated")
    return evaluate(model, TOKENIZER, SETTINGS, folder=folder), folder


@pytest.fixture
def found(evaluated: tuple[Fidelity, Path], tmp_path: Path) -> Fidelity:
    """What was found; its folder is copied to `out`."""
    shutil.copytree(evaluated[1], tmp_path / "out")
    return evaluated[0]


def pick(rows: Sequence[Row], method: str, budget: str, name: str) -> list[Row]:
    return [row for row in rows if (row.method, row.budget, row.set) == (method, budget, name)]


def nats(row: Row) -> float:
    """Of a text; -1 where there are none."""
    return -1.0 if row.nll is None else row.nll


def assert_alike(rows: Sequence[Row], others: Sequence[Row]) -> None:
    """The same but for rounding, and for what is held of a batch as a whole."""
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.divergences == pytest.approx(other.divergences, rel=1e-3, abs=1e-5)
        held = dict.fromkeys(("tokens_kept", "bytes_held", "bytes_fast", "bytes_full"), 0)
        assert nats(row) == pytest.approx(nats(other), rel=1e-4)
        whole = {"divergences": [], "nll": None, **held}
        assert replace(row, **whole) == replace(other, **whole)


def test_there_is_a_row_for_each_sample_method_and_budget(found: Fidelity) -> None:
    runs = list(dict.fromkeys((row.method, row.budget) for row in found.rows))
    evicting = [
        (name, budget) for name in ("streaming", "snapkv", "short") for budget in ("0.25", "64")
    ]
    assert runs == [("full", "1.0"), *evicting, ("same", "1.0")]
    assert len(found.rows) == len({(r.method, r.budget, r.set, r.index) for r in found.rows}) == 48
    for row in found.rows:
        assert len(row.divergences) == len(row.agreements) == (row.answer_tokens or 6)
        assert (row.answer is None) == (row.kind == "text") == (row.nll is not None)


def test_full_is_at_no_distance_from_itself(found: Fidelity) -> None:
    for name in SETTINGS.sets:
        reference, same = (
            pick(found.rows, "full", "1.0", name),
            pick(found.rows, "same", "1.0", name),
        )
        for row, other in zip(reference, same, strict=True):
            assert row.kl == 0
            assert other.kl is not None
            assert other.kl < 1e-6
            assert row.agreement == other.agreement == 1
            assert nats(row) == pytest.approx(nats(other), rel=1e-5)
            assert (row.answer, row.is_right, row.fault) == (
                other.answer,
                other.is_right,
                other.fault,
            )
            assert row.bytes_held >= row.bytes_full > 0


def test_methods_differ_and_keep_to_their_budget(found: Fidelity) -> None:
    for row in found.rows:
        if row.method in ("streaming", "snapkv", "short"):
            assert row.kl is not None
            assert row.kl > 1e-4
            assert row.tokens_kept <= (64 if row.budget == "64" else 280 // 4)
            assert row.bytes_held < row.bytes_full / 2


def test_rows_of_a_batch_equal_single_runs(
    found: Fidelity, model: PreTrainedModel, tmp_path: Path
) -> None:
    lengths = {row.prompt_tokens for row in found.rows if row.set == "hotpotqa"}
    assert len(lengths) > 1, "some are padded"
    single = evaluate(model, TOKENIZER, replace(SETTINGS, batch=1), folder=tmp_path / "single")
    assert_alike(found.rows, single.rows)


def test_numbers_are_those_of_one_cache_fed_by_hand(
    found: Fidelity, model: PreTrainedModel
) -> None:
    (text, *_) = draw_samples(TOKENIZER, "wikitext", 1, length=280, tokens=6)
    assert text.continuation is not None
    prompt = torch.tensor([text.prompt])
    full, held = kvfold.make_cache(model, "full"), kvfold.make_cache(model, "snapkv", budget=0.25)
    prefill(model, prompt, full)
    prefill(model, prompt, held)
    expected = divergence(
        model, held, text.continuation, list(forced_logits(model, full, text.continuation)), seed=0
    )
    row = pick(found.rows, "snapkv", "0.25", "wikitext")[0]
    assert expected is not None
    assert row.kl == pytest.approx(expected.kl.mean, rel=1e-4)
    assert row.agreement == pytest.approx(expected.agreement)


@pytest.mark.parametrize(("method", "budget"), [("full", "1.0"), ("snapkv", "0.25")])
def test_likelihoods_are_those_of_the_text_fed_by_hand(
    method: str, budget: str, found: Fidelity, model: PreTrainedModel
) -> None:
    (text, *_) = draw_samples(TOKENIZER, "wikitext", 1, length=280, tokens=6)
    assert text.continuation is not None
    first, *rest = text.continuation
    options = {} if method == "full" else {"budget": float(budget)}
    cache = kvfold.make_cache(model, method, **options)
    prefill(model, torch.tensor([text.prompt]), cache)
    logits = list(forced_logits(model, cache, [first, *rest[:-1]]))
    lost = [-each.log_softmax(-1)[token] for each, token in zip(logits, rest, strict=True)]
    row = pick(found.rows, method, budget, "wikitext")[0]
    assert row.nll == pytest.approx(float(sum(lost)) / 5, rel=1e-4)


def test_answers_are_those_of_greedy_decoding(found: Fidelity, model: PreTrainedModel) -> None:
    samples = draw_samples(TOKENIZER, "hotpotqa", 3, length=280)
    differ = 0
    for method, budget in (("full", None), ("streaming", "64")):
        rows = pick(found.rows, method, budget or "1.0", "hotpotqa")
        for sample, row in zip(samples, rows, strict=True):
            cache = kvfold.make_cache(model, method, budget=budget)
            logits = prefill(model, torch.tensor([sample.prompt]), cache)
            answer = list(generate(model, cache, logits, max_new_tokens=8))
            assert row.answer == str(TOKENIZER.decode(answer, skip_special_tokens=True)).strip()
            assert row.answer_tokens == 8
            differ += row.answer != pick(found.rows, "full", "1.0", "hotpotqa")[row.index].answer
    assert differ, "some answers are the method's own"


def test_nothing_counts_after_an_answer_has_ended(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = draw_samples(TOKENIZER, "hotpotqa", 3, length=280)
    prompts = [sample.prompt for sample in samples]

    def answers(stop: set[int]):
        decoder = PromptBatch(model, prompts, pad=0).decoder()
        return answer_greedily(decoder, limit=8, stop=frozenset(stop))[0]

    whole = answers(set())
    stop = next(token for token in whole[0].tokens if token != whole[1].tokens[0])
    cut = answers({stop})
    for before, after in zip(whole, cut, strict=True):
        end = before.tokens.index(stop) if stop in before.tokens else 8
        assert after.tokens == before.tokens[:end]
        assert after.is_cut == (end == 8)
    monkeypatch.setattr(model.generation_config, "eos_token_id", stop)
    settings = replace(SETTINGS, sets=("hotpotqa",), budgets=("0.25",))
    rows = evaluate(model, TOKENIZER, settings, folder=tmp_path / "ended").rows
    for row in rows:
        assert len(row.divergences) == len(cut[row.index].tokens)
    assert [row.kl for row in rows if not cut[row.index].tokens] == [None] * sum(
        not answer.tokens for answer in cut for _ in range(5)
    )
    single = evaluate(model, TOKENIZER, replace(settings, batch=1), folder=tmp_path / "one").rows
    assert_alike(rows, single)


def test_every_row_says_what_its_batch_took(found: Fidelity) -> None:
    for row in found.rows:
        assert row.batch_rows == 3
        assert row.first_token_seconds is not None
        assert row.tokens_per_second is not None
        assert row.bytes_peak is not None
        assert 0 < row.first_token_seconds < 60
        assert row.tokens_per_second > 0
        assert row.bytes_held <= row.bytes_peak < 1.2 * row.bytes_held
        taken = (row.set, row.method, row.budget)
        others = [each for each in found.rows if (each.set, each.method, each.budget) == taken]
        assert {each.tokens_per_second for each in others} == {row.tokens_per_second}
    if peak_resident() is not None:
        assert found.process_peak is not None
        assert found.process_peak > found.rows[0].bytes_held


def test_old_rows_are_read_without_what_they_took(
    found: Fidelity, model: PreTrainedModel, tmp_path: Path
) -> None:
    path = tmp_path / "out" / FILE
    lines = path.read_text(encoding="utf-8").splitlines()
    later = {"batch_rows", "first_token_seconds", "tokens_per_second", "bytes_peak"}
    documents = [
        {name: value for name, value in json.loads(line).items() if name not in later}
        for line in lines
    ]
    rows = [Row.from_dict(each) for each in documents]
    assert {row.bytes_peak for row in rows} == {None}
    assert rows == [Row.from_dict(json.loads(line)) for line in lines], "else they are the same"
    assert costs(rows) == []
    path.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    again = evaluate(model, TOKENIZER, SETTINGS, folder=tmp_path / "out", resume=True)
    assert again.rows == found.rows


def test_resume_takes_what_is_there(
    found: Fidelity, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    compare = BatchRunner.compare

    def count(self, cache, reference):
        calls.append(cache.spec.method)
        return compare(self, cache, reference)

    monkeypatch.setattr(BatchRunner, "compare", count)
    again = evaluate(model, TOKENIZER, SETTINGS, folder=tmp_path / "out", resume=True)
    assert calls == []
    assert again.rows == found.rows
    assert again.process_peak is None, "this process has computed nothing"
    more = replace(SETTINGS, samples=4, methods=(*SETTINGS.methods[:1], MethodSpec("tova", "tova")))
    resumed = evaluate(model, TOKENIZER, more, folder=tmp_path / "out", resume=True)
    old, new = ["tova"] * 2, ["streaming"] * 2 + ["tova"] * 2
    assert calls == [*old, *new, *old, *new]
    fresh = evaluate(model, TOKENIZER, more, folder=tmp_path / "fresh")
    assert_alike(resumed.rows, fresh.rows)


def test_an_interrupted_run_goes_on(
    found: Fidelity, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, left = BatchRunner.compare, [5]

    def stop(self, cache, reference):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return compare(self, cache, reference)

    with monkeypatch.context() as patched:
        patched.setattr(BatchRunner, "compare", stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, TOKENIZER, SETTINGS, folder=tmp_path / "half")
    lines = (tmp_path / "half" / FILE).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6 * 3
    assert {path.name for path in (tmp_path / "half").iterdir()} == {FILE, LOCK}
    resumed = evaluate(model, TOKENIZER, SETTINGS, folder=tmp_path / "half", resume=True)
    assert resumed.rows == found.rows


def test_two_that_write_into_one_folder_lose_nothing(found: Fidelity, tmp_path: Path) -> None:
    one, other = (RowStore(tmp_path / "both", Row.from_dict, resume=True) for _ in range(2))
    rows = [row for row in found.rows if row.method != "same"]
    for number, row in enumerate(rows):
        (other if number % 2 else one).add([row])
    kept = RowStore(tmp_path / "both", Row.from_dict, resume=True)
    assert [kept.find(row.key) for row in rows] == rows
    assert one.find(rows[1].key) == rows[1], "known, too, once it has written"


def test_other_settings_take_no_rows_and_labels_may_change(
    found: Fidelity, model: PreTrainedModel, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    short = replace(SETTINGS, sets=("wikitext",), tokens=4)
    other = evaluate(model, TOKENIZER, short, folder=out, resume=True)
    assert {len(row.divergences) for row in other.rows} == {4}
    assert {row.key for row in other.rows}.isdisjoint(row.key for row in found.rows)
    renamed = replace(SETTINGS, methods=(MethodSpec("again", "snapkv"),), budgets=("25%",))
    rows = evaluate(model, TOKENIZER, renamed, folder=out, resume=True).rows
    before = pick(found.rows, "snapkv", "0.25", "wikitext")
    assert pick(rows, "again", "0.25", "wikitext") == [replace(r, method="again") for r in before]


def test_results_are_not_written_over_nor_guessed(
    found: Fidelity, model: PreTrainedModel, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="holds results: give --resume"):
        evaluate(model, TOKENIZER, SETTINGS, folder=out)
    (out / FILE).write_text('{"key": 1}\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"results.jsonl is damaged"):
        evaluate(model, TOKENIZER, SETTINGS, folder=out, resume=True)


def test_the_file_has_the_rows(found: Fidelity, tmp_path: Path) -> None:
    lines = (tmp_path / "out" / FILE).read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    assert {Row.from_dict(each).key for each in documents} == {row.key for row in found.rows}
    assert all(each["kl"] is not None for each in documents)


def test_progress_goes_from_start_to_end(model: PreTrainedModel, tmp_path: Path) -> None:
    shares: list[float] = []
    settings = replace(SETTINGS, samples=2, batch=1, sets=("wikitext",), max_new_tokens=2)
    evaluate(
        model,
        TOKENIZER,
        settings,
        folder=tmp_path / "told",
        on_progress=lambda _, share: shares.append(share),
    )
    assert shares == sorted(shares)
    assert (shares[0], len(shares)) == (0, 2 * 8)
    assert 0.9 < shares[-1] < 1


def test_options_reach_the_cache_and_are_checked_first(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    for text, message in (
        ("snapkv:kernal=3", "snapkv has no option 'kernal'"),
        ("distill:policy=nowhere", "there is no policy at nowhere"),
    ):
        settings = replace(SETTINGS, methods=(MethodSpec.parse(text),))
        with pytest.raises((ConfigError, ArtifactError), match=message):
            evaluate(model, TOKENIZER, settings, folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_prompt_longer_than_the_model_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2048 positions: give a smaller length"):
        evaluate(model, TOKENIZER, replace(SETTINGS, lengths=(2045,)), folder=tmp_path / "long")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("h2o", MethodSpec("h2o", "h2o")),
        (" a = h2o ", MethodSpec("a", "h2o")),
        (
            "short=distill:policy=/a+b/c=d+every=1",
            MethodSpec("short", "distill", {"policy": "/a+b/c=d", "every": 1}),
        ),
        (
            "random:seed=-3+scope=layer",
            MethodSpec("random:seed=-3+scope=layer", "random", {"seed": -3, "scope": "layer"}),
        ),
    ],
)
def test_methods_are_read(text: str, spec: MethodSpec) -> None:
    assert MethodSpec.parse(text) == spec


@pytest.mark.parametrize("text", ["", "=h2o", "a=", "h2o:", "h2o:recent", "h2o:recent=", "best"])
def test_unreadable_methods_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|has no value|unknown method"):
        MethodSpec.parse(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": (MethodSpec("full", "full"),)}, "no method is named"),
        ({"methods": (MethodSpec("a", "h2o"), MethodSpec("a", "tova"))}, "'a' is named twice"),
        ({"budgets": ()}, "no budget"),
        ({"budgets": ("25%", "0.25")}, "budget '0.25' is named twice"),
        ({"budgets": ("64MiB",)}, "shared by a batch"),
        ({"budgets": ("2.5",)}, "more than the whole cache"),
        ({"sets": ()}, "no set"),
        ({"sets": ("ruler",)}, "unknown set 'ruler'"),
        ({"sets": ("niah", "niah")}, "named twice"),
        ({"samples": 0}, "samples: 0 is below 1"),
        ({"max_new_tokens": 0}, "max new tokens: 0 is below 1"),
        ({"baseline": "distill"}, "baseline 'distill' is not measured: choose from streaming"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **options)  # pyright: ignore[reportArgumentType]
