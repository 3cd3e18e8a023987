"""What an evaluation of fidelity finds of each sample, and the file in which it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Generic, TypeVar
from typing import Protocol as Interface

from filelock import FileLock

from kvfold.artifacts import write_files
from kvfold.errors import ArtifactError, ConfigError
from kvfold.evaluation.answers import Fault
from kvfold.evaluation.sample import Protocol

FILE = "results.jsonl"
"""Name of the file in its folder: one sample, method and budget a line."""
LOCK = ".results.lock"
"""Name of the file beside it that one process at a time may hold while it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample, method and budget."""

    key: str
    """Hash of all that the numbers depend on."""
    set: str
    """The set of the sample."""
    kind: str
    """`text` or `task`."""
    index: int
    """The sample's place in the set."""
    length: int = 0
    """Tokens that the sample was made for, at most."""
    depth: float | None = None
    """Where its needle stands, from 0 to 1, if it was named."""
    protocol: Protocol = "aware"
    """Whether the cache was cut after it had read the question, or before."""
    method: str
    """Label of the method."""
    budget: str
    """What it may keep."""
    prompt_tokens: int
    """Tokens that were prefilled."""
    left_out: int = 0
    """Tokens that were cut out of the middle of a prompt that was too long."""
    divergences: list[float]
    """`KL(full || method)` in nats after each forced token; empty for an empty answer."""
    agreements: list[bool]
    """Whether both find the same token likeliest, after each forced token."""
    nll: float | None = None
    """Mean negative log-likelihood of a text's tokens after the first forced one, in nats: the
    logarithm of the perplexity. None for a task, where there is one token, and in old rows."""
    answer: str | None
    """Greedy; None for a text."""
    answer_tokens: int | None
    """Its length."""
    is_right: bool | None
    """Whether it is right; None for a text, and where `score` says how good it is."""
    score: float | None = None
    """A benchmark's own score, from 0 to 1; None where the set has none."""
    found: float | None = None
    """Share of what is expected that it has, where all is wanted."""
    fault: Fault | None
    """What is wrong with it, if it is not."""
    tokens_kept: int
    """After the prompt: most tokens that a row of the batch holds in a layer."""
    bytes_held: int
    """After the prompt: all bytes of the batch's cache, a row."""
    bytes_fast: int
    """After the prompt: those on the tier that attention reads."""
    bytes_full: int
    """Keys and values that a full cache would hold of the batch, a row."""
    batch_rows: int | None = field(default=None, compare=False)
    """Samples of the batch, which share the measurements that follow. These were made by the way
    and are no benchmark; rows that differ in them alone are equal. None in old rows."""
    first_token_seconds: float | None = field(default=None, compare=False)
    """To read the batch's prompts, to fill the cache and to read the questions, if these come
    later; reading, which is done once for all methods, counts for each."""
    tokens_per_second: float | None = field(default=None, compare=False)
    """Of all rows of the batch together, over the forced tokens, or the full cache's own answers;
    None where there were none."""
    bytes_peak: int | None = field(default=None, compare=False)
    """Most bytes of the batch's cache after a forward, both tiers, a row."""

    @property
    def kl(self) -> float | None:
        """Mean divergence over the forced tokens."""
        return fmean(self.divergences) if self.divergences else None

    @property
    def agreement(self) -> float | None:
        """Share of tokens after which both find the same token likeliest."""
        return fmean(self.agreements) if self.agreements else None

    @property
    def points(self) -> float | None:
        """The score, or 1 for a right answer and 0 for a wrong one; None for a text."""
        if self.score is not None or self.is_right is None:
            return self.score
        return float(self.is_right)

    def to_dict(self) -> dict[str, object]:
        """The row as plain data, with its means."""
        return {**asdict(self), "kl": self.kl, "agreement": self.agreement}

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> Row:
        """Read what `to_dict` wrote, now or before rows had what has a default here, or tiers.

        Raises:
            KeyError: When something else is missing.
        """
        known = {"bytes_fast": document["bytes_held"], **document}
        values = {
            each.name: known[each.name]
            for each in fields(cls)
            if each.default is MISSING or each.name in known
        }
        return cls(**values)  # pyright: ignore[reportArgumentType]


def key_of(facts: Mapping[str, object]) -> str:
    """A hash of some plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def by_run(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by method and budget."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row.method, row.budget), []).append(row)
    return runs


class Keyed(Interface):
    """What a store takes."""

    @property
    def key(self) -> str:
        """Hash of all that the numbers depend on."""
        ...

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        ...


R = TypeVar("R", bound=Keyed)


class RowStore(Generic[R]):
    """The rows of a folder; those of other configurations stay where they are."""

    def __init__(
        self, folder: Path, read: Callable[[Mapping[str, object]], R], *, resume: bool
    ) -> None:
        """Look into a folder.

        Args:
            folder: Made when the first rows are written.
            read: Makes a row of what its `to_dict` gave.
            resume: Go on with the rows that are there.

        Raises:
            ConfigError: When there are some, and they are not to be gone on with.
            ArtifactError: When they cannot be read.
        """
        require_folder(folder, resume=resume)
        self._folder = folder
        self._read = read
        self._rows = self._found()

    def find(self, key: str) -> R | None:
        """The row of a key, if there is one."""
        return self._rows.get(key)

    def _found(self) -> dict[str, R]:
        """What the file holds; nothing where there is none."""
        return {row.key: row for row in _read(self._folder / FILE, self._read)}

    def add(self, rows: Iterable[R]) -> None:
        """Add rows, and what other processes have added, and write the file, whole or not at all.

        Raises:
            ArtifactError: When the file cannot be read or written.
        """
        write_files(self._folder, {})
        with FileLock(self._folder / LOCK):
            self._rows |= self._found() | {row.key: row for row in rows}
            lines = [json.dumps(row.to_dict(), allow_nan=False) for row in self._rows.values()]
            text = "\n".join([*lines, ""])
            write_files(self._folder, {FILE: lambda path: path.write_text(text, encoding="utf-8")})


def require_folder(folder: Path, *, resume: bool) -> None:
    """Refuse to write over results.

    Raises:
        ConfigError: When there are some, and they are not to be gone on with.
    """
    if not resume and (folder / FILE).exists():
        raise ConfigError(
            f"{str(folder)!r} holds results: give --resume to go on with them, or another folder"
        )


def _read(path: Path, read: Callable[[Mapping[str, object]], R]) -> list[R]:
    """Rows of a file; none where there is no file."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [read(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is damaged or not kvfold's ({type(error).__name__}: {error}): remove it, or "
            "choose another folder"
        ) from error
