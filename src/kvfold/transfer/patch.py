"""PATCH: what the attention of a layer is given, as codes; keys and values by the consumer itself.

    H_B ~ g(Z) = offset + Z D + MLP(Z);  K = rope_B(norm_B(H_B Wk_B)),  V = H_B Wv_B

A patched layer's error depends on its own code alone, where errors of layers in a row add up
(SCD, arXiv 2606.07684, Lemma 5.1). The linear part of the aligner is the code's decoder; the MLP
learns what is left, and starts at nothing.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn

from kvfold.errors import ConfigError
from kvfold.transfer.translator import Translator


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignerSettings:
    """How an aligner's MLP is trained (ours: the paper does not say)."""

    hidden: int = 128
    """Width of its hidden layer; 0 leaves the MLP out."""
    steps: int = 300
    """Updates."""
    batch: int = 256
    """Rows of an update."""
    learning_rate: float = 2e-3
    """AdamW's highest; it falls to 0 along a cosine."""
    held_out: float = 0.1
    """Share of the rows that decide which weights are kept."""
    check_every: int = 50
    """Updates between looks at the held-out rows."""


class Aligner(nn.Module):
    """The part of g that is not linear: from codes `[N, R]` to what the decoder misses, `[N, M]`.

    The norms of both sides are the codes' and the targets' own, so that one learning rate fits all.
    """

    def __init__(
        self, rank: int, hidden: int, width: int, generator: torch.Generator | None = None
    ) -> None:
        """Start at nothing.

        Args:
            rank: R.
            hidden: Width of the hidden layer.
            width: M.
            generator: Draws the first layer; without it, it is left as allocated.
        """
        super().__init__()
        self.inner = nn.Linear(rank, hidden)
        self.outer = nn.Linear(hidden, width)
        self.register_buffer("scale", torch.ones(rank))
        self.register_buffer("size", torch.ones(()))
        self.scale: torch.Tensor
        self.size: torch.Tensor
        with torch.no_grad():
            self.outer.weight.zero_()
            self.outer.bias.zero_()
            if generator is not None:
                drawn = torch.randn(hidden, rank, generator=generator) / max(1, rank) ** 0.5
                self.inner.weight.copy_(drawn)
                self.inner.bias.copy_(torch.randn(hidden, generator=generator) / 2)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """What to add to the linear part, `[N, M]` in float32."""
        inner = nn.functional.linear(
            codes / self.scale.float(), self.inner.weight.float(), self.inner.bias.float()
        )
        outer, bias = self.outer.weight.float(), self.outer.bias.float()
        return nn.functional.linear(nn.functional.gelu(inner), outer, bias) * self.size.float()


def train_aligner(
    codes: torch.Tensor,
    missed: torch.Tensor,
    settings: AlignerSettings,
    generator: torch.Generator,
    root: torch.Tensor | None = None,
) -> Aligner:
    """Learn what the linear part misses.

    Args:
        codes: As the consumer has them, `[N, R]`.
        missed: The target less the linear part, `[N, M]`.
        settings: How.
        generator: Of the first weights and the order of the rows.
        root: Errors are multiplied by it before they are squared, `[M, M]`; the square root of a
            metric. All dims count alike without it.

    Returns:
        The aligner that was best on rows it did not learn from; at worst one that adds nothing.
    """
    aligner = Aligner(codes.shape[1], settings.hidden, missed.shape[1], generator)
    aligner.scale.copy_(codes.square().mean(0).sqrt().clamp_min(1e-6))
    aligner.size.copy_(missed.square().mean().sqrt().clamp_min(1e-12))
    if root is None:
        root = torch.eye(missed.shape[1])
    root = root.to(missed) / (missed @ root.to(missed)).square().mean().sqrt().clamp_min(1e-12)
    order = torch.randperm(len(codes), generator=generator)
    held = max(1, int(len(codes) * settings.held_out))
    test, rest = order[:held], order[held:]
    optimiser = torch.optim.AdamW(aligner.parameters(), lr=settings.learning_rate)
    best = (_error(aligner, codes[test], missed[test], root), _copy(aligner))
    for step in range(settings.steps if len(rest) else 0):
        rate = 0.5 * (1 + math.cos(math.pi * step / settings.steps)) * settings.learning_rate
        optimiser.param_groups[0]["lr"] = rate
        rows = rest[torch.randint(len(rest), (settings.batch,), generator=generator)]
        with torch.enable_grad():
            loss = ((aligner(codes[rows]) - missed[rows]) @ root).square().mean()
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        if (step + 1) % settings.check_every == 0 or step + 1 == settings.steps:
            error = _error(aligner, codes[test], missed[test], root)
            best = min(best, (error, _copy(aligner)), key=_by)
    aligner.load_state_dict(best[1])
    return aligner.eval().requires_grad_(False)


def stored_aligner(aligner: Aligner, dtype: torch.dtype) -> Aligner:
    """A copy of an aligner in the type that it is stored in, which learns no more.

    Raises:
        ConfigError: When it does not fit.
    """
    kept = copy.deepcopy(aligner).to(dtype)
    if not all(bool(tensor.isfinite().all()) for tensor in kept.state_dict().values()):
        raise ConfigError(
            f"an aligner has numbers beyond {dtype}: store it in float32, or leave aligners out by "
            "a hidden width of 0"
        )
    return kept.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """One patched layer."""

    inputs: Translator
    """Codes of what the attention is given, and the linear part of g."""
    aligner: Aligner | None
    """The rest of g."""

    def decode(self, packed: dict[str, torch.Tensor], count: int) -> torch.Tensor:
        """What the consumer's attention is given, `[N, M]` in float32."""
        rows = self.inputs.decode(packed, count)
        if self.aligner is None:
            return rows
        return rows + self.aligner(self.inputs.received(packed, count))


@torch.no_grad()
def _error(
    aligner: Aligner, codes: torch.Tensor, missed: torch.Tensor, root: torch.Tensor
) -> float:
    return float(((aligner(codes) - missed) @ root).square().mean())


def _copy(aligner: Aligner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in aligner.state_dict().items()}


def _by(found: tuple[float, dict[str, torch.Tensor]]) -> float:
    return found[0]
