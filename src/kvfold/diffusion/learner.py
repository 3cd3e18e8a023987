"""Learning to fill masks: the objective of masked diffusion, weighted by 1/t (LLaDA, 2502.09992).

Each row of a batch has a time t, the probability with which a place is masked. The loss is the sum
over masked places of the negative log-likelihood of the token, over t, divided by all places that
could be masked. Times are spread evenly over a batch. Under a shifted prediction the first token
has no place that predicts it, and is never masked.

What learns is all weights, or low-rank changes of the layers' matrices. Then embedding, norms and
head stay what they are, the embedding of the mask too: the first layer reads it through its own
changes, and to those any direction that no text has will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from kvfold.diffusion.likelihood import fill
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.options import as_number, is_whole
from kvfold.errors import ConfigError
from kvfold.models.fingerprint import weights_checksum
from kvfold.training import StepOutcome
from kvfold.training.lora import LowRankChanges
from kvfold.training.words import Split

SHARES = (0.15, 0.5, 0.85)
"""Of the places that a validation masks."""
SCALE = 2.0
"""Factor of a low-rank change, whatever its rank."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens `[B, T]`, and whether a place may be masked, `[B, T]`."""


class Lessons(Protocol):
    """What is learnt from."""

    def batch(self, index: int, rows: int, split: Split) -> Batch:
        """The batch of a number, always the same one; the splits share nothing."""
        ...

    def describe(self) -> Mapping[str, object]:
        """JSON-ready facts, which a resumed run must share."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingSettings:
    """How masks are put, beside the loop's `TrainingSettings`."""

    rows: int = 8
    """B, sequences of a step."""
    least: float = 0.02
    """The smallest time, which bounds the weights."""
    validation: int = 32
    """Sequences of a validation."""

    def check(self) -> None:
        """Refuse what cannot be trained with.

        Raises:
            ConfigError: When a value is out of its range.
        """
        conditions = (
            ("rows", is_whole(self.rows), "a whole number, at least 1"),
            ("least", 0 < as_number(self.least) < 1, "a time between 0 and 1"),
            ("validation", is_whole(self.validation), "a whole number, at least 1"),
        )
        for name, holds, expected in conditions:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give {expected}")


class MaskedLearner:
    """Trains all weights of a diffusion model, or low-rank changes of them."""

    criterion = "loss"

    def __init__(
        self,
        model: DiffusionModel,
        lessons: Lessons,
        settings: MaskingSettings,
        *,
        lora_rank: int | None = None,
        seed: int = 0,
    ) -> None:
        """Make the weights ready to be learnt, or put changes, which are none yet, beside them.

        Args:
            model: In float32; its traits say which token masks, and where a token is predicted.
            lessons: What is learnt from.
            settings: How.
            lora_rank: Of the changes that learn; all weights do without it.
            seed: Of the changes' first weights.

        Raises:
            ConfigError: When a setting or the rank is out of its range, or the weights are not
                float32.
        """
        settings.check()
        if model.dtype != torch.float32:
            raise ConfigError(
                f"the weights are {model.dtype}: load them in float32, to learn small steps"
            )
        self.model, self.lessons, self.settings = model, lessons, settings
        self._held_out = self._draw_validation()
        self._lora: Mapping[str, object] = {}
        self._changes: LowRankChanges | None = None
        model.decoder.requires_grad_(lora_rank is None)
        if lora_rank is not None:
            # A checkpoint holds the changes alone, and is for exactly these weights.
            seal = weights_checksum(model.decoder)
            self._lora = {"lora": {"rank": lora_rank, "scale": SCALE, "base": seal}}
            self._changes = LowRankChanges(
                model.decoder.layers,
                rank=lora_rank,
                alpha=SCALE * lora_rank,
                generator=torch.Generator().manual_seed(seed),
            )

    @property
    def module(self) -> torch.nn.Module:
        """The decoder, or its changes by the names of the layers' matrices."""
        return self.model.decoder if self._changes is None else self._changes.module

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Leave a plain model, which wants no gradient; what breaks off leaves no changes in it."""
        try:
            yield
            if self._changes is not None:
                self._changes.merge()
        finally:
            if self._changes is not None:
                self._changes.remove()
            self.model.decoder.requires_grad_(False)

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        """The loss of a batch."""
        ids, free = self._ready(self.lessons.batch(index, self.settings.rows, "train"))
        rows = len(ids)
        times = (torch.rand(1, generator=generator) + torch.arange(rows) / rows) % 1
        times = self.settings.least + (1 - self.settings.least) * times[:, None]
        drawn = torch.rand(ids.shape, generator=generator) < times
        masked = drawn.to(ids.device) & free
        nll, right = fill(self.model, ids, masked)
        weights = (1 / times).to(ids.device).expand(ids.shape)[masked]
        loss = (nll * weights).sum() / free.sum().clamp_min(1)
        return StepOutcome(loss, {"nll": _mean(nll.detach()), "right": _mean(right)})

    def validate(self) -> Mapping[str, float]:
        """Negative log-likelihood and share of right tokens, at three shares of masks."""
        found: dict[str, float] = {}
        for share, batches in zip(SHARES, self._held_out, strict=True):
            parts = [fill(self.model, ids, masked) for ids, masked in batches]
            name = f"{share:.0%}"
            found[f"nll at {name}"] = _mean(torch.cat([nll for nll, _ in parts]))
            found[f"right at {name}"] = _mean(torch.cat([right for _, right in parts]))
        losses = [value for name, value in found.items() if name.startswith("nll")]
        return {"loss": sum(losses) / len(losses), **found}

    def state(self) -> Mapping[str, torch.Tensor]:
        """Nothing: what a step draws depends on its number alone."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take back."""

    def identity(self) -> Mapping[str, object]:
        """What is learnt, from what, and how."""
        traits = {"mask_id": self.model.traits.mask_id, "prediction": self.model.traits.prediction}
        facts = {"lessons": self.lessons.describe(), "settings": asdict(self.settings)}
        return {**traits, **facts, **self._lora}

    def _ready(self, batch: Batch) -> Batch:
        ids, free = (tensor.to(self.model.device) for tensor in batch)
        if self.model.traits.shift:
            free = free.clone()
            free[:, 0] = False
        return ids, free

    def _draw_validation(self) -> list[list[Batch]]:
        """By share of masks, the held-out batches and what is masked in them."""
        count, rows = self.settings.validation, self.settings.rows
        sizes = [min(rows, count - begin) for begin in range(0, count, rows)]
        held = [
            self._ready(self.lessons.batch(index, size, "validation"))
            for index, size in enumerate(sizes)
        ]
        generator = torch.Generator().manual_seed(0)
        found = []
        for share in SHARES:
            drawn = [torch.rand(ids.shape, generator=generator) < share for ids, _ in held]
            found.append([(i, d.to(i.device) & f) for (i, f), d in zip(held, drawn, strict=True)])
        return found


def _mean(values: torch.Tensor) -> float:
    """NaN of none."""
    return float(values.mean())
