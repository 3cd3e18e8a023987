"""Codes in few bits: what comes back, what it takes, and steps that lose least."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.transfer.quantiser import WIDTHS, Quantiser, fit_steps

PLANS = st.dictionaries(st.sampled_from(WIDTHS), st.integers(1, 7)).map(
    lambda counts: tuple(sorted(counts.items(), reverse=True))
)


@settings(max_examples=40, deadline=None)
@given(plan=PLANS, rows=st.integers(0, 5), heads=st.sampled_from([(), (3,)]))
def test_codes_come_back_within_half_a_step(plan, rows: int, heads: tuple):
    rank = sum(count for _, count in plan)
    generator = torch.Generator().manual_seed(rows)
    steps = torch.rand(rank, generator=generator) + 0.1
    quantiser = Quantiser(plan, steps)
    codes = torch.rand(rows, *heads, rank, generator=generator) * 12 * steps - 6 * steps
    packed = quantiser.pack(codes)
    found = quantiser.unpack(packed, codes.shape[:-1])
    assert found.shape == codes.shape
    assert found.dtype == torch.float32
    assert bool(((found - codes).abs() <= 0.5001 * steps).all())
    shapes = {name: (t.dtype, t.shape[-1]) for name, t in packed.items()}
    assert shapes == quantiser.layout()
    held = sum(t.nbytes for t in packed.values())
    assert 8 * held == quantiser.bits * codes[..., :1].numel()


def test_float_widths_round_as_their_types_do():
    codes = torch.tensor([[1.001, -3.14159]])
    quantiser = Quantiser(((32, 1), (16, 1)), torch.ones(2))
    found = quantiser.unpack(quantiser.pack(codes), torch.Size([1]))
    assert found.tolist() == [[codes[0, 0].item(), codes[0, 1].bfloat16().item()]]


@pytest.mark.parametrize("plan", [((4, 3), (8, 2)), ((8, 0),), ((5, 2),), ((8, 1), (8, 1))])
def test_plans_that_cannot_be_kept_are_refused(plan):
    with pytest.raises(ConfigError, match="wide first"):
        Quantiser(plan, torch.ones(sum(count for _, count in plan)))


def test_one_step_a_channel():
    with pytest.raises(ConfigError, match="give one each"):
        Quantiser(((8, 3),), torch.ones(2))


@pytest.mark.parametrize(("bits", "lost"), [(4, 0.0123), (8, 9e-5)])
def test_steps_lose_about_what_the_best_uniform_quantiser_of_a_gaussian_does(bits, lost):
    codes = torch.randn(20000, 3, generator=torch.Generator().manual_seed(0))
    codes = codes * torch.tensor([1e-3, 1.0, 50.0])
    steps, shares = fit_steps(codes, bits)
    assert shares.tolist() == pytest.approx([lost] * 3, rel=0.25)
    assert (steps / steps[1]).tolist() == pytest.approx([1e-3, 1.0, 50.0], rel=0.2)


def test_no_other_clip_loses_less_than_the_steps_by_much():
    codes = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)) ** 3
    steps, shares = fit_steps(codes, 4)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = Quantiser(((4, 2),), steps * factor)
        lost = (other.unpack(other.pack(codes), codes.shape[:1]) - codes).square().mean(0)
        assert bool((lost / codes.square().mean(0) >= shares * 0.97).all())


def test_channels_of_nothing_and_wide_ones_lose_nothing():
    codes = torch.zeros(10, 2)
    for bits in WIDTHS:
        assert fit_steps(codes, bits)[1].tolist() == [0.0, 0.0]
    assert fit_steps(torch.randn(10, 2), 32)[1].tolist() == [0.0, 0.0]
