"""What the frozen model makes of a text with a full cache: the targets that gates learn from.

A text is read once and without a gradient. Attention rows are made for sampled queries alone, one
layer at a time, so that nothing of the square of the text's length is held. The spans of the text
and their factors are made here too, for they have no gradient either.

Shapes: one text, B = 1; T its tokens, S its spans of at most N tokens, R = min(32, N, D).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvfold.attention import LazyMask, Scoring, require_attached
from kvfold.attention.grouped import attention_probabilities
from kvfold.cache import CACHE_KEYWORD
from kvfold.cache.replay import RecordingLayer
from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.models import angles, base_model, head_shape, probe_rope, text_config
from kvfold.ops.lowrank import factorise
from kvfold.ops.rotary import rotate, unrotate
from kvfold.zoom.gates import RANK, GateShape
from kvfold.zoom.surprisal import Readout, Surprisal, find_readout

_MOST_NATS = 1e6
"""More surprisal than any finite logits give."""
_ROWS = 128
"""Queries whose attention to a text is in memory at once."""
_EVERY = 3
"""One zooming layer of so many tells how far back queries look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dividing:
    """How a text is divided for training."""

    sinks: int = 4
    """First tokens that stay exact."""
    window: int = 32
    """Tokens before a query that stay exact: it sees no span that ends in them."""
    deviations: float = 1.0
    """Standard deviations above the mean surprisal so far from which a token is an anchor."""
    most_anchors: float = 0.01
    """Share of the tokens so far, the most surprising, among which an anchor is."""
    shortest: int = 8
    """Tokens of the shortest span; shorter runs stay exact."""
    longest: int = 16
    """Tokens of the longest span; longer runs are cut into such."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The spans of a text, the same in all layers."""

    places: torch.Tensor
    """Position of each token of each span, `[S, N]`; any where a span is shorter."""
    is_token: torch.Tensor
    """False where a span is shorter, `[S, N]`."""
    weights: torch.Tensor
    """Each token's share of its span's surprisal, `[S, N]`; 0 where a span is shorter."""
    span_of: torch.Tensor
    """Span of each token of the text, `[T]`; -1 for what always stays exact."""

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each span, `[S]`."""
        return self.is_token.sum(1)

    @property
    def ends(self) -> torch.Tensor:
        """Position of the last token of each span, `[S]`."""
        return self.places[:, 0] + self.lengths - 1

    def seen(self, positions: torch.Tensor, window: int) -> torch.Tensor:
        """Which queries see which spans, `[Q, S]`: those that end before the query's window."""
        return self.ends < positions[:, None] - window


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Truncated singular value decompositions, one a span and kv head."""

    left: torch.Tensor
    """Left singular vectors times their values, `[1, G, S, N, R]`."""
    right: torch.Tensor
    """`[1, G, S, R, D]`."""

    @property
    def singular(self) -> torch.Tensor:
        """Singular values, the greatest first, `[1, G, S, R]`."""
        return self.left.float().norm(dim=-2)

    def half(self) -> Factors:
        """The same in half precision."""
        return Factors(self.left.half(), self.right.half())

    def rebuild(self, ranks: torch.Tensor) -> torch.Tensor:
        """The tokens of all spans, in order, `[1, G, S * N, D]`.

        Args:
            ranks: How much of each singular value is used, `[1, G, S, R]`.
        """
        return ((self.left.float() * ranks.unsqueeze(-2)) @ self.right.float()).flatten(2, 3)


@dataclass(frozen=True, slots=True, eq=False)
class ReadSpans:
    """The spans of a text in one layer."""

    number: int
    """Of the layer, among those that zoom."""
    means: torch.Tensor
    """Mean rotated keys, `[1, G, S, D]`."""
    value_means: torch.Tensor
    """`[1, G, S, D]`."""
    keys: Factors
    """Of the keys before RoPE."""
    values: Factors
    """Of the values."""
    turn: tuple[torch.Tensor, torch.Tensor, bool] | None
    """Cosines and sines of the spans' tokens `[1, 1, S * N, D']`, and whether RoPE is interleaved;
    None where keys are not rotated."""

    def rebuild_keys(self, ranks: torch.Tensor) -> torch.Tensor:
        """Rotated keys of the tokens of all spans, `[1, G, S * N, D]`; see `Factors.rebuild`."""
        keys = self.keys.rebuild(ranks)
        if self.turn is None:
            return keys
        cosines, sines, interleaved = self.turn
        return rotate(keys, cosines, sines, interleaved=interleaved)


@dataclass(slots=True, eq=False)
class ReadLayer:
    """What one layer holds of a text."""

    keys: torch.Tensor
    """Rotated, `[1, G, T, D]`."""
    values: torch.Tensor
    """`[1, G, T, D]`."""
    query: torch.Tensor | None
    """Rotated and not scaled, `[1, H, T, D]`; None when nothing more is asked of it."""
    mask: LazyMask
    """The model's own rule of who sees whom."""
    scoring: Scoring
    """How the model makes scores."""
    spans: ReadSpans | None
    """None for a layer that does not zoom."""

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """What the queries at some positions `[Q]` attend to, `[1, G, H/G, Q, T]`."""
        assert self.query is not None, "it is asked before it is forgotten"
        visible = self.mask.visible(_all(self.keys)[None, None], positions[None])
        return attention_probabilities(
            self.query[:, :, positions], self.keys, self.scoring, visible=visible
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """A text that the model has read."""

    ids: torch.Tensor
    """`[T]`."""
    hidden: torch.Tensor
    """Last hidden states, after the final norm, `[T, M]`."""
    layers: list[ReadLayer]
    """All of the model's."""
    division: Division
    """Its spans."""

    def compact(self) -> None:
        """Forget the queries and halve the factors, when nothing more is asked of the text."""
        for layer in self.layers:
            layer.query = None
            if (spans := layer.spans) is not None:
                halved = {"keys": spans.keys.half(), "values": spans.values.half()}
                layer.spans = replace(spans, **halved)

    def far_mass(self, positions: torch.Tensor, distance: int) -> torch.Tensor:
        """Attention of some queries to what is further back, the mean over every third layer.

        Args:
            positions: Of the queries, `[Q]`.
            distance: Tokens between a query and the nearest key that counts.

        Returns:
            Shares, `[Q]`.
        """
        zooming = [layer for layer in self.layers if layer.spans is not None][::_EVERY]
        parts = []
        for some in positions.split(_ROWS):
            is_far = _all(zooming[0].keys) < some[:, None] - distance
            masses = [(layer.rows(some) * is_far).sum(-1).mean((0, 1, 2)) for layer in zooming]
            parts.append(torch.stack(masses).mean(0))
        return torch.cat(parts)

    def span_mass(self, layer: ReadLayer, positions: torch.Tensor) -> torch.Tensor:
        """Attention of some queries to each span, seen or not, `[1, G, H/G, Q, S]`."""
        rows, spans = layer.rows(positions), self.division.places.shape[0]
        sums = rows.new_zeros(*rows.shape[:-1], spans + 1)
        which = torch.where(self.division.span_of < 0, spans, self.division.span_of)
        return sums.scatter_add_(-1, which.expand_as(rows), rows)[..., :-1]


class Teacher:
    """Reads texts with a full cache."""

    def __init__(self, model: PreTrainedModel, dividing: Dividing) -> None:
        """Find out how the model makes its logits and turns its keys.

        Args:
            model: An attached model.
            dividing: How texts are divided.

        Raises:
            ConfigError: When the model is not attached.
            UnsupportedModelError: When no layer zooms, their shapes differ, or their keys or the
                model's logits are made in a way that kvfold does not know.
        """
        require_attached(model)
        self.model, self.dividing = model, dividing
        kinds = [type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers]
        self.zooming = [index for index, zooms in enumerate(kinds) if zooms]
        """Indices of the layers that zoom."""
        self._layers = len(kinds)
        self._ropes = probe_rope(model)
        self.shape = self._shape()
        self.readout: Readout = find_readout(model)
        self._surprisal = Surprisal(model)

    def _shape(self) -> GateShape:
        name = type(self.model).__name__
        if not self.zooming:
            raise UnsupportedModelError(
                f"{name} has no full-attention layer: there is nothing to zoom into"
            )
        shapes = {head_shape(self.model, index) for index in self.zooming}
        unknown = [index for index in self.zooming if self._ropes[index] == "unknown"]
        if len(shapes) > 1 or unknown:
            what = f"keys of layer {unknown[0]} cannot be un-rotated" if unknown else "heads differ"
            raise UnsupportedModelError(
                f"{name} is no model that gates can be trained for (the {what}): use sekv without "
                "training"
            )
        (heads,) = shapes
        return GateShape(len(self.zooming), heads.query_heads, heads.head_dim)

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> ReadText:
        """Run a text `[T]` through the model, and divide it.

        Raises:
            ConfigError: When the text has no span, or more tokens than the model has positions.
        """
        limit = getattr(text_config(self.model), "max_position_embeddings", None)
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"a text of {len(ids)} tokens is longer than the model's {limit} positions: give "
                "shorter ones"
            )
        ids = ids.to(self.model.device)
        cache = Cache(layers=[RecordingLayer() for _ in range(self._layers)])
        output = base_model(self.model)(
            input_ids=ids[None], use_cache=True, **{CACHE_KEYWORD: cache}
        )
        hidden = output.last_hidden_state
        surprisal = self._surprisal(hidden, ids[None]).to(ids.device)
        division = divide(surprisal[0], self.dividing)
        if len(division.places) == 0:
            raise ConfigError(
                f"a text of {len(ids)} tokens has no span: give longer texts or a smaller shortest"
            )
        numbers = {index: number for number, index in enumerate(self.zooming)}
        layers = [
            self._read_layer(layer, index, numbers.get(index), division)
            for index, layer in enumerate(cache.layers)
        ]
        return ReadText(ids, hidden[0], layers, division)

    def _read_layer(
        self, layer: object, index: int, number: int | None, division: Division
    ) -> ReadLayer:
        assert isinstance(layer, RecordingLayer)
        assert layer.heard is not None, "the model has run"
        query, mask, scoring = layer.heard
        keys, values = layer.slots.keys, layer.slots.values
        if mask is None:
            mask = LazyMask(0, query.shape[2])
        assert isinstance(mask, LazyMask), "the model is attached"
        spans = None if number is None else self._spans(index, number, keys, values, division)
        return ReadLayer(keys, values, query, mask, scoring, spans)

    def _spans(
        self, index: int, number: int, keys: torch.Tensor, values: torch.Tensor, division: Division
    ) -> ReadSpans:
        turn = self._turn(index, _all(keys))
        plain = keys if turn is None else unrotate(keys, turn[0], turn[1], interleaved=turn[2])
        if turn is not None:
            flat = division.places.flatten()
            turn = (turn[0][:, :, flat], turn[1][:, :, flat], turn[2])
        return ReadSpans(
            number,
            _means(keys, division),
            _means(values, division),
            _factors(plain, division),
            _factors(values, division),
            turn,
        )

    def _turn(
        self, index: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
        if self._ropes[index] == "nope":
            return None
        turned = angles(self.model, index, positions[None])
        assert turned is not None, "the probe has un-rotated by them"
        return (*turned, self._ropes[index] == "interleaved")


def divide(surprisal: torch.Tensor, how: Dividing) -> Division:
    """Cut a text into anchors and spans, from left to right: no span depends on what follows it.

    A cache divides a text once it has read it, with a threshold over all of it and runs cut evenly
    (`kvfold.zoom.segment`), so that its spans are a little other ones.

    Args:
        surprisal: In nats, `[T]`.
        how: What becomes a span.
    """
    count, device = len(surprisal), surprisal.device
    surprisal = surprisal.nan_to_num(nan=0.0).clamp(0.0, _MOST_NATS)
    is_anchor = torch.tensor(_anchors(surprisal.tolist(), how), device=device)
    everywhere = torch.arange(count, device=device)
    after_anchor = (everywhere + 1).where(is_anchor, 0).cummax(0).values
    begins = ~is_anchor & ((everywhere - after_anchor) % how.longest == 0)
    piece = (begins.cumsum(0) - 1).clamp_min(0)
    lengths = torch.zeros_like(piece).scatter_add_(0, piece, (~is_anchor).long())
    is_span = lengths >= how.shortest
    span_of = (is_span.cumsum(0) - 1)[piece].where(~is_anchor & is_span[piece], -1)
    first, lengths = everywhere[begins & (span_of >= 0)], lengths[is_span]
    steps = torch.arange(how.longest, device=device)
    is_token = steps < lengths[:, None]
    places = (first[:, None] + steps).clamp_max(count - 1)
    nats = surprisal[places] * is_token
    total, even = nats.sum(1, keepdim=True), is_token / lengths[:, None]
    weights = torch.where(total > 0, nats / total.clamp_min(torch.finfo(nats.dtype).tiny), even)
    return Division(places, is_token, weights, span_of)


def _anchors(surprisal: list[float], how: Dividing) -> list[bool]:
    """The first tokens, and those that stood out when they came, by all up to them."""
    found, ordered = list[bool](), list[float]()
    total = squares = 0.0
    for place, nats in enumerate(surprisal):
        insort(ordered, nats)
        total, squares, count = total + nats, squares + nats * nats, place + 1
        mean, most = total / count, int(how.most_anchors * count)
        deviation = max(squares / count - mean * mean, 0.0) ** 0.5
        stands_out = nats > mean + how.deviations * deviation
        among = most == count or nats > ordered[count - most - 1]
        found.append(place < how.sinks or (stands_out and among))
    return found


def _gathered(tensor: torch.Tensor, division: Division) -> torch.Tensor:
    """Tokens `[1, G, T, D]` by span, `[1, G, S, N, D]`; zeros where a span is shorter."""
    return tensor[:, :, division.places].float() * division.is_token.unsqueeze(-1)


def _means(tensor: torch.Tensor, division: Division) -> torch.Tensor:
    return (_gathered(tensor, division) * division.weights.unsqueeze(-1)).sum(-2)


def _factors(tensor: torch.Tensor, division: Division) -> Factors:
    return Factors(*factorise(_gathered(tensor, division), RANK))


def _all(keys: torch.Tensor) -> torch.Tensor:
    """Positions of all tokens of `[..., T, D]`."""
    return torch.arange(keys.shape[-2], device=keys.device)
