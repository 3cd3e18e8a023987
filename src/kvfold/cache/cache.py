"""The cache that `generate` takes: transformers' container around kvfold's layers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvfold.attention import require_attached
from kvfold.cache.contents import contents_of
from kvfold.cache.layer import CacheLayer
from kvfold.cache.report import CacheReport


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
    """The method's own options, as given."""


class ForwardEnd(Protocol):
    """Work that needs all layers, done when a forward is over."""

    def __call__(self, layers: list[CacheLayer]) -> None:
        """Act on the layers that are kvfold's."""
        ...


class KVCache(Cache):
    """A transformers cache whose full-attention layers are kvfold's.

    Make one with `kvfold.make_cache`. It goes wherever transformers takes a cache, for a model that
    is attached; sliding and other layers stay transformers' own.

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
        make_layer: Callable[[], CacheLayer],
        *,
        at_forward_end: ForwardEnd | None = None,
    ) -> None:
        """Build an empty cache for a model.

        Args:
            model: An attached model; only its configuration is used, and no reference is held that
                keeps it alive.
            spec: How the cache is made.
            make_layer: Builds one of our layers, called once for each full-attention layer.
            at_forward_end: What acts on all of them at the end of a forward.

        Raises:
            ConfigError: When the model is not attached.
        """
        require_attached(model)
        native = DynamicCache(config=model.config).layers
        layers = [make_layer() if type(layer) is DynamicLayer else layer for layer in native]
        super().__init__(layers=layers)
        self.spec = spec
        self._model = weakref.ref(model)
        self._at_forward_end = at_forward_end if self.own_layers else None
        self._first = layers.index(self.own_layers[0]) if self.own_layers else None
        self._forward_is_open = False

    @property
    def own_layers(self) -> list[CacheLayer]:
        """The layers that are kvfold's."""
        return [layer for layer in self.layers if isinstance(layer, CacheLayer)]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new tokens; see `CacheLayer.update`."""
        if self._forward_is_open and layer_idx == self._first:
            # No hook told us that the last forward was over: the next one does.
            self.end_of_forward()
        self._forward_is_open = self._at_forward_end is not None
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def end_of_forward(self) -> None:
        """Do what needs all layers; called by the hook that `attach` installs."""
        if self._forward_is_open and self._at_forward_end is not None:
            self._forward_is_open = False
            self._at_forward_end(self.own_layers)

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
            bytes_slow=0,
            bytes_index=sum(layer.bytes_index for layer in held),
            bytes_full=sum(layer.bytes_full for layer in held),
        )
