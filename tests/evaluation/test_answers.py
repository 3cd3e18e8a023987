"""Right answers, and what is wrong with others."""

from __future__ import annotations

import pytest

from kvfold.evaluation.answers import (
    contains_all,
    contains_one,
    ends_with_number,
    find_fault,
    found_share,
    is_repetitive,
    words_in_common,
)


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("1234567", "It is 1,234,567.", True),
        ("1234567", "It is 12345678.", False),
        ("Bath, Maine", "He was from bath,  Maine!", True),
        ("no", "It is not known.", False),
        ("no", "No.", True),
        ('Jonny" Craig', "Jonny Craig", True),
        ('"Now and Then" (1995)', "It was Now and Then (1995), I think", True),
        ("Virginia", "West Virginian", False),
        ("Virginia", "", False),
    ],
)
def test_words_and_numbers_are_found_whole(expected: str, answer: str, right: bool) -> None:
    assert contains_one((expected,), answer) is right
    assert contains_one(("never said", expected), answer) is right


@pytest.mark.parametrize(
    ("expected", "answer", "share"),
    [
        (("4821973",), " 4821973.", 1),
        (("1234567", "7654321"), "They are 7654321, 1234567 and 1111111.", 1),
        (("1234567", "7654321"), "7654321", 0.5),
        (("QWERT", "ASDFG", "ZXCVB"), "qwert = ASDFG", 2 / 3),
        (("amber", "kite"), "1. kite 2. Amber", 1),
        (("amber", "kite"), "", 0),
        (("0c6f-4a", "0c6f-4b"), "it is 0C6F-4b", 0.5),
    ],
)
def test_the_share_found_is_that_of_ruler(
    expected: tuple[str, ...], answer: str, share: float
) -> None:
    # RULER: how many of the references are parts of the answer, whatever the case of letters.
    ruler = [reference.lower() in answer.lower() for reference in expected]
    assert found_share(expected, answer) == pytest.approx(share)
    assert sum(ruler) / len(ruler) == pytest.approx(share)
    assert contains_all(expected, answer) is all(ruler)
    assert contains_one(expected, answer) is any(ruler)


def test_a_part_of_a_word_or_number_is_not_enough() -> None:
    assert found_share(("kite", "amber"), "kites in amber") == 0.5
    assert found_share(("1234567",), "12345678") == 0
    assert found_share(("QWERT", "ASDFG"), "QWERTASDFG") == 0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("9 * 2 = 18", True),
        ("The answer is $18.00.", True),
        ("18 eggs, no: 17", False),
        ("It is 1,8", False),
        ("1,018 - 1,000 = 18", True),
        ("-18", False),
        ("20-18", True),
        ("eighteen", False),
    ],
)
def test_the_last_number_counts(answer: str, right: bool) -> None:
    assert ends_with_number(("18",), answer) is right


@pytest.mark.parametrize(
    ("tokens", "repetitive"),
    [
        ([], False),
        ([5] * 6, False),
        ([5] * 7, True),
        ([1, 2, 3, 4] * 3, True),
        ([1, 2, 3, 4] * 2 + [1, 2, 3], False),
        ([*range(20), *[1, 2, 3, 4, 5, 6] * 3], True),
        ([*[1, 2, 3, 4, 5, 6] * 3, *range(20, 40)], False),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4, 7, 1, 2, 3, 4], True),
        (list(range(32)), False),
    ],
)
def test_loops_and_repetitions_are_found(tokens: list[int], repetitive: bool) -> None:
    assert is_repetitive(tokens) is repetitive


@pytest.mark.parametrize(
    ("tokens", "right", "cut", "full_cut", "fault"),
    [
        ([7] * 12, True, True, False, None),
        ([7] * 12, False, True, False, "repetitive"),
        ([1, 2, 3], False, True, False, "overlength"),
        ([1, 2, 3], False, True, True, "wrong"),
        ([1, 2, 3], False, False, False, "wrong"),
    ],
)
def test_faults(
    tokens: list[int], right: bool, cut: bool, full_cut: bool, fault: str | None
) -> None:
    assert find_fault(tokens, is_right=right, is_cut=cut, full_is_cut=full_cut) == fault


@pytest.mark.parametrize(
    ("answer", "f1"),
    [
        (" Oslo / smith .", 1.0),
        ("smith oslo", 1.0),
        ("Oslo / baker .", 0.5),
        ("It is Oslo", 0.4),
        ("Oslo Oslo", 0.5),
        ("42", 0.0),
        ("", 0.0),
    ],
)
def test_f1_of_words(answer: str, f1: float) -> None:
    assert words_in_common("Oslo / smith .", answer) == pytest.approx(f1)
