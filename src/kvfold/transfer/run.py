"""One calibration, step by step; `kvfold.transfer.calibrate` says what the steps are for."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvfold.errors import ConfigError
from kvfold.models import fingerprint_facts
from kvfold.transfer.basis import Fitting, fit_basis
from kvfold.transfer.choose import (
    greedy_patches,
    least_bits,
    measure_patch_weights,
    measure_weights,
    restore_one,
)
from kvfold.transfer.codec import Codec
from kvfold.transfer.coder import Coder
from kvfold.transfer.draft import Draft
from kvfold.transfer.findings import payload_curve
from kvfold.transfer.journal import Journal
from kvfold.transfer.metrics import hidden_metric, key_metric, value_metric
from kvfold.transfer.patch import Patch
from kvfold.transfer.probes import Probes
from kvfold.transfer.refine import Lesson, refined
from kvfold.transfer.refit import aligned, all_translators, received_rows, refitted_coders
from kvfold.transfer.settings import CalibrationSettings, Target
from kvfold.transfer.storage import fingerprint_of
from kvfold.transfer.streams import Gathering, Pair, Pass, Place, Tell, gather
from kvfold.version import __version__

_LOGGER = logging.getLogger(__name__)

_FITS = 6
"""Tries to find the bits of a token that fill a payload."""

Read = Callable[[torch.Tensor], Iterator[tuple[Place, torch.Tensor]]]


class Run:
    """Two models, texts and a target on their way to a codec."""

    def __init__(
        self,
        pair: Pair,
        texts: Sequence[torch.Tensor],
        settings: CalibrationSettings,
        target: Target,
        *,
        refine: Sequence[torch.Tensor],
        folder: Path | None,
        tell: Callable[[str], Tell],
    ) -> None:
        """Divide the texts and open the journals; see `kvfold.transfer.calibrate`."""
        self._pair, self._settings, self._target, self._tell = pair, settings, target, tell
        self._refining, self._own = refine, None if folder is None else folder / str(target)
        measured = 2 * settings.probes
        self._texts, held = list(texts[:-measured]), list(texts[-measured:])
        self._choosing, self._checking = held[: settings.probes], held[settings.probes :]
        self._facts = [fingerprint_facts(side.model) for side in (pair.producer, pair.consumer)]
        self._draft = Draft(len(pair.consumer.layers), settings)
        self._metrics: dict[Place, torch.Tensor] = {}
        self._record: dict[str, object] = {}
        self._started = time.monotonic()
        identity: dict[str, object] = {
            "models": [fingerprint_of(facts) for facts in self._facts],
            "texts": _digest(texts),
            "sampling": [settings.seed, settings.sample_rows, settings.probes],
            "versions": [__version__, torch.__version__],
        }
        self._identity = identity
        # The moments of keys and values serve every target.
        self._common = Journal(folder, identity)
        self._journal = Journal(self._own, identity | {"settings": settings.to_dict()})

    def codec(self) -> Codec:
        """Take all steps."""
        settings, draft, patches = self._settings, self._draft, []
        hidden = settings.patches > 0 and not self._target.is_full
        probes = Probes(self._pair, self._choosing, settings.continuation, hidden=hidden)
        self._fit_states(probes)
        plans, bits = draft.full_plans(), float(draft.most_bits())
        if not self._target.is_full:
            bits = self._find_bits(probes, ())
            tell = self._tell("weighing errors")
            draft.weights |= self._once(
                "weights", lambda: measure_weights(draft, probes, bits, tell)
            )
            bits = self._find_bits(probes, ())
            patches = self._choose_patches(probes, bits) if hidden else []
            bits = self._find_bits(probes, patches)
            plans = draft.plans(bits, patches)
        coders = self._refit(draft.coders(plans))
        if self._refining:
            coders = self._refine(coders, probes)
        if not self._target.is_full:
            self._record["curve"] = self._curve(probes, bits, patches)
        self._record["growth"] = self._growth(probes, coders, bits)
        return self._finish(coders, probes)

    # Codes ------------------------------------------------------------------------------------

    def _fit_states(self, probes: Probes) -> None:
        names, layers = ("key", "value"), range(self._draft.layers)
        places: list[Place] = [(name, layer) for layer in layers for name in names]
        gathering = Gathering(self._widths(places), both=False)
        rows = self._settings.sample_rows
        self._gather(gathering, "moments", rows, self._raw(places), self._common)
        if self._settings.form == "regression":
            consumer = self._pair.consumer
            for layer, inputs in enumerate(probes.own_inputs):
                self._metrics["key", layer] = key_metric(consumer, layer, inputs)
                self._metrics["value", layer] = value_metric(consumer, layer)
        self._fit(gathering, places)

    def _widths(self, places: Sequence[Place]) -> dict[Place, tuple[int, int]]:
        return {place: self._pair.widths(place) for place in places}

    def _raw(self, places: Sequence[Place]) -> Read:
        """Reads rows [producer's | consumer's]."""

        def read(text: torch.Tensor) -> Iterator[tuple[Place, torch.Tensor]]:
            for place, first, second in self._pair.read(text, places):
                yield place, torch.cat([first.cpu(), second.cpu()], 1)

        return read

    def _gather(
        self, gathering: Gathering, stage: str, rows: int, read: Read, journal: Journal
    ) -> None:
        settings = self._settings
        how = Pass(stage=stage, rows=rows, save_every=settings.save_every, seed=settings.seed)
        gather(gathering, self._texts, read, how, journal, self._tell(f"reading for {stage}"))

    def _fit(self, gathering: Gathering, places: Sequence[Place]) -> None:
        settings = self._settings
        for place in places:
            name, layer = place
            how = Fitting(
                widths=settings.widths,
                # The other forms are for keys and values alone.
                form="regression" if name == "hidden" else settings.form,
                strength=settings.strength,
                dtype=settings.torch_dtype,
            )
            self._draft.bases[place] = fit_basis(
                gathering.moments[place],
                gathering.sample(place)[:, : self._pair.widths(place)[0]],
                how,
                heads=self._pair.consumer.anatomy.layers[layer].heads.kv_heads,
                metric=self._metrics.get(place),
            )

    # Choices ----------------------------------------------------------------------------------

    def _once(self, stage: str, measure: Callable[[], dict[Place, float]]) -> dict[Place, float]:
        """Measurements by place, taken from the journal when they are there."""
        entry = self._journal.read(stage)
        if entry is None:
            found = measure()
            listed = [[name, layer, value] for (name, layer), value in found.items()]
            self._journal.write(stage, {"found": listed}, {})
            return found
        listed = entry.facts["found"]
        assert isinstance(listed, list)
        return {(name, layer): value for name, layer, value in listed}

    def _find_bits(self, probes: Probes, patches: Sequence[int]) -> float:
        """Bits of a token that meet the target."""
        if self._target.divergence is not None:
            return least_bits(self._draft, probes, self._target.divergence, patches)
        assert self._target.payload is not None
        wanted, tokens = self._target.payload, self._settings.tokens
        shapes = [layer.heads for layer in self._pair.consumer.anatomy.layers]
        raw = 16 * sum(shape.rows("key") + shape.rows("value") for shape in shapes)
        bits = wanted * raw
        for _ in range(_FITS):
            if bits <= 0:
                break
            codec = self._made(self._draft.coders(self._draft.plans(bits, patches)))
            over = codec.share(tokens) - wanted
            if over <= 0:
                return bits
            bits -= 1.001 * over * raw + 1
        raise ConfigError(
            f"a payload of {wanted:g} leaves no room beside the headers of a message of {tokens} "
            "tokens: give a larger payload, or longer prefixes"
        )

    def _choose_patches(self, probes: Probes, bits: float) -> list[int]:
        """Layers to patch; the codes of their inputs join the draft."""
        settings, draft = self._settings, self._draft
        gains = self._once("sensitivity", lambda: self._sensitivity(probes, bits))
        ranked = sorted(gains, key=lambda place: -gains[place])
        pool = sorted(layer for _, layer in ranked[: settings.pool])
        places: list[Place] = [("hidden", layer) for layer in pool]
        gathering = Gathering(self._widths(places), both=True)
        self._gather(gathering, "patches", settings.aligner_rows, self._raw(places), self._journal)
        if self._metrics:
            self._metrics |= {
                place: hidden_metric(self._pair.consumer, place[1], self._metrics, draft.weights)
                for place in places
            }
        self._fit(gathering, places)
        self._samples = {layer: gathering.sample(("hidden", layer)) for layer in pool}
        weights = self._once(
            "patch-weights", lambda: measure_patch_weights(draft, probes, bits, pool)
        )
        draft.weights |= weights
        pool = [layer for _, layer in weights]
        tell = self._tell("choosing patches")
        order = self._once(
            "choice",
            lambda: {
                ("hidden", layer): reached
                for layer, reached in greedy_patches(draft, probes, bits, pool, tell)
            },
        )
        self._record["pool"] = pool
        self._record["sensitivity"] = [gains["layer", layer] for layer in range(draft.layers)]
        self._record["patch_order"] = [[layer, reached] for (_, layer), reached in order.items()]
        return [layer for _, layer in order]

    def _sensitivity(self, probes: Probes, bits: float) -> dict[Place, float]:
        coders = self._draft.coders(self._draft.plans(bits))
        gains = restore_one(coders, probes, self._tell("restoring layers"))
        return {("layer", layer): gain for layer, gain in enumerate(gains)}

    # What is told -----------------------------------------------------------------------------

    def _curve(self, probes: Probes, bits: float, patches: Sequence[int]) -> list[list[float]]:
        tokens, draft = self._settings.tokens, self._draft

        def share(bits: float) -> float:
            return self._made(draft.coders(draft.plans(bits, patches))).share(tokens)

        tell = self._tell("measuring payloads")
        return [list(point) for point in payload_curve(draft, probes, bits, patches, share, tell)]

    def _growth(
        self, probes: Probes, coders: Sequence[Coder], bits: float
    ) -> dict[str, list[float]]:
        """Errors of what each layer is given, as made and, where patched, without patches."""
        found = {"as made": probes.growth(probes.all_decoded(coders))}
        if any(isinstance(coder, Patch) for coder in coders):
            alone = self._draft.coders(self._draft.plans(bits))
            found["without patches"] = probes.growth(probes.all_decoded(alone))
        return found

    # The end ----------------------------------------------------------------------------------

    def _refit(self, coders: Sequence[Coder]) -> list[Coder]:
        """Decoders fitted to the codes as received, and aligners trained."""
        chosen = all_translators(coders)
        widths = {
            place: (translator.quantiser.rank, len(translator.offset))
            for place, translator in chosen.items()
        }
        gathering = Gathering(widths, both=False)
        self._gather(
            gathering,
            "decoders",
            0,
            lambda text: received_rows(self._pair, chosen, text),
            self._journal,
        )
        self._received = gathering.moments
        found = refitted_coders(coders, gathering.moments, self._settings.strength)
        tell = self._tell("training aligners")
        patches = [(layer, coder) for layer, coder in enumerate(found) if isinstance(coder, Patch)]
        for index, (layer, patch) in enumerate(patches):
            seed = self._settings.seed * 1_000_003 + layer
            rows = self._samples[layer]
            metric = self._metrics.get(("hidden", layer))
            found[layer] = aligned(patch, rows, self._settings.aligner, seed, metric)
            tell(index + 1, len(patches))
        return found

    def _refine(self, coders: Sequence[Coder], probes: Probes) -> list[Coder]:
        """Decoders and aligners taught by what the consumer says."""
        settings, tell = self._settings, self._tell("refining decoders")
        lesson = Lesson(self._pair, coders, self._received, self._refining, probes)
        with nullcontext(self._own) if self._own else TemporaryDirectory() as place:
            found, record = refined(
                lesson, settings.refine, settings.seed, Path(place) / "refining", tell
            )
        self._record["refined"] = {
            "texts": len(self._refining),
            "seconds": record.seconds,
            "best_step": record.best_step,
            "curve": record.curve,
        }
        return found

    def _finish(self, coders: Sequence[Coder], probes: Probes) -> Codec:
        """The codec, and what it comes to on texts that no choice was made by."""
        settings = self._settings
        hidden = any(isinstance(coder, Patch) for coder in coders)
        checks = Probes(self._pair, self._checking, settings.continuation, hidden=hidden)
        codec, states = self._made(coders), checks.all_decoded(coders)
        divergence, wanted = checks.divergence(states), self._target.divergence
        if wanted is not None and divergence > wanted:
            _LOGGER.warning(
                "on texts that no choice was made by, the codec diverges by %.4f nats, more than "
                "the %g wanted: give more texts or probes, or a smaller max_kl",
                divergence,
                wanted,
            )
        record = self._record | {
            "settings": settings.to_dict(),
            "target": {"payload": self._target.payload, "max_kl": self._target.divergence},
            "identity": self._identity,
            "texts": len(self._texts),
            "lengths": sorted(set(map(len, self._texts))),
            "bits": codec.bits,
            "payload": codec.share(settings.tokens),
            "patched": codec.patched,
            "divergence": divergence,
            "divergence_chosen_by": probes.divergence(probes.all_decoded(coders)),
            "errors": [list(share) for share in checks.errors(states).values()],
            "weights": [[*place, weight] for place, weight in self._draft.weights.items()],
            "seconds": time.monotonic() - self._started,
        }
        return replace(codec, record=record)

    def _made(self, coders: Sequence[Coder]) -> Codec:
        producer, consumer = self._facts
        return Codec(tuple(coders), producer, consumer, self._settings.tokenizer, {})


def _digest(texts: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "big"))
        digest.update(text.cpu().to(torch.int64).numpy().tobytes())
    return digest.hexdigest()
