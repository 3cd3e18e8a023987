"""All that an evaluation of fidelity finds, and what of."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfold.environment import environment
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings


@dataclass(frozen=True, slots=True)
class Subject:
    """What was judged on what."""

    model: str
    """The name it was loaded by."""
    fingerprint: str
    """Of the model's shape and weights."""
    dtype: str
    """Of the weights."""
    device: str
    """Where it ran."""
    samples: dict[str, str]
    """By set, and length where there are several, the hash of its samples."""
    policies: dict[str, str]
    """By label, the hash of a learned policy's weights."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """All that was found."""

    command: str
    """What makes this result again."""
    subject: Subject
    """Model and samples."""
    settings: FidelitySettings
    """What was asked for."""
    rows: tuple[Row, ...]
    """One a sample, method and budget, those of the full cache first."""
    environment: dict[str, object] = field(default_factory=environment)
    """Versions, commit and machine."""
    process_peak: int | None = None
    """Most bytes of memory that the process has taken: model, prompts, the full cache and each
    method's beside it, so of no method by itself. None where every row was there already or left by
    another process, and where the system does not tell."""
