"""Where a layer's tokens stand: keys, values, positions and whatever a policy notes beside them.

Attention does not care about the order of its keys, since they carry their own rotation. So a slot
is only a place: a new token can take the place of an evicted one, and nothing is moved or copied
while tokens are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvfold.ops.selection import EMPTY

POSITION_DTYPE = torch.int32

_FIELDS, _COMMON = "fields", "common"


def headroom(slots: int) -> int:
    """Slots to allocate beyond those in use, so that growing copies little: 1/32, at least 16."""
    return max(16, slots // 32)


class Slots:
    """Growing storage of one layer, `[B, G, T, D]` keys and values.

    `positions` is `[B, P, T]`: P = G when every kv head keeps its own tokens, 1 when all keep the
    same. Fields are one number a slot and kv head, `[B, G, T]` in float32; common ones one number a
    slot, `[B, 1, T]`. All of a kind stand in one tensor, `[B, G, F, T]` and `[B, 1, F, T]`,
    so that a token is forgotten, and a block of fields updated, in one operation.
    """

    def __init__(
        self, *, shared: bool, fields: tuple[str, ...] = (), common: tuple[str, ...] = ()
    ) -> None:
        """Start empty; the first keys give the shape.

        Args:
            shared: Whether all kv heads keep the same tokens.
            fields: Names of what a policy notes of each slot and kv head.
            common: Names of what it notes of each slot for all heads; only where they are shared.
        """
        self.shared = shared
        self.common = common
        self.fields = (*fields, *common)
        self.length = 0
        self.in_order = True
        """Whether the tokens stand in the order of their positions, as far as is known."""
        self._tensors: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        """Slots in use, the empty ones among them included."""
        return self.length

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever stored."""
        return not self._tensors

    @property
    def keys(self) -> torch.Tensor:
        """`[B, G, T, D]`, a view."""
        return self._tensors["keys"].narrow(2, 0, self.length)

    @property
    def values(self) -> torch.Tensor:
        """`[B, G, T, D]`, a view."""
        return self._tensors["values"].narrow(2, 0, self.length)

    @property
    def positions(self) -> torch.Tensor:
        """`[B, P, T]`, a view; `EMPTY` where a slot holds no token."""
        return self._tensors["positions"].narrow(2, 0, self.length)

    def field(self, name: str) -> torch.Tensor:
        """`[B, G, T]`, or `[B, 1, T]` of a common field; a view that may be written in place."""
        return self._whole_field(name).narrow(2, 0, self.length)

    def block(self, first: str, count: int) -> torch.Tensor:
        """Fields that were named one after the other, `[B, G or 1, count, T]`; a view as well."""
        kind, index = self._place_of(first)
        return self._tensors[kind].narrow(3, 0, self.length).narrow(2, index, count)

    def _whole_field(self, name: str) -> torch.Tensor:
        kind, index = self._place_of(name)
        return self._tensors[kind][:, :, index]

    def _place_of(self, name: str) -> tuple[str, int]:
        if name in self.common:
            return _COMMON, self.common.index(name)
        return _FIELDS, self.fields.index(name)

    @property
    def capacity(self) -> int:
        """Slots that are allocated."""
        return self._tensors["keys"].shape[2] if self._tensors else 0

    @property
    def counts(self) -> torch.Tensor:
        """Tokens that each row holds in a head, `[B]`."""
        return (self.positions[:, 0] >= 0).sum(-1)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token of every row."""
        return sum(t[:, :, 0].numel() * t.element_size() for t in (self.keys, self.values))

    @property
    def bytes_per_token(self) -> int:
        """What one more token of every row takes, its position and fields included."""
        return sum(
            tensor.select(_time(name), 0).numel() * tensor.element_size()
            for name, tensor in self._tensors.items()
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all tensors."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def emptied(self) -> Slots:
        """New storage of the same kind that holds nothing."""
        own = tuple(name for name in self.fields if name not in self.common)
        return Slots(shared=self.shared, fields=own, common=self.common)

    def thaw(self) -> None:
        """Make what was stored under `torch.inference_mode` writable outside it."""
        frozen = not self.is_empty and self._tensors["positions"].is_inference()
        if frozen and not torch.is_inference_mode_enabled():
            self.map(torch.clone)

    def append(self, keys: torch.Tensor, values: torch.Tensor, *, headroom: int) -> int:
        """Put new tokens after the last slot; their positions are still `EMPTY`.

        Args:
            keys: `[B, G, N, D]`.
            values: `[B, G, N, D]`.
            headroom: Slots to allocate beyond what is needed, when more are needed at all.

        Returns:
            Index of the first new slot.
        """
        start, needed = self.length, self.length + keys.shape[2]
        if self.is_empty:
            self._start(keys, values, headroom)
            self.length = needed
            return start
        if needed > self.capacity:
            self.reserve(needed + headroom)
        self.length = needed
        self.put(slice(start, needed), keys, values)
        return start

    def _start(self, keys: torch.Tensor, values: torch.Tensor, headroom: int) -> None:
        batch, groups, count, _ = keys.shape
        capacity = count + headroom
        places = 1 if self.shared else groups
        positions = torch.full((batch, places, capacity), EMPTY, dtype=POSITION_DTYPE)
        self._tensors = {
            "keys": _adopted(keys) if headroom == 0 else _resized(keys, capacity),
            "values": _adopted(values) if headroom == 0 else _resized(values, capacity),
            "positions": positions.to(keys.device),
        }
        for name, heads, count in (
            (_FIELDS, groups, len(self.fields) - len(self.common)),
            (_COMMON, 1, len(self.common)),
        ):
            if count:
                shape = (batch, heads, count, capacity)
                self._tensors[name] = keys.new_zeros(shape, dtype=torch.float32)

    def _grow(self, capacity: int) -> None:
        for name, tensor in self._tensors.items():
            fill = EMPTY if name == "positions" else 0
            self._tensors[name] = _resized(tensor, capacity, self.length, fill, _time(name))

    def reserve(self, capacity: int) -> None:
        """Allocate at least `capacity` slots."""
        if capacity > self.capacity:
            self._grow(capacity)

    def extend(self, count: int) -> None:
        """Bring `count` empty slots into use."""
        self.reserve(self.length + count)
        self.length += count
        self.clear(slice(self.length - count, self.length))

    def clear(self, where: slice) -> None:
        """Make slots empty."""
        self._tensors["positions"][:, :, where] = EMPTY
        for notes in self._notes():
            notes[..., where] = 0

    def _notes(self) -> list[torch.Tensor]:
        return [self._tensors[name] for name in (_FIELDS, _COMMON) if name in self._tensors]

    def put(self, where: slice | torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values, and forget what was noted of the slots.

        Args:
            where: A range of slots, or one slot a row and place, `[B, P, 1]`.
            keys: `[B, G, N, D]`, N = 1 for single slots.
            values: `[B, G, N, D]`.
        """
        if isinstance(where, slice):
            self._tensors["keys"][:, :, where] = keys
            self._tensors["values"][:, :, where] = values
            self.clear(where)
            return
        self.in_order = False
        heads = where.expand(-1, keys.shape[1], -1)
        for name, new in (("keys", keys), ("values", values)):
            self._tensors[name].scatter_(2, heads[..., None].expand_as(new), new)
        for notes in self._notes():
            places = where if notes.shape[1] == where.shape[1] else heads
            notes.scatter_(3, places[:, :, None].expand(-1, -1, notes.shape[2], -1), 0.0)

    def place(self, where: slice | torch.Tensor, positions: torch.Tensor) -> None:
        """Say which tokens stand in slots.

        Args:
            where: A range of slots, or one slot a row and place, `[B, P, 1]`.
            positions: Logical positions, `[B, N]` or `[1, N]`; `EMPTY` for padding.
        """
        positions = positions.to(POSITION_DTYPE)
        if isinstance(where, slice):
            self._tensors["positions"][:, :, where] = positions[:, None]
        else:
            new = positions[:, None].expand_as(where)
            self._tensors["positions"].scatter_(2, where, new)

    def note(self, where: slice | torch.Tensor, name: str, numbers: torch.Tensor) -> None:
        """Write a field of slots.

        Args:
            where: A range of slots, or one slot a row and place, `[B, P, 1]`.
            name: The field.
            numbers: `[B, G, N]`, or `[B, 1, N]` of a common field.
        """
        if isinstance(where, slice):
            self._whole_field(name)[:, :, where] = numbers
        else:
            self._whole_field(name).scatter_(2, where.expand_as(numbers), numbers.float())

    def keep(self, indices: torch.Tensor, held: torch.Tensor) -> None:
        """Keep some slots and free the memory of the others.

        Args:
            indices: Slots in the order of their positions, `[B, P, K]`.
            held: False where a row keeps fewer, `[B, P, K]`.
        """
        for name, tensor in self._tensors.items():
            where = indices if name == "positions" else indices.expand(-1, tensor.shape[1], -1)
            if tensor.ndim == 4:
                other = 5 - _time(name)
                sizes = [-1] * 4
                sizes[other] = tensor.shape[other]
                where = where.unsqueeze(other).expand(sizes)
            self._tensors[name] = tensor.gather(_time(name), where)
        self._tensors["positions"].masked_fill_(~held, EMPTY)
        self.length, self.in_order = indices.shape[2], True

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on."""
        self.clear(slice(length, self.length))
        self.length = length

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension, or of the device, to every tensor."""
        self._tensors = {name: change(tensor) for name, tensor in self._tensors.items()}

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, without the unused slots."""
        for name, tensor in self._tensors.items():
            yield name, tensor.narrow(_time(name), 0, self.length)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        self._tensors = dict(tensors)
        self.length, self.in_order = tensors["keys"].shape[2], False


def _time(name: str) -> int:
    """The dimension of a tensor that counts slots."""
    return 3 if name in (_FIELDS, _COMMON) else 2


def _resized(
    tensor: torch.Tensor, capacity: int, used: int | None = None, fill: float = 0, time: int = 2
) -> torch.Tensor:
    """A copy of the used slots in a buffer of `capacity`, the rest filled."""
    used = tensor.shape[time] if used is None else used
    buffer = tensor.new_empty((*tensor.shape[:time], capacity, *tensor.shape[time + 1 :]))
    buffer.narrow(time, 0, used).copy_(tensor.narrow(time, 0, used))
    buffer.narrow(time, used, capacity - used).fill_(fill)
    return buffer


def _adopted(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, so that a long prompt is not copied, unless it is a part of a larger one.

    Such a part (of a fused projection, say) would keep all of the larger one in memory.
    """
    whole = tensor.untyped_storage().nbytes() <= tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
