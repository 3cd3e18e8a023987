"""Scores of public benchmarks: worked examples, and numbers that the official code gave.

Where it says "official", LongBench's metrics.py (with rouge 1.0.1, fuzzywuzzy 0.18.0 and jieba
0.42.1) or InfiniteBench's compute_scores.py (with rouge-score 0.1.2) gave the number.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvfold.evaluation import chinese
from kvfold.evaluation.scores import METRICS

TEXT = "The cat sat on the mat. A dog ran to the river."
OTHER = "A dog sat on the mat near the river. The cat ran. It was red."


def score(name: str, expected: str | tuple[str, ...], said: str, *classes: str) -> float:
    wanted = (expected,) if isinstance(expected, str) else expected
    return METRICS[name].score(wanted, said, classes)


@pytest.mark.parametrize(
    ("name", "expected", "said", "value"),
    [
        # Two of two words expected, two of three said.
        ("words", "Red River", "The red, RED river!", 0.8),
        ("words", "red", "green", 0.0),
        ("words", "red", "", 0.0),
        ("words", ("blue", "red"), "a red", 1.0),
        ("characters_zh", "北京大学", "在北大。", 4 / 7),
        ("number", "12", "It is 12, or 13, or 12.", 2 / 3),
        ("number", "12", "112", 0.0),
        ("number", "12", "twelve", 0.0),
        ("paragraph", "Paragraph 3", "Paragraph 3 or 4", 0.5),
        ("paragraph", "段落3", "段落3", 1.0),
        ("line", "return x + 1", "\n# comment\nreturn x + 1\nmore", 1.0),
        ("line", "    return x", "\n    return x\nmore", 1.0),
        ("line", "return y", "// none\n`code`", 0.0),
        ("first_number", "71432", "The key 71432, not 5.", 1.0),
        ("first_number", "71432", "714321", 0.0),
        ("word", "ab-12", '"ab-12": yes', 1.0),
        ("word", "ab-12", "ab-123", 0.0),
        ("name", "ACE", "It is Ace.", 1.0),
        ("letter", ("Cid", "C"), "C. Cid", 1.0),
        ("letter", ("Cid", "C"), "B", 0.0),
        ("letter", ("Cid", "C"), "Cid", 1.0),
        ("letter", ("Cid", "C"), "the answer is: Cid, clearly", 1.0),
        ("letter", ("Cid", "C"), "the answer is", 0.0),
        ("letter", ("Cid", "C"), "it may be C or D", 1.0),
        ("letter", ("Cid", "C"), "", 0.0),
        ("option", ("get_all", "B"), " B. get_all", 1.0),
        ("option", ("get_all", "B"), "B", 0.0),
        ("option", ("get_all", "B"), "A. get_all", 0.0),
        ("option", ("get_all", "B"), "The correct option is: **B**", 1.0),
        ("option", ("get_all", "B"), "My answer: `get_all`, for it fails", 1.0),
        ("option", ("get_all", "B"), "The answer is: C, not B", 0.0),
        ("option", ("get_all", "B"), "The answer is:", 0.0),
        ("option", ("get_all", "B"), "", 0.0),
        ("first_value", "88", " 88, then 3", 1.0),
        ("first_value", "88", "883", 0.0),
        ("first_value", "48.0", "It is 48.", 1.0),
        ("first_value", "48.5", "48.50 of 49", 1.0),
        ("first_value", "48.5", "48 or 48.5", 0.0),
        ("first_value", "48.5", "none", 0.0),
        ("last_number", "-14", "so it is `-14`.", 1.0),
        ("last_number", "-14", "14", 0.0),
        ("last_number", "4", "func_2(1) gives 4\n\n", 1.0),
        ("last_number", "4", "4 it is", 0.0),
        ("last_number", "4", "", 0.0),
        # 1 + 3 + 4 - 6 + 2, from its second number on.
        ("results", ("4", "8", "2", "4"), "[1, 4, 8, 2, 4]", 1.0),
        ("results", ("4", "8", "2", "4"), " [1, 4, 8, 3, 4]", 0.5),
        ("results", ("4", "8", "2", "4"), "[1, 4, 8, 2", 0.75),
        ("results", ("4", "8", "2", "4"), "[4, 8, 2, 4]", 0.0),
        ("results", ("4", "8", "2", "4"), "[1, 4, -8, 2, 4, 9]", 1.0),
        ("results", ("4", "8", "2", "4"), "none", 0.0),
        ("any_part", ("one", "two"), "TWOFOLD", 1.0),
        ("any_part", ("one", "two"), "three", 0.0),
        ("all_parts", ("one", "two"), "TWOFOLD", 0.5),
        ("conclusion", "(B)", "It is late. So the answer is (B).", 1.0),
        ("conclusion", "(B)", "So the answer is (B) or (C).", 0.0),
        ("conclusion", "True", "so the answer is true.", 0.0),
        ("conclusion", "True", "True", 0.0),
        ("final_number", "1250", "She pays 50 * 25 = 1,250.\n#### 1,250", 1.0),
        ("final_number", "-3", "#### -3\n\nSo", 1.0),
        ("final_number", "18", "#### 18.", 0.0),
        ("final_number", "18", "#### 180", 0.0),
        ("final_number", "18", "#### 9\n#### 18", 0.0),
        ("final_number", "18", "The answer is 18", 0.0),
        ("evidence", "yes", "yes indeed", 0.0),
        ("evidence", "yes", "Yes.", 1.0),
        ("evidence", "red river", "yes", 0.0),
        ("evidence", "red river", "the river", 2 / 3),
        # Four characters in a row, of six and of four.
        ("span_zh", ("上海", "北京大学"), "在北京大学。学", 8 / 10),
        ("span_zh", "NBA 2019", "nba, 2019", 1.0),
        ("span_zh", "北京大学", "大北学京", 0.25),
    ],
)
def test_worked_examples(name: str, expected: str, said: str, value: float) -> None:
    assert score(name, expected, said) == pytest.approx(value)


def test_classes_that_are_named_share_the_point() -> None:
    classes = ("Animal", "Colour", "Colour of hair")
    assert score("class", "Colour", "Colour", *classes) == 1
    assert score("class", "Colour", "Colour or Animal", *classes) == 0.5
    assert score("class", "Colour", "Animal", *classes) == 0
    assert score("class", ("Animal", "Colour"), "Colour", *classes) == 1
    # "Colour" is a part of the right one, and counts for nothing.
    assert score("class", "Colour of hair", "Colour of hair", *classes) == 1
    assert score("class", "Colour", "Colour of hair", *classes) == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [("rouge", 0.8), ("rouge_lines", 0.8148148), ("line", 0.54)],
)
def test_official_numbers(name: str, value: float) -> None:
    lines = name == "rouge_lines"
    wanted, said = (text.replace(". ", ".\n") if lines else text for text in (TEXT, OTHER))
    assert score(name, wanted, said) == pytest.approx(value, abs=1e-6)


def test_rouge_of_nothing_is_nothing() -> None:
    for name in ("rouge", "rouge_lines"):
        assert score(name, TEXT, "") == score(name, TEXT, " . \n.") == 0
        assert score(name, TEXT, TEXT) == pytest.approx(1)


def test_rouge_takes_long_sentences() -> None:
    words = " ".join(f"w{number}" for number in range(1500))
    assert score("rouge", words, words) == 1


def test_chinese_words_are_jiebas(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("jieba")
    library.cut = lambda text, cut_all: text.split("|")  # pyright: ignore[reportAttributeAccessIssue]
    library.setLogLevel = lambda level: None  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "jieba", library)
    chinese._jieba.cache_clear()
    assert score("words_zh", "我们|在|北京", "我们|北京|。") == 0.8
    assert score("rouge_zh", "我们|在|北京", "我们|北京") == pytest.approx(0.8)
    chinese._jieba.cache_clear()


def test_official_numbers_of_chinese_words() -> None:
    pytest.importorskip("jieba")
    wanted, said = "他来到北京大学学习人工智能。", "她在北京大学研究人工智能技术"
    assert score("words_zh", wanted, said) == pytest.approx(0.3636364, abs=1e-6)
    assert score("rouge_zh", wanted, said) == pytest.approx(0.3333333, abs=1e-6)
