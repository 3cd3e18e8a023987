"""The slow tier as factors: truncated singular value decompositions of the tokens of each span.

SeKV (arXiv 2606.31145). The keys of a span before RoPE, and its values, are each `sum_i u_i v_i^T`
over at most R components, one decomposition a kv head, or (ours) one over all heads together,
whose left vectors are then held once. Departures: a span whose factors would take as much as its
tokens, or more, stays as it is. A component that trained gates leave out is not held; one that they
use is used whole, which is what they learn with.

Left vectors stand one after the other, each as long as its span; right vectors likewise, those of
the keys of a span before those of its values. The root of a singular value is in either side, so
that neither leaves the range of half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from kvfold.ops.lowrank import factorise
from kvfold.ops.quantize import quantise, scales_of
from kvfold.zoom.gates import RANK, Gates
from kvfold.zoom.growing import Growing
from kvfold.zoom.runs import packed, runs, starts_of
from kvfold.zoom.tiers import Folded, Wanted
from kvfold.zoom.turning import Turning

_SCALE_BYTES = 4
"""Of what code 1 of a component of one head stands for."""


def _room(length: int) -> int:
    """A 32nd, so that the parts together have no more room than the tokens would."""
    return length // 32


@dataclass(frozen=True, slots=True)
class Factoring:
    """How the spans of a cache are factorised."""

    rank: int
    """R, at most 32."""
    is_joint: bool
    """Whether all kv heads share one decomposition."""
    is_int8: bool
    """Whether components are held in 8 bits; otherwise as spans are."""
    longest: int
    """L, tokens of the longest span."""
    gates: Gates | None = None
    """Choose components of each head's own decomposition, where they were trained."""

    def __deepcopy__(self, memo: dict[int, object]) -> Factoring:
        """Itself: nothing of it changes, and gates are large."""
        return self


class _Components(NamedTuple):
    """Of the keys `[:, :, :, 0]` and values `[:, :, :, 1]` of new spans; P is 1 or G."""

    left: torch.Tensor
    """`[B, P, S, 2, R, L]`, 0 after a span's last token."""
    right: torch.Tensor
    """`[B, G, S, 2, R, D]`."""
    used: torch.Tensor
    """`[B, S, 2, R]`."""


