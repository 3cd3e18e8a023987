"""Learning gates by distillation, so that zooming changes what the model says least.

SeKV (arXiv 2606.31145): with everything but the gates frozen, the loss of a step is

    KL(full || student) + zoom + 0.5 recon + lambda (expanded + 0.1 ranks)

where lambda rises from 0 over the first half of the steps. Departures: the gates start fitted to
some texts (see `kvfold.zoom.first_gates`); a text, which is dear to read, serves several steps with
other queries; all losses are means, so that no weight depends on the length; keys are reconstructed
before RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.models import fingerprint
from kvfold.ops.divergence import kl_divergence
from kvfold.training import Corpus, StepOutcome
from kvfold.training.words import Split
from kvfold.zoom.first_gates import Sample, fit_first, sample_layers
from kvfold.zoom.gates import RANK, Gates
from kvfold.zoom.student import Heard, Lesson, hear
from kvfold.zoom.teacher import Dividing, ReadText, Teacher

FAR = 512
"""Tokens back from which attention is far, or a quarter of a shorter text (paper)."""
_APART = 1_000_000
"""Number of the first excerpt that comes before the steps, which count from 0."""
_OF_RANKS = 0.1
"""Weight of the ranks in the loss for the budget (paper)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoomSettings:
    """How gates are trained, beside the loop's `TrainingSettings`."""

    queries: int = 64
    """Positions of a text that a step samples; half of them look far back."""
    steps_a_text: int = 4
    """Steps that a text serves, with other positions each."""
    zoom: float = 1.0
    """Weight of the loss of the gates."""
    recon: float = 0.5
    """Weight of the loss of the rank gates."""
    budget: float = 0.1
    """Weight of what is expanded, from the middle of the training on."""
    first_texts: int = 8
    """Excerpts to which the gates are fitted before the first step; 0 for random directions."""
    first_expanded: float = 0.25
    """Share of the spans that a head expands before training."""
    validation: int = 8
    """Excerpts of every validation, of the last length; their keys and values stay in memory."""
    sinks: int = 4
    """First tokens that stay exact."""
    window: int = 32
    """Tokens before a query that stay exact."""
    deviations: float = 1.0
    """Standard deviations above the mean surprisal from which a token is an anchor."""
    most_anchors: float = 0.01
    """Share of the tokens that may be anchors."""
    shortest: int = 8
    """Tokens of the shortest span; shorter runs stay exact."""
    longest: int = 16
    """Tokens of the longest span."""

    @property
    def dividing(self) -> Dividing:
        """How a text is divided."""
        return Dividing(
            sinks=self.sinks,
            window=self.window,
            deviations=self.deviations,
            most_anchors=self.most_anchors,
            shortest=self.shortest,
            longest=self.longest,
        )

    def check(self) -> None:
        """Refuse what cannot be trained with.

        Raises:
            ConfigError: When a value is out of its range.
        """
        conditions = (
            ("queries", self.queries >= 1, "at least 1"),
            ("steps_a_text", self.steps_a_text >= 1, "at least 1"),
            ("zoom", 0 <= self.zoom < float("inf"), "0 or more"),
            ("recon", 0 <= self.recon < float("inf"), "0 or more"),
            ("budget", 0 <= self.budget < float("inf"), "0 or more"),
            ("first_texts", self.first_texts >= 0, "0 or more"),
            ("first_expanded", 0 < self.first_expanded < 1, "a share between 0 and 1"),
            ("validation", self.validation >= 1, "at least 1"),
            ("sinks", self.sinks >= 0, "0 or more"),
            ("window", self.window >= 0, "0 or more"),
            ("deviations", self.deviations == self.deviations, "a number"),
            ("most_anchors", 0 <= self.most_anchors <= 1, "a share from 0 to 1"),
            ("shortest", 1 <= self.shortest <= self.longest, f"1 to longest, {self.longest}"),
            ("longest", self.longest <= RANK, f"at most {RANK}"),
        )
        for name, holds, expected in conditions:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give {expected}")


@dataclass(frozen=True, slots=True, eq=False)
class _Subject:
    """A text, and where to ask about it."""

    number: int
    """Of its excerpt."""
    text: ReadText
    pool: torch.Tensor
    """Positions that look far back, some more than are asked."""
    eligible: torch.Tensor
    """All positions that see a span."""


