"""What to measure. Values are checked in `kvfold.bench.checks`, before anything long starts."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field

import torch

DYNAMIC = "dynamic"
"""The subject that is not kvfold's: transformers' `DynamicCache` on its own attention."""
SUBJECTS = (DYNAMIC, "full", "streaming", "snapkv")
"""Both full caches, a method that needs no attention statistics, and one that does."""
SEED = 0
"""Nothing is drawn but the tokens that method `random` keeps, by this seed."""

_OPTIONS = {"subjects": "methods", "contexts": "context", "batches": "batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decode and prefill measurements share."""

    model: str = "default"
    """A name or folder that `kvfold.load` takes."""
    subjects: tuple[str, ...] = SUBJECTS
    """`dynamic` and names from `kvfold.methods()`, in the order of measurement."""
    budget: str = "0.25"
    """Of the methods that evict."""
    contexts: tuple[int, ...]
    """Tokens, one comparison each."""
    dtype: str = "float32"
    """Of weights and cache."""
    device: str = "cpu"
    """Where the model runs."""
    threads: int = field(default_factory=torch.get_num_threads)
    """Of torch, in each process; torch's own choice here by default, all cores as a rule."""
    rounds: int = 3
    """Measurements of every subject, alternating."""

    def to_dict(self) -> dict[str, object]:
        """The settings as plain data."""
        return asdict(self)

    def command(self, kind: str) -> str:
        """The command line that measures this, every option spelled out."""
        words = ["kvfold", "bench", kind]
        for name, value in self.to_dict().items():
            if value is None:
                continue
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{_OPTIONS.get(name, name.replace('_', '-'))}", text]
        return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(Settings):
    """A measurement of decode steps."""

    contexts: tuple[int, ...] = (512, 4096)
    """Tokens that the last timed step attends to in a full cache, itself included."""
    batches: tuple[int, ...] = (1, 8)
    """Rows; one comparison each, for every context."""
    warmup: int = 4
    """Steps before the timed ones."""
    steps: int = 24
    """Timed steps."""
    read: int | None = None
    """Tokens that are really read, at most; in a longer context their queries, keys and values are
    repeated, so that it may be longer than the model's positions."""

    def stored(self, context: int) -> int:
        """Tokens that are prefilled, once, before the steps."""
        return context - self.warmup - self.steps

    def prompt(self, context: int) -> int:
        """Those of them that are really read."""
        return self.stored(context) if self.read is None else min(self.stored(context), self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings(Settings):
    """A measurement of the time to the first token."""

    contexts: tuple[int, ...] = (4096,)
    """Tokens of the prompt."""
    chunk_size: int = 512
    """Most tokens a forward; the whole prompt at once if it is no longer than this."""
