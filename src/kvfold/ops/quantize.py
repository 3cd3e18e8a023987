"""Symmetric quantisation to 8 or 4 bits, and two 4-bit codes to a byte.

A packed byte holds the codes of two neighbouring dims, `(a + 8) | (b + 8) << 4`. Unpacking looks up
both at once in a table of 256 pairs, each pair moved as one integer of twice the width: on a CPU
about half of the time that shifting, masking and stacking take. Scores against many packed codes
unpack them in chunks that stay in the processor's cache.
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

_CHUNK_ROWS = 32768
"""Rows of codes, over all heads, that are unpacked and scored at a time on a CPU."""


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


def packed_scores(queries: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Products of queries with packed codes, of which only a chunk is unpacked at a time.

    Args:
        queries: `[*, Q, R]`.
        packed: Codes as `pack_nibbles` packs them, `[*, T, ceil(R / 2)]`, uint8.

    Returns:
        `[*, Q, T]`, computed in float32 and returned in the queries' dtype.

    Raises:
        ConfigError: The queries have more or fewer dims than there are codes.
    """
    total, count = packed.shape[-2], queries.shape[-1]
    wide, scores = queries.float(), queries.new_empty(*queries.shape[:-1], total)
    step = total if packed.is_cuda else _CHUNK_ROWS // max(1, packed.shape[:-2].numel())
    for start in range(0, total, max(1, step)):
        chunk = slice(start, start + max(1, step))
        codes = unpack_nibbles(packed[..., chunk, :], count, torch.float32)
        scores[..., chunk] = wide @ codes.mT
    return scores


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
