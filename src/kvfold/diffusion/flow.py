"""Chosen tokens through all layers, against stored keys and values of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.decoder import Decoder
from kvfold.diffusion.model import DiffusionModel, visibility
from kvfold.diffusion.work import Work

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Which tokens of which rows flow."""

    start: int = 0
    """Without `columns`: all columns from this one on."""
    columns: torch.Tensor | None = None
    """Of each row's tokens, `[b, F]`; rows with fewer are filled up with N, which is no column."""
    rows: torch.Tensor | None = None
    """Indices of the rows, `[b]`; all without it."""

    def of_rows(self, field: torch.Tensor) -> torch.Tensor:
        """The flow's rows of a field `[B, ...]`."""
        return field if self.rows is None else field[self.rows]

    def take(self, field: torch.Tensor) -> torch.Tensor:
        """The flow's tokens of a field `[B, N]`: `[b, F]`, 0 for no column."""
        field = self.of_rows(field)
        if self.columns is None:
            return field[:, self.start :]
        return torch.nn.functional.pad(field, (0, 1)).gather(1, self.columns)


def flow_of(fresh: torch.Tensor, rows: torch.Tensor | None = None) -> Flow:
    """The flow of the tokens marked in `[b, N]`, whose rows are `rows`."""
    total = fresh.shape[1]
    places = torch.arange(total, device=fresh.device).where(fresh, total)
    most = int(fresh.sum(dim=1).max())
    return Flow(columns=places.sort(dim=1).values[:, :most], rows=rows)


class KVStore:
    """Keys and values of every token, layer by layer: `[B, N + 1, G, D]` each.

    The last column is no token's: what a row with fewer tokens in a flow has to spare is written
    there, and never read.
    """

    def __init__(self, decoder: Decoder, rows: int, width: int) -> None:
        """Make room.

        Args:
            decoder: Whose keys and values.
            rows: B.
            width: N.
        """
        shape = (rows, width + 1, decoder.shape.kv_heads, decoder.shape.head_dim)
        weight = decoder.embedding.weight
        self.keys = [weight.new_zeros(shape) for _ in decoder.layers]
        self.values = [weight.new_zeros(shape) for _ in decoder.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, flow: Flow, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new keys and values of a flow, and give all of its rows.

        Args:
            layer: Number of the layer.
            flow: Which tokens they are of.
            keys: `[b, F, G, D]`.
            values: `[b, F, G, D]`.

        Returns:
            Keys and values `[b, N, G, D]`.
        """
        self.put_keys(layer, flow, keys)
        self.put_values(layer, flow, values)
        return self.read(layer, flow)

    def put_keys(self, layer: int, flow: Flow, keys: torch.Tensor) -> None:
        """Store new keys of a flow, `[b, F, G, D]`."""
        _put(self.keys[layer], flow, keys)

    def put_values(self, layer: int, flow: Flow, values: torch.Tensor) -> None:
        """Store new values of a flow, `[b, F, G, D]`."""
        _put(self.values[layer], flow, values)

    def read(self, layer: int, flow: Flow) -> Pair:
        """Keys and values `[b, N, G, D]` of a flow's rows."""
        keys, values = flow.of_rows(self.keys[layer]), flow.of_rows(self.values[layer])
        return keys[:, :-1], values[:, :-1]

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self.keys = [tensor[rows] for tensor in self.keys]
        self.values = [tensor[rows] for tensor in self.values]


def _put(store: torch.Tensor, flow: Flow, new: torch.Tensor) -> None:
    if flow.columns is None and flow.rows is None:
        store[:, flow.start : -1] = new
    elif flow.columns is None:
        store[flow.rows, flow.start : -1] = new
    else:
        store[rows_of(flow, store)[:, None], flow.columns] = new


def rows_of(flow: Flow, field: torch.Tensor) -> torch.Tensor:
    """Indices of a flow's rows, `[b]`, in a field `[B, ...]`."""
    return torch.arange(len(field), device=field.device) if flow.rows is None else flow.rows


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The last layer's outputs."""

    hidden: torch.Tensor
    """`[B, F, M]`, of all columns from `start` on."""
    start: int = 0
    """The first column."""

    def at(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Outputs `[W, M]` at places given by row and column, `[W]` each."""
        return self.hidden[rows, columns - self.start]


def run_flow(
    model: DiffusionModel, canvas: Canvas, flow: Flow, store: KVStore | None, work: Work
) -> torch.Tensor:
    """A flow through all layers.

    Args:
        model: Whose layers.
        canvas: Where the tokens stand.
        flow: Which ones flow.
        store: Where their keys and values go, and the others' are; None when all tokens flow.
        work: Counts them.

    Returns:
        The last layer's outputs `[b, F, M]`.
    """
    decoder, positions = model.decoder, flow.take(canvas.positions)
    hidden, angles = decoder.embedding(flow.take(canvas.ids)), decoder.angles(positions)
    visible = visibility(
        model.traits, flow.of_rows(canvas.valid), flow.of_rows(canvas.positions), positions
    )
    for index, layer in enumerate(decoder.blocks):
        normed = layer.attention_norm(hidden)
        pair = layer.keys(normed, angles), layer.values(normed)
        keys, values = pair if store is None else store.write(index, flow, *pair)
        hidden = layer.attended(hidden, layer.queries(normed, angles), keys, values, visible)
        work.add(index, positions.numel(), positions.numel())
    return hidden
