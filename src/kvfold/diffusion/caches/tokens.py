"""Caches that recompute the same tokens in every layer and freeze the others' keys and values.

Such a cache says which tokens are fresh. To these are always added the places whose outputs predict
the wanted tokens: under a shifted prediction that is the one before the first, which lies outside
of what the authors' code recomputes. Rows that are due are recomputed whole: all rows in the first
step, in every `refresh`-th, and, for caches of blocks, a row that has entered a new block. Rows
that are due and rows that are not run one after the other, so that none waits for its neighbours.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.diffusion.caches.cache import CacheState, DiffusionCache
from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.flow import Flow, KVStore, Outputs, flow_of, rows_of, run_flow
from kvfold.diffusion.model import DiffusionModel


@dataclass(frozen=True)
class TokenCache(DiffusionCache):
    """Freezes all tokens but the fresh ones."""

    by_block: ClassVar[bool] = True
    """Whether a row is recomputed whole when it enters a block."""

    refresh: int | None = None
    """Steps from one recomputation of everything to the next; no limit without it."""

    def __post_init__(self) -> None:
        """Check the options."""
        self.require_whole("refresh", optional=True)

    @abstractmethod
    def fresh(self, canvas: Canvas, shift: int) -> torch.Tensor:
        """The tokens to recompute in a row that is not due, `[B, N]`.

        Args:
            canvas: With the block and the wanted places set.
            shift: 1 where a token is predicted one place before.
        """

    def start(self, model: DiffusionModel, canvas: Canvas) -> CacheState:
        """Room for all keys and values."""
        return TokenState(self, model, canvas)


class TokenState(CacheState):
    """Keys and values of all tokens, and the block in which each row was last recomputed whole."""

    def __init__(self, cache: TokenCache, model: DiffusionModel, canvas: Canvas) -> None:
        """Make room.

        Args:
            cache: The description.
            model: Whose layers run.
            canvas: As it is before the first step.
        """
        super().__init__(model)
        self._cache = cache
        self._store = KVStore(model.decoder, len(canvas.ids), canvas.width)
        self._block = torch.full_like(canvas.start, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return self._store.nbytes

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self._store.keep(rows)
        self._block = self._block[rows]

    def step(self, canvas: Canvas) -> Outputs:
        """Run the rows that are due whole, and of the others the fresh tokens."""
        due = self._due(canvas)
        if bool(due.all()):
            return Outputs(run_flow(self.model, canvas, Flow(), self._store, self.work))
        shift = self.model.traits.shift
        fresh = self._cache.fresh(canvas, shift) & canvas.valid | canvas.sources(shift)
        if not bool(due.any()):
            return self._run(canvas, [flow_of(fresh)])
        waiting = (~due).nonzero()[:, 0]
        whole = Flow(rows=due.nonzero()[:, 0])
        return self._run(canvas, [whole, flow_of(fresh[waiting], waiting)])

    def _due(self, canvas: Canvas) -> torch.Tensor:
        refresh = self._cache.refresh
        everything = canvas.step == 0 or (refresh is not None and canvas.step % refresh == 0)
        due = torch.full_like(canvas.start, everything, dtype=torch.bool)
        if self._cache.by_block:
            due = due | (canvas.start != self._block)
        self._block = canvas.start
        return due

    def _run(self, canvas: Canvas, flows: list[Flow]) -> Outputs:
        rows, width = canvas.ids.shape
        hidden = self.model.decoder.embedding.weight.new_zeros(
            rows, width + 1, self.model.shape.hidden
        )
        for flow in flows:
            found = run_flow(self.model, canvas, flow, self._store, self.work)
            columns = flow.columns
            if columns is None:
                columns = torch.arange(width, device=hidden.device)[None]
            hidden[rows_of(flow, hidden)[:, None], columns] = found
        return Outputs(hidden)
