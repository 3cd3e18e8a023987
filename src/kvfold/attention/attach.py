"""Switching a model to kvfold's attention, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.attention.interface import IMPLEMENTATION, register
from kvfold.errors import ConfigError, UnsupportedModelError


class Attachment:
    """A model on kvfold's attention; leaving the context, or `detach`, restores it.

    Attaching also installs two hooks on the base model. Before a forward, one gives the cache the
    chance to refuse another model than its own, or a prompt that does not fit; after it, one tells
    the cache that the forward is over: what needs all layers acts there.

    Example:
        >>> with kvfold.attach(model):
        ...     cache = kvfold.make_cache(model, "h2o", budget=0.25)
        ...     output = model.generate(**inputs, cache=cache)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Attach the model now.

        Args:
            model: Any causal language model whose attention goes through transformers'
                attention interface.

        Raises:
            UnsupportedModelError: When the model keeps its own attention.
        """
        self._model = model
        self._before = getattr(model.config, "_attn_implementation", None)
        register()
        self._set(IMPLEMENTATION)
        if not is_attached(model):
            self._set(self._before)
            raise UnsupportedModelError(
                f"{type(model).__name__} computes attention in its own code, not through "
                "transformers' attention interface, so kvfold cannot work with it: "
                "use a Llama, Mistral, Qwen, Phi-3, Gemma or similar model"
            )
        body = body_of(model)
        self._hooks = [
            body.register_forward_pre_hook(_start_of_forward, with_kwargs=True),
            body.register_forward_hook(_end_of_forward, with_kwargs=True),
        ]

    def _set(self, implementation: str | None) -> None:
        try:
            self._model.set_attn_implementation(implementation or "eager")
        except ValueError as error:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not accept another attention "
                f"implementation ({str(error).splitlines()[0]}): kvfold cannot work with it"
            ) from error

    def detach(self) -> None:
        """Give the model back as it was; doing it again changes nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._before != IMPLEMENTATION:
            self._set(self._before)

    def __enter__(self) -> PreTrainedModel:
        """The attached model."""
        return self._model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Detach, whatever happened."""
        self.detach()


def attach(model: PreTrainedModel) -> Attachment:
    """Switch a model to kvfold's attention, at once.

    Args:
        model: Any causal language model on transformers' attention interface.

    Returns:
        The attachment: a context manager that restores the model, also by `detach()`.

    Raises:
        UnsupportedModelError: When the model keeps its own attention.
    """
    return Attachment(model)


def body_of(model: torch.nn.Module) -> torch.nn.Module:
    """The base model in a model and its wrappers: what runs the layers, and tells models apart."""
    inner = getattr(model, "base_model", model)
    return model if inner is model else body_of(inner)


def is_attached(model: PreTrainedModel) -> bool:
    """Whether the model's attention is kvfold's."""
    return getattr(model.config, "_attn_implementation", None) == IMPLEMENTATION


def require_attached(model: PreTrainedModel) -> None:
    """Refuse a model that is not attached.

    Raises:
        ConfigError: With what to call.
    """
    if not is_attached(model):
        now = getattr(model.config, "_attn_implementation", None)
        raise ConfigError(
            f"the model's attention is {now!r}, not kvfold's: call kvfold.attach(model) first, or "
            "load the model with kvfold.load"
        )


def _start_of_forward(
    module: torch.nn.Module, arguments: tuple[object, ...], keywords: dict[str, object]
) -> None:
    named = _named(module, arguments, keywords)
    for cache in _caches(named):
        start: Callable[[torch.nn.Module, dict[str, object]], None] | None
        start = getattr(cache, "start_of_forward", None)
        if start is not None:
            start(module, named)


def _end_of_forward(
    module: torch.nn.Module,
    arguments: tuple[object, ...],
    keywords: dict[str, object],
    output: object,
) -> None:
    named = _named(module, arguments, keywords)
    for cache in _caches(named):
        finish: Callable[[dict[str, object], object], None] | None
        finish = getattr(cache, "finish_forward", None)
        if finish is not None:
            finish(named, output)


def _named(
    module: torch.nn.Module, arguments: tuple[object, ...], keywords: dict[str, object]
) -> dict[str, object]:
    """The arguments of a forward by name, those given by position too."""
    if not arguments:
        return keywords
    names = list(inspect.signature(module.forward).parameters)
    return dict(zip(names, arguments, strict=False)) | keywords


def _caches(arguments: dict[str, object]) -> list[Cache]:
    return [value for value in arguments.values() if isinstance(value, Cache)]
