"""The policy network of DistillCache: one small MLP that scores each token by its features.

5 -> 128 -> 128 -> 1 with LayerNorm (arXiv 2608.08878). Departure: the three features that span
orders of magnitude enter as logarithms, mass and its variance relative to a uniform distribution
over the held tokens, so that a text's length alone changes nothing.
"""

from __future__ import annotations

import torch
from torch import nn

from kvfold.errors import ConfigError
from kvfold.evict.features import FEATURES

HIDDEN = 128
"""Units of each hidden layer."""

_TINY = 1e-12


class PolicyNetwork(nn.Module):
    """Scores tokens independently of each other; higher stays."""

    mean: torch.Tensor
    scale: torch.Tensor
    used: torch.Tensor

    def __init__(
        self,
        *,
        features: tuple[str, ...] = FEATURES,
        generator: torch.Generator,
    ) -> None:
        """Start with small random weights and no normalisation.

        Args:
            features: The ones it may look at; the others are zero to it.
            generator: Draws the weights; the global one is left alone.

        Raises:
            ConfigError: For a feature that there is not, or none.
        """
        super().__init__()
        check_features(features)
        self.register_buffer("mean", torch.zeros(len(FEATURES)))
        self.register_buffer("scale", torch.ones(len(FEATURES)))
        used = torch.tensor([float(name in features) for name in FEATURES])
        self.register_buffer("used", used)
        self.layers = nn.Sequential(
            _linear(len(FEATURES), HIDDEN, generator),
            nn.LayerNorm(HIDDEN),
            nn.ReLU(),
            _linear(HIDDEN, HIDDEN, generator),
            nn.LayerNorm(HIDDEN),
            nn.ReLU(),
            _linear(HIDDEN, 1, generator),
        )

    def forward(self, features: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Score tokens.

        Args:
            features: `[B, T, 5]`, in the order of `FEATURES`.
            held: Tokens that each row holds, `[B]`.

        Returns:
            `[B, T]`.
        """
        return self.score(self.compress(features, held))

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        """Score tokens by their compressed features, `[..., 5]` to `[...]`."""
        return self.layers((inputs - self.mean) * (self.used / self.scale))[..., 0]

    def compress(self, features: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """The inputs before normalisation, `[B, T, 5]`."""
        mass, norm, spread, entropy, position = features.unbind(-1)
        count = held.view(-1, 1).to(features.dtype)
        columns = (
            (mass * count + _TINY).log(),
            (norm + _TINY).log(),
            (spread * count.square() + _TINY).log(),
            entropy,
            position,
        )
        return torch.stack(columns, dim=-1)

    def normalise(self, inputs: torch.Tensor) -> None:
        """Set mean and scale from a sample of compressed inputs, `[N, 5]`."""
        self.mean.copy_(inputs.mean(0))
        self.scale.copy_(inputs.std(0).clamp_min(1e-3))


def check_features(features: tuple[str, ...]) -> None:
    """Refuse what a network cannot look at.

    Raises:
        ConfigError: For a feature that there is not, or none.
    """
    unknown = sorted(set(features) - set(FEATURES))
    if unknown or not features:
        raise ConfigError(
            f"features {', '.join(unknown) or 'are missing'}: choose from {', '.join(FEATURES)}"
        )


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    # Plain nn.Linear would first draw weights from the global generator.
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    assert isinstance(layer, nn.Linear)
    nn.init.uniform_(layer.weight, -(inputs**-0.5), inputs**-0.5, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
