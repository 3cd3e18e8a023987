"""Budgets as people write them, and how many tokens they allow."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.budget import MINIMUM_TOKENS, Budget
from kvfold.errors import BudgetError
from kvfold.evict.allowance import row_allowance

RATIOS = st.integers(1, 10_000).map(lambda count: f"{count / 10_000:.4f}")
"""Shares as a person writes them, 0.0001 to 1.0000."""


@pytest.mark.parametrize(
    ("written", "amount", "unit"),
    [
        (0.25, 0.25, "ratio"),
        ("0.25", 0.25, "ratio"),
        (".25", 0.25, "ratio"),
        ("25%", 0.25, "ratio"),
        (" 25 % ", 0.25, "ratio"),
        ("12.5%", 0.125, "ratio"),
        (1.0, 1.0, "ratio"),
        ("1.0", 1.0, "ratio"),
        ("100%", 1.0, "ratio"),
        (512, 512, "tokens"),
        ("512", 512, "tokens"),
        ("512 tokens", 512, "tokens"),
        (8, 8, "tokens"),
        ("64MiB", 64 * 2**20, "bytes"),
        ("64 mib", 64 * 2**20, "bytes"),
        ("1.5kB", 1500, "bytes"),
        ("2GB", 2 * 10**9, "bytes"),
        ("1GiB", 2**30, "bytes"),
        ("4096B", 4096, "bytes"),
    ],
)
def test_forms(written: float | str, amount: float, unit: str):
    budget = Budget.parse(written)
    assert (budget.amount, budget.unit) == (amount, unit)
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize(
    "written",
    [
        0, 2, 7, -1, 0.0, 1.5, -0.25, float("nan"), float("inf"), True, False, None, 10**400,
        "", " ", "0", "2", "-1", "abc", "200%", "0%", "-5%", "nan", "inf", "1e400", "9" * 400,
        "0.0", "1.01", "0B", "-1MiB", "12 parsecs", "1,5", "0x20", "25%%", "MiB", "7 tokens",
    ],
)  # fmt: skip
def test_refusals_say_what_to_give(written: object):
    with pytest.raises(BudgetError, match=r"budget.*: give a share in \(0, 1\] such as 0\.25"):
        Budget.parse(written)


def test_whole():
    assert Budget.parse(1.0).is_everything
    assert not Budget.parse(0.999).is_everything
    assert not Budget.parse(10**9).is_everything


@pytest.mark.parametrize(
    "written", [0.25, 1.0, 0.123456789, 1e-5, 0.9999999, 1 / 3, 512, 10**9, "64MiB", "33%", "1.5kB"]
)
def test_text_is_read_back(written: float | str):
    budget = Budget.parse(written)
    assert Budget.parse(str(budget)) == budget


@settings(deadline=None)
@given(st.floats(1e-9, 1.0))
def test_any_ratio_is_read_back(ratio: float):
    assert Budget.parse(str(Budget(ratio, "ratio"))) == Budget(ratio, "ratio")


@settings(deadline=None)
@given(RATIOS, st.integers(0, 2**20))
def test_a_ratio_is_never_exceeded_but_for_the_minimum(ratio: str, seen: int):
    exact = max(int(Fraction(ratio) * seen), MINIMUM_TOKENS)
    allowed = Budget.parse(ratio).tokens(seen)
    assert MINIMUM_TOKENS <= allowed <= exact
    assert exact - allowed < exact / 32


def test_a_ratio_at_a_long_context():
    assert Budget.parse("0.9995").tokens(500_001) == 499_750 // 8192 * 8192
    assert Budget.parse("0.29").tokens(100) == 29
    assert Budget.parse("0.25").tokens(8192) == 2048
    assert Budget.parse("0.25").tokens(3115) == 768


def test_tokens_do_not_depend_on_the_length():
    assert [Budget.parse(512).tokens(seen) for seen in (0, 100, 10**6)] == [512] * 3


@pytest.mark.parametrize(("amount", "tokens"), [(8000, 8), (8999, 8), (9000, 9), (10**6, 1000)])
def test_bytes_buy_whole_tokens(amount: int, tokens: int):
    assert Budget(amount, "bytes").tokens(0, 1000) == tokens


def test_too_few_bytes_name_what_is_needed():
    with pytest.raises(BudgetError, match=r"7999 bytes holds 7 tokens .* give at least 8000 bytes"):
        Budget(7999, "bytes").tokens(0, 1000)


@pytest.mark.parametrize("written", [0.25, 0.29, 0.999, 1 / 3, 64, "100kB"])
def test_rows_are_allowed_what_each_is_alone(written: float | str):
    budget, lengths = Budget.parse(written), torch.arange(5000)
    rows = row_allowance(budget, lengths, 1000)
    assert rows.tolist() == [budget.tokens(length, 1000) for length in range(5000)]


@pytest.mark.parametrize("written", [0.25, 0.7, 1.0])
def test_allowances_never_shrink_as_a_row_grows(written: float):
    budget = Budget.parse(written)
    allowed = [budget.tokens(length) for length in range(5000)]
    assert allowed == sorted(allowed)
