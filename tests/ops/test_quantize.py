"""Codes of 8 and 4 bits, packed and unpacked, against plain arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.ops import quantize
from kvfold.ops.quantize import (
    dequantise,
    pack_nibbles,
    packed_coefficients,
    packed_scores,
    quantise,
    scales_of,
    unpack_nibbles,
)

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


def random_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)


@settings(deadline=None, max_examples=100)
@given(st.lists(NUMBERS, min_size=1, max_size=20), st.sampled_from([(8, 127), (4, 7)]))
def test_found_scales_miss_by_half_a_step_at_most(numbers: list[float], width: tuple[int, int]):
    bits, levels = width
    x = torch.tensor([numbers, [2 * number for number in numbers]])
    scales = scales_of(x, bits, -1)
    assert scales.shape == (2, 1)
    codes = quantise(x, scales, bits)
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) <= levels
    restored = dequantise(codes, scales, torch.float32)
    assert bool(((restored - x).abs() <= 0.5001 * scales).all())
    assert torch.equal(quantise(-x, scales, bits), -codes)


def test_scales_of_several_dims():
    x = torch.tensor([[[1.0, -3.5], [0.5, 2.0]], [[0.0, 0.0], [0.0, 0.0]]])
    scales = scales_of(x, 4, (-2, -1))
    assert scales.flatten().tolist() == [0.5, torch.finfo(torch.float32).tiny]
    assert quantise(x, scales, 4).flatten().tolist() == [2, -7, 1, 4, 0, 0, 0, 0]


def test_given_scales_clamp():
    x = torch.tensor([-100.0, -7.6, -3.4, 0.0, 6.4, 7.6, 100.0])
    assert quantise(x, torch.tensor(1.0), 4).tolist() == [-7, -7, -3, 0, 6, 7, 7]
    assert quantise(2 * x, torch.tensor(1.0), 8).tolist() == [-127, -15, -7, 0, 13, 15, 127]
    assert quantise(x, torch.tensor(0.0), 8).tolist() == [0] * 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_rounded_once(dtype: torch.dtype):
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    scales = scales_of(x, 8, -1)
    assert scales.dtype == torch.float32
    codes = quantise(x, scales, 8)
    assert torch.equal(codes, quantise(x.float(), scales, 8))
    expected = torch.tensor(
        [
            [code * scale for code in row]
            for row, [scale] in zip(codes.tolist(), scales.tolist(), strict=True)
        ]
    )
    assert torch.equal(dequantise(codes, scales, dtype), expected.to(dtype))


@pytest.mark.parametrize("hole", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(hole: float):
    x = torch.tensor([1.0, hole])
    with pytest.raises(ConfigError, match="no codes"):
        quantise(x, torch.tensor(1.0), 8)
    with pytest.raises(ConfigError, match="no codes"):
        quantise(torch.ones(2), x, 8)
    with pytest.raises(ConfigError, match="no codes"):
        quantise(x, scales_of(x, 4, 0), 4)


@pytest.mark.parametrize("bits", [0, 2, 16])
def test_other_widths_are_refused(bits: int):
    with pytest.raises(ConfigError, match="8 or 4 bits"):
        scales_of(torch.ones(2), bits, 0)
    with pytest.raises(ConfigError, match="8 or 4 bits"):
        quantise(torch.ones(2), torch.ones(1), bits)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 33), st.integers(0, 2**31))
def test_packed_and_unpacked(rows: int, count: int, seed: int):
    codes = random_codes(2, rows, count, seed=seed)
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, rows, (count + 1) // 2)
    for dtype in (torch.int8, torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(unpack_nibbles(packed, count, dtype), codes.to(dtype))


def test_the_layout_of_a_byte():
    codes = torch.tensor([-8, 7, 0, -1, 3], dtype=torch.int8)
    assert pack_nibbles(codes).tolist() == [0xF0, 0x78, 0x8B]


def test_a_view_of_packed_codes_unpacks():
    codes = random_codes(3, 10, 6)
    packed = pack_nibbles(codes)
    actual = unpack_nibbles(packed.transpose(0, 1)[2:7], 6, torch.float32)
    assert torch.equal(actual, codes.transpose(0, 1)[2:7].float())


def test_codes_beyond_4_bits_are_refused():
    for code in (-9, 8, 127):
        with pytest.raises(ConfigError, match="4 bits"):
            pack_nibbles(torch.tensor([0, code], dtype=torch.int8))


def test_a_wrong_number_of_codes_is_refused():
    packed = pack_nibbles(random_codes(5, 6))
    for count in (4, 7, 8):
        with pytest.raises(ConfigError, match="3 packed bytes hold 5 or 6 codes"):
            unpack_nibbles(packed, count, torch.float32)
        with pytest.raises(ConfigError, match="codes of 3 bytes: give 6"):
            packed_scores(torch.ones(2, count + count % 2 * 3), packed.mT)


def test_other_types_are_refused():
    with pytest.raises(ConfigError, match="float64"):
        unpack_nibbles(pack_nibbles(random_codes(2, 2)), 2, torch.float64)


@pytest.mark.parametrize("count", [1, 15, 24])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_scores(count: int, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantize, "_CHUNK_COLUMNS", chunk)
    codes = random_codes(2, 3, 17, count)
    queries = torch.randn(2, 3, 5, count, generator=torch.Generator().manual_seed(1))
    coefficients = packed_coefficients(queries)
    actual = packed_scores(coefficients[..., :-1], pack_nibbles(codes).mT) + coefficients[..., -1:]
    expected = queries.double() @ codes.double().mT
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


def test_scores_of_nothing():
    scores = packed_scores(torch.ones(1, 2, 4), pack_nibbles(random_codes(1, 0, 4)).mT)
    assert scores.shape == (1, 2, 0)


def test_scores_have_gradients():
    """Of the queries: codes have none."""
    queries = torch.ones(2, 4, requires_grad=True)
    codes = random_codes(9, 4)
    coefficients = packed_coefficients(queries)
    scores = packed_scores(coefficients[..., :-1], pack_nibbles(codes).mT)
    (scores + coefficients[..., -1:]).sum().backward()
    assert queries.grad is not None
    expected = codes.float().sum(0).expand(2, -1)
    torch.testing.assert_close(queries.grad, expected, atol=1e-3, rtol=1e-4)
