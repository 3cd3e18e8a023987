"""Passes over the texts: both models read each, sums are kept, and no trace.

A pass adds to the moments of rows [producer's | consumer's] of some parts of layers, and keeps a
bounded sample of the rows. It can be left after any text and gone on with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvfold.ops.ridge import Moments
from kvfold.transfer.endpoint import Endpoint, Trace
from kvfold.transfer.journal import Entry, Journal

Place = tuple[str, int]
"""A part of a layer: `key`, `value` or `hidden`, and the layer's index."""

Tell = Callable[[int, int], None]
"""Told how many texts of how many are done."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """The two ends of a codec that is being made."""

    producer: Endpoint
    """Reads prefixes."""
    consumer: Endpoint
    """Goes on from them."""

    def widths(self, place: Place) -> tuple[int, int]:
        """Numbers in a row of a part, on either side."""
        name, layer = place
        sides = (self.producer, self.consumer)
        if name == "hidden":
            first, second = (side.anatomy.hidden_size for side in sides)
        else:
            part = "key" if name == "key" else "value"
            first, second = (side.width(layer, part) for side in sides)
        return first, second

    def read(
        self, texts: torch.Tensor, places: Sequence[Place]
    ) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor]]:
        """What both made of texts `[B, T]`: place by place, rows `[N, W]` of either."""
        hidden = [layer for name, layer in places if name == "hidden"]
        traces = [side.read(texts, hidden=hidden) for side in (self.producer, self.consumer)]
        for place in places:
            yield place, rows_of(traces[0], place), rows_of(traces[1], place)


def rows_of(trace: Trace, place: Place) -> torch.Tensor:
    """Rows `[N, W]` of a part of a layer."""
    name, layer = place
    return {"key": trace.keys, "value": trace.values, "hidden": trace.inputs}[name](layer)


class Gathering:
    """Moments and samples of parts of layers."""

    def __init__(self, widths: dict[Place, tuple[int, int]], *, both: bool) -> None:
        """Start with no text.

        Args:
            widths: Places, with the numbers in a row of either side.
            both: Whether samples are of both sides' rows; else of the first's.
        """
        self.moments = {place: Moments(sum(sides)) for place, sides in widths.items()}
        self._kept = {place: sum(sides) if both else sides[0] for place, sides in widths.items()}
        self._samples: dict[Place, list[torch.Tensor]] = {place: [] for place in widths}
        self.done = 0

    def add(self, place: Place, rows: torch.Tensor, chosen: torch.Tensor) -> None:
        """Add rows [first side | second side] of a place, and keep the chosen ones."""
        rows = rows.cpu()
        self.moments[place].add(rows)
        self._samples[place].append(rows[chosen, : self._kept[place]].float().clone())

    def sample(self, place: Place) -> torch.Tensor:
        """The rows that were kept, `[N, W]`."""
        kept = self._samples[place]
        return torch.cat(kept) if kept else torch.empty(0, self._kept[place])

    def entry(self) -> Entry:
        """All of it, for the journal."""
        tensors: dict[str, torch.Tensor] = {}
        for (name, layer), moments in self.moments.items():
            prefix = f"{name}.{layer}"
            tensors[f"{prefix}.total"] = moments.total
            tensors[f"{prefix}.gram"] = moments.gram
            tensors[f"{prefix}.sample"] = self.sample((name, layer))
        counts = {f"{name}.{layer}": m.count for (name, layer), m in self.moments.items()}
        return Entry({"done": self.done, "counts": counts}, tensors)

    def load(self, entry: Entry) -> None:
        """Take back what `entry` gave."""
        counts = entry.facts["counts"]
        assert isinstance(counts, dict)
        for name, layer in self.moments:
            prefix, moments = f"{name}.{layer}", self.moments[name, layer]
            moments.count = int(counts[prefix])
            moments.total = entry.tensors[f"{prefix}.total"]
            moments.gram = entry.tensors[f"{prefix}.gram"]
            self._samples[name, layer] = [entry.tensors[f"{prefix}.sample"]]
        self.done = int(str(entry.facts["done"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """How a pass over the texts goes."""

    stage: str
    """Its name in the journal."""
    rows: int
    """Rows of a sample, over all texts, rounded up to the same number of each; 0 keeps none."""
    save_every: int
    """Texts between two states on disk."""
    seed: int
    """Of the samples."""


def gather(
    gathering: Gathering,
    texts: Sequence[torch.Tensor],
    read: Callable[[torch.Tensor], Iterator[tuple[Place, torch.Tensor]]],
    how: Pass,
    journal: Journal,
    tell: Tell,
) -> None:
    """Go over the texts, from where the journal says the last run stopped.

    Args:
        gathering: What is added to.
        texts: Token ids, `[T]` each.
        read: From a text `[1, T]` to rows [first side | second side] of each place.
        how: The pass.
        journal: Where its state is kept.
        tell: Called after each text.
    """
    entry = journal.read(how.stage)
    if entry is not None:
        gathering.load(entry)
    each = math.ceil(how.rows / len(texts))
    for index in range(gathering.done, len(texts)):
        for place, rows in read(texts[index][None]):
            generator = torch.Generator().manual_seed(how.seed * 1_000_003 + index)
            gathering.add(place, rows, torch.randperm(len(rows), generator=generator)[:each])
        gathering.done = index + 1
        if gathering.done % how.save_every == 0 or gathering.done == len(texts):
            journal.write(how.stage, gathering.entry().facts, gathering.entry().tensors)
        tell(gathering.done, len(texts))