class FactorTier:
    """Spans as components where that is smaller."""

    def __init__(self, how: Factoring, turning: Turning | None, layer: int = 0) -> None:
        """Start empty.

        Args:
            how: Of all layers.
            turning: Of the layer's keys; None where they are not rotated.
            layer: Which of those that zoom it is, from 0.
        """
        self.longest = how.longest
        self._how, self._turning, self._layer = how, turning, layer
        self._tokens = Growing({"tokens": 2}, _room)
        self._left = Growing({"left": 2}, _room)
        self._right = Growing({"right": 2, **({"scales": 2} if how.is_int8 else {})}, _room)
        self._index = Growing({"first": 1, "ranks": 1}, _room)
        self._length = 0

    def __len__(self) -> int:
        """Tokens of the spans of the row that has most, empty places among them included."""
        return self._length

    @property
    def width(self) -> int:
        """2D, numbers of a token's key and value."""
        return self._tokens["tokens"].shape[-1]

    @property
    def nbytes(self) -> int:
        """Of all tensors; the angles are the model's."""
        return sum(each.nbytes for each in self._parts)

    @property
    def ranks(self) -> torch.Tensor:
        """Components of the keys and of the values of each span, `[B, S, 2]`; 0 if it has none."""
        return self._index["ranks"]

    @property
    def mean_rank(self) -> float | None:
        """Components of keys or values, the mean over the spans that are factorised, if any is."""
        if not len(self._index):
            return None
        ranks = self.ranks.float()
        count = int((ranks > 0).sum())
        return float(ranks.sum()) / count if count else None

    @property
    def _parts(self) -> tuple[Growing, ...]:
        return self._tokens, self._left, self._right, self._index

    def reserve(self, count: int, like: torch.Tensor) -> None:
        """Nothing: memory is not refused in advance."""

    # Taking -----------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, new: Folded) -> None:
        """Append new spans."""
        found, lengths = self._factorise(new), new.lengths
        is_raw = self._stays(new, found)
        used = found.used & ~is_raw[:, :, None, None]
        counts, as_they_are = used.sum((2, 3)), lengths * is_raw
        first = torch.where(
            is_raw,
            starts_of(as_they_are) + len(self._tokens),
            starts_of(counts) + len(self._right),
        )
        first = torch.stack([first, starts_of(counts * lengths) + len(self._left)], dim=-1)
        index = {"first": first.int(), "ranks": used.sum(-1).to(torch.uint8)}
        tokens = torch.cat([new.keys, new.values], dim=-1)
        self._tokens.append({"tokens": packed(tokens, _in_spans(is_raw, new))})
        self._append(found._replace(used=used), lengths, new.keys.dtype)
        self._index.append(index)
        self._length += tokens.shape[2]

    def _factorise(self, new: Folded) -> _Components:
        how, lengths = self._how, new.lengths
        steps = torch.arange(how.longest, device=lengths.device)
        where = starts_of(lengths).unsqueeze(-1) + steps
        where = where.clamp_max_(new.keys.shape[2] - 1)
        keys, values = (
            side.gather(
                2, where.flatten(1)[:, None, :, None].expand(*side.shape[:2], -1, side.shape[3])
            )
            .unflatten(2, where.shape[1:])
            .float()
            for side in (new.keys, new.values)
        )
        keys = keys if self._turning is None else self._turning.back(keys)
        both = torch.stack([keys, values], dim=3)
        outside = steps >= lengths.unsqueeze(-1)
        both = both.masked_fill_(outside[:, None, :, None, :, None], 0.0)
        if how.is_joint:
            both = both.movedim(1, -2).flatten(-2).unsqueeze(1)
        left, right = factorise(both, RANK)
        singular = left.norm(dim=-2)
        used = self._used(singular, new)[..., : how.rank]
        root = singular.clamp_min(torch.finfo(singular.dtype).tiny).sqrt().unsqueeze(-2)
        left = (left / root)[..., : how.rank].mT
        right = (right * root.mT)[..., : how.rank, :]
        if how.is_joint:
            right = right.squeeze(1).unflatten(-1, (new.keys.shape[1], -1)).movedim(-2, 1)
        return _Components(left, right, used)

    def _used(self, singular: torch.Tensor, new: Folded) -> torch.Tensor:
        """Which components any head needs, `[B, S, 2, R]`, from `[B, P, S, 2, R]` values."""
        steps = torch.arange(singular.shape[-1], device=singular.device)
        used = (steps < new.lengths.unsqueeze(-1)).unsqueeze(2).expand(-1, -1, 2, -1)
        gates = self._how.gates
        if gates is None:
            return used
        keys, values = singular.unbind(3)
        asked = torch.stack(
            [gates.key_ranks(keys, new.mean_keys), gates.value_ranks(values, new.mean_keys)], dim=3
        )
        return used & ((asked > 0.5).any(1) | (steps == 0))

    def _stays(self, new: Folded, found: _Components) -> torch.Tensor:
        """Which spans factors would not make smaller, `[B, S]`; a span that a row lacks is one."""
        lengths, counts = new.lengths, found.used.sum((2, 3))
        (_, heads, _, width), shared = new.keys.shape, found.left.shape[1]
        size = new.keys.element_size()
        token, number = 2 * heads * width * size, shared * (1 if self._how.is_int8 else size)
        one = heads * (width + _SCALE_BYTES if self._how.is_int8 else width * size)
        stays = counts * (lengths * number + one) >= lengths * token
        # Rows are held side by side, each as long as the longest.
        used = counts * ~stays
        held = _most(lengths * stays) * token + _most(used) * one + _most(used * lengths) * number
        return stays | (held >= new.keys.shape[2] * token)

    def _append(self, found: _Components, lengths: torch.Tensor, dtype: torch.dtype) -> None:
        left, right, used = found
        steps = torch.arange(left.shape[-1], device=left.device)
        inside = steps < lengths[:, :, None, None, None]
        tensors = {}
        if self._how.is_int8:
            scales = scales_of(left, 8, -1), scales_of(right, 8, -1)
            left, right = quantise(left, scales[0], 8), quantise(right, scales[1], 8)
            both = (scales[0] * scales[1]).flatten(2)
            tensors["scales"] = packed(both, used.flatten(1))
        else:
            # No component leaves the range of float16, which has more digits.
            dtype = torch.float16 if dtype == torch.bfloat16 else dtype
            left, right = left.to(dtype), right.to(dtype)
        tensors["right"] = packed(right.flatten(2, 4), used.flatten(1))
        self._right.append(tensors)
        numbers = (used.unsqueeze(-1) & inside).flatten(1)
        self._left.append({"left": packed(left.flatten(2), numbers)})

    # Giving -----------------------------------------------------------------------------------

    def fetch(self, wanted: Wanted) -> torch.Tensor:
        """Keys and values of spans, `[N, L, 2D]`; anything after a span's last token."""
        tokens = self._tokens.whole("tokens")
        if not len(wanted.spans):
            return tokens.new_zeros(0, self.longest, tokens.shape[-1])
        first = self._index["first"][wanted.rows, wanted.spans].long()
        ranks = self.ranks[wanted.rows, wanted.spans].long()
        has_rank = (ranks > 0).any(1)
        if bool(has_rank.all()):
            return self._rebuild(wanted, first, ranks).to(tokens.dtype)
        found = tokens.new_zeros(len(first), self.longest, tokens.shape[-1])
        if len(which := (~has_rank & (wanted.lengths > 0)).nonzero().squeeze(1)):
            found[which] = runs(tokens, wanted.owners[which], first[which, 0], self.longest)
        if len(which := has_rank.nonzero().squeeze(1)):
            some = self._rebuild(_only(wanted, which), first[which], ranks[which])
            found[which] = some.to(found.dtype)
        return found

    def _rebuild(self, wanted: Wanted, first: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        rank, second = ranks.unbind(1)
        keys = self._multiply(wanted, first, rank)
        shift = torch.stack([rank, rank * wanted.lengths], dim=1)
        values = self._multiply(wanted, first + shift, second)
        keys = keys if self._turning is None else self._turning.forth(keys)
        return torch.cat([keys, values], dim=-1)

    def _multiply(self, wanted: Wanted, first: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        """The components of spans, from the first on, added up: `[N, L, D]` in float32."""
        rights, lefts = self._right.whole("right"), self._left.whole("left")
        most, device = int(rank.max()), rank.device
        components, steps = (torch.arange(n, device=device) for n in (most, self.longest))
        right = runs(rights, wanted.owners, first[:, 0], most).float()
        shared = wanted.rows if self._how.is_joint else wanted.owners
        numbers = first[:, 1, None, None] + components[:, None] * wanted.lengths[:, None, None]
        numbers = (numbers + steps).clamp_max_(lefts.shape[2] - 1)
        numbers = numbers + (shared * lefts.shape[2])[:, None, None]
        left = lefts.flatten().index_select(0, numbers.flatten()).view_as(numbers).float()
        is_one = (components < rank[:, None])[:, :, None]
        left = left.masked_fill_(~(is_one & (steps < wanted.lengths[:, None])[:, None]), 0.0)
        if self._how.is_int8:
            left *= runs(self._right.whole("scales"), wanted.owners, first[:, 0], most).unsqueeze(
                -1
            )
        return left.mT @ right

    # What is held -----------------------------------------------------------------------------

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        for part in self._parts:
            part.map(change)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, and how many tokens there are."""
        if len(self._index):
            for part in self._parts:
                yield from part.state()
            yield "length", torch.tensor(self._length)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        for part in self._parts:
            part.load(tensors)
        self._length = int(tensors["length"])


def _most(sizes: torch.Tensor) -> torch.Tensor:
    """The largest sum of a row of `[B, S]`."""
    return sizes.sum(1).max()


def _in_spans(chosen: torch.Tensor, new: Folded) -> torch.Tensor:
    """Which tokens stand in the chosen of the new spans, `[B, N]`, from `[B, S]`."""
    count = new.keys.shape[2]
    places = torch.arange(count, device=chosen.device).expand(len(chosen), -1).contiguous()
    span = torch.searchsorted(new.lengths.cumsum(1), places, right=True)
    return torch.nn.functional.pad(chosen, (0, 1)).gather(1, span)


def _only(wanted: Wanted, which: torch.Tensor) -> Wanted:
    return Wanted(**{each.name: getattr(wanted, each.name)[which] for each in fields(wanted)})
