"""The budget curve goes through its three points, and is stretched to what is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.diffusion import CURVES, PRESETS, BudgetCurve, SpaCache
from kvfold.diffusion.caches.drift import count_of
from kvfold.errors import ConfigError


def test_the_curve_goes_through_first_peak_and_last() -> None:
    shares = BudgetCurve(0.1, 0.4, 0.2, at=0.25).shares(9)
    assert shares[0] == pytest.approx(0.1)
    assert shares[2] == pytest.approx(0.4)
    assert shares[8] == pytest.approx(0.2)
    assert shares[1] == pytest.approx(0.4 * (0.1 / 0.4) ** 0.25)
    assert shares[5] == pytest.approx(0.4 * (0.2 / 0.4) ** 0.25)
    assert sorted(shares[:3]) == shares[:3]
    assert sorted(shares[2:], reverse=True) == shares[2:]


@pytest.mark.parametrize(("at", "ends"), [(0.0, (0.4, 0.2)), (1.0, (0.1, 0.4))])
def test_a_peak_at_an_end_has_one_side(at: float, ends: tuple[float, float]) -> None:
    shares = BudgetCurve(0.1, 0.4, 0.2, at=at).shares(5)
    assert (shares[0], shares[-1]) == (pytest.approx(ends[0]), pytest.approx(ends[1]))


@pytest.mark.parametrize(
    ("name", "layers", "mean"),
    [("llada-8b", 32, 0.16), ("llada-1.5", 32, 0.16), ("dream-7b", 28, 0.19)],
)
def test_published_curves_have_the_published_means(name: str, layers: int, mean: float) -> None:
    shares = CURVES[name].shares(layers)
    assert sum(shares) / layers == pytest.approx(mean, abs=0.006)
    assert max(shares) <= 0.25 + 1e-9
    assert min(shares) == 2**-4


@settings(max_examples=80, deadline=None)
@given(
    st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 0.2), st.floats(0.2, 1)
)
def test_a_curve_is_stretched_to_a_mean(
    first: float, last: float, at: float, floor: float, mean: float
) -> None:
    curve = BudgetCurve(first, max(first, last), last, at=at, floor=floor)
    shares = curve.shares(12, mean=mean)
    assert sum(shares) / 12 == pytest.approx(mean, abs=1e-6)
    assert all(floor <= share <= 1 for share in shares)


def test_a_mean_of_one_is_everything_in_every_layer() -> None:
    shares = CURVES["llada-8b"].shares(32, mean=1.0)
    assert [count_of(share, 1000) for share in shares] == [1000] * 32
    assert SpaCache(ratio=1).shares(5) == [1.0] * 5


def test_dense_layers_come_first() -> None:
    assert SpaCache(ratio=0.2, dense_layers=2).shares(4) == [1.0, 1.0, 0.2, 0.2]
    assert SpaCache(dense_layers=9).shares(3) == [1.0] * 3


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_options(name: str) -> None:
    assert SpaCache(**PRESETS[name]).shares(8)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"first": 0.0}, "the curve's first is 0.0"),
        ({"peak": 1.5}, "the curve's peak is 1.5"),
        ({"last": 0.5}, "peak 0.3 is below its ends"),
        ({"at": 1.2}, "peak is at 1.2"),
        ({"floor": -0.1}, "floor -0.1"),
    ],
)
def test_numbers_that_make_no_curve_are_refused(numbers: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BudgetCurve(**{"first": 0.1, "peak": 0.3, "last": 0.2, **numbers})


def test_what_cannot_be_reached_is_refused() -> None:
    curve = BudgetCurve(0.1, 0.3, 0.2, floor=0.1)
    with pytest.raises(ConfigError, match=r"mean share 0\.05 is below the curve's floor"):
        curve.shares(4, mean=0.05)
    with pytest.raises(ConfigError, match="mean share is 2"):
        curve.shares(4, mean=2)
