"""llada: blocks from left to right, the surest places first (LLaDA, arXiv 2502.09992).

The generated places are cut into blocks, and a block is finished before the next is begun. Its
masks are split evenly over its steps, the larger parts first. Tokens are drawn by the Gumbel trick
in float64; a place is as sure as the probability of its token without noise, or as a random number
(`remasking="random"`). With guidance, logits are `u + (1 + scale)(c - u)`, where u are those with
the prompt masked. Unlike the authors' code, any number of steps goes with any length: blocks and
steps that do not divide are shared out, the first ones getting more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.options import as_number
from kvfold.diffusion.samplers.noise import RowNoise
from kvfold.diffusion.samplers.sampler import Proposal, Sampler, register_sampler
from kvfold.errors import ConfigError


@register_sampler("llada")
@dataclass(frozen=True)
class LLaDASampler(Sampler):
    """Blocks, an even schedule, and remasking of what is least sure."""

    summary = "blocks from left to right, an even schedule (LLaDA)"

    block_length: int | None = None
    """Places in a block; all in one without it."""
    remasking: str = "low_confidence"
    """`low_confidence` decides the surest places first, `random` any."""
    cfg_scale: float = 0.0
    """Scale of classifier-free guidance, which doubles the cost of a step; 0 for none."""

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.require_whole("block_length", optional=True)
        self.require_choice("remasking", ("low_confidence", "random"))
        scaled = 0 <= as_number(self.cfg_scale) < math.inf
        self.require("cfg_scale", "a number from 0 up", holds=scaled)
        if self.is_parallel and self.remasking == "random":
            raise ConfigError("threshold and factor need remasking by low_confidence, not random")

    @property
    def guidance(self) -> float:
        """Scale of classifier-free guidance."""
        return self.cfg_scale

    def check(self, length: int) -> None:
        """Refuse fewer steps than blocks."""
        blocks = -(-length // self._block_length(length))
        if self.steps is not None and self.steps < blocks:
            raise ConfigError(
                f"{self.steps} steps are too few for {blocks} blocks: give at least one a block"
            )

    def block(self, canvas: Canvas) -> tuple[torch.Tensor, torch.Tensor]:
        """The first block with an undecided place."""
        size = self._block_length(canvas.width - canvas.prompt)
        first = canvas.masked.long().argmax(dim=1) - canvas.prompt
        start = canvas.prompt + first // size * size
        return start, (start + size).clamp_max(canvas.width)

    def propose(self, logits: torch.Tensor, counts: list[int], noise: RowNoise) -> Proposal:
        """The likeliest token, or one drawn by the Gumbel trick."""
        tokens = logits.argmax(dim=-1)
        if self.temperature > 0:
            drawn = noise.gumbel(counts, logits.shape[-1])
            tokens = (logits.double() + self.temperature * drawn).argmax(dim=-1)
        if self.remasking == "random":
            return tokens, noise.uniform(counts, 1)[:, 0].float()
        return tokens, logits.softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]

    def scheduled(self, canvas: Canvas) -> torch.Tensor:
        """What is left in the block, shared out over what is left of its steps."""
        length = canvas.width - canvas.prompt
        size = self._block_length(length)
        blocks = -(-length // size)
        steps, more = divmod(self.steps or length, blocks)
        number = (canvas.start - canvas.prompt) // size
        left = (steps + (number < more).long() - canvas.in_block).clamp_min(1)
        return -(-canvas.wanted.sum(dim=1) // left)

    def _block_length(self, length: int) -> int:
        return min(self.block_length or length, length)