class GateLearner:
    """Trains gates; the model stays as it is."""

    criterion = "loss"

    def __init__(
        self,
        model: PreTrainedModel,
        corpora: Sequence[Corpus],
        settings: ZoomSettings,
        *,
        steps: int,
        seed: int = 0,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        """Start with random gates.

        Args:
            model: An attached model; its weights are not touched.
            corpora: Excerpts, in the order in which they are learnt from: the last in the second
                half of the steps, the others in equal parts of the first.
            settings: How.
            steps: Of the whole training.
            seed: Of the weights.
            process: Which of several processes that train together this is, from 0; each learns
                from texts of its own.
            processes: How many there are.

        Raises:
            ConfigError: When a value is out of its range, or there is no corpus.
            UnsupportedModelError: When gates cannot be trained for the model.
        """
        settings.check()
        if not corpora:
            raise ConfigError("there is nothing to learn from: give at least one corpus")
        self.model, self.corpora, self.settings = model, tuple(corpora), settings
        self._steps, self._process, self._processes = steps, process, processes
        self._teacher = Teacher(model, settings.dividing)
        generator = torch.Generator().manual_seed(seed)
        self._gates = Gates(self._teacher.shape, generator=generator).to(model.device)
        self._subject: _Subject | None = None
        self._validation: list[Lesson] = []

    @property
    def module(self) -> Gates:
        """The gates."""
        return self._gates

    # Texts ------------------------------------------------------------------------------------

    def _read(self, corpus: Corpus, split: Split, number: int) -> _Subject:
        excerpt = corpus.excerpt(number, split)
        text = self._teacher.read(excerpt.tokens)
        eligible = self._eligible(text)
        far = text.far_mass(eligible, min(FAR, len(text.ids) // 4))
        # An answer is what the text before has to be read for.
        if excerpt.scored is not None:
            far = far + (eligible >= len(text.ids) - 1 - excerpt.scored)
        wanted = self.settings.queries * self.settings.steps_a_text // 2
        pool = eligible[far.topk(min(wanted, len(eligible))).indices]
        return _Subject(number, text, pool, eligible)

    def _eligible(self, text: ReadText) -> torch.Tensor:
        """Positions that see a span."""
        places = torch.arange(len(text.ids), device=text.ids.device)
        eligible = places[text.division.seen(places, self.settings.window).any(1)]
        if len(eligible) == 0:
            raise ConfigError(
                f"in a text of {len(text.ids)} tokens no position sees a span: give longer texts "
                "or a smaller window"
            )
        return eligible

    def _lesson(self, subject: _Subject, generator: torch.Generator) -> Lesson:
        """Positions that look far back, and others."""
        queries = self.settings.queries
        mined = _some(subject.pool, queries // 2, generator)
        others = subject.eligible[~torch.isin(subject.eligible, mined)]
        chosen = torch.cat([mined, _some(others, queries - len(mined), generator)])
        return Lesson.make(self._teacher, subject.text, chosen.sort().values)

    def stage(self, index: int) -> int:
        """Which corpus the text of a step is from.

        Args:
            index: Steps done before it.
        """
        begun = index - index % self.settings.steps_a_text
        last = len(self.corpora) - 1
        return min(last, 2 * begun * last // self._steps)

    def _subject_of(self, index: int) -> _Subject:
        number = index // self.settings.steps_a_text * self._processes + self._process
        if self._subject is None or self._subject.number != number:
            self._subject = self._read(self.corpora[self.stage(index)], "train", number)
        return self._subject

    # Learning ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, on_progress: Callable[[str, float], None] | None = None) -> None:
        """Fit the gates to the queries and spans of some texts.

        Args:
            on_progress: Told what is done, and the share of it, 0 to 1.
        """
        tell = on_progress or (lambda what, share: None)
        count, samples = self.settings.first_texts, list[list[Sample]]()
        for index in range(count):
            text = self._teacher.read(self.corpora[0].excerpt(_APART + index, "train").tokens)
            generator = torch.Generator().manual_seed(index)
            positions = _some(self._eligible(text), self.settings.queries, generator)
            samples.append(sample_layers(text, positions, self.settings.window))
            tell("first gates: reading", (index + 1) / count)
        if count:
            fit_first(self._gates, samples, self.settings.first_expanded)

    def budget_at(self, index: int) -> float:
        """Weight of what is expanded in a step: it rises over the first half of them.

        Args:
            index: Steps done before it.
        """
        return self.settings.budget * min(1.0, 2 * index / self._steps)

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        """Let the student hear some positions of a text."""
        lesson = self._lesson(self._subject_of(index), generator)
        heard = hear(self.model, self._gates, lesson)
        return self._outcome(heard, lesson, self.budget_at(index))

    def _outcome(self, heard: Heard, lesson: Lesson, budget: float) -> StepOutcome:
        choices, settings = heard.choices, self.settings
        kl = kl_divergence(lesson.logits, heard.logits).mean()
        loss = kl + settings.zoom * choices.zoom + settings.recon * heard.recon
        loss = loss + budget * (choices.expanded + _OF_RANKS * heard.ranks)
        metrics = {
            "kl": kl,
            "zoom": choices.zoom,
            "recon": heard.recon,
            "expanded": choices.expanded,
            "ranks": heard.ranks,
            "recall": choices.recall,
            "caught": choices.caught,
        }
        return StepOutcome(loss, {name: float(value.detach()) for name, value in metrics.items()})

    # Validation and resumption ----------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """All losses on held-out texts, the budget's with its full weight."""
        if not self._validation:
            self._validation = [self._held_out(index) for index in range(self.settings.validation)]
        found = []
        for lesson in self._validation:
            heard = hear(self.model, self._gates, lesson)
            outcome = self._outcome(heard, lesson, self.settings.budget)
            found.append({"loss": float(outcome.loss), **outcome.metrics})
        return {name: sum(each[name] for each in found) / len(found) for name in found[0]}

    def _held_out(self, index: int) -> Lesson:
        subject = self._read(self.corpora[-1], "validation", index)
        lesson = self._lesson(subject, torch.Generator().manual_seed(index))
        subject.text.compact()
        return lesson

    def state(self) -> Mapping[str, torch.Tensor]:
        """Nothing besides the gates changes."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take back."""

    def identity(self) -> dict[str, object]:
        """The model, the texts and the settings."""
        return {
            "model": fingerprint(self.model),
            "dtype": str(self.model.dtype),
            "device": self.model.device.type,
            "corpora": [corpus.describe() for corpus in self.corpora],
            "settings": asdict(self.settings),
        }


def _some(places: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """So many of them, drawn, or all."""
    drawn = torch.randperm(len(places), generator=generator)[:count]
    return places[drawn.to(places.device)]
