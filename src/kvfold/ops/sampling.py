"""Choosing some of T tokens at random without replacement: two samplers, each with its own law.

- Plackett-Luce (DistillCache, arXiv 2608.08878): tokens are drawn one after the other from the
  softmax over those that are left, and the law is that of the ordered draw,
  `sum_k s_k - logsumexp(left before draw k)`. Adding Gumbel noise and taking the top draws it.
- Conditional Poisson: a set S has a probability proportional to `exp(sum of its scores)`. The
  normaliser is the elementary symmetric polynomial of the weights, of degree `count`. The paper
  names this normaliser beside the Gumbel sampler, whose law it is not; here each has its own.

Both have the same signatures: T tokens' scores `[..., T]` and chosen indices `[..., count]`, with
a boolean mask of the candidates. Empty slots and tokens that are kept whatever happens are simply
no candidates. Log-probabilities are differentiable in the scores, in float32 or float64.
"""

from __future__ import annotations

import math

import torch

from kvfold.errors import ConfigError

_NEVER = -1e30
"""Score of what cannot be chosen: finite, since infinities make undefined gradients."""


def gumbel(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Standard Gumbel noise: the top of scores plus noise is a Plackett-Luce draw.

    Args:
        like: Gives the shape and the device, `[..., T]`.
        generator: On the CPU, so that every device draws the same.

    Returns:
        Finite noise in float32, `[..., T]`.
    """
    # In double, or the largest of many tokens' noise would come from a handful of values.
    uniform = torch.rand(like.shape, dtype=torch.float64, generator=generator)
    uniform = uniform.clamp_min(torch.finfo(torch.float64).tiny)
    return -(-uniform.log()).log().to(like.device, torch.float32)


@torch.no_grad()
def plackett_luce_sample(
    scores: torch.Tensor,
    count: int,
    *,
    generator: torch.Generator,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw tokens one after the other, each from the softmax over those that are left.

    Args:
        scores: Unnormalised log-weights, `[..., T]`.
        count: Tokens to draw in each row.
        generator: On the CPU.
        candidates: Tokens that may be drawn, `[..., T]`; all without it.

    Returns:
        Indices in the order drawn, `[..., count]`.

    Raises:
        ConfigError: When a row has fewer candidates than `count`.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> plackett_luce_sample(torch.tensor([0.0, 50.0, 99.0]), 2, generator=generator)
        tensor([2, 1])
    """
    scores = _masked(scores, count, candidates)
    return (scores + gumbel(scores, generator)).topk(count, dim=-1).indices


def plackett_luce_log_prob(
    scores: torch.Tensor, indices: torch.Tensor, candidates: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probability of an ordered draw, in O(T).

    Args:
        scores: Unnormalised log-weights, `[..., T]`.
        indices: The tokens in the order drawn, `[..., count]`.
        candidates: Tokens that could be drawn, `[..., T]`; all without it.

    Returns:
        Log-probabilities `[...]`, in float64 for float64 scores and in float32 otherwise.

    Raises:
        ConfigError: When a drawn token is no candidate.
    """
    scores = _masked(scores, indices.shape[-1], candidates)
    _require_candidates(indices, candidates)
    drawn = scores.gather(-1, indices)
    never_drawn = scores.scatter(-1, indices, _NEVER).logsumexp(-1, keepdim=True)
    # What is left before draw k: the tokens never drawn, and draws k and later.
    left = torch.cat([never_drawn, drawn.flip(-1)], -1).logcumsumexp(-1)[..., 1:].flip(-1)
    return (drawn - left).sum(-1)


@torch.no_grad()
def conditional_poisson_sample(
    scores: torch.Tensor,
    count: int,
    *,
    generator: torch.Generator,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a set with a probability proportional to the exponential of its summed scores.

    The tokens are halved again and again, and each half's share of the count is drawn from its
    exact law: log2(T) steps.

    Args:
        scores: Unnormalised log-weights, `[..., T]`.
        count: Tokens to draw in each row.
        generator: On the CPU.
        candidates: Tokens that may be drawn, `[..., T]`; all without it.

    Returns:
        Indices in ascending order, `[..., count]`.

    Raises:
        ConfigError: When a row has fewer candidates than `count`.
    """
    levels = _polynomials(_masked(scores, count, candidates), count)
    counts = torch.full_like(levels[-1][..., 0], count, dtype=torch.long)
    for level in reversed(levels[:-1]):
        counts = _split(counts, level[..., ::2, :], level[..., 1::2, :], generator)
    return counts.argsort(dim=-1, descending=True, stable=True)[..., :count]


def conditional_poisson_log_prob(
    scores: torch.Tensor, indices: torch.Tensor, candidates: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probability of a set, in O(T count) time and memory.

    Args:
        scores: Unnormalised log-weights, `[..., T]`.
        indices: The tokens of the set in any order, `[..., count]`.
        candidates: Tokens that could be drawn, `[..., T]`; all without it.

    Returns:
        Log-probabilities `[...]`, in float64 for float64 scores and in float32 otherwise. Their
        gradient is 1 for a chosen token, less every token's probability to be chosen.

    Raises:
        ConfigError: When a chosen token is no candidate.
    """
    count = indices.shape[-1]
    scores = _masked(scores, count, candidates)
    _require_candidates(indices, candidates)
    normaliser = _polynomials(scores, count)[-1][..., 0, count]
    chosen = scores.double().gather(-1, indices).sum(-1)
    return (chosen - normaliser).to(scores.dtype)


def choice_entropy(scores: torch.Tensor, candidates: torch.Tensor | None = None) -> torch.Tensor:
    """Entropy of the first draw, as a share of the largest possible.

    Args:
        scores: Unnormalised log-weights, `[..., T]`.
        candidates: Tokens that could be drawn, `[..., T]`; all without it.

    Returns:
        Values `[...]` from 0 (one token for sure, or the only one) to 1 (all equally likely).

    Raises:
        ConfigError: When a row has no candidate.
    """
    scores = _masked(scores, 1, candidates)
    logs = scores.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    if candidates is None:
        return entropy / math.log(max(2, scores.shape[-1]))
    return entropy / candidates.sum(-1).clamp_min(2).to(scores.dtype).log()


def _masked(scores: torch.Tensor, count: int, candidates: torch.Tensor | None) -> torch.Tensor:
    """The scores in at least float32, `_NEVER` for what is no candidate."""
    fewest = scores.shape[-1] if candidates is None else int(candidates.sum(-1).min())
    if not 0 <= count <= fewest:
        raise ConfigError(
            f"{count} tokens were to be drawn where a row has {fewest} candidates: draw from 0 to "
            "as many as there are"
        )
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores if candidates is None else scores.masked_fill(~candidates, _NEVER)


def _require_candidates(indices: torch.Tensor, candidates: torch.Tensor | None) -> None:
    if candidates is not None and not candidates.gather(-1, indices).all():
        raise ConfigError(
            "a drawn token is not among the candidates: give the mask it was drawn with"
        )


def _polynomials(scores: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Logs of the elementary symmetric polynomials of blocks of 1, 2, 4, ... tokens.

    Args:
        scores: Log-weights, `[..., T]`.
        most: Highest degree wanted.

    Returns:
        One tensor a level, `[..., blocks, min(block length, most) + 1]`, the last of one block,
        in float64: logs of binomials reach thousands, and their differences count.
    """
    length = 1 << (scores.shape[-1] - 1).bit_length()
    padding = (0, length - scores.shape[-1])
    weights = torch.nn.functional.pad(scores.double(), padding, value=_NEVER)
    levels = [torch.stack([torch.zeros_like(weights), weights], -1)[..., : most + 1]]
    while levels[-1].shape[-2] > 1:
        level = levels[-1]
        levels.append(_product(level[..., ::2, :], level[..., 1::2, :], most))
    return levels


def _product(left: torch.Tensor, right: torch.Tensor, most: int) -> torch.Tensor:
    """Product of polynomials given by the logs of their coefficients, cut off past a degree.

    Args:
        left: `[..., degree + 1]`.
        right: The same.
        most: Highest degree wanted, at least theirs.

    Returns:
        `[..., min(2 degree, most) + 1]`.
    """
    degree = left.shape[-1] - 1
    highest = min(2 * degree, most)
    padded = torch.nn.functional.pad(right, (degree, highest - degree), value=_NEVER)
    windows = padded.unfold(-1, degree + 1, 1)  # [..., k, j] is right[k - degree + j]
    return (windows + left.flip(-1).unsqueeze(-2)).logsumexp(-1)


def _split(
    counts: torch.Tensor, left: torch.Tensor, right: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Share each block's count out to its two halves.

    Args:
        counts: Tokens to draw from each block, `[..., blocks]`.
        left: The first halves' polynomials, `[..., blocks, degree + 1]`.
        right: The second halves'.
        generator: On the CPU.

    Returns:
        Tokens to draw from each half, `[..., 2 blocks]`.
    """
    shares = torch.arange(left.shape[-1], device=left.device)
    others = counts.unsqueeze(-1) - shares
    possible = (others >= 0) & (others < right.shape[-1])
    logits = left + right.gather(-1, others.clamp(0, right.shape[-1] - 1))
    logits = logits.masked_fill(~possible, -torch.inf)
    first = (logits + gumbel(logits, generator)).argmax(-1)
    return torch.stack([first, counts - first], -1).flatten(-2)
