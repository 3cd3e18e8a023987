"""Attention of one query at two resolutions by the kernel `native/zoom.c`, where that can be.

It stands in for `zoom_attention` on a CPU in float32, with routing by sketches and spans that are
in memory as they are. There is nothing to bring from one memory to another, so spans are read where
they stand.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfold.attention import Scoring
from kvfold.errors import ArtifactError, KVFoldError
from kvfold.native.build import library
from kvfold.zoom.sketch_router import SketchRouter
from kvfold.zoom.spans import Spans
from kvfold.zoom.tiers import RawTier

if TYPE_CHECKING:
    from kvfold.zoom.attention import Exact

_POINTERS = (
    "query", "look", "codes", "starts", "ends", "keys", "values", "visible", "means", "tokens",
    "output",
)  # fmt: skip
_HELD = tuple(name for name in _POINTERS if name not in ("query", "output"))
_NUMBERS = (
    "batch", "groups", "heads", "width", "bytes", "tokens_held", "spans", "near", "expanded",
    "code_room", "line_room", "span_room", "near_room", "visible_room", "mean_room", "token_room",
    "precision", "threads",
)  # fmt: skip
_NO_MEMORY, _DAMAGED = -1, -2
_PRECISIONS = {torch.float32: 0, torch.float16: 1}


class _Zoom(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _POINTERS) + tuple(
        (name, ctypes.c_int64) for name in _NUMBERS
    )


def attend_natively(
    query: torch.Tensor, exact: Exact, spans: Spans, expanded: int, scoring: Scoring
) -> torch.Tensor | None:
    """Attention over both resolutions; see `zoom_attention`.

    Args:
        query: `[B, H, Q, D]`, rotated, all newer than every span.
        exact: The tokens of full resolution.
        spans: The others; not empty.
        expanded: E, the most spans that a kv head expands.
        scoring: How scores are made.

    Returns:
        `[B, H, Q, D]`; None where the kernel is not for this, or there is none.

    Raises:
        KVFoldError: Out of memory.
    """
    if not _is_plain(query, scoring) or spans.tally is not None:
        return None
    scaled = (query * scoring.scaling).contiguous()
    output, visible = torch.empty_like(scaled), _bytes(exact.visible, len(query))
    call = _described(scaled, exact, visible, spans, expanded, output)
    if call is None or (kernel := library("zoom")) is None:
        return None
    read = _entry(kernel)(ctypes.byref(call))
    if read == _NO_MEMORY:
        raise KVFoldError("no memory is left for attention: make the batch or the context smaller")
    if read == _DAMAGED:
        raise ArtifactError("the cache's spans are not where its tokens are: make the cache anew")
    spans.note_moved(read)
    return output


@functools.cache
def _entry(kernel: ctypes.CDLL) -> Callable[..., int]:
    """The kernel's only function, with its types."""
    kernel.zoom_attend.argtypes = (ctypes.POINTER(_Zoom),)
    kernel.zoom_attend.restype = ctypes.c_int64
    return kernel.zoom_attend


def _described(
    query: torch.Tensor,
    exact: Exact,
    visible: torch.Tensor | None,
    spans: Spans,
    expanded: int,
    output: torch.Tensor,
) -> _Zoom | None:
    """Where everything stands, for as long as all of it does; None where it stands otherwise."""
    slow, router = spans.slow, spans.router
    if not isinstance(slow, RawTier) or not isinstance(router, SketchRouter):
        return None
    if router.sketch is None:
        return None
    held = _Held(
        exact.keys, exact.values, visible, router.sketch.look, router.codes, spans.means,
        slow.tokens, spans.starts, spans.ends,
    )  # fmt: skip
    if not held.are_numbers_that_fit(query) or not held.have_shapes_that_fit(query):
        return None
    pointers = {name: getattr(held, name) for name in _HELD} | {"query": query, "output": output}
    addresses = {
        name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()
    }
    return _Zoom(
        **addresses,
        batch=len(query),
        groups=held.keys.shape[1],
        heads=query.shape[1] // held.keys.shape[1],
        width=query.shape[3],
        bytes=held.codes.shape[2],
        tokens_held=held.codes.shape[3],
        spans=len(spans),
        near=held.keys.shape[2],
        expanded=expanded,
        code_room=held.codes.stride(1),
        line_room=held.codes.stride(2),
        span_room=held.starts.stride(0),
        near_room=held.keys.stride(1),
        visible_room=0 if visible is None else visible.stride(0),
        mean_room=held.means.stride(1),
        token_room=held.tokens.stride(1),
        precision=_PRECISIONS[held.means.dtype],
        threads=torch.get_num_threads(),
    )


def _is_plain(query: torch.Tensor, scoring: Scoring) -> bool:
    """Whether one query of each row is scored as the kernel does."""
    return query.shape[2] == 1 and query.dtype == torch.float32 and scoring.is_plain


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Tensors that the kernel reads where they stand."""

    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None
    look: torch.Tensor
    codes: torch.Tensor
    means: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    def are_numbers_that_fit(self, query: torch.Tensor) -> bool:
        """Whether all are of the types that the kernel takes them for, and nothing is learnt."""
        spans = (self.look, self.means, self.tokens)
        exact, ranges = (query, self.keys, self.values), (self.starts, self.ends)
        is_learnt = any(each.requires_grad for each in (*exact, *spans))
        return (
            all(each.dtype == torch.float32 for each in exact)
            and all(each.dtype == self.means.dtype for each in spans)
            and self.means.dtype in _PRECISIONS
            and self.codes.dtype == torch.uint8
            and all(each.dtype == torch.int64 for each in ranges)
            and all(each.device.type == "cpu" for each in (*exact, *spans, self.codes, *ranges))
            and not (torch.is_grad_enabled() and is_learnt)
        )

    def have_shapes_that_fit(self, query: torch.Tensor) -> bool:
        """Whether all are as large as they say to each other, and laid out for the kernel."""
        batch, groups, near, width = self.keys.shape
        pairs, total = self.codes.shape[2:]
        count = self.means.shape[2]
        expected = (
            (self.values, (batch, groups, near, width)),
            (self.look, (batch, groups, width, 2 * pairs + 1)),
            (self.codes, (batch, groups, pairs, total)),
            (self.means, (batch, groups, count, width)),
            (self.tokens, (batch, groups, total, 2 * width)),
            (self.starts, (batch, count)),
            (self.ends, (batch, count)),
        )
        rows = (self.keys, self.look, self.means, self.tokens)
        codes, ranges = self.codes, (self.starts, self.ends)
        return (
            query.shape == (batch, query.shape[1] // groups * groups, 1, width)
            and all(tensor.shape == shape for tensor, shape in expected)
            and (self.visible is None or self.visible.shape == (batch, near))
            and self.values.stride() == self.keys.stride()
            and all(map(_is_laid_out, rows))
            and codes.stride(3) == 1
            and codes.stride(0) == groups * codes.stride(1)
            and all(each.stride(1) == 1 for each in ranges)
            and self.starts.stride() == self.ends.stride()
        )


def _is_laid_out(held: torch.Tensor) -> bool:
    """Whether `[B, G, N, D]` stands owner by owner, and each of those in one piece."""
    is_piece = held.stride(3) == 1 and held.stride(2) == held.shape[3]
    return is_piece and held.stride(0) == held.shape[1] * held.stride(1)


def _bytes(visible: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """What is visible, `[B, N]` and a byte each."""
    if visible is None:
        return None
    return visible[:, 0, 0].expand(rows, -1).contiguous().view(torch.uint8)
