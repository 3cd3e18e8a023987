"""What is asked of other libraries, and what becomes of their answers, on a tiny random model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import DynamicCache

import kvfold
from bench.peers import exchange, run
from kvfold.cache import prefill
from kvfold.errors import ArtifactError, ConfigError
from kvfold.evaluation.batch_decoding import Answer, left_padded
from kvfold.evaluation.fidelity import Fidelity, draw_all, evaluate
from kvfold.evaluation.fidelity_export import NUMBERS, write_report
from kvfold.evaluation.fidelity_record import read_fidelity
from kvfold.evaluation.fidelity_report import report_of
from kvfold.evaluation.fidelity_rows import FILE, Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.fidelity_tables import title_of
from kvfold.evaluation.peers import (
    ANSWERS,
    QUESTIONS,
    PeerAnswer,
    _ended,
    add_answers,
    same_as_full,
    write_questions,
)
from kvfold.text import encode
from tests.evaluation.public import write_data
from tests.tiny_folder import byte_tokenizer, save_tiny

TOKENIZER = byte_tokenizer()
SETTINGS = FidelitySettings(
    methods=(MethodSpec.parse("streaming"),),
    budgets=("0.1", "0.3"),
    sets=("wikitext", "niah", "niah-multivalue"),
    samples=2,
    lengths=(700,),
    tokens=5,
    protocol="agnostic",
)
FULL = exchange.REFERENCE


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVFOLD_DATA", str(write_data(tmp_path_factory.mktemp("data"))))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def evaluated(source: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Fidelity, Path]:
    folder = tmp_path_factory.mktemp("evaluated")
    model, tokenizer = kvfold.load(source)
    found = evaluate(model, tokenizer, SETTINGS, folder=folder, name=source)
    write_report(report_of(found), folder)
    return found, folder


@pytest.fixture
def folder(evaluated: tuple[Fidelity, Path], tmp_path: Path) -> Path:
    """A copy of the evaluation's folder."""
    for name in (FILE, NUMBERS):
        (tmp_path / name).write_bytes((evaluated[1] / name).read_bytes())
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, script, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
    script.main()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_answers(folder: Path, *answers: PeerAnswer) -> None:
    text = "".join(json.dumps(asdict(each)) + "\n" for each in answers)
    (folder / ANSWERS).write_text(text, encoding="utf-8")


def answer(question: dict, text: str = "", **options: object) -> PeerAnswer:
    values = {
        "id": question["id"],
        "peer": "other:one",
        "budget": "0.1",
        "tokens": encode(TOKENIZER, text),
        "divergences": [0.5, 1.5],
        "agreements": [True, False],
        "tokens_kept": 80,
        "bytes_held": 1000,
        "versions": {"other": "1"},
    }
    return PeerAnswer(**{**values, **options})  # pyright: ignore[reportArgumentType]


def pick(rows, method: str, name: str, budget: str = "0.1") -> list[Row]:
    return [row for row in rows if (row.method, row.set, row.budget) == (method, name, budget)]


def test_an_evaluation_is_read_back_as_it_was(evaluated: tuple[Fidelity, Path]) -> None:
    found, folder = evaluated
    read = read_fidelity(folder)
    assert read.settings.to_dict() == found.settings.to_dict()
    assert (read.rows, read.subject, read.command) == (found.rows, found.subject, found.command)
    assert report_of(read).summaries == report_of(found).summaries


