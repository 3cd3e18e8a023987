"""What an evaluation of fidelity is asked to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import get_args

from kvfold.budget import Budget
from kvfold.cache import METHODS
from kvfold.errors import ConfigError
from kvfold.evaluation.sample import Protocol
from kvfold.evaluation.samples import SETS, default_sets
from kvfold.evict import POLICIES

FULL = "full"
"""The reference: always measured, and the name of its rows."""
PREFERRED = "distill"
"""The method that the others are compared with where it is among them."""
BATCH_TOKENS = 8192
"""Most tokens of all prompts of a batch: at 110 KB a token of the default model, about 1 GB of
queries, keys and values."""
EVERYTHING = str(Budget(1.0, "ratio"))
"""The budget of what keeps everything."""


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method with options, under a name of its own."""

    label: str
    """Name in the results."""
    method: str
    """Registered name."""
    options: dict[str, object] = field(default_factory=dict)
    """As `kvfold.make_cache` takes them."""

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Read `method`, `method:option=value+option=value`, or either after `name=`.

        Args:
            text: As above; whole numbers and decimal fractions become numbers.

        Returns:
            The method; without a name of its own it is called by the text.

        Raises:
            ConfigError: When there is no such method, or an option has no value.

        Example:
            >>> MethodSpec.parse("often=distill:every=1+sinks=0").options
            {'every': 1, 'sinks': 0}
        """
        head, colon, tail = text.strip().partition(":")
        name, equals, method = head.rpartition("=")
        label = name.strip() if equals else text.strip()
        if not label or not method.strip() or (colon and not tail.strip()):
            raise ConfigError(
                f"method {text!r} cannot be read: write method, method:option=value+option=value, "
                "or either after name="
            )
        METHODS[method.strip()]
        options = dict(_option(part) for part in re.split(r"\+(?=\w+=)", tail)) if colon else {}
        return cls(label, method.strip(), options)

    @property
    def evicts(self) -> bool:
        """Whether it takes a budget."""
        return self.method not in POLICIES or POLICIES[self.method].evicts


def default_methods() -> tuple[MethodSpec, ...]:
    """Every method that evicts, with its own options."""
    return tuple(MethodSpec(name, name) for name in POLICIES if POLICIES[name].evicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelitySettings:
    """How methods are judged."""

    methods: tuple[MethodSpec, ...] = field(default_factory=default_methods)
    """What is judged; `full` without a name of its own is the reference, and measured anyway."""
    budgets: tuple[str, ...] = ("0.25", "0.125")
    """What each may keep: shares or tokens."""
    sets: tuple[str, ...] = field(default_factory=default_sets)
    """Names from `kvfold.evaluation.samples.SETS`."""
    samples: int = 16
    """Of each set."""
    lengths: tuple[int, ...] = (768,)
    """Tokens of a prompt, at most; with protocol `agnostic`, of prompt and answer together."""
    tokens: int = 32
    """Tokens of a text's continuation."""
    max_new_tokens: int | None = None
    """Most tokens of an answer; without it, what each set needs."""
    protocol: Protocol = "aware"
    """Whether caches are cut after they have read the question, or before."""
    depths: int | None = None
    """Number of depths, evenly from 0 to 1, at which needles stand in turn; anywhere without it."""
    batch: int = 8
    """Samples that are run together, at most."""
    seed: int = 0
    """Of the samples and the intervals."""
    baseline: str | None = None
    """Label of the method that every other is compared with; `distill` where it is among them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured, before anything long starts."""
        numbers = [
            *((name, getattr(self, name)) for name in ("samples", "tokens")),
            *([] if self.max_new_tokens is None else [("max_new_tokens", self.max_new_tokens)]),
            *(("length", length) for length in self.lengths),
            ("batch", self.batch),
        ]
        for name, value in numbers:
            if value < 1:
                raise ConfigError(f"{name.replace('_', ' ')}: {value} is below 1: give at least 1")
        if not self.judged:
            raise ConfigError("no method is named: give at least one besides full, such as snapkv")
        _once([spec.label for spec in self.judged], "method")
        _once([str(Budget.parse(budget)) for budget in self.budgets], "budget")
        _once(self.sets, "set")
        _once(list(map(str, self.lengths)), "length")
        self._check_protocol()
        for name in self.sets:
            SETS[name]
        for budget in self.budgets:
            if Budget.parse(budget).unit == "bytes":
                raise ConfigError(
                    f"budget {budget} is shared by a batch, so a sample's part is not known: give "
                    "shares such as 0.25 or tokens such as 512"
                )
        labels = [spec.label for spec in self.judged]
        if self.baseline is not None and self.baseline not in labels:
            raise ConfigError(
                f"baseline {self.baseline!r} is not measured: choose from {', '.join(labels)}"
            )

    def _check_protocol(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise ConfigError(
                f"protocol {self.protocol!r} is not one of {', '.join(get_args(Protocol))}"
            )
        if self.depths is not None and self.depths < 2:
            raise ConfigError(f"depths: {self.depths} is below 2: give the two ends at least")

    def prompt_length(self, name: str, length: int) -> int:
        """Tokens that a prompt of a set may have.

        Raises:
            ConfigError: When what follows it takes all of the length.
        """
        if self.protocol == "aware":
            return length
        room = length - self.tokens_after(name)
        if room < 1:
            raise ConfigError(
                f"length {length} leaves no room for a prompt before {self.tokens_after(name)} "
                "more tokens: give a greater length, or fewer new tokens"
            )
        return room

    def tokens_after(self, name: str) -> int:
        """Most tokens that follow a prompt of a set."""
        return self.tokens if SETS[name].kind == "text" else self.answer_tokens(name)

    def answer_tokens(self, name: str) -> int:
        """Most tokens of an answer in a set."""
        return SETS[name].new_tokens if self.max_new_tokens is None else self.max_new_tokens

    def batch_at(self, length: int) -> int:
        """Samples of a length that are run together, so that what they hold stays bounded."""
        return min(self.batch, max(1, BATCH_TOKENS // length))

    @property
    def judged(self) -> tuple[MethodSpec, ...]:
        """The methods without the reference."""
        return tuple(spec for spec in self.methods if spec.label != FULL)

    @property
    def pairs(self) -> tuple[tuple[MethodSpec, str], ...]:
        """Every method with every budget; what keeps everything has one."""
        return tuple(
            (spec, budget)
            for spec in self.judged
            for budget in (map(_normal, self.budgets) if spec.evicts else (EVERYTHING,))
        )

    @property
    def compared_with(self) -> str | None:
        """Label of the baseline; None where none is named and `distill` is not measured."""
        if self.baseline is not None:
            return self.baseline
        return next((spec.label for spec in self.judged if spec.label == PREFERRED), None)

    def to_dict(self) -> dict[str, object]:
        """The settings as plain data."""
        answers = {name: self.answer_tokens(name) for name in self.sets}
        return {**asdict(self), "baseline": self.compared_with, "answer_tokens": answers}


def _normal(budget: str) -> str:
    return str(Budget.parse(budget))


def _once(names: Sequence[str], what: str) -> None:
    if not names:
        raise ConfigError(f"no {what} is named: give at least one")
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ConfigError(f"{what} {min(repeated)!r} is named twice: name each once")


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise ConfigError(f"option {text!r} has no value: write option=value")
    return name.strip(), _value(value.strip())


def _value(text: str) -> object:
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d*\.\d+", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)
