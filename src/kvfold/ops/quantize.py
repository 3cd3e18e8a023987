"""Symmetric quantisation to 8 or 4 bits, and two 4-bit codes to a byte.

A packed byte holds the codes of two neighbouring dims, `(a + 8) | (b + 8) << 4`. Unpacking looks up
both at once in a table of 256 pairs, each pair moved as one integer of twice the width: on a CPU
about half of the time that shifting, masking and stacking take. Scores against many packed codes
need only half of that.
"""

from __future__ import annotations

import torch

from kvfold.errors import ConfigError

_LEVELS = {8: 127, 4: 7}
"""Largest code of each width; the smallest is its negative."""

_NIBBLES = torch.arange(-8, 8, dtype=torch.int8, device="cpu")
_PAIRS = torch.stack([_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)], dim=-1)
"""The two codes of each byte, `[256, 2]`."""

_PAIR_TYPES = {
    torch.int8: torch.int16,
    torch.float16: torch.int32,
    torch.bfloat16: torch.int32,
    torch.float32: torch.int64,
}
"""An integer as wide as two numbers of a type."""

_CHUNK_COLUMNS = 1 << 16
"""Tokens whose codes are unpacked and scored at a time on a CPU."""


def scales_of(x: torch.Tensor, bits: int, dim: int | tuple[int, ...]) -> torch.Tensor:
    """The step of each group of numbers, such that its largest becomes the largest code.

    Args:
        x: Numbers to quantise, of any shape.
        bits: 8 or 4.
        dim: Dims that share a scale.

    Returns:
        Scales in float32, of `x`'s shape with size 1 in `dim`; never zero.

    Raises:
        ConfigError: The width is neither 8 nor 4 bits.
    """
    scales = x.abs().amax(dim=dim, keepdim=True).float() / _levels(bits)
    return scales.clamp_min(torch.finfo(torch.float32).tiny)


def quantise(x: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of numbers, rounded to the nearest; what lies beyond the last code gets the last.

    Args:
        x: Numbers, of any shape.
        scales: The number that code 1 stands for, broadcast against `x`. A group of scale 0, as
            after rounding tiny scales to a narrower type, gets code 0.
        bits: 8 for codes in [-127, 127], 4 for codes in [-7, 7].

    Returns:
        Codes, int8, in `x`'s shape.

    Raises:
        ConfigError: The width is neither 8 nor 4 bits, or `x` or a scale is NaN or infinite.
    """
    levels = _levels(bits)
    if not (bool(x.isfinite().all()) and bool(scales.isfinite().all())):
        raise ConfigError("NaN and infinity have no codes: mask such numbers before quantising")
    steps = scales.float()
    codes = (x.float() / steps).round_().clamp_(-levels, levels)
    return codes.masked_fill_(steps == 0, 0.0).to(torch.int8)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that codes stand for: multiplied in float32, returned in `dtype`.

    Args:
        codes: int8, of any shape.
        scales: The number that code 1 stands for, broadcast against `codes`.
        dtype: Of the result.
    """
    return (codes * scales.float()).to(dtype)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte; a last code without neighbour shares its byte with a zero.

    Args:
        codes: int8 in [-8, 7], `[*, R]`.

    Returns:
        `[*, ceil(R / 2)]`, uint8.

    Raises:
        ConfigError: A code is outside [-8, 7].
    """
    if bool(((codes < -8) | (codes > 7)).any()):
        raise ConfigError("codes outside [-8, 7] do not fit 4 bits: quantise to 4 bits first")
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    shifted = (codes + 8).view(torch.uint8) & 15
    return shifted[..., ::2] | (shifted[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The codes that `pack_nibbles` packed, as numbers ready for arithmetic.

    Args:
        packed: `[*, ceil(R / 2)]`, uint8.
        count: R.
        dtype: float32, float16, bfloat16 or int8.

    Returns:
        `[*, R]`; a view that leaves the last column out when R is odd.

    Raises:
        ConfigError: `count` is not the number of codes, or `dtype` is another.
    """
    _require_count(packed, count)
    if dtype not in _PAIR_TYPES:
        raise ConfigError(f"codes do not unpack to {dtype}: use float32, float16, bfloat16 or int8")
    table = _PAIRS.to(device=packed.device, dtype=dtype).view(_PAIR_TYPES[dtype]).flatten()
    pairs = table.index_select(0, packed.flatten().int())
    return pairs.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])[..., :count]


def packed_coefficients(coefficients: torch.Tensor) -> torch.Tensor:
    """What `packed_scores` multiplies packed codes with, instead of the codes themselves.

    A byte is `v = l + 16 h` with `l = a + 8` and `h = b + 8`, so that

        x a + y b = (x - y/16) l + (y/16) v - 8 (x + y)

    and neither a code nor its sign has to be brought out of a byte but by one `and`.

    Args:
        coefficients: Of R codes, `[*, R]`.

    Returns:
        `[*, 2P + 1]` with P = ceil(R / 2): of the low halves, of the bytes, and the constant.
    """
    if coefficients.shape[-1] % 2:
        coefficients = torch.nn.functional.pad(coefficients, (0, 1))
    high = coefficients[..., 1::2] / 16
    constant = -8 * coefficients.sum(-1, keepdim=True)
    return torch.cat([coefficients[..., ::2] - high, high, constant], dim=-1)


def packed_scores(coefficients: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Products of queries with packed codes, a chunk of which is unpacked at a time.

    Codes stand byte by byte, each byte of all tokens together: numbers that are next to each other
    are converted and multiplied several times as fast as short rows of them.

    Args:
        coefficients: `[*, Q, 2P]` in float32: those of `packed_coefficients` without the constant.
        packed: Codes as `pack_nibbles` packs them, transposed, `[*, P, T]`, uint8.

    Returns:
        `[*, Q, T]` in float32.

    Raises:
        ConfigError: The queries have more or fewer dims than there are codes.
    """
    count, total = packed.shape[-2:]
    if coefficients.shape[-1] != 2 * count:
        raise ConfigError(
            f"{coefficients.shape[-1]} coefficients were given for codes of {count} bytes: give "
            f"{2 * count}, two a byte"
        )
    if packed.is_cuda or total <= _CHUNK_COLUMNS:
        return coefficients @ _halves_and_bytes(packed)
    chunks = packed.split(_CHUNK_COLUMNS, dim=-1)
    return torch.cat([coefficients @ _halves_and_bytes(chunk) for chunk in chunks], dim=-1)


def _halves_and_bytes(packed: torch.Tensor) -> torch.Tensor:
    """The low half of each byte, then each byte, `[*, 2P, T]` in float32 from `[*, P, T]`."""
    count = packed.shape[-2]
    both = packed.new_empty((*packed.shape[:-2], 2 * count, packed.shape[-1]), dtype=torch.float32)
    both[..., :count, :].copy_(packed & 15)
    both[..., count:, :].copy_(packed)
    return both


def _require_count(packed: torch.Tensor, count: int) -> None:
    held = packed.shape[-1]
    if (count + 1) // 2 != held:
        raise ConfigError(
            f"{held} packed bytes hold {2 * held - 1} or {2 * held} codes, not {count}: "
            "give the number of codes that were packed"
        )


def _levels(bits: int) -> int:
    if bits not in _LEVELS:
        raise ConfigError(f"numbers are quantised to 8 or 4 bits, not to {bits}")
    return _LEVELS[bits]
