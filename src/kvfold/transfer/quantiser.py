"""Codes as few bits: each channel of a code at a width of its own, strongest first.

A plan is a list of (bits, channels): `((8, 12), (4, 40))` says that the first 12 channels take 8
bits, the next 40 take 4, and the rest is not sent. 32 and 16 bits are float32 and bfloat16. The
step of a channel is fitted once and belongs to the codec, so that nothing but codes travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvfold.errors import ConfigError
from kvfold.ops.quantize import dequantise, pack_nibbles, quantise, unpack_nibbles

Plan = tuple[tuple[int, int], ...]
"""(bits, channels), wide ones first."""

WIDTHS = (32, 16, 8, 4)
"""Bits that a channel can take."""

_DTYPES = {32: torch.float32, 16: torch.bfloat16, 8: torch.int8, 4: torch.uint8}
_CLIPS = torch.logspace(-1.2, 0, 25, dtype=torch.float64)
"""Shares of the largest number that are tried as the largest code."""
_ROOM = {8: 127, 4: 7}


@dataclass(frozen=True, slots=True, eq=False)
class Quantiser:
    """Turns codes into packed tensors, by name, and back."""

    plan: Plan
    """Widths of the channels."""
    steps: torch.Tensor
    """What code 1 stands for, `[R]` in float32; of no use to float channels."""

    def __post_init__(self) -> None:
        """Refuse a plan that cannot be kept."""
        bits = [width for width, _ in self.plan]
        whole = all(count > 0 for _, count in self.plan)
        if not set(bits) <= set(WIDTHS) or bits != sorted(set(bits), reverse=True) or not whole:
            raise ConfigError(
                f"the plan {self.plan} is not (bits, channels) with bits of {WIDTHS}, wide first"
            )
        if self.steps.shape != (self.rank,):
            raise ConfigError(
                f"{list(self.steps.shape)} steps were given for {self.rank} channels: give one each"
            )

    @property
    def rank(self) -> int:
        """R: channels that are sent."""
        return sum(count for _, count in self.plan)

    @property
    def bits(self) -> int:
        """Bits of one code, its padding to whole bytes included."""
        return 8 * sum(_columns(*part) * _DTYPES[part[0]].itemsize for part in self.plan)

    def layout(self) -> dict[str, tuple[torch.dtype, int]]:
        """Type and last dimension of each packed tensor, by name."""
        return {str(part[0]): (_DTYPES[part[0]], _columns(*part)) for part in self.plan}

    def pack(self, codes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Packed tensors of codes `[..., R]`."""
        packed, start = {}, 0
        for bits, count in self.plan:
            part = codes[..., start : start + count]
            steps = self.steps[start : start + count]
            if bits in _ROOM:
                part = quantise(part, steps, bits)
            packed[str(bits)] = pack_nibbles(part) if bits == 4 else part.to(_DTYPES[bits])
            start += count
        return packed

    def unpack(self, packed: Mapping[str, torch.Tensor], leading: torch.Size) -> torch.Tensor:
        """Codes `[*leading, R]` in float32 of packed tensors."""
        parts, start = [torch.empty(*leading, 0, device=self.steps.device)], 0
        for bits, count in self.plan:
            part = packed[str(bits)]
            if bits == 4:
                part = unpack_nibbles(part, count, torch.int8)
            steps = self.steps[start : start + count]
            parts.append(dequantise(part, steps, torch.float32) if bits in _ROOM else part.float())
            start += count
        return torch.cat(parts, -1)


def fit_steps(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step of each channel with the least squared error, found by trying.

    Args:
        codes: A sample, `[N, R]`.
        bits: A width of `WIDTHS`.

    Returns:
        Steps `[R]` in float32, and the share of each channel's energy that is lost, `[R]`.
    """
    codes = codes.float()
    energy = codes.square().mean(0)
    if bits not in _ROOM:
        lost = (codes.to(_DTYPES[bits]).float() - codes).square().mean(0)
        return torch.ones_like(energy), _share(lost, energy)
    largest = codes.abs().amax(0).clamp_min(1e-20)
    best, steps = torch.full_like(energy, torch.inf), torch.ones_like(energy)
    for clip in _CLIPS.tolist():
        tried = largest * clip / _ROOM[bits]
        kept = dequantise(quantise(codes, tried, bits), tried, torch.float32)
        lost = (kept - codes).square().mean(0)
        steps, best = torch.where(lost < best, tried, steps), torch.minimum(lost, best)
    return steps, _share(best, energy)


def _share(lost: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    return (lost / energy.clamp_min(torch.finfo(energy.dtype).tiny)).clamp(0, 1)


def _columns(bits: int, count: int) -> int:
    return -(-count // 2) if bits == 4 else count
