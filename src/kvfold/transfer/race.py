"""How soon a consumer says its first token: with codes, with other caches, and by itself.

Stages of one prefix, one after the other, without overlap: the producer reads it, codes are made,
sent through a paced connection, decoded (layers of codes, and patched ones, apart), and the
consumer computes the last token. Subjects take turns within a round.

The baselines of `hand_over_by` are timed in their favour: making and unpacking their caches counts
as nothing, and what the consumer recomputes for `recompute` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.transfer.codec import Codec
from kvfold.transfer.entrant import Entrant
from kvfold.transfer.track import Track

MBIT = 1e6
"""Bits a second."""

OnProgress = Callable[[str, float], None]
"""Told what is done, and the share of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """What is measured."""

    bandwidths: tuple[float, ...] = (100 * MBIT, 1000 * MBIT, 10_000 * MBIT)
    """Bits a second."""
    continuation: int = 64
    """Last tokens of the text, which the consumer's predictions are compared on."""
    rounds: int = 3
    """In which all subjects take their turn; one more goes before, uncounted."""

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: When a value is out of its range.
        """
        if not self.bandwidths or not all(0 < b < float("inf") for b in self.bandwidths):
            raise ConfigError(
                f"bandwidths {self.bandwidths} are no bits a second: give some above 0"
            )
        if self.continuation < 1 or self.rounds < 1:
            raise ConfigError(
                f"{self.continuation} tokens and {self.rounds} rounds: give at least 1 of both"
            )


def race(
    codecs: Mapping[str, Codec],
    producer: PreTrainedModel,
    consumer: PreTrainedModel,
    text: torch.Tensor,
    settings: RaceSettings,
    on_progress: OnProgress | None = None,
) -> dict[str, Entrant]:
    """Measure codecs, the baselines, and the consumer's own prefill.

    Args:
        codecs: By name; all of this pair.
        producer: Reads the prefix.
        consumer: Goes on from it; attached.
        text: Prefix and continuation, `[T]`.
        settings: What is measured.
        on_progress: Told what is done and the share of all.

    Returns:
        By subject, the consumer's own prefill first.

    Raises:
        ConfigError: When the text is too short, or a setting out of its range.
        ArtifactError: When a codec is of another pair.
    """
    settings.check()
    if len(text) < settings.continuation + 2:
        raise ConfigError(
            f"a text of {len(text)} tokens leaves no prefix before {settings.continuation}: give "
            "a longer one"
        )
    track = Track(producer, consumer, text, settings.continuation, settings.bandwidths)
    subjects = track.subjects(codecs)
    total, done = (settings.rounds + 1) * len(subjects), 0
    for number in range(settings.rounds + 1):
        for name, run in subjects.items():
            run(number > 0)
            done += 1
            if on_progress is not None:
                on_progress(f"round {number} of {settings.rounds}: {name}", done / total)
    return track.entrants
