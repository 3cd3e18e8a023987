"""Rotation by position against complex numbers, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.ops.rotary import rotate, unrotate


def table(
    batch: int, tokens: int, dims: int, *, interleaved: bool, scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cosines, sines `[B, 1, T, D']` and the turn of each pair `[B, 1, T, D' / 2]` as a number."""
    frequencies = 1e4 ** (-torch.arange(0, dims, 2) / dims)
    positions = 7 * torch.arange(batch * tokens).view(batch, 1, tokens, 1)
    phases = positions * frequencies
    if interleaved:
        wide = phases.repeat_interleave(2, dim=-1)
    else:
        wide = torch.cat([phases, phases], dim=-1)
    turns = torch.polar(torch.full_like(phases, scaling), phases)
    return scaling * wide.cos(), scaling * wide.sin(), turns


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dims", [12, 8, 2])
def test_a_pair_is_a_complex_number(interleaved: bool, dims: int):
    x = torch.randn(2, 3, 5, 12, generator=torch.Generator().manual_seed(0))
    cosines, sines, turns = table(2, 5, dims, interleaved=interleaved, scaling=1.25)
    step = dims // 2
    real, imaginary = (
        (x[..., :dims:2], x[..., 1:dims:2]) if interleaved else (x[..., :step], x[..., step:dims])
    )
    turned = torch.complex(real, imaginary) * turns
    expected = x.clone()
    if interleaved:
        expected[..., :dims:2], expected[..., 1:dims:2] = turned.real, turned.imag
    else:
        expected[..., :step], expected[..., step:dims] = turned.real, turned.imag
    actual = rotate(x, cosines, sines, interleaved=interleaved)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(actual[..., dims:], x[..., dims:])


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([2, 6, 16]),
    st.integers(0, 3),
    st.booleans(),
    st.floats(0.5, 2.0),
    st.integers(0, 2**31),
)
def test_there_and_back(
    batch: int,
    heads: int,
    tokens: int,
    dims: int,
    rest: int,
    interleaved: bool,
    scaling: float,
    seed: int,
):
    shape = (batch, heads, tokens, dims + rest)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    cosines, sines, _ = table(batch, tokens, dims, interleaved=interleaved, scaling=scaling)
    turned = rotate(x, cosines, sines, interleaved=interleaved)
    torch.testing.assert_close(
        unrotate(turned, cosines, sines, interleaved=interleaved), x, rtol=1e-6, atol=1e-6
    )
    back = unrotate(x, cosines, sines, interleaved=interleaved)
    torch.testing.assert_close(
        rotate(back, cosines, sines, interleaved=interleaved), x, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_half_precision_is_rounded_once(interleaved: bool):
    x = torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    cosines, sines, _ = table(1, 4, 8, interleaved=interleaved)
    for turn in (rotate, unrotate):
        actual = turn(x, cosines, sines, interleaved=interleaved)
        expected = turn(x.float(), cosines, sines, interleaved=interleaved).bfloat16()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients(interleaved: bool):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    cosines, sines, _ = table(1, 3, 4, interleaved=interleaved, scaling=1.25)
    cosines, sines = cosines.double(), sines.double()
    for turn in (rotate, unrotate):
        assert torch.autograd.gradcheck(
            lambda x, turn=turn: turn(x, cosines, sines, interleaved=interleaved), x
        )
