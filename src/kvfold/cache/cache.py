"""The cache that `generate` takes: transformers' container around kvfold's layers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvfold.attention import require_attached
from kvfold.attention.attach import body_of
from kvfold.cache.contents import contents_of
from kvfold.cache.layer import CacheLayer
from kvfold.cache.report import CacheReport, Details
from kvfold.cache.split import SplitLayer
from kvfold.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """How a cache was made: enough to make the same one again."""

    method: str
    """Registered name."""
    budget: str | None = None
    """The budget as text."""
    scope: str | None = None
    """What shares one kept set."""
    options: dict[str, object] = field(default_factory=dict)
    """The method's options: those given, as the method settled them, and those it found."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a forward of the base model had and gave."""

    input_ids: torch.Tensor | None
    """New tokens `[B, N]`; None where the model was given embeddings."""
    hidden: torch.Tensor
    """Last hidden states, after the final norm, `[B, N, M]`."""
    known: dict[str, torch.Tensor] = field(default_factory=dict)
    """What was made of it, by name, so that other caches that are told it need not again."""


class Coordinator(Protocol):
    """Work that needs all layers of a cache."""

    def before_forward(self, layers: list[CacheLayer], count: int) -> None:
        """Act on what holds the tokens before `count` new ones are stored in the first."""
        ...

    def after_forward(self, layers: list[CacheLayer], outcome: Outcome | None) -> None:
        """Act on what holds the tokens when a forward is over.

        Args:
            layers: What holds them.
            outcome: Of the forward; None where the model has no hook that tells.
        """
        ...


