"""Codes in closed form: exact at full rank, errors as foretold, and no worse with more."""

from dataclasses import replace

import pytest
import torch

from kvfold.errors import ConfigError
from kvfold.ops.ridge import Moments
from kvfold.transfer.basis import Fitting, fit_basis
from kvfold.transfer.refit import refitted
from tests.transfer.codecs import basis_of

HEADS, DIM, N = 2, 6, 3000
WIDTH = HEADS * DIM
FORMS = ["regression", "joint", "shared"]


def related(*, noise: float = 0.2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A producer's rows and a consumer's, of two heads, both far from zero."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(N, WIDTH, generator=generator) * torch.arange(1, WIDTH + 1) ** -0.6
    mixed = a @ (torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH, generator=generator))
    return a + 4, mixed + noise * torch.randn(N, WIDTH, generator=generator) - 2


def shared_map(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose heads are all related by one map."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(N, HEADS, DIM, generator=generator)
    return a.flatten(1), (a @ torch.randn(DIM, DIM, generator=generator) + 1).flatten(1)


def missed(basis, plan, a: torch.Tensor, b: torch.Tensor) -> float:
    translator = basis.translator(plan)
    found = translator.decode(translator.encode(a), len(a))
    assert found.shape == b.shape
    return float((found - b).square().sum(-1).mean())


@pytest.mark.parametrize("form", FORMS)
def test_full_rank_is_exact_for_a_linear_relation(form):
    a, b = shared_map()
    basis = basis_of(a, b, form, heads=HEADS, strength=0.0)
    total = float((b - b.mean(0)).square().sum(-1).mean())
    assert missed(basis, ((32, basis.rank),), a, b) < 1e-9 * total


@pytest.mark.parametrize("form", FORMS)
def test_the_error_is_the_one_foretold_and_falls_with_the_rank(form):
    a, b = related()
    basis = basis_of(a, b, form, heads=HEADS, strength=0.0)
    errors = [missed(basis, ((32, rank),), a, b) for rank in range(1, basis.rank + 1)]
    assert errors == sorted(errors, reverse=True)
    told = [basis.error(((32, rank),)) for rank in range(1, basis.rank + 1)]
    assert told == pytest.approx(errors, rel=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", [((8, 6),), ((4, 6),), ((8, 2), (4, 3))])
def test_the_error_of_quantised_codes_is_about_the_one_foretold(form, plan):
    a, b = related()
    basis = basis_of(a, b, form, heads=HEADS, strength=0.0)
    assert basis.error(plan) == pytest.approx(missed(basis, plan, a, b), rel=0.05)


def test_no_form_beats_the_regression_at_its_size():
    a, b = related()
    best = basis_of(a, b, "regression", heads=HEADS, strength=0.0)
    joint = basis_of(a, b, "joint", heads=HEADS, strength=0.0)
    shared = basis_of(a, b, "shared", heads=HEADS, strength=0.0)
    for rank in range(1, DIM + 1):
        assert best.error(((32, rank),)) <= joint.error(((32, rank),)) + 1e-9
        assert best.error(((32, HEADS * rank),)) <= shared.error(((32, rank),)) + 1e-9
    assert best.translator(((8, 6),)).bits == shared.translator(((8, 3),)).bits == 48


def test_a_decoder_fitted_to_received_codes_is_the_best_for_them():
    a, b = related()
    basis = basis_of(a, b, strength=0.0)
    plan = ((4, 8),)
    translator = basis.translator(plan)
    codes = translator.received(translator.encode(a), len(a))
    moments = Moments(8 + WIDTH)
    for rows in torch.cat([codes, b], 1).split(211):
        moments.add(rows)
    found = refitted(translator, moments, 0.0)
    centred = codes.double() - codes.double().mean(0)
    expected = torch.linalg.lstsq(centred, (b - b.mean(0)).double()).solution
    torch.testing.assert_close(found.decoder.double(), expected, rtol=1e-4, atol=1e-5)
    reached = float((found.decode(found.encode(a), N) - b).square().sum(-1).mean())
    assert reached <= missed(basis, plan, a, b) * (1 + 1e-6)


def test_a_code_of_nothing_is_the_mean():
    a, b = related()
    translator = basis_of(a, b, strength=0.0).translator(())
    assert translator.encode(a) == {}
    found = translator.decode({}, 5)
    torch.testing.assert_close(found, b.mean(0).expand(5, -1), rtol=1e-4, atol=1e-4)


def test_half_precision_encoders_lose_nothing_that_the_decoder_can_mend():
    a, b = related()
    whole = basis_of(a, b, strength=0.0)
    half = basis_of(a, b, strength=0.0, dtype=torch.float16)
    assert half.encoder.dtype == half.translator(((32, 3),)).decoder.dtype == torch.float16
    for plan in (((32, WIDTH),), ((32, 5),)):
        assert missed(half, plan, a, b) == pytest.approx(missed(whole, plan, a, b), rel=1e-2)


def test_the_sample_may_be_smaller_than_the_moments():
    a, b = related()
    moments = Moments(2 * WIDTH)
    moments.add(torch.cat([a, b], 1))
    basis = fit_basis(moments, a[:500], Fitting(widths=(8,), strength=0.0))
    assert missed(basis, ((8, 6),), a, b) == pytest.approx(basis.error(((8, 6),)), rel=0.05)


def test_codes_of_rows_of_any_size_fit_half_precision():
    a, b = related()
    expected = None
    for size in (1e-6, 1.0, 1e5):
        basis = basis_of(a * size, b, strength=0.0, dtype=torch.float16)
        norms = basis.encoder.float().norm(dim=0)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-2, atol=1e-2)
        gains = basis.gains / basis.total
        expected = gains if expected is None else expected
        torch.testing.assert_close(gains, expected, rtol=1e-2, atol=1e-5)


def test_a_decoder_that_does_not_fit_its_type_is_refused():
    a, b = related()
    whole = basis_of(a * 1e-6, b).translator(((32, 4),))
    moments = Moments(4 + WIDTH)
    moments.add(torch.cat([whole.codes(a * 1e-6), b], 1))
    half = replace(whole, decoder=whole.decoder.half())
    with pytest.raises(ConfigError, match=r"beyond torch\.float16"):
        refitted(half, moments, 0.0)
    with pytest.raises(ConfigError, match=r"beyond torch\.float16"):
        basis_of(a * 1e-6, b, dtype=torch.float16).translator(((32, 4),))
