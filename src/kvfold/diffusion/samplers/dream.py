"""dream: no blocks, time runs from 1 to 0 and decides a share of what is left (Dream 7B).

At step i of S, with times t and s the i-th and next of S + 1 even ones from 1 to `epsilon`, the
share `1 - s/t` of the undecided places is decided; the last step decides all (Ye et al., Dream 7B,
arXiv 2508.15487, and its published code). `algorithm` says which:

    origin          each place by itself, at random with that probability
    maskgit_plus    those whose token is likeliest
    topk_margin     those whose likeliest token is furthest ahead of the second
    entropy         those whose distribution has the least entropy

With `alg_temp` above 0, places are drawn without replacement from the softmax of these numbers over
it. The authors count a batch's undecided places together; here each row counts its own, and decides
one at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.options import as_number
from kvfold.diffusion.samplers.choice import best, within_top_k, within_top_p
from kvfold.diffusion.samplers.noise import RowNoise
from kvfold.diffusion.samplers.sampler import Proposal, Sampler, register_sampler
from kvfold.errors import ConfigError

ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy")
"""By what places are decided."""


@register_sampler("dream")
@dataclass(frozen=True)
class DreamSampler(Sampler):
    """A share of what is left in every step, over all places at once."""

    summary = "a share of what is left in every step, no blocks (Dream)"

    algorithm: str = "maskgit_plus"
    """One of `ALGORITHMS`."""
    alg_temp: float = 0.0
    """Temperature of the choice of places; 0 takes the surest."""
    top_p: float | None = None
    """Tokens are drawn from the likeliest that reach this probability together."""
    top_k: int | None = None
    """Tokens are drawn from this many of the likeliest."""
    epsilon: float = 1e-3
    """Time at which all is decided."""

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.require_whole("top_k", optional=True)
        self.require_choice("algorithm", ALGORITHMS)
        warm = 0 <= as_number(self.alg_temp) < math.inf
        self.require("alg_temp", "a number from 0 up", holds=warm)
        shared = self.top_p is None or 0 < as_number(self.top_p) <= 1
        self.require("top_p", "a probability above 0 and at most 1", holds=shared)
        inside = 0 < as_number(self.epsilon) < 1
        self.require("epsilon", "a time between 0 and 1", holds=inside)
        sure = self.algorithm in ("maskgit_plus", "topk_margin") and not self.alg_temp
        if self.is_parallel and not sure:
            raise ConfigError(
                "threshold and factor need algorithm maskgit_plus or topk_margin, without alg_temp"
            )

    def block(self, canvas: Canvas) -> tuple[torch.Tensor, torch.Tensor]:
        """All generated places."""
        start = torch.full_like(canvas.start, canvas.prompt)
        return start, torch.full_like(start, canvas.width)

    def propose(self, logits: torch.Tensor, counts: list[int], noise: RowNoise) -> Proposal:
        """The likeliest token, or one drawn from the likeliest ones, and how sure it is."""
        if self.temperature > 0:
            logits = logits / self.temperature
        if self.top_p is not None and self.top_p < 1:
            logits = within_top_p(logits, self.top_p)
        if self.top_k is not None:
            logits = within_top_k(logits, self.top_k)
        tokens = logits.argmax(dim=-1)
        if self.temperature > 0:
            drawn = noise.gumbel(counts, logits.shape[-1])
            tokens = (logits.double() + drawn).argmax(dim=-1)
        return tokens, self._confidence(logits.softmax(dim=-1), tokens)

    def _confidence(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.algorithm == "topk_margin":
            first, second = probabilities.topk(2, dim=-1).values.unbind(-1)
            return first - second
        if self.algorithm == "entropy":
            return -torch.special.entr(probabilities).sum(dim=-1)
        return probabilities.gather(-1, tokens[:, None])[:, 0]

    def scheduled(self, canvas: Canvas) -> torch.Tensor:
        """The share of what is left that time decides, rounded down; all in the last step."""
        left = canvas.wanted.sum(dim=1)
        return (left.double() * self._share(canvas)).long()

    def choose(self, confidence: torch.Tensor, canvas: Canvas, noise: RowNoise) -> torch.Tensor:
        """By chance alone under `origin`, and at least one place; else as all samplers do."""
        if self.algorithm != "origin" or self._is_last(canvas):
            return super().choose(confidence, canvas, noise)
        numbers = noise.uniform([1] * len(confidence), confidence.shape[1])
        numbers = numbers.masked_fill(confidence.isneginf(), torch.inf)
        hit = (numbers < self._share(canvas)).sum(dim=1)
        return best(-numbers, hit.clamp_min(1))

    def ranked(self, confidence: torch.Tensor, noise: RowNoise) -> torch.Tensor:
        """The confidence, or under `alg_temp` a draw without replacement by the Gumbel trick."""
        if self.alg_temp == 0:
            return confidence
        drawn = noise.gumbel([1] * len(confidence), confidence.shape[1])
        return confidence.double() / self.alg_temp + drawn

    def _share(self, canvas: Canvas) -> float:
        """`1 - s/t` of this step, and 1 in the last."""
        steps = self.steps or canvas.width - canvas.prompt
        if canvas.step >= steps - 1:
            return 1.0
        stride = (1 - self.epsilon) / steps
        now = 1 - canvas.step * stride
        return stride / now
