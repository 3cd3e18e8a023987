"""How likely a masked diffusion model finds a continuation, estimated by filling masks.

Of the T tokens after a context, n are masked, all sets of n alike, and the model fills them at
once. With n drawn evenly from 1 to T, the mean of

    T/n * (the sum over masked tokens of their log-probabilities, given all others)

is a lower bound of the log-likelihood (LLaDA, arXiv 2502.09992), and what is drawn here
estimates it. The numbers n of one estimate are spread over 1 to T in even strides from a random
start, so that each draw by itself is still even.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfold.diffusion.caches import DiffusionCache
from kvfold.diffusion.generate import stream
from kvfold.diffusion.model import DiffusionModel, positions_of, visibility
from kvfold.diffusion.samplers import LLaDASampler
from kvfold.errors import ConfigError


def estimate(
    model: DiffusionModel,
    context: Sequence[int],
    tokens: Sequence[int],
    *,
    draws: int = 128,
    rows: int = 16,
    generator: torch.Generator,
) -> float:
    """Estimate the lower bound of a continuation's log-likelihood.

    A continuation of one token has one mask alone, so its log-likelihood is exact, after one draw.

    Args:
        model: Read densely, without a cache.
        context: Token ids before the continuation, at least one.
        tokens: Of the continuation, at least one.
        draws: Masks that are drawn.
        rows: Draws that are computed side by side.
        generator: On the CPU, of the masks.

    Returns:
        In nats.

    Raises:
        ConfigError: A part is empty, or both are longer than the model's positions.
    """
    _check(model, context, tokens)
    masks = draw_masks(len(tokens), 1 if len(tokens) == 1 else draws, generator)
    found = [weighted(model, context, tokens, part) for part in masks.split(rows)]
    return float(torch.cat(found).mean())


def draw_masks(length: int, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Which tokens of a continuation are masked: at least one, boolean `[draws, length]`.

    Args:
        length: Tokens of the continuation, T.
        draws: Masks wanted.
        generator: On the CPU.
    """
    start = int(torch.randint(length, (1,), generator=generator))
    counts = 1 + (start + torch.arange(draws) * length // draws) % length
    ranks = torch.rand(draws, length, generator=generator).argsort(dim=1).argsort(dim=1)
    return ranks < counts[:, None]


@torch.no_grad()
def weighted(
    model: DiffusionModel, context: Sequence[int], tokens: Sequence[int], masks: torch.Tensor
) -> torch.Tensor:
    """The log-probability of what each mask hides, times T/n.

    Args:
        model: Read densely.
        context: Token ids before the continuation, at least one.
        tokens: Of the continuation, T of them.
        masks: Boolean `[N, T]`, each with at least one True.

    Returns:
        `[N]` in float64, on the CPU.
    """
    count = len(masks)
    ids = torch.tensor([*context, *tokens], device=model.device).expand(count, -1)
    kept = torch.zeros(count, len(context), dtype=torch.bool)
    nll, _ = fill(model, ids, torch.cat([kept, masks], dim=1).to(model.device))
    totals = torch.zeros(count, dtype=torch.float64)
    totals.index_add_(0, masks.nonzero()[:, 0], -nll.double().cpu())
    return totals * masks.shape[1] / masks.sum(dim=1)


def fill(
    model: DiffusionModel, ids: torch.Tensor, masked: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the masked tokens of rows without padding, all at once.

    Args:
        model: Read densely.
        ids: The true tokens, `[B, T]`.
        masked: Which of them are hidden, boolean `[B, T]`; under a shifted prediction never the
            first.

    Returns:
        Of each masked token, row by row, its negative log-likelihood, and 1 where it is the
        likeliest or 0, `[W]` each in float32.
    """
    traits, decoder = model.traits, model.decoder
    valid = torch.ones_like(masked)
    positions = positions_of(valid)
    seen = ids.masked_fill(masked, traits.mask_id)
    hidden = decoder(seen, positions, visibility(traits, valid, positions, positions))
    sources = torch.nn.functional.pad(masked[:, traits.shift :], (0, traits.shift))
    logits = decoder.logits(hidden[sources]).float()
    wanted = ids[masked]
    nll = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    return nll, (logits.argmax(dim=-1) == wanted).float()


def is_greedy(
    model: DiffusionModel, context: Sequence[int], tokens: Sequence[int], cache: DiffusionCache
) -> bool:
    """Whether a continuation is what the model writes in its place.

    It writes the likeliest tokens, one a step, the surest place first, and no further than to the
    first that is another.

    Args:
        model: Which writes.
        context: Token ids before the continuation, at least one.
        tokens: Of the continuation, at least one.
        cache: That it writes with.

    Raises:
        ConfigError: A part is empty, both are longer than the model's positions, or the cache's
            options do not fit the model.
    """
    _check(model, context, tokens)
    wanted = torch.tensor(tokens, device=model.device)
    sampler = LLaDASampler(stop_at_eos=False)
    frames = stream(model, [list(context)], cache, length=len(tokens), sampler=sampler)
    return all(bool((frame.ids[0] == wanted)[frame.changed[0]].all()) for frame in frames)


def _check(model: DiffusionModel, context: Sequence[int], tokens: Sequence[int]) -> None:
    if not context or not tokens:
        raise ConfigError("the context or the continuation is empty: give at least one token each")
    if len(context) + len(tokens) > model.shape.positions:
        raise ConfigError(
            f"a context of {len(context)} and a continuation of {len(tokens)} tokens are more than "
            f"the model's {model.shape.positions} positions: shorten one of them"
        )
