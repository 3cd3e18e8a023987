"""Codecs of tiny pairs, fitted directly and without any choice."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvfold.models import fingerprint_facts
from kvfold.ops.ridge import Moments
from kvfold.transfer.basis import Basis, Fitting, Form, fit_basis
from kvfold.transfer.codec import Codec
from kvfold.transfer.coder import Coder, Reuse
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.patch import Patch
from kvfold.transfer.quantiser import WIDTHS, Plan
from kvfold.transfer.streams import Pair

Rows = dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]
"""Both models' rows `[N, W]`, by part and layer."""


def rows_of(base: PreTrainedModel, other: PreTrainedModel, texts: list[torch.Tensor]) -> Rows:
    """What both models made of texts of one length."""
    pair = Pair(Endpoint(base), Endpoint(other))
    names = ("key", "value", "hidden")
    places = [(name, layer) for name in names for layer in pair.producer.layers]
    return {place: (a, b) for place, a, b in pair.read(torch.stack(texts), places)}


def basis_of(
    a: torch.Tensor, b: torch.Tensor, form: Form = "regression", *, heads: int = 1, **options
) -> Basis:
    """A basis of rows `[N, W]` of a producer and a consumer."""
    moments = Moments(a.shape[1] + b.shape[1])
    moments.add(torch.cat([a, b], 1))
    return fit_basis(moments, a, Fitting(widths=WIDTHS, form=form, **options), heads=heads)


def quick_codec(
    base: PreTrainedModel,
    other: PreTrainedModel,
    texts: list[torch.Tensor],
    *,
    bits: int = 32,
    rank: int | None = None,
    form: Form = "regression",
    patches: tuple[int, ...] = (),
    strength: float = 0.0,
) -> Codec:
    """Every layer at one width and rank."""
    endpoint, rows = Endpoint(base), rows_of(base, other, texts)
    heads = endpoint.anatomy.kv_heads

    def fitted(name: str, layer: int):
        basis = basis_of(*rows[name, layer], form, heads=heads, strength=strength)
        plan: Plan = ((bits, min(rank or basis.rank, basis.rank)),)
        return basis.translator(plan)

    coders: list[Coder] = [
        Patch(fitted("hidden", layer), None)
        if layer in patches
        else Reuse(fitted("key", layer), fitted("value", layer))
        for layer in endpoint.layers
    ]
    facts = [fingerprint_facts(model) for model in (base, other)]
    return Codec(tuple(coders), facts[0], facts[1], "", {"made": "for a test"})