def test_questions_are_the_tokens_that_caches_have_read(
    evaluated: tuple[Fidelity, Path], folder: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, exchange, "ask", folder)
    head, *questions = lines(folder / QUESTIONS)
    assert (head["model"], head["dtype"], head["budgets"]) == (source, "float32", ["0.1", "0.3"])
    samples = [each for found in draw_all(TOKENIZER, SETTINGS).values() for each in found]
    assert len(questions) == len({each["id"] for each in questions}) == len(samples) == 6
    model, _ = kvfold.load(source)
    for sample, question in zip(samples, questions, strict=True):
        assert question["context"] + question["question"] == sample.prompt
        assert len(question["question"]) == sample.question
        assert question["continuation"] == sample.continuation
        assert (question["set"], question["index"]) == (sample.set, sample.index)
        assert question["expected"] == list(sample.expected)
        cache = kvfold.make_cache(model, "streaming", budget=0.1)
        prefill(model, left_padded([question["context"]], 0, model.device)[0], cache)
        assert set(cache.report().tokens_kept) == {question["keep"]["0.1"]}


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_transformers_own_cache_says_what_the_full_cache_says(
    evaluated: tuple[Fidelity, Path],
    source: str,
    protocol: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = kvfold.load(source)
    settings = replace(SETTINGS, protocol=protocol, samples=1)
    found = evaluate(model, tokenizer, settings, folder=tmp_path, name=source)
    write_report(report_of(found), tmp_path)
    call(monkeypatch, exchange, "ask", tmp_path)
    call(monkeypatch, run, tmp_path, "--peers", FULL)
    call(monkeypatch, exchange, "merge", tmp_path)
    whole = read_fidelity(tmp_path)
    same = same_as_full(whole, FULL)
    assert same is not None
    assert (same.right, same.count) == (2, 2)
    for name in SETTINGS.sets:
        (row,), (full,) = (pick(whole.rows, each, name, "1.0") for each in (FULL, "full"))
        held = {"bytes_held": full.bytes_full, "bytes_fast": full.bytes_full}
        own = {"key": row.key, "divergences": row.divergences, "method": FULL, "nll": None}
        assert row == replace(full, **held, **own)
        assert row.divergences == pytest.approx(full.divergences, abs=1e-6)
    tables = (tmp_path / "eval.md").read_text(encoding="utf-8")
    assert tables.count(f"| {FULL} | 1.0 | 0.0000 (0.0000 to 0.0000) | 100.0% |") == 6


class LastTokens:
    """A press that leaves the last tokens of a cache."""

    layers = 0
    """That all of them have cut."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    @contextmanager
    def __call__(self, model) -> Iterator[None]:
        hooks = [
            layer.self_attn.register_forward_hook(self._behind, with_kwargs=True)
            for layer in model.model.layers
        ]
        yield
        for hook in hooks:
            hook.remove()

    def _behind(self, module, args, kwargs, output) -> None:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        self.forward_hook(module, args, {"past_key_values": cache}, output)

    def forward_hook(self, module, args, kwargs, output) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        kept = int(layer.keys.shape[2] * (1 - self.ratio))
        layer.keys, layer.values = (each[:, :, -kept:] for each in (layer.keys, layer.values))
        LastTokens.layers += 1


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> type[LastTokens]:
    together, alone = run.Peer(LastTokens), run.Peer(LastTokens, alone=True)
    monkeypatch.setattr(run, "peers", lambda: {"other:last": together, "other:alone": alone})
    monkeypatch.setattr(LastTokens, "layers", 0)
    return LastTokens


def test_a_press_keeps_as_much_as_our_caches_and_is_run_once(
    folder: Path, last: type[LastTokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, exchange, "ask", folder)
    call(monkeypatch, run, folder, "--peers", "other:last")
    assert last.layers == 3 * 2 * 6
    before = (folder / ANSWERS).read_bytes()
    call(monkeypatch, run, folder, "--peers", "other:last")
    assert (last.layers, (folder / ANSWERS).read_bytes()) == (3 * 2 * 6, before)
    call(monkeypatch, exchange, "merge", folder)
    rows = read_fidelity(folder).rows
    for question in lines(folder / QUESTIONS)[1:]:
        for budget, kept in question["keep"].items():
            row = pick(rows, "other:last", question["set"], budget)[question["index"]]
            whole = len(question["context"]) + len(question["question"])
            assert row.tokens_kept == kept + len(question["question"])
            assert row.bytes_held * whole == row.bytes_full * row.tokens_kept
            assert row.bytes_fast == row.bytes_held
            assert (row.kl or 0) >= 0
    assert max(row.kl or 0 for row in rows if row.method == "other:last") > 0.01


def test_reading_the_context_once_for_all_presses_changes_nothing(
    folder: Path, source: str, last: type[LastTokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, exchange, "ask", folder)
    call(monkeypatch, run, folder)
    found = {(each["peer"], each["budget"], each["id"]): each for each in lines(folder / ANSWERS)}
    assert len(found) == 2 * 2 * 6
    for (peer, budget, name), each in found.items():
        same = {**found["other:alone", budget, name], "peer": peer}
        assert each == {**same, "divergences": pytest.approx(same["divergences"], rel=1e-4)}


def test_an_answer_is_that_of_a_cache_left_alone(
    folder: Path, source: str, last: type[LastTokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, exchange, "ask", folder)
    call(monkeypatch, run, folder, "--peers", "other:last")
    question = next(each for each in lines(folder / QUESTIONS)[1:] if each["set"] == "niah")
    model = run.AutoModelForCausalLM.from_pretrained(source).eval()
    kept = (question["keep"]["0.1"] + 0.5) / len(question["context"])
    reader = run.Reader(model, DynamicCache(), last(1 - kept))
    reader.read_alone(question["context"])
    logits, said = reader.read(question["question"]), []
    for _ in range(question["max_new_tokens"]):
        said.append(int(logits.argmax()))
        logits = reader.read(said[-1:])
    (found,) = [
        each
        for each in lines(folder / ANSWERS)
        if (each["id"], each["budget"]) == (question["id"], "0.1")
    ]
    assert found["tokens"] == (said[: said.index(2)] if 2 in said else said)


def test_a_peer_that_fails_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(ratio: float) -> None:
        raise ValueError("no such head")

    monkeypatch.setattr(run, "peers", lambda: {"other:bad": run.Peer(fail), FULL: run.Peer()})
    call(monkeypatch, exchange, "ask", folder)
    with pytest.raises(SystemExit, match="1"):
        call(monkeypatch, run, folder)
    said = capsys.readouterr().err
    assert said.count("other:bad failed and is left out: ValueError: no such head") == 1
    assert {each["peer"] for each in lines(folder / ANSWERS)} == {FULL}
    assert len(lines(folder / ANSWERS)) == 6


def test_answers_are_judged_as_our_own(
    evaluated: tuple[Fidelity, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, exchange, "ask", folder)
    questions = lines(folder / QUESTIONS)[1:]
    text, needle, several = (
        next(each for each in questions if each["set"] == name) for name in SETTINGS.sets
    )
    write_answers(
        folder,
        answer(text),
        answer(needle, f" It is {needle['expected'][0]}.", budget="0.3"),
        answer(needle, "none"),
        answer(several, ", ".join(several["expected"][:2])),
    )
    whole = add_answers(folder, TOKENIZER, evaluated[0])
    assert whole.rows[: len(evaluated[0].rows)] == evaluated[0].rows
    (wrong,), (right,) = (pick(whole.rows, "other:one", "niah", b) for b in ("0.1", "0.3"))
    assert (right.answer, right.is_right) == (f"It is {needle['expected'][0]}.", True)
    assert (wrong.is_right, wrong.fault, wrong.answer_tokens) == (False, "wrong", 4)
    assert (wrong.kl, wrong.agreement, wrong.bytes_held) == (1.0, 0.5, 1000)
    (some,) = pick(whole.rows, "other:one", "niah-multivalue")
    assert (some.is_right, some.found) == (False, pytest.approx(2 / 3))
    (read,) = pick(whole.rows, "other:one", "wikitext")
    assert (read.answer, read.is_right, read.fault) == (None, None, None)
    titles = {
        each.group: title_of(each.group, [each, *report_of(whole).summaries])
        for each in report_of(whole).summaries
    }
    assert titles["niah"] == "niah: 1 to 6 samples"


def test_a_peers_answer_ends_at_the_strings_of_its_set() -> None:
    tokens = TOKENIZER.encode("\nred\nDialogue", add_special_tokens=False)
    found = _ended(TOKENIZER, tokens, len(tokens), ("\n",))
    assert (TOKENIZER.decode(found.tokens), found.is_cut) == ("\nred\n", False)
    assert _ended(TOKENIZER, tokens, len(tokens), ("Q:",)) == Answer(tokens, True)
    assert _ended(TOKENIZER, tokens, len(tokens), ()) == Answer(tokens, True)


def test_merging_again_changes_nothing(
    evaluated: tuple[Fidelity, Path], folder: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, exchange, "ask", folder)
    first, second = lines(folder / QUESTIONS)[3:5]
    write_answers(folder, answer(first, "a"), answer(second, "b"), answer(first, "c"))
    call(monkeypatch, exchange, "merge", folder)
    once, stored = read_fidelity(folder).rows, (folder / FILE).read_bytes()
    assert [row.answer for row in once if row.method == "other:one"] in (["b", "c"], ["c", "b"])
    call(monkeypatch, exchange, "merge", folder)
    assert (read_fidelity(folder).rows, (folder / FILE).read_bytes()) == (once, stored)
    model, tokenizer = kvfold.load(source)
    again = evaluate(model, tokenizer, SETTINGS, folder=folder, resume=True, name=source)
    assert again.rows == evaluated[0].rows
    assert len(lines(folder / FILE)) == len(evaluated[0].rows) + 2


@pytest.mark.parametrize("changed", [{"id": "0" * 64}, {"peer": "streaming"}])
def test_answers_to_something_else_are_refused(
    evaluated: tuple[Fidelity, Path],
    folder: Path,
    changed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call(monkeypatch, exchange, "ask", folder)
    write_answers(folder, answer(lines(folder / QUESTIONS)[1], **changed))
    with pytest.raises(ArtifactError, match=r"answers what questions\.jsonl does not ask"):
        add_answers(folder, TOKENIZER, evaluated[0])


def test_missing_and_damaged_files_say_what_to_do(
    evaluated: tuple[Fidelity, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArtifactError, match=r"questions\.jsonl is missing or damaged"):
        add_answers(folder, TOKENIZER, evaluated[0])
    call(monkeypatch, exchange, "ask", folder)
    (folder / ANSWERS).write_text('{"id": "a"}\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"answers\.jsonl is missing or damaged \(TypeError"):
        add_answers(folder, TOKENIZER, evaluated[0])
    (folder / NUMBERS).write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="is damaged or not kvfold's"):
        read_fidelity(folder)
    with pytest.raises(SystemExit, match=r"run kvfold eval --out .* first"):
        call(monkeypatch, exchange, "merge", folder / "none")


def test_other_samples_than_those_judged_are_not_asked(
    evaluated: tuple[Fidelity, Path], folder: Path, source: str
) -> None:
    found = evaluated[0]
    model, tokenizer = kvfold.load(source)
    for other in (
        replace(found, settings=replace(found.settings, seed=1)),
        replace(found, subject=replace(found.subject, fingerprint="0")),
    ):
        with pytest.raises(ConfigError, match="are no longer those of the results"):
            write_questions(folder, model, tokenizer, other, source=source)
    assert not (folder / QUESTIONS).exists()
