"""Public benchmarks: what is read of their files, what is asked, what is cut, how answers end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvfold
from kvfold.errors import ConfigError
from kvfold.evaluation.answers import before_stop
from kvfold.evaluation.batch_decoding import Answer
from kvfold.evaluation.benchmarks import TASKS, cut_middle
from kvfold.evaluation.fidelity import evaluate
from kvfold.evaluation.fidelity_report import report_of
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.fidelity_tables import title_of
from kvfold.evaluation.sample import Sample
from kvfold.evaluation.samples import SETS, draw_samples, expand_sets, require_sets
from kvfold.evaluation.scores import METRICS
from kvfold.evaluation.verdict import judge_answer
from tests.evaluation.benchmark_data import ROWS
from tests.evaluation.prompts import parts
from tests.evaluation.public import write_data
from tests.tiny import tiny_model
from tests.tiny_folder import byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_data(tmp_path / "data")
    monkeypatch.setenv("KVFOLD_DATA", str(folder))
    return folder


def first(name: str, length: int = 2500) -> Sample:
    return draw_samples(TOKENIZER, name, 1, length=length)[0]


def text_of(sample: Sample) -> str:
    return str(TOKENIZER.decode(sample.prompt))


def test_the_table_has_the_tasks_of_each_benchmark() -> None:
    counts = {name: sum(task.benchmark == name for task in TASKS.values()) for name in _COUNTS}
    assert counts == _COUNTS
    assert len(TASKS) == sum(_COUNTS.values())
    assert all(task.metric in METRICS and task.new_tokens > 0 for task in TASKS.values())
    assert all(task.prompt.count("{context}") == 1 for task in TASKS.values())


_COUNTS = {
    "longbench": 21,
    "infinitebench": 12,
    "ruler": 13,
    "bbh": 27,
    "cmrc2018": 2,
    "hotpotqa": 1,
    "gsm8k": 2,
}


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("longbench/hotpotqa", 32, ("red", "never said")),
        ("longbench/trec", 64, ("Colour",)),
        ("longbench/gov_report", 512, ("red", "never said")),
        ("longbench/passage_retrieval_zh", 32, ("段落3", "never said")),
        ("infinitebench/passkey", 6, ("71432",)),
        ("infinitebench/longbook_choice_eng", 40, ("Cid", "C")),
        ("infinitebench/longbook_sum_eng", 1200, ("Cid",)),
        ("infinitebench/math_find", 3, ("48.5",)),
        ("infinitebench/math_calc", 30000, ("4", "8")),
        ("infinitebench/code_run", 5, ("-7",)),
        ("infinitebench/code_debug", 5, ("Cid", "C")),
        ("ruler/niah_single_1", 128, ("green", "grass")),
        ("ruler/vt", 30, ("green", "grass")),
        ("bbh/boolean_expressions", 512, ("False",)),
        ("cmrc2018/trial", 64, ("北京大学", "北大")),
    ],
)
def test_what_is_expected_and_how_long_it_may_be(
    name: str, limit: int, expected: tuple[str, ...], data: Path
) -> None:
    assert first(name).expected == expected
    assert SETS[name].new_tokens == limit


def test_the_question_stands_apart_in_the_official_prompt(data: Path) -> None:
    document, question = parts(first("longbench/hotpotqa"))
    assert document.startswith("<s><user>Answer the question based on the given passages.")
    assert document.endswith("is red {today}. ")
    assert question.endswith("\nAnswer:<assistant>")
    assert "Question: What is number" in question
    document, question = parts(first("infinitebench/longbook_choice_eng"))
    assert document.startswith("Read the book and answer the question.\n\nChapter")
    assert question.endswith(
        "A. Ann\nB. Bob\nC. Cid\nD. Dan\n\nThe letter of the correct answer is"
    )


def test_what_an_input_names_stands_in_the_prompt(data: Path) -> None:
    document, question = parts(first("infinitebench/math_find"))
    assert document.startswith(
        "What is the second largest number in the following list?\n\nChapter"
    )
    assert question.endswith("\n\nOne number, no words. The second largest number of the list is:")
    sample = first("infinitebench/code_run")
    document, question = parts(sample)
    number = document.partition("called func_")[2].partition(" ")[0]
    assert document.startswith(f"There is a function called func_{number} in the following Python")
    assert question.endswith(
        f"of func_{number}(-{number}). The value of func_{number}(-{number}) is"
    )


def test_an_input_that_names_nothing_is_refused(data: Path) -> None:
    path = data / "infinitebench" / "code_run.jsonl"
    path.write_text('{"context": "a", "answer": 1, "input": "f(2)"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"code_run\.jsonl is not as infinitebench .*has nothing"):
        first("infinitebench/code_run")


def test_few_shot_tasks_stay_out_of_the_chat_template(data: Path) -> None:
    for name, task in TASKS.items():
        assert text_of(first(name)).startswith("<s><user>") == task.chat
    assert not TASKS["longbench/samsum"].chat
    assert first("longbench/trec").classes == ("Animal", "Colour", "Colour of hair")


def test_rulers_answers_begin_as_its_rows_say(data: Path) -> None:
    document, question = parts(first("ruler/vt"))
    assert question.startswith("Question: Find all variables")
    assert question.endswith("in the text above.<assistant> Answer:")
    assert "Question: none." in document
    document, question = parts(first("ruler/qa_1"))
    assert document.startswith("<s><user>Answer the question based on the given documents.\n")
    assert question.startswith("Answer the question based on the given documents. Only")


def test_worked_examples_come_without_their_warning(data: Path) -> None:
    document, question = parts(first("bbh/boolean_expressions"))
    assert document.startswith("Evaluate.\n\nQ: not 77 is\n")
    assert "keep out" not in document
    assert question.startswith("\n\nQ: not ")
    assert question.endswith(" is\nA: Let's think step by step.\n")


def test_paragraphs_are_told_as_passages(data: Path) -> None:
    document, _ = parts(first("hotpotqa/distractor"))
    assert "Passage 1:\nRiver " in document
    assert "\n\nPassage 2:\nGuide " in document


def test_problems_come_after_worked_ones_that_are_never_asked(data: Path) -> None:
    for sample in draw_samples(TOKENIZER, "gsm8k/8-shot", ROWS, length=2500):
        document, question = parts(sample)
        worked = [f"finds {number}. How many?\nAnswer: There are 1000" for number in range(9, 17)]
        assert document.startswith("Question: Ann has 1000 shells and finds 9. How many?")
        assert document.endswith("\nAnswer: There are 1000 + 16 = 1016 shells.\n#### 1016")
        assert [document.count(each) for each in worked] == [1] * 8
        number = int(sample.expected[0]) - 1000
        assert 1 <= number <= 8
        assert (
            question == f"\n\nQuestion: Ann has 1000 shells and finds {number}. How many?\nAnswer:"
        )
    document, _ = parts(first("gsm8k/50-shot", 8000))
    assert document.count("####") == 50


@pytest.mark.parametrize(
    ("question", "room", "kept"),
    [
        (4, 14, "abcdefghij"),
        (4, 12, "abcdefij"),
        (4, 11, "abcdej"),
        (4, 9, "abcd"),
        (4, 8, "abcd"),
        (4, 6, "ab"),
        (4, 5, "a"),
        (4, 4, None),
    ],
)
def test_the_middle_is_cut(question: int, room: int, kept: str | None) -> None:
    found = cut_middle([ord(each) for each in "abcdefghij"], question, room)
    assert found == (None if kept is None else [ord(each) for each in kept])


def test_long_prompts_keep_both_ends(data: Path) -> None:
    whole, cut = first("infinitebench/passkey"), first("infinitebench/passkey", 300)
    assert (whole.left_out, len(cut.prompt)) == (0, 300)
    assert cut.left_out == len(whole.prompt) - 300
    assert cut.prompt[:150] == whole.prompt[:150]
    assert cut.prompt[-149:] == whole.prompt[-149:]
    with pytest.raises(ConfigError, match="passkey has 0 samples with prompts of 40 tokens"):
        first("infinitebench/passkey", 40)


@pytest.mark.parametrize(
    ("said", "stops", "text"),
    [
        ("\nred\nDialogue: more", ("\n",), "\nred"),
        ("red\n", ("\n",), "red"),
        ("so it is.\n\nQ: what", ("Q:",), "so it is.\n\n"),
        ("Q: what", ("Q:",), "Q: what"),
        (" a b ", (), " a b "),
    ],
)
def test_answers_end_at_strings(said: str, stops: tuple[str, ...], text: str) -> None:
    assert before_stop(said, stops) == text


def test_indentation_counts_where_a_line_of_code_is_compared() -> None:
    tokens = TOKENIZER.encode("\n    return x\nmore", add_special_tokens=False)
    found = judge_answer(
        TOKENIZER, "longbench/lcc", ("    return x",), Answer(tokens, True), full_is_cut=True
    )
    assert (found.score, found.answer) == (1, "return x\nmore")


def test_all_stands_for_what_is_at_hand(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(expand_sets(["longbench/all", "niah"])) == 22
    (data / "bbh" / "cot-prompts" / "snarks.txt").unlink()
    assert "bbh/snarks" not in expand_sets(["bbh/all"])
    assert expand_sets(["cmrc2018/all"]) == ("cmrc2018/trial", "cmrc2018/dev")
    assert not any("/" in name for name in expand_sets(["ruler"]))
    monkeypatch.delenv("KVFOLD_DATA")
    with pytest.raises(ConfigError, match=r"no data of ruler/all .* such as ruler/niah_single_1"):
        expand_sets(["ruler/all"])


def test_missing_data_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFOLD_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"longbench/lcc\.jsonl: put it there \(unzip -j https:"):
        require_sets(["longbench/lcc"])
    with pytest.raises(ConfigError, match=r"bbh/snarks\.json: put it there \(from https:.*unset"):
        require_sets(["bbh/snarks"])
    monkeypatch.delenv("KVFOLD_DATA")
    with pytest.raises(ConfigError, match=r"KVFOLD_DATA to a folder that has it \(prepare\.py of"):
        require_sets(["ruler/vt"])


def test_missing_jieba_is_told_before_a_model_is_loaded(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.evaluation.samples.find_spec", lambda name: None)
    require_sets(["longbench/hotpotqa"])
    with pytest.raises(ConfigError, match=r"longbench/vcsum is scored with jieba: install it"):
        require_sets(["longbench/vcsum"])


def test_damaged_rows_are_refused(data: Path) -> None:
    (data / "longbench" / "lcc.jsonl").write_text('{"context": "a"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lcc\.jsonl is not as longbench has it \(KeyError"):
        first("longbench/lcc")
    (data / "cmrc2018-dev.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cmrc2018-dev\.json' has no list 'data'"):
        first("cmrc2018/dev")


def test_the_datasets_library_is_asked_for_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = TASKS["longbench/lcc"].sources
    url = "zip://data/lcc.jsonl::https://huggingface.co/datasets/THUDM/LongBench/resolve/main/"
    assert (source.dataset, source.options) == ("json", {"data_files": f"{url}data.zip"})
    examples, shown = TASKS["bbh/snarks"].sources
    assert examples.options["field"] == "examples"
    assert (shown.dataset, shown.options["sample_by"]) == ("text", "document")


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
def test_scores_stand_in_rows_and_reports(protocol: str, data: Path, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=259)
    kvfold.attach(model)
    names = ("longbench/samsum", "longbench/trec", "infinitebench/passkey")
    settings = FidelitySettings(
        methods=(MethodSpec("streaming", "streaming"),),
        budgets=("0.5",),
        sets=names,
        samples=2,
        lengths=(400,),
        max_new_tokens=5,
        protocol=protocol,  # pyright: ignore[reportArgumentType]
    )
    found = evaluate(model, TOKENIZER, settings, folder=tmp_path / "out")
    assert {row.set for row in found.rows if row.is_right is None} == {"longbench/samsum"}
    assert all(row.score is not None and row.left_out >= 0 for row in found.rows)
    assert any(row.left_out for row in found.rows)
    again = evaluate(model, TOKENIZER, settings, folder=tmp_path / "out", resume=True)
    assert again.rows == found.rows
    report = report_of(found)
    for each in report.summaries:
        own = [row for row in found.rows if row.set == each.group and row.method == each.method]
        if own:
            assert each.score == pytest.approx(sum(row.score or 0 for row in own) / 2)
            assert each.cut == sum(row.left_out > 0 for row in own)
            assert ("cut in the middle" in title_of(each.group, [each])) == (each.cut > 0)
    json.dumps(report.to_dict())


def test_every_task_has_rows_to_be_tested_with(data: Path) -> None:
    for name in TASKS:
        assert len(draw_samples(TOKENIZER, name, ROWS, length=2500)) == ROWS
