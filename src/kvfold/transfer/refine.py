"""Decoders taught by what the consumer says over what they decode (ours: SCD fits states alone).

Least squares brings decoded states near the consumer's own, whatever of them the consumer goes by.
From there decoders, offsets and aligners learn what brings its predictions near,

    KL(P_B(. | own) || P_B(. | decoded)),

on the last tokens of texts that nothing else was fitted to. Codes stay what they are, so that
payload and producer are not concerned.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache

from kvfold.models import frozen
from kvfold.ops.divergence import kl_divergence
from kvfold.ops.ridge import Moments
from kvfold.tensorfile import digest_of
from kvfold.training import CHECKPOINT, StepOutcome, TrainingRecord, TrainingSettings, train
from kvfold.transfer.batches import batches
from kvfold.transfer.coder import (
    Coder,
    Reuse,
    decode_layer,
    encode_layer,
    moved,
    patched,
    translators,
)
from kvfold.transfer.endpoint import positions_of
from kvfold.transfer.patch import Aligner, Patch, stored_aligner
from kvfold.transfer.probes import Probes
from kvfold.transfer.settings import RefineSettings
from kvfold.transfer.storage import tensors_of
from kvfold.transfer.streams import Pair, Place, Tell
from kvfold.transfer.translator import Translator, stored

_LEAST = 1e-6
"""Smallest spread of a channel, as a share of the largest."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What decoders are taught by."""

    pair: Pair
    """The models; the consumer is attached."""
    coders: Sequence[Coder]
    """Fitted by least squares."""
    moments: Mapping[Place, Moments]
    """Of rows [code as received | consumer's] of each place."""
    texts: Sequence[torch.Tensor]
    """Token ids, `[T]` each, of any lengths."""
    probes: Probes
    """Tell how well."""


def refined(
    lesson: Lesson, settings: RefineSettings, seed: int, folder: Path, tell: Tell
) -> tuple[list[Coder], TrainingRecord]:
    """Teach decoders on each text once; what was best on the probes is kept.

    Args:
        lesson: What by.
        settings: How.
        seed: Of the run.
        folder: Of its checkpoint, with which it goes on where it stopped.
        tell: Told how many updates are done.

    Returns:
        The coders, in the types that they came in, and how it went.

    Raises:
        ConfigError: When what was learnt does not fit these types.
        KVFoldError: When a divergence is no number.
    """
    learner = DecoderLearner(lesson, settings)
    steps = learner.steps
    how = TrainingSettings(
        steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=steps // 20,
        seed=seed,
        validate_every=settings.check_every,
        checkpoint_every=settings.check_every,
    )
    record = train(
        learner,
        how,
        folder,
        resume=(folder / CHECKPOINT).exists(),
        on_progress=lambda at: tell(at.step, at.total),
    )
    return learner.module.coders(), record


class Change(nn.Module):
    """What is added to a translator's decoder and offset; nothing at first."""

    def __init__(self, codes: torch.Tensor, size: torch.Tensor) -> None:
        """Start at nothing.

        Args:
            codes: Spread of each channel of the code, `[R]`.
            size: Spread of what is decoded, `[Q]`.
        """
        super().__init__()
        self.decoder = nn.Parameter(torch.zeros(len(codes), len(size)))
        self.offset = nn.Parameter(torch.zeros(len(size)))
        least = _LEAST * codes.max() if len(codes) else 0.0
        self.register_buffer("scale", size.mean() / codes.clamp_min(least)[:, None])
        self.register_buffer("size", size.mean())
        self.scale: torch.Tensor
        self.size: torch.Tensor

    def applied(self, translator: Translator) -> Translator:
        """The translator with what was learnt, in float32."""
        return replace(
            translator,
            decoder=translator.decoder.float() + self.scale * self.decoder,
            offset=translator.offset + self.size * self.offset,
        )


