"""What all texts of an evaluation that diffusion wrote took together."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvfold.diffusion import DiffusionReport


@dataclass(slots=True)
class Writings:
    """Sums over generations."""

    rows: int = 0
    """Texts."""
    tokens: int = 0
    """Of them, up to their ends."""
    steps: int = 0
    """Evaluations of the model, each of a batch."""
    dense: int = 0
    """Tokens that all layers would have computed without a cache."""
    queries: int = 0
    """Tokens whose query, attention and MLP all layers computed."""
    bytes_held: int = 0
    """Most that a cache held at once."""

    def add(self, report: DiffusionReport) -> None:
        """Count one generation more."""
        self.rows += report.rows
        self.tokens += report.tokens
        self.steps += report.steps
        self.dense += report.dense * len(report.queries)
        self.queries += sum(report.queries)
        self.bytes_held = max(self.bytes_held, report.bytes_held)

    def to_dict(self) -> dict[str, object]:
        """The sums by name, and the share of queries computed."""
        return {**asdict(self), "share": self.queries / self.dense if self.dense else 0.0}
