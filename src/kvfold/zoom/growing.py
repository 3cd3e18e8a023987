"""Tensors that grow together along one dimension each, not copied every time they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvfold.cache.slots import headroom


class Growing:
    """Tensors of one length, each with room for more than it holds."""

    def __init__(self, dims: dict[str, int], room: Callable[[int], int] = headroom) -> None:
        """Start without tensors; the first appended give their shapes.

        Args:
            dims: The dimension along which each grows, by name.
            room: From a length to the entries to allocate beyond it, once more are needed at all.
        """
        self._dims, self._room = dims, room
        self._tensors: dict[str, torch.Tensor] = {}
        self._length = 0

    def __len__(self) -> int:
        """How long all are."""
        return self._length

    def __getitem__(self, name: str) -> torch.Tensor:
        """What a tensor holds, a view."""
        return self._tensors[name].narrow(self._dims[name], 0, self._length)

    def whole(self, name: str) -> torch.Tensor:
        """A tensor with its room, of which only what `[name]` holds was written."""
        return self._tensors[name]

    @property
    def nbytes(self) -> int:
        """Of all tensors, their room included."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def append(self, tensors: dict[str, torch.Tensor]) -> None:
        """Grow all by as many entries.

        Args:
            tensors: What is new of each, by name.
        """
        name, first = next(iter(tensors.items()))
        start, count = self._length, first.shape[self._dims[name]]
        if not self._tensors:
            self._tensors = {name: new.contiguous() for name, new in tensors.items()}
            self._length = count
            return
        self._thaw()
        if start + count > self._tensors[name].shape[self._dims[name]]:
            self._reserve(start + count + self._room(start + count))
        self._length = start + count
        for name, new in tensors.items():
            self._tensors[name].narrow(self._dims[name], start, count).copy_(new)

    def _reserve(self, capacity: int) -> None:
        for name, tensor in self._tensors.items():
            shape = list(tensor.shape)
            shape[self._dims[name]] = capacity
            larger = tensor.new_zeros(shape)
            larger.narrow(self._dims[name], 0, self._length).copy_(self[name])
            self._tensors[name] = larger

    def _thaw(self) -> None:
        """Make what was stored under `torch.inference_mode` writable outside it."""
        frozen = any(tensor.is_inference() for tensor in self._tensors.values())
        if frozen and not torch.is_inference_mode_enabled():
            self.map(torch.clone)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        self._tensors = {name: change(tensor) for name, tensor in self._tensors.items()}

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, without its room."""
        for name in self._tensors:
            yield name, self[name]

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        self._tensors = {name: tensors[name].contiguous() for name in self._dims}
        name = next(iter(self._dims))
        self._length = self._tensors[name].shape[self._dims[name]]
