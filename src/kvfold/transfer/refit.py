"""Decoders fitted to the codes that are really received: quantised, by encoders as stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from kvfold.ops.ridge import Moments, ridge, square_root
from kvfold.transfer.coder import Coder, Reuse, translators
from kvfold.transfer.patch import AlignerSettings, Patch, stored_aligner, train_aligner
from kvfold.transfer.streams import Pair, Place
from kvfold.transfer.translator import Translator, stored

Translators = dict[Place, Translator]
"""The linear codes of a codec, by place."""


def all_translators(coders: Sequence[Coder]) -> Translators:
    """The linear codes of all layers."""
    return {
        (name, layer): translator
        for layer, coder in enumerate(coders)
        for name, translator in translators(coder).items()
    }


def received_rows(
    pair: Pair, chosen: Translators, text: torch.Tensor
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Rows [code as received | consumer's] of each place of a text `[1, T]`."""
    for place, first, second in pair.read(text, list(chosen)):
        translator = chosen[place]
        rows, targets = first.cpu(), second.cpu()
        codes = translator.received(translator.encode(rows), len(rows))
        targets = targets.reshape(-1, len(translator.offset))
        yield place, torch.cat([codes.reshape(len(targets), -1), targets], 1)


def refitted(translator: Translator, moments: Moments, strength: float) -> Translator:
    """The same code with the decoder that the moments of [code | target] call for.

    Raises:
        ConfigError: When the decoder does not fit the type it is stored in.
    """
    rank, covariance, mean = translator.quantiser.rank, moments.covariance, moments.mean
    decoder = ridge(covariance[:rank, :rank], covariance[:rank, rank:], strength)
    kept = stored(decoder, translator.decoder.dtype)
    offset = mean[rank:] - mean[:rank] @ kept.double()
    return replace(translator, decoder=kept, offset=offset.float())


def refitted_coders(
    coders: Sequence[Coder], moments: Mapping[Place, Moments], strength: float
) -> list[Coder]:
    """All layers with decoders refitted."""
    found: list[Coder] = []
    for layer, coder in enumerate(coders):
        fitted = {
            name: refitted(translator, moments[name, layer], strength)
            for name, translator in translators(coder).items()
        }
        if isinstance(coder, Patch):
            found.append(Patch(fitted["hidden"], coder.aligner))
        else:
            found.append(Reuse(fitted["key"], fitted["value"]))
    return found


def aligned(
    patch: Patch,
    rows: torch.Tensor,
    settings: AlignerSettings,
    seed: int,
    metric: torch.Tensor | None = None,
) -> Patch:
    """A patch whose aligner has learned what its decoder misses.

    Args:
        patch: With its decoder refitted.
        rows: A sample of rows [producer's | consumer's], `[N, 2 M]`.
        settings: How the aligner is trained.
        seed: Of the training.
        metric: What an error of the attention's input costs, `[M, M]`.

    Raises:
        ConfigError: When the aligner does not fit the type it is stored in.
    """
    inputs = patch.inputs
    if settings.hidden == 0 or inputs.quantiser.rank == 0:
        return Patch(inputs, None)
    first, second = rows[:, : len(inputs.mean)], rows[:, len(inputs.mean) :]
    packed = inputs.encode(first)
    missed = second - inputs.decode(packed, len(rows))
    generator = torch.Generator().manual_seed(seed)
    codes = inputs.received(packed, len(rows))
    root = None if metric is None else square_root(metric)
    aligner = train_aligner(codes, missed, settings, generator, root)
    return Patch(inputs, stored_aligner(aligner, inputs.decoder.dtype))