class KVCache(Cache):
    """A transformers cache whose full-attention layers are kvfold's.

    Make one with `kvfold.make_cache`. It goes wherever transformers takes a cache, for a model that
    is attached; sliding and other layers stay transformers' own. What it stores carries no
    gradient. It belongs to the model it was made for, and refuses another.

    Example:
        >>> cache = kvfold.make_cache(model, "streaming", budget=64)
        >>> output = model.generate(**inputs, cache=cache)
        >>> cache.report().tokens_kept[0] <= 64
        True
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: CacheSpec,
        make_layer: Callable[[], CacheLayer | SplitLayer],
        *,
        coordinator: Coordinator | None = None,
        details: Callable[[Sequence[CacheLayer]], Details | None] | None = None,
    ) -> None:
        """Build an empty cache for a model.

        Args:
            model: An attached model; only its configuration is used, and no reference is held that
                keeps it alive.
            spec: How the cache is made.
            make_layer: Builds one of our layers, called once for each full-attention layer.
            coordinator: What acts on all of them together.
            details: What they report beyond tokens and bytes, once they hold a token.

        Raises:
            ConfigError: When the model is not attached.
        """
        require_attached(model)
        native = DynamicCache(config=model.config).layers
        layers = [make_layer() if type(layer) is DynamicLayer else layer for layer in native]
        super().__init__(layers=layers)
        self.spec = spec
        self._model = weakref.ref(model)
        self._body = weakref.ref(body_of(model))
        self._kinds = _kinds(native)
        self._coordinator = coordinator if self.own_layers else None
        self._details = details
        self._first = layers.index(self.own_layers[0]) if self.own_layers else None
        self._latest: CacheLayer | SplitLayer | None = None
        self._forward_is_open = False

    @property
    def own_layers(self) -> list[CacheLayer | SplitLayer]:
        """The layers that are kvfold's."""
        return [layer for layer in self.layers if isinstance(layer, CacheLayer | SplitLayer)]

    @property
    def parts(self) -> list[CacheLayer]:
        """What holds the tokens of kvfold's layers: each itself, or its parts of the kv heads."""
        return [part for layer in self.own_layers for part in layer.parts]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new tokens; see `CacheLayer.update`.

        Raises:
            ConfigError: When the layer before never reached kvfold's attention.
        """
        if self._latest is not None and self._latest.awaits_attention:
            raise ConfigError(
                "this cache is used with a model whose attention is not kvfold's: keep the model "
                "attached (kvfold.attach) as long as the cache is used"
            )
        if layer_idx == self._first:
            self._begin_forward(key_states.shape[2])
        layer = self.layers[layer_idx]
        if isinstance(layer, CacheLayer | SplitLayer):
            self._latest = layer
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def start_of_forward(self, body: torch.nn.Module, arguments: Mapping[str, object]) -> None:
        """Refuse what does not belong here; called by the hook that `attach` installs.

        Args:
            body: The base model that is about to run.
            arguments: What it is given, by name.

        Raises:
            ConfigError: For another model than the cache's own, and for a prompt that does not
                begin with the tokens seen so far.
        """
        if self._body() is not body:
            self._go_over_to(body)
        for name in ("input_ids", "inputs_embeds"):
            new = arguments.get(name)
            if isinstance(new, torch.Tensor) and new.shape[1] != 1:
                self._check_prompt(new.shape[1], arguments.get("position_ids"))

    def _go_over_to(self, body: torch.nn.Module) -> None:
        """Serve another model, if nothing is held of the cache's own and that is gone."""
        is_free = self._body() is None and self.get_seq_length() == 0
        if not (
            is_free
            and isinstance(body, PreTrainedModel)
            and _kinds(DynamicCache(config=body.config).layers) == self._kinds
        ):
            raise ConfigError(
                "this cache was made for another model: make one for this model with "
                "kvfold.make_cache, or, if the weights are the same, carry it over by cache.save "
                "and kvfold.load_cache"
            )
        self._body = weakref.ref(body)

    def _check_prompt(self, count: int, positions: object) -> None:
        """Refuse new tokens from which `generate` has cut a past that they did not contain."""
        seen = self.get_seq_length()
        if seen and (count == 0 or self._is_behind(positions)):
            raise ConfigError(
                f"the cache has seen {seen} tokens, but this prompt does not begin with them: pass "
                "all tokens so far and the new ones after them, or the new ones alone with an "
                "attention_mask over all"
            )

    def _is_behind(self, positions: object) -> bool:
        """Whether even the last new token of every row, by its position, was seen before."""
        if not self.own_layers or not isinstance(positions, torch.Tensor) or positions.ndim != 2:
            return False
        lengths = self.own_layers[0].row_lengths
        shortest = lengths if isinstance(lengths, int) else int(lengths.min())
        return int(positions[:, -1].max()) < shortest

    def _begin_forward(self, count: int) -> None:
        if self._coordinator is not None:
            # Without a hook, the next forward is the first to know that the last one is over.
            self.end_of_forward()
            self._coordinator.before_forward(self.parts, count)
        self._forward_is_open = True

    def finish_forward(self, arguments: Mapping[str, object], output: object) -> None:
        """Do what needs all layers; called by the hook that `attach` installs.

        Args:
            arguments: What the base model was given, by name.
            output: What it gave.
        """
        self.end_of_forward(_outcome(arguments, output))

    def end_of_forward(self, outcome: Outcome | None = None) -> None:
        """Do what needs all layers, if it was not done yet.

        Args:
            outcome: Of the forward, where it is known.
        """
        if self._forward_is_open and self._coordinator is not None:
            self._coordinator.after_forward(self.parts, outcome)
        self._forward_is_open = False

    def fork(self) -> KVCache:
        """An independent copy: what is generated with one does not change the other."""
        self.end_of_forward()
        return copy.deepcopy(self)

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file, under a temporary name first.

        Args:
            path: The file; `kvfold.load_cache` reads it back.

        Raises:
            ArtifactError: When the file cannot be written.
        """
        from kvfold.cache.storage import save_cache

        self.end_of_forward()
        save_cache(self, path)

    @property
    def model(self) -> PreTrainedModel | None:
        """The model the cache was made for, None when it is gone."""
        return self._model()

    @property
    def bytes_held(self) -> int:
        """All bytes on both tiers, without the rest of a report."""
        held = filter(None, map(contents_of, self.layers))
        return sum(each.bytes_held + each.bytes_slow for each in held)

    def report(self) -> CacheReport:
        """Count what is held now."""
        self.end_of_forward()
        held = [contents for layer in self.layers if (contents := contents_of(layer))]
        return CacheReport(
            method=self.spec.method,
            budget=self.spec.budget,
            scope=self.spec.scope,
            rows=held[0].rows if held else 0,
            tokens_seen=self.get_seq_length() if held else 0,
            tokens_kept=[layer.kept for layer in held],
            bytes_fast=sum(layer.bytes_held for layer in held),
            bytes_slow=sum(layer.bytes_slow for layer in held),
            bytes_index=sum(layer.bytes_index for layer in held),
            bytes_full=sum(layer.bytes_full for layer in held),
            details=self._details(self.parts) if held and self._details else None,
        )


def _outcome(arguments: Mapping[str, object], output: object) -> Outcome | None:
    ids, hidden = arguments.get("input_ids"), getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, torch.Tensor):
        return None
    return Outcome(ids if isinstance(ids, torch.Tensor) else None, hidden)


def _kinds(layers: Sequence[object]) -> list[tuple[type, int | None]]:
    """What tells the layers of one model from those of another: their type and window."""
    return [(type(layer), getattr(layer, "sliding_window", None)) for layer in layers]