class Decoders(nn.Module):
    """Coders whose decoders, offsets and aligners learn."""

    def __init__(self, coders: Sequence[Coder], moments: Mapping[Place, Moments]) -> None:
        """Start with what least squares found.

        Args:
            coders: On the consumer's device.
            moments: Of rows [code as received | consumer's] of each place.
        """
        super().__init__()
        self._coders = coders
        self.changes = nn.ModuleDict()
        self.aligners = nn.ModuleDict()
        for layer, coder in enumerate(coders):
            for name, translator in translators(coder).items():
                spread = moments[name, layer].covariance.diagonal().clamp_min(0).sqrt().float()
                rank = translator.quantiser.rank
                change = Change(spread[:rank], spread[rank:])
                self.changes[_key(name, layer)] = change.to(translator.decoder.device)
            if isinstance(coder, Patch) and coder.aligner is not None:
                aligner = copy.deepcopy(coder.aligner).float().requires_grad_(True)
                self.aligners[str(layer)] = aligner

    def coder(self, layer: int) -> Coder:
        """One layer's coder as it is now, in float32."""
        coder = self._coders[layer]
        now = {
            name: self._change(name, layer).applied(translator)
            for name, translator in translators(coder).items()
        }
        if isinstance(coder, Patch):
            return Patch(now["hidden"], self._aligner(layer))
        return Reuse(now["key"], now["value"])

    def coders(self) -> list[Coder]:
        """All coders, in the types that they came in.

        Raises:
            ConfigError: When what was learnt does not fit them.
        """
        kept = (self._kept(layer, coder) for layer, coder in enumerate(self._coders))
        return [moved(coder, torch.device("cpu")) for coder in kept]

    def _kept(self, layer: int, before: Coder) -> Coder:
        dtypes = {name: each.decoder.dtype for name, each in translators(before).items()}
        now = {
            name: replace(
                each,
                decoder=stored(each.decoder.detach(), dtypes[name]),
                offset=each.offset.detach(),
            )
            for name, each in translators(self.coder(layer)).items()
        }
        if isinstance(before, Reuse):
            return Reuse(now["key"], now["value"])
        aligner = self._aligner(layer)
        if aligner is not None:
            aligner = stored_aligner(aligner, dtypes["hidden"])
        return Patch(now["hidden"], aligner)

    def _change(self, name: str, layer: int) -> Change:
        found = self.changes[_key(name, layer)]
        assert isinstance(found, Change)
        return found

    def _aligner(self, layer: int) -> Aligner | None:
        if str(layer) not in self.aligners:
            return None
        found = self.aligners[str(layer)]
        assert isinstance(found, Aligner)
        return found


class DecoderLearner:
    """Teaches decoders; see `kvfold.training.train`."""

    def __init__(self, lesson: Lesson, settings: RefineSettings) -> None:
        """Start with what least squares found."""
        self._pair, self._texts, self._probes = lesson.pair, lesson.texts, lesson.probes
        self._settings, self._patched = settings, patched(lesson.coders)
        self._batches = batches(lesson.texts, settings.batch)
        first, second = (end.model.device for end in (self._pair.producer, self._pair.consumer))
        self._encoders = [moved(coder, first) for coder in lesson.coders]
        self._decoders = Decoders([moved(c, second) for c in lesson.coders], lesson.moments)

    @property
    def module(self) -> Decoders:
        """The decoders."""
        return self._decoders

    @property
    def steps(self) -> int:
        """Updates that take each text once."""
        return len(self._batches)

    @property
    def criterion(self) -> str:
        """Divergence on the probes."""
        return "divergence"

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        """Texts of one length that no other step sees."""
        return StepOutcome(self._loss(self._batches[index]), {})

    def validate(self) -> Mapping[str, float]:
        """Divergence of the coders as they would be kept."""
        coders = self._decoders.coders()
        return {"divergence": self._probes.divergence(self._probes.all_decoded(coders))}

    def state(self) -> Mapping[str, torch.Tensor]:
        """Nothing beside the module."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take back."""

    def identity(self) -> Mapping[str, object]:
        """Coders as they came, texts and settings."""
        texts = {f"text {number}": text for number, text in enumerate(self._texts)}
        digest = digest_of("", tensors_of(self._encoders) | texts)
        return {"coders and texts": digest, "settings": asdict(self._settings)}

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean divergence of the consumer's predictions after the prefixes of texts `[B, T]`."""
        consumer, count = self._pair.consumer, self._probes.continuation
        prefix, rest = ids[:, :-count], ids[:, -count:].to(consumer.model.device)
        with torch.no_grad():
            own = consumer.continued(self._own(prefix), rest)
        with frozen(consumer.model):
            said = consumer.continued(self._decoded(prefix), rest)
        return kl_divergence(own, said).mean()

    def _own(self, prefix: torch.Tensor) -> DynamicCache:
        trace, cache = self._pair.consumer.read(prefix), DynamicCache()
        for layer, states in enumerate(trace.rotated):
            cache.update(*states, layer)
        return cache

    def _decoded(self, prefix: torch.Tensor) -> DynamicCache:
        """The consumer's cache of codes, with the decoders' graph."""
        consumer, cache = self._pair.consumer, DynamicCache()
        trace = self._pair.producer.read(prefix, hidden=self._patched)
        rows, length = prefix.shape
        turns = consumer.turns(positions_of(length, None, consumer.model.device))
        for layer, encoder in enumerate(self._encoders):
            packed = encode_layer(encoder, trace, layer)
            packed = {name: tensor.to(consumer.model.device) for name, tensor in packed.items()}
            states = decode_layer(
                self._decoders.coder(layer), consumer, layer, packed, rows * length
            )
            heads = consumer.anatomy.layers[layer].heads.kv_heads
            keys, values = (each.view(rows, length, heads, -1).transpose(1, 2) for each in states)
            # Turned before they are rounded, as `Assembly` fills a cache.
            turned = consumer.turn(layer, keys, turns)
            dtype = consumer.model.dtype
            cache.update(turned.to(dtype), values.to(dtype), layer)
        return cache


def _key(name: str, layer: int) -> str:
    return f"{layer}/{name}"
