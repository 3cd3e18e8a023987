"""Calibration: from two models and some texts to a codec (SCD, arXiv 2606.07684).

1. Both models read the texts; moments of their keys and values are kept, and no trace.
2. Codes in closed form; what their errors cost is measured; bits are shared out by that.
3. Layers that restoring helps most may be patched: their inputs' moments, and a greedy choice.
4. The texts once more: decoders are refitted to the codes as received; aligners are trained.

The paper shares one rank among the layers, knows no quantiser, and patches by oracle states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvfold.attention import require_attached
from kvfold.errors import ConfigError
from kvfold.models import differing_facts, shape_facts
from kvfold.transfer.codec import Codec
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.probes import SHORTEST
from kvfold.transfer.run import Run
from kvfold.transfer.settings import CalibrationSettings, Target
from kvfold.transfer.streams import Pair, Tell


@dataclass(frozen=True, slots=True)
class CalibrationProgress:
    """Where a calibration stands."""

    stage: str
    """What is being done."""
    done: int
    """How much of it."""
    total: int
    """Out of how much."""


OnProgress = Callable[[CalibrationProgress], None]
"""Told where a calibration stands."""


def calibrate(
    producer: PreTrainedModel,
    consumer: PreTrainedModel,
    texts: Sequence[torch.Tensor],
    *,
    payload: float | None = None,
    max_kl: float | None = None,
    settings: CalibrationSettings | None = None,
    refine: Sequence[torch.Tensor] = (),
    folder: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> Codec:
    """Fit a codec that hands prefixes from one model to another.

    Args:
        producer: Reads prefixes.
        consumer: Goes on from them: of the same shapes, attached.
        texts: Token ids, `[T]` each, of any lengths; the last `2 * settings.probes` are measured
            on: texts that choices are made by, then as many for the result.
        payload: Most bytes of a message as a share of the prefix's keys and values in bfloat16,
            headers included, for prefixes of `settings.tokens`.
        max_kl: Most divergence of the consumer's predictions, in nats, at as few bytes as can be;
            on the texts that the choices are made by. On others it may be more: it is measured on
            as many, recorded as `divergence`, and warned of where it exceeds the target.
        settings: How; the defaults without it.
        refine: More texts, of any lengths, on which decoders are taught by the consumer's
            predictions at last.
        folder: Keeps the state, so that the same call goes on where it stopped.
        on_progress: Told where the calibration stands.

    Returns:
        The codec; its record says what was chosen and measured.

    Raises:
        ConfigError: When the models differ in shape, there are too few or too short texts, or the
            target cannot be met.
        UnsupportedModelError: When keys of a model cannot be turned back.

    Example:
        >>> codec = calibrate(base, specialist, texts, payload=0.25)  # doctest: +SKIP
        >>> codec.save("codec")  # doctest: +SKIP
    """
    settings = CalibrationSettings() if settings is None else settings
    settings.check()
    target = Target(payload, max_kl)
    require_attached(consumer)
    _require_same_shapes(producer, consumer)
    _require_texts(texts, refine, settings)
    pair = Pair(Endpoint(producer), Endpoint(consumer))
    place = None if folder is None else Path(folder)
    tell = _teller(on_progress)
    return Run(pair, texts, settings, target, refine=refine, folder=place, tell=tell).codec()


def _teller(on_progress: OnProgress | None) -> Callable[[str], Tell]:
    """From a stage to what is told how much of it is done."""

    def tell(stage: str) -> Tell:
        def told(done: int, total: int) -> None:
            if on_progress is not None:
                on_progress(CalibrationProgress(stage, done, total))

        return told

    return tell


def _require_same_shapes(producer: PreTrainedModel, consumer: PreTrainedModel) -> None:
    """Refuse models whose rows are not of one kind; RoPE may differ."""
    facts = [shape_facts(model) for model in (producer, consumer)]
    for side in facts:
        del side["rope"], side["rope_layers"], side["query_scale"]
    if difference := differing_facts(*facts):
        raise ConfigError(
            f"the consumer has {difference}: producer and consumer must be of one architecture, "
            "such as a base model and one fine-tuned from it"
        )


def _require_texts(
    texts: Sequence[torch.Tensor], refine: Sequence[torch.Tensor], settings: CalibrationSettings
) -> None:
    measured, shortest = 2 * settings.probes, settings.continuation + SHORTEST
    if len(texts) <= measured:
        raise ConfigError(
            f"{len(texts)} texts are too few: give at least {measured + 1}, of which {measured} "
            "are measured on; 100 and more are better"
        )
    read = len(texts) - measured
    named = [
        *((f"text {i}", text, 1 if i < read else shortest) for i, text in enumerate(texts)),
        *((f"text {i} to refine on", text, shortest) for i, text in enumerate(refine)),
    ]
    for name, text, least in named:
        if text.ndim != 1 or text.is_floating_point():
            raise ConfigError(f"{name} is not a row of token ids [T]: tokenize it first")
        if len(text) < least:
            raise ConfigError(
                f"{name} has {len(text)} tokens: those that are measured or refined on need at "
                f"least {shortest}, all others 1"
            )
