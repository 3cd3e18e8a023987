"""How much the model did not expect each token of a text (SeKV, arXiv 2606.31145).

    H_t = -log p(x_t | x_<t), in nats, and H_0 = 0

`generate` computes logits for the last position only, so surprisal is taken from the last hidden
states `[B, N, M]`, through the model's own head, a few tokens at a time.

Some models do more to logits than the head: Gemma 2 caps them with `tanh`, Granite and Cohere scale
them. Which, and whether a number in the configuration multiplies or divides, is found by trying on
a short forward; a model whose logits cannot be had this way is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.models import base_model, lm_head, text_config

_ROWS = 128
"""Tokens whose logits `[V]` are in memory at once."""
_FACTORS = ("logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier")
"""Options by which configurations scale logits: some multiply, some divide."""
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Options by which configurations cap logits."""
_TRIAL = 5
"""Tokens of the short forward."""


@dataclass(frozen=True, slots=True)
class Readout:
    """From the base model's last hidden states to the model's logits."""

    head: nn.Module
    """The model's own."""
    factor: float
    """On the head's output."""
    softcap: float | None
    """Bound on the scaled logits by `tanh`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in float32.

        Args:
            hidden: Last hidden states, after the final norm, `[..., M]`.

        Returns:
            `[..., V]`, on the head's device.
        """
        logits = self.head(hidden).float() * self.factor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class Surprisal:
    """Surprisal of tokens, from the last hidden states; a prompt may come in chunks.

    It holds the model's head, and nothing of any text.

    Example:
        >>> surprisal = Surprisal(model)  # doctest: +SKIP
        >>> hidden = model.model(ids).last_hidden_state  # doctest: +SKIP
        >>> first = surprisal(hidden[:, :64], ids[:, :64])  # doctest: +SKIP
        >>> rest = surprisal(hidden[:, 64:], ids[:, 64:], before=hidden[:, 63])  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the model's way to its logits, with a forward of a few tokens and no cache.

        Args:
            model: A causal language model with its weights.

        Raises:
            ConfigError: When the model has no weights.
            UnsupportedModelError: When its logits are not made from its last hidden states by the
                head, a factor and a cap that its configuration has.
        """
        self._readout = find_readout(model)

    @property
    def head(self) -> nn.Module:
        """The model's own, when it was tried."""
        return self._readout.head

    @torch.no_grad()
    def __call__(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        *,
        tokens: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
        begun: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Surprisal of one chunk of a text, or of the whole.

        Args:
            hidden: The base model's last hidden states, `[B, N, M]`.
            ids: Token ids, `[B, N]`.
            tokens: False for padding, `[B, N]`; without it all are tokens. A token after padding
                has nothing that predicts it.
            before: Last hidden state of the chunk before, `[B, M]`; None at the start.
            begun: Rows `[B]` of which `before` is a token's; without it all that have one. False
                for a row of nothing but padding so far.

        Returns:
            Nats in float32, `[B, N]`; 0 for padding and for the first token of a row.

        Raises:
            ConfigError: When there is not one hidden state a token.
        """
        if hidden.shape[:2] != ids.shape:
            raise ConfigError(
                f"hidden states {list(hidden.shape)} were given for token ids {list(ids.shape)}: "
                "give one hidden state [M] for each token"
            )
        tokens = torch.ones_like(ids, dtype=torch.bool) if tokens is None else tokens.bool()
        begun = tokens.new_full(ids.shape[:1], before is not None) if begun is None else begun
        before = torch.zeros_like(hidden[:, 0]) if before is None else before
        parts = [self._nats(before[:, None], ids[:, :1])]
        step = max(1, _ROWS // len(ids))
        for start in range(1, ids.shape[1], step):
            end = min(start + step, ids.shape[1])
            parts.append(self._nats(hidden[:, start - 1 : end - 1], ids[:, start:end]))
        predicted = torch.cat([begun[:, None], tokens], dim=1)[:, :-1]
        return torch.cat(parts, dim=1).where(tokens & predicted, 0.0)

    def _nats(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """From the hidden states that predict them, `[B, C, M]`, tokens' surprisal `[B, C]`."""
        logits = self._readout.logits(hidden).flatten(0, 1)
        wanted = ids.flatten().to(logits.device)
        nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return nats.view(ids.shape).to(ids.device)


@torch.no_grad()
def find_readout(model: PreTrainedModel) -> Readout:
    """Find out, on a short forward, how a model makes logits from its last hidden states.

    Args:
        model: A causal language model with its weights.

    Returns:
        What gives the same logits.

    Raises:
        ConfigError: When the model has no weights.
        UnsupportedModelError: When nothing that the configuration names does.
    """
    if model.device.type == "meta":
        raise ConfigError("a model on the meta device has no weights to try: load it first")
    hidden, expected = _try(model)
    bound = float(expected.norm()) * (1e-3 if expected.dtype == torch.float32 else 3e-2)
    candidates = _candidates(model)
    errors = [float((each.logits(hidden) - expected).norm()) for each in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if errors[best] > bound:
        raise UnsupportedModelError(
            f"{type(model).__name__} makes its logits from its last hidden states in a way that "
            "kvfold does not know: use a model whose logits are its head's output, scaled or "
            "capped as in Granite, Cohere or Gemma 2"
        )
    return candidates[best]


def _candidates(model: PreTrainedModel) -> list[Readout]:
    """Nothing but the head first, so that of equals it is chosen."""
    config, head = text_config(model), lm_head(model)
    named = [getattr(config, name, None) for name in _FACTORS]
    factors = [1.0]
    for value in named:
        factors += [float(value), 1 / float(value)] if value else []
    caps = [None, *(float(cap) for name in _SOFTCAPS if (cap := getattr(config, name, None)))]
    return [Readout(head, factor, cap) for cap in caps for factor in factors]


def _try(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states `[1, N, M]` and logits `[1, N, V]` of a few tokens."""
    seen: list[torch.Tensor] = []
    handle = base_model(model).register_forward_hook(
        lambda module, arguments, output: seen.append(output[0])
    )
    ids = torch.arange(1, _TRIAL + 1, device=model.device)[None] % text_config(model).vocab_size
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for module, mode in modes:
            module.training = mode
        handle.remove()
    return seen[-1], logits
