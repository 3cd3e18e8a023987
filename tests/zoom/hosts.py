"""What the tests of spans on the host share: a stream that delays its copies, and such caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import KVCache
from kvfold.zoom.lane import Event, Lanes, Transport
from kvfold.zoom.pinned import PinnedTier
from tests.tiny import tiny_ids
from tests.zoom.running import layers_of, one_by_one, wide


class Copied:
    """A copy that happens as late as it may."""

    def __init__(self, owner: Delayed, source: torch.Tensor, target: torch.Tensor) -> None:
        self.owner, self.source, self.target = owner, source, target

    def synchronize(self) -> None:
        self.owner.log.append(f"synchronize {self.owner.begun.index(self)}")
        self.owner.finish(self)


class Delayed:
    """A stream whose copies run when something waits for them, and not before."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.begun: list[Copied] = []
        self.finished = 0
        self.log: list[str] = []
        self.fails = fails

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if "host" in self.fails:
            raise RuntimeError("no memory to lock\nat all")
        return torch.empty(shape, dtype=dtype)

    def locked(self, tensor: torch.Tensor) -> torch.Tensor:
        if "locked" in self.fails:
            raise RuntimeError("no memory to lock")
        return tensor

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Copied:
        self.begun.append(Copied(self, source, target))
        self.log.append(f"copy {len(self.begun) - 1}")
        return self.begun[-1]

    def wait(self, room: torch.Tensor, event: Event) -> None:
        assert isinstance(event, Copied)
        self.log.append(f"wait {self.begun.index(event)}")
        self.finish(event)

    def finish(self, last: Copied) -> None:
        """One after the other, as a stream does."""
        while self.finished <= self.begun.index(last):
            each = self.begun[self.finished]
            each.target.copy_(each.source)
            self.finished += 1


def lanes_of(transport: Transport | None = None) -> Lanes:
    return Lanes(lambda device: transport)


BOTH = pytest.mark.parametrize("make", [lambda: None, Delayed], ids=["plain", "stream"])


def on_host(
    budget: float = 0.4,
    transport: Transport | None = None,
    ahead: float = 0.0,
    model: PreTrainedModel | None = None,
    **options: object,
) -> KVCache:
    """A cache that keeps spans on the host wherever the model is."""
    held = kvfold.make_cache(model or wide(), "sekv", budget=budget, **options)
    lanes = lanes_of(transport)
    for layer in layers_of(held):
        longest = layer.spans.slow.longest
        layer.resolution = replace(
            layer.resolution,
            make_slow=lambda index, device, longest=longest: PinnedTier(
                longest, lanes, index, ahead
            ),
        )
    held.reset()
    return held


def pieces(rows: int = 2, more: int = 40) -> list[torch.Tensor]:
    return [tiny_ids(rows, 300), *one_by_one(tiny_ids(rows, more, seed=1))]
