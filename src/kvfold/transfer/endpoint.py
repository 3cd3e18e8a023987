"""A model at one end of a transfer: what it read as states without position, and back again.

A state is a row `[N, G * D]` of a layer: the keys before RoPE, or the values, of all kv heads of
one token. Keys are turned back with the angles of the model that made them, and turned again with
those of the model that uses them: the two may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvfold.cache.prefill import CACHE_KEYWORD, prefill
from kvfold.errors import UnsupportedModelError
from kvfold.models import (
    anatomy_of,
    angles,
    attention_module,
    decoder_layers,
    key_norm,
    probe_rope,
    project,
    query_norm,
)
from kvfold.models.projections import Part
from kvfold.ops.rotary import rotate, unrotate

Turns = list[tuple[torch.Tensor, torch.Tensor] | None]
"""Cosines and sines of each layer, None for one that does not rotate."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What a model made of a batch of texts."""

    endpoint: Endpoint
    """The model."""
    rotated: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys, rotated, and values of each layer, `[B, G, T, D]`."""
    turns: Turns
    """The angles of the keys."""
    tokens: torch.Tensor | None
    """False for padding, `[B, T]`; None where there is none."""
    hidden: dict[int, torch.Tensor]
    """What the attention of some layers was given, after the input norm, `[B, T, M]`."""
    residual: dict[int, torch.Tensor]
    """What some layers were given, before the input norm, `[B, T, M]`."""

    def keys(self, layer: int) -> torch.Tensor:
        """Keys before RoPE, one row a token, `[N, G * D]` in float32."""
        return self.rows(self.endpoint.unturn(layer, self.rotated[layer][0].float(), self.turns))

    def values(self, layer: int) -> torch.Tensor:
        """Values, one row a token, `[N, G * D]` in float32."""
        return self.rows(self.rotated[layer][1].float())

    def inputs(self, layer: int) -> torch.Tensor:
        """What the attention was given, one row a token, `[N, M]` in float32."""
        return self._real(self.hidden[layer].float().flatten(0, 1))

    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """States `[B, G, T, D]`, one row a token that is no padding, `[N, G * D]`."""
        return self._real(states.transpose(1, 2).flatten(2).flatten(0, 1))

    def _real(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.tokens is None else rows[self.tokens.flatten()]


class Endpoint:
    """Reads texts into states without position, and makes keys and values of such states."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Look at the model and probe, with a short forward, how it turns its keys.

        Raises:
            UnsupportedModelError: When keys of a layer cannot be turned back.
        """
        self.model = model
        self.anatomy = anatomy_of(model)
        self._findings = probe_rope(model)
        odd = [index for index, found in enumerate(self._findings) if found == "unknown"]
        if odd or any(rope.depends_on_length for rope in self.anatomy.ropes):
            where = f"layers {odd}" if odd else "RoPE that changes with the length"
            raise UnsupportedModelError(
                f"{type(model).__name__} has keys that cannot be turned back ({where}): use a "
                "model with fixed RoPE, or without"
            )

    @property
    def layers(self) -> range:
        """Indices of the layers."""
        return range(len(self.anatomy.layers))

    def width(self, layer: int, part: Part) -> int:
        """Numbers in a row of keys, values or queries of a layer."""
        return self.anatomy.layers[layer].heads.rows(part)

    @torch.no_grad()
    def read(
        self,
        ids: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        hidden: Iterable[int] = (),
        residual: Iterable[int] = (),
        chunk_size: int | None = None,
    ) -> Trace:
        """Run texts through the model.

        Args:
            ids: Token ids, `[B, T]`, left padded, on any device.
            mask: False for padding, `[B, T]`; without it all are tokens.
            hidden: Layers of which the attention's input is wanted too.
            residual: Layers of which their own input is wanted too.
            chunk_size: Most tokens a forward; all at once without it.

        Returns:
            What it made of them.

        Raises:
            ConfigError: For no tokens, or more than the model has positions.
        """
        ids = ids.to(self.model.device)
        mask = None if mask is None else mask.to(self.model.device)
        # Without a configuration no layer forgets what left its window.
        cache = DynamicCache()
        attended = None if mask is None else mask.long()
        given = {layer: decoder_layers(self.model)[layer] for layer in residual}
        with attention_inputs(self.model, hidden) as heard, inputs_of(given) as stream:
            prefill(self.model, ids, cache, attention_mask=attended, chunk_size=chunk_size)
        tokens = None if mask is None or bool(mask.all()) else mask.bool()
        return Trace(
            self,
            [_states(layer) for layer in cache.layers],
            self.turns(positions_of(ids.shape[1], tokens, ids.device)),
            tokens,
            {layer: torch.cat(inputs, 1) for layer, inputs in heard.items()},
            {layer: torch.cat(inputs, 1) for layer, inputs in stream.items()},
        )

    def turns(self, positions: torch.Tensor) -> Turns:
        """The angles of every layer at some positions, `[B, T]`."""
        known: dict[object, tuple[torch.Tensor, torch.Tensor] | None] = {None: None}
        found: Turns = []
        for layer, finding in enumerate(self._findings):
            rope = None if finding == "nope" else self.anatomy.rope_of(layer)
            if rope not in known:
                known[rope] = angles(self.model, layer, positions)
            found.append(known[rope])
        return found

    def pairs(self, layer: int) -> tuple[slice, slice] | None:
        """The dims of a head that a layer turns together, as first and second of each pair."""
        rope = self.anatomy.rope_of(layer)
        if self._findings[layer] == "nope" or rope is None:
            return None
        dims = rope.rotary_dims
        if self._findings[layer] == "interleaved":
            return slice(0, dims, 2), slice(1, dims, 2)
        return slice(0, dims // 2), slice(dims // 2, dims)

    def turn(self, layer: int, keys: torch.Tensor, turns: Turns) -> torch.Tensor:
        """Keys `[B, G, T, D]` turned by their position."""
        angle, pairs = turns[layer], self._findings[layer] == "interleaved"
        return keys if angle is None else rotate(keys, *angle, interleaved=pairs)

    def unturn(self, layer: int, keys: torch.Tensor, turns: Turns) -> torch.Tensor:
        """Keys `[B, G, T, D]` turned back."""
        angle, pairs = turns[layer], self._findings[layer] == "interleaved"
        return keys if angle is None else unrotate(keys, *angle, interleaved=pairs)

    def project(self, layer: int, part: Part, inputs: torch.Tensor) -> torch.Tensor:
        """Keys before RoPE, values or queries of what the attention is given, with their graph.

        Args:
            layer: Whose own projection and norm are used.
            part: Which of the three.
            inputs: After the input norm, `[N, M]`.

        Returns:
            One row a token, `[N, heads * D]` in float32.
        """
        norms = {"key": key_norm, "query": query_norm}
        norm = norms[part](self.model, layer) if part in norms else None
        by_token = project(self.model, layer, part, inputs.to(self.model.dtype)[None])
        by_token = by_token.transpose(1, 2)
        if norm is not None:
            full = self.anatomy.qk_norm == "full"
            by_token = norm(by_token.flatten(2) if full else by_token)
        return by_token.reshape(len(inputs), -1).float()

    def continued(self, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
        """What the model says of tokens after a cache, with the graph of both.

        Args:
            cache: Of what stands before them, without padding; it takes them in.
            ids: Token ids, `[B, C]`.

        Returns:
            Logits, `[B, C, V]`.
        """
        start, count = cache.get_seq_length(), ids.shape[1]
        positions = torch.arange(start, start + count, device=ids.device)[None]
        output = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, **{CACHE_KEYWORD: cache}
        )
        return output.logits


def positions_of(length: int, tokens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Positions `[B, T]` (or `[1, T]`) of left-padded tokens; 0 for padding."""
    if tokens is None:
        return torch.arange(length, device=device)[None]
    return (tokens.long().cumsum(-1) - 1).clamp_min(0)


def _states(layer: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def attention_inputs(
    model: PreTrainedModel, layers: Iterable[int]
) -> AbstractContextManager[dict[int, list[torch.Tensor]]]:
    """Record what the attention of some layers is given while the context is open."""
    return inputs_of({layer: attention_module(model, layer) for layer in layers})


@contextmanager
def inputs_of(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Record the hidden states that modules are given while the context is open."""
    heard: dict[int, list[torch.Tensor]] = {layer: [] for layer in modules}
    handles = []
    for layer, module in modules.items():

        def record(module: nn.Module, arguments: tuple, keywords: dict, layer: int = layer) -> None:
            given = arguments[0] if arguments else keywords["hidden_states"]
            heard[layer].append(given.detach())

        handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()
