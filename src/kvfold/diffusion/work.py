"""What a generation computed and held, counted while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from kvfold.artifacts import format_bytes


@dataclass(slots=True)
class Work:
    """Tokens that went through each layer, padding included: what was computed, not what counts."""

    queries: list[int]
    """Tokens whose query, attention and MLP were computed, by layer."""
    keys: list[int]
    """Tokens whose key was computed, by layer."""
    dense: int = 0
    """Tokens that a layer computes without a cache."""
    logits: int = 0
    """Places whose logits were computed."""
    steps: int = 0
    """Evaluations of the model."""

    @classmethod
    def of_layers(cls, layers: int) -> Work:
        """Nothing yet."""
        return cls([0] * layers, [0] * layers)

    def add(self, layer: int, queries: int, keys: int) -> None:
        """Count what a layer computed."""
        self.queries[layer] += queries
        self.keys[layer] += keys


@dataclass(frozen=True, slots=True)
class DiffusionReport:
    """What a generation took."""

    cache: str
    """Name of the cache."""
    rows: int
    """Prompts."""
    steps: int
    """Evaluations of the model, each of all rows not yet finished."""
    tokens: int
    """Tokens generated, up to the end of each text."""
    logits: int
    """Places whose logits were computed."""
    dense: int
    """Tokens that each layer would have computed without a cache."""
    queries: Sequence[int] = field(default_factory=list)
    """Tokens whose query, attention and MLP each layer computed."""
    keys: Sequence[int] = field(default_factory=list)
    """Tokens whose key each layer computed."""
    bytes_held: int = 0
    """Most bytes that the cache held at once."""

    @property
    def query_shares(self) -> list[float]:
        """Computed queries as a share of the dense ones, by layer."""
        return [count / self.dense if self.dense else 0.0 for count in self.queries]

    @property
    def key_shares(self) -> list[float]:
        """Computed keys as a share of the dense ones, by layer."""
        return [count / self.dense if self.dense else 0.0 for count in self.keys]

    @property
    def share(self) -> float:
        """Mean of the shares of queries over the layers."""
        return sum(self.query_shares) / len(self.queries) if self.queries else 0.0

    def to_dict(self) -> dict[str, object]:
        """The report as plain data."""
        shares = {"query_shares": self.query_shares, "key_shares": self.key_shares}
        return {**asdict(self), **shares, "share": self.share}

    def __str__(self) -> str:
        """One line for a person."""
        each = self.tokens / self.steps if self.steps else 0.0
        return (
            f"{self.cache}: {self.tokens} tokens in {self.steps} steps ({each:.2f} a step), "
            f"{self.share:.0%} of the tokens of dense layers computed, "
            f"{format_bytes(self.bytes_held)} held"
        )
