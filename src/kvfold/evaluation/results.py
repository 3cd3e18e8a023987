"""What a comparison found, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvfold.bench.spread import Spread
from kvfold.cache import CacheReport, Details
from kvfold.evaluation.document import Document
from kvfold.evaluation.settings import Settings
from kvfold.evaluation.statistics import Interval


@dataclass(frozen=True, slots=True)
class Divergence:
    """Distance from the full cache's distributions, over tokens."""

    kl: Interval
    """`KL(full || method)` in nats."""
    agreement: float
    """Share of tokens after which both find the same token likeliest."""


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method on one prompt."""

    method: str
    """Registered name."""
    report: CacheReport
    """What the cache held after the prompt."""
    first_token_seconds: float
    """From the prompt to the first token, measured once."""
    answer: str
    """Greedy."""
    answer_tokens: int
    """Length of the answer."""
    after_answer: Details | None
    """What the method says of its cache after the answer, beyond tokens and bytes."""
    is_right: bool | None
    """Whether the expected answer is in it; None when none is known."""
    on_answer: Divergence | None
    """On the full cache's own answer; None when that is empty."""
    on_continuation: Divergence | None
    """On the held-out continuation; None when there is none."""
    tokens_per_second: Spread
    """Decode speed over the rounds."""
    times_full: Spread
    """Decode speed as a multiple of the full cache's in the same round."""

    @property
    def share_of_full(self) -> float:
        """Bytes on both tiers as a share of the full cache's."""
        held = self.report.bytes_fast + self.report.bytes_slow
        return held / self.report.bytes_full if self.report.bytes_full else 0.0

    @property
    def answer_line(self) -> str:
        """The answer on one line, without characters that do something to a terminal."""
        printable = "".join(each if each.isprintable() else " " for each in self.answer)
        return " ".join(printable.split()) or "(nothing)"

    def to_dict(self) -> dict[str, object]:
        """The result as plain data."""
        return asdict(self) | {
            "report": self.report.to_dict(),
            "share_of_full": self.share_of_full,
            "tokens_per_second": _numbers(self.tokens_per_second),
            "times_full": _numbers(self.times_full),
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """What the methods were compared on."""

    model: str
    """The name it was loaded by."""
    fingerprint: str
    """Of the model's shape and weights."""
    dtype: str
    """Of the weights."""
    device: str
    """Where it ran."""
    prompt_tokens: int
    """Tokens that were prefilled."""
    document: Document
    """The document and the question."""

    def to_dict(self) -> dict[str, object]:
        """The subject as plain data, the document's tokens as their number."""
        document: dict[str, object] = asdict(self.document)
        document["tokens"] = len(self.document.tokens)
        document["continuation"] = len(self.document.continuation)
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "device": self.device,
            "prompt_tokens": self.prompt_tokens,
            "document": document,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Methods side by side: the same prompt, the same budget."""

    command: str
    """What makes this result again."""
    subject: Subject
    """Model and prompt."""
    settings: Settings
    """What was asked for."""
    environment: dict[str, object]
    """Versions, commit and machine."""
    results: tuple[MethodResult, ...]
    """One a method, in the order in which they were measured."""

    def to_dict(self) -> dict[str, object]:
        """The comparison as plain data."""
        return {
            "command": self.command,
            "subject": self.subject.to_dict(),
            "settings": self.settings.to_dict(),
            "environment": self.environment,
            "results": [result.to_dict() for result in self.results],
        }


def _numbers(spread: Spread) -> dict[str, object]:
    return {
        "median": spread.median,
        "low": spread.lowest,
        "high": spread.highest,
        "count": len(spread.samples),
        "samples": list(spread.samples),
    }
