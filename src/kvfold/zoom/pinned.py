"""The slow tier of a layer on a device with a memory of its own: its tokens stand on the host.

SeKV (arXiv 2606.31145) keeps spans in the host's memory; here that is page-locked, so that the
tokens of those that are asked for come by a stream beside the ones that compute, see
`kvfold.zoom.lane`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from kvfold.zoom.lane import Coming, Lane, Lanes
from kvfold.zoom.tiers import Folded, RawTier, Wanted

_OWN = ("keys", "values", "positions")
AHEAD = 0.0
"""Spans that come before they are asked for, as a share of those that are expanded: none.

With a quarter, 28 % of the spans that a token newly asks for were ready at a budget of 10 %, and
42 % at 25 % (the default model, 30 tokens after 2,000 of Python's reference; all that the layer
before asked for would have been 29 and 38 %). That takes a fifth of the places of expanded spans,
and brings about as many spans again as are asked for.
"""


class PinnedTier(RawTier):
    """Keys and values as they are, on the host; `fetch` gives them where they came from."""

    def __init__(self, longest: int, lanes: Lanes, layer: int = 0, ahead: float = AHEAD) -> None:
        """Start empty.

        Args:
            longest: L, tokens of the longest span.
            lanes: To the devices, shared by all layers.
            layer: Counted from 0; the first one counts the bytes of the lanes.
            ahead: Spans that come before they are asked for, as a share of those that are expanded.
        """
        super().__init__(longest)
        self.ahead = ahead
        self._lanes, self._layer = lanes, layer
        self._device = torch.device("cpu")

    @property
    def _lane(self) -> Lane:
        return self._lanes.to(self._device)

    @property
    def nbytes(self) -> int:
        """Of all tensors; of the first layer, of what copies to devices are made from as well."""
        return super().nbytes + (self._lanes.nbytes if self._layer == 0 else 0)

    def add(self, new: Folded) -> None:
        """Append new spans."""
        self._device, self._key_width = new.keys.device, new.keys.shape[-1]
        tokens = self._lane.to_host(torch.cat([new.keys, new.values], dim=-1))
        self._held.append({"tokens": tokens, "positions": new.positions[:, None].int().cpu()})
        self._lock()

    def start(self, wanted: Wanted) -> Coming:
        """Begin to bring keys and values of spans.

        Args:
            wanted: One at least.

        Returns:
            `[N * L, 2D]`, on their way; anything after a span's last token.
        """
        owners, starts = torch.stack([wanted.owners, wanted.starts]).cpu()
        tokens = self._held.whole("tokens")
        return self._lane.start(tokens.view(-1, self.width), self._places(owners, starts))

    def fetch(self, wanted: Wanted) -> torch.Tensor:
        """Keys and values of spans, `[N, L, 2D]`; anything after a span's last token."""
        return self.start(wanted).wait().view(-1, self.longest, self.width)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        super().map(change)
        self._lock()

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        self._device = tensors["keys"].device
        own = {name: tensor.cpu() for name, tensor in tensors.items() if name in _OWN}
        super().load(own)
        self._lock()

    def _lock(self) -> None:
        self._held.map(self._lane.locked)

    def __deepcopy__(self, memo: dict[int, object]) -> PinnedTier:
        """A tier with memory of its own and the same lanes."""
        other = PinnedTier(self.longest, self._lanes, self._layer, self.ahead)
        other._held = copy.deepcopy(self._held, memo)
        other._key_width, other._device = self._key_width, self._device
        other._lock()
        return other
