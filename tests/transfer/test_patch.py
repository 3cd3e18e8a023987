"""Aligners: nothing at first, better than the linear part where there is something to learn."""

from dataclasses import replace

import pytest
import torch

from kvfold.errors import ConfigError
from kvfold.transfer.patch import Aligner, AlignerSettings, Patch, train_aligner
from kvfold.transfer.refit import aligned
from tests.transfer.codecs import basis_of

QUICK = AlignerSettings(hidden=64, steps=400, batch=256, learning_rate=5e-3)


def curved(count: int = 3000) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a producer, and a consumer's that bend away from them."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(count, 6, generator=generator)
    return a, torch.cat([a + 0.5 * a.abs(), (a[:, :2] * a[:, 2:4])], 1)


def patch(bits: int = 8) -> tuple[Patch, torch.Tensor, torch.Tensor]:
    a, b = curved()
    return Patch(basis_of(a, b, strength=0.0).translator(((bits, 6),)), None), a, b


def error(found: Patch, a: torch.Tensor, b: torch.Tensor) -> float:
    packed = found.inputs.encode(a)
    return float((found.decode(packed, len(a)) - b).square().mean())


def test_an_aligner_starts_at_nothing():
    aligner = Aligner(4, 8, 5, torch.Generator().manual_seed(0))
    assert bool((aligner(torch.randn(3, 4)) == 0).all())


def test_an_aligner_learns_what_bends():
    linear, a, b = patch()
    rows = torch.cat([a, b], 1)[:2000]
    found = aligned(linear, rows, QUICK, seed=0)
    assert error(found, a[2000:], b[2000:]) < 0.5 * error(linear, a[2000:], b[2000:])
    again = aligned(linear, rows, QUICK, seed=0)
    assert error(again, a, b) == error(found, a, b)
    assert all(not weight.requires_grad for weight in found.aligner.parameters())


def test_an_aligner_that_learns_nothing_is_left_at_nothing():
    codes, missed = torch.randn(400, 4), torch.randn(400, 3)
    settings = AlignerSettings(hidden=64, steps=60, learning_rate=1.0)
    aligner = train_aligner(codes, missed, settings, torch.Generator().manual_seed(0))
    held = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    assert float(aligner(codes[held[:40]]).square().mean()) < 0.2


@pytest.mark.parametrize("hidden", [0, 32])
def test_no_aligner_is_made_where_none_is_wanted_or_nothing_is_sent(hidden: int):
    linear, a, b = patch()
    rows = torch.cat([a, b], 1)
    settings = AlignerSettings(hidden=hidden, steps=1)
    empty = Patch(basis_of(a, b, strength=0.0).translator(()), None)
    assert aligned(empty, rows, settings, seed=0).aligner is None
    assert (aligned(linear, rows, settings, seed=0).aligner is None) == (hidden == 0)


def test_an_aligner_that_does_not_fit_its_type_is_refused():
    """Codes of 1e6 have a decoder that float16 holds, and a scale that it does not."""
    a, b = curved()
    translator = basis_of(1e6 * a, b, dtype=torch.float16).translator(((32, 6),))
    rows = torch.cat([1e6 * a, b], 1)
    with pytest.raises(ConfigError, match=r"beyond torch.float16: store it in float32"):
        aligned(Patch(translator, None), rows, replace(QUICK, steps=2), seed=0)
    wide = basis_of(1e6 * a, b, dtype=torch.float32).translator(((32, 6),))
    assert aligned(Patch(wide, None), rows, replace(QUICK, steps=2), seed=0).aligner is not None
