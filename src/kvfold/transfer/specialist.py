"""A base model taught one task by low-rank changes of its weights (LoRA, arXiv 2106.09685).

Every linear layer but the head learns `W + alpha / R * up @ down`; nothing else does. A step reads
excerpts of one length, most often a short one, and what is predicted are their last tokens, where a
corpus says that these are the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
from torch import nn
from transformers import PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.models import fingerprint
from kvfold.training import Corpus, Excerpt, StepOutcome
from kvfold.training.lora import LowRankChanges

_APART = 1_000_000
"""Number of the first excerpt of a validation among those of its split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialistSettings:
    """How a specialist is taught, beside the loop's `TrainingSettings`."""

    rank: int = 16
    """Of every change."""
    alpha: float = 32.0
    """A change is multiplied by it and divided by its rank."""
    step_tokens: int = 1024
    """Of the excerpts of a step; one is read where it is longer."""
    validation: int = 12
    """Excerpts of every validation, shared out among the lengths."""

    def check(self) -> None:
        """Refuse what cannot be trained with.

        Raises:
            ConfigError: When a value is out of its range.
        """
        conditions = (
            ("rank", self.rank >= 1, "at least 1"),
            ("alpha", 0 < self.alpha < math.inf, "a number above 0"),
            ("step_tokens", self.step_tokens >= 1, "at least 1"),
            ("validation", self.validation >= 1, "at least 1"),
        )
        for name, holds, expected in conditions:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give {expected}")


class SpecialistLearner:
    """Learns the changes of a model's linear layers."""

    def __init__(
        self,
        model: PreTrainedModel,
        corpora: Sequence[Corpus],
        settings: SpecialistSettings,
        *,
        seed: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        """Put changes, which are none yet, into a model.

        Args:
            model: Not attached; its linear layers are wrapped, its weights are not touched.
            corpora: Of one length each.
            settings: Of the method.
            seed: Of the first weights.
            process: Which of those that train together.
            processes: How many do.

        Raises:
            ConfigError: When a setting is out of its range, or the rank above a layer's width.
        """
        settings.check()
        self._model, self._corpora, self._settings = model, corpora, settings
        self._process, self._processes = process, processes
        self._fingerprint = fingerprint(model)
        self._lengths = [len(corpus.excerpt(0, "train").tokens) for corpus in corpora]
        generator = torch.Generator().manual_seed(seed)
        self._changes = LowRankChanges(
            model, rank=settings.rank, alpha=settings.alpha, generator=generator
        )

    @property
    def module(self) -> nn.Module:
        """The changes, by the names of the layers."""
        return self._changes.module

    @property
    def criterion(self) -> str:
        """Mean cross-entropy of the tokens predicted."""
        return "loss"

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        """Excerpts of one length that no other step sees; a length is drawn the more, the less."""
        chances = 1 / torch.tensor(self._lengths, dtype=torch.float64)
        which = int(torch.multinomial(chances, 1, generator=generator))
        count = max(1, self._settings.step_tokens // self._lengths[which])
        first = (index * self._processes + self._process) * self._settings.step_tokens
        excerpts = [self._corpora[which].excerpt(first + row, "train") for row in range(count)]
        loss, right = self._judged(excerpts)
        return StepOutcome(loss, {"right": right, "length": float(self._lengths[which])})

    def validate(self) -> Mapping[str, float]:
        """Loss, and share of excerpts whose every token is found likeliest, by length and over all.

        Each is told what comes before it, so that a right excerpt is a right greedy answer.
        """
        each = math.ceil(self._settings.validation / len(self._corpora))
        found: dict[str, float] = {}
        losses, rights = [], []
        for length, corpus in zip(self._lengths, self._corpora, strict=True):
            excerpts = [corpus.excerpt(_APART + index, "validation") for index in range(each)]
            judged = [self._judged([excerpt]) for excerpt in excerpts]
            losses.append(fmean(float(loss) for loss, _ in judged))
            rights.append(fmean(right for _, right in judged))
            found[f"right_{length}"] = rights[-1]
        return {"loss": fmean(losses), "right": fmean(rights), **found}

    def state(self) -> Mapping[str, torch.Tensor]:
        """Nothing beside the module."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take back."""

    def identity(self) -> Mapping[str, object]:
        """Model, texts and settings."""
        return {
            "fingerprint": self._fingerprint,
            "corpora": [corpus.describe() for corpus in self._corpora],
            "settings": asdict(self._settings),
            "processes": self._processes,
        }

    def changes(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What was learnt, by the names of the layers; see `AdapterArtifact`."""
        return self._changes.tensors()

    @property
    def scale(self) -> float:
        """Factor of a change."""
        return self._changes.scale

    def _judged(self, excerpts: Sequence[Excerpt]) -> tuple[torch.Tensor, float]:
        """Loss of the tokens to predict, and the share of excerpts that are all right."""
        tokens = torch.stack([excerpt.tokens for excerpt in excerpts]).to(self._model.device)
        length = tokens.shape[1]
        counts = torch.tensor([min(each.scored or length, length - 1) for each in excerpts])
        most = int(counts.max())
        kept = self._model(input_ids=tokens, use_cache=False, logits_to_keep=most + 1).logits
        logits, targets = kept[:, :-1].float(), tokens[:, -most:]
        wanted = torch.arange(most) >= (most - counts)[:, None]
        wanted = wanted.to(tokens.device)
        loss = nn.functional.cross_entropy(logits[wanted], targets[wanted])
        right = ((logits.argmax(-1) == targets) | ~wanted).all(-1)
        return loss, float(right.float().mean())
