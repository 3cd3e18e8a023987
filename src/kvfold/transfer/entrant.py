"""What was measured of one way to hand a prefix over."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

OWN = "own prefill"
"""The subject that does without a producer."""
STAGES = ("prefill", "encode", "decode", "patch", "first token")
"""Of a first token but for sending, in their order."""
AT_PRODUCER = ("prefill", "encode")
"""Those that are over once the producer keeps the codes."""


@dataclass(slots=True)
class Entrant:
    """What was measured of one subject."""

    payload: int
    """Bytes that travel."""
    divergence: float
    """Mean KL from the consumer's own predictions, in nats."""
    perplexity: float
    """Of the continuation."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By stage but sending, one a round."""
    sending: dict[float, list[float]] = field(default_factory=dict)
    """By bandwidth, one a round."""

    def total(self, bandwidth: float, *, kept: bool) -> list[float]:
        """Seconds to the first token, one a round.

        Args:
            bandwidth: Bits a second.
            kept: Whether the producer has the codes already.
        """
        at_producer = AT_PRODUCER if kept and self.sending else ()
        stages = [s for name, s in self.seconds.items() if name not in at_producer]
        stages += [self.sending[bandwidth]] if self.sending else []
        return [sum(parts) for parts in zip(*stages, strict=True)]

    def crossover(self, own: float, *, kept: bool) -> float | None:
        """Bits a second from which on it is sooner than the consumer alone; None for never."""
        at_producer = AT_PRODUCER if kept else ()
        rest = sum(median(s) for name, s in self.seconds.items() if name not in at_producer)
        return 8 * self.payload / (own - rest) if own > rest else None

    def to_dict(self) -> dict[str, object]:
        """The measurements as plain data."""
        return {
            "payload": self.payload,
            "divergence": self.divergence,
            "perplexity": self.perplexity,
            "seconds": self.seconds,
            "sending": {f"{bandwidth:.0f}": times for bandwidth, times in self.sending.items()},
        }
