"""The model `kvfold` of lm-evaluation-harness: its `hf` model, with a cache of kvfold's in between.

Loading, tokens, chat templates, truncation, batches and stop strings are those of `hf`. What is
changed is where a model would read the whole past: continuations are scored by
`kvfold.evaluation.continuations`, and texts are generated from a cache of the method asked for. A
cache that keeps every token gives what one forward gives, so `hf`'s own scoring runs then, through
that cache.

This module can be imported without lm-eval, which the extra `harness` installs; its model cannot be
made then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import kvfold
from kvfold.attention import attach
from kvfold.attention.attach import is_attached
from kvfold.budget import Budget
from kvfold.cache import CACHE_KEYWORD
from kvfold.cache.layer import CacheLayer
from kvfold.errors import BudgetError, ConfigError
from kvfold.evaluation.continuations import Continuation, batches, score
from kvfold.evaluation.harness_base import harness_base, require_harness
from kvfold.evaluation.harness_diffusion import KVFoldDiffusionLM
from kvfold.evaluation.holdings import Holdings
from kvfold.models import ensure_default

OPTION = "option."
"""Stands before the name of a method's option among the arguments of the model."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""The texts, or None for a part of a rolling text; tokens of the context and of what follows."""


_HF: Any = harness_base("lm_eval.models.huggingface", "HFLM")


class KVFoldLM(_HF):
    """A causal language model whose past stands in a cache of kvfold's.

    Example:
        >>> import lm_eval
        >>> model = KVFoldLM(pretrained="default", method="snapkv", budget=0.25, batch_size=4)
        >>> lm_eval.simple_evaluate(model=model, tasks=["arc_easy"], limit=10)
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = "default",
        *,
        method: str = "distill",
        budget: float | str | None = None,
        options: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> None:
        """Load a model and attach it.

        Args:
            pretrained: `default`, a folder, a Hub name, or a model; with a model, its `tokenizer`
                among the settings.
            method: One of `kvfold.methods()`.
            budget: As `kvfold.make_cache` takes it.
            options: The method's own. One can also be given as a setting `option.NAME`.
            **settings: Those of lm-eval's `hf`: `dtype`, `device`, `batch_size`, `max_length`, ...

        Raises:
            ConfigError: lm-eval is not installed, or an option is unknown.
            BudgetError: The budget cannot be kept, or is one of bytes.
            UnsupportedModelError: The model keeps its own attention.
        """
        require_harness(_HF)
        given = dict(options or {})
        for name in [name for name in settings if name.startswith(OPTION)]:
            given[name.removeprefix(OPTION)] = settings.pop(name)
        self._holdings = Holdings()
        source = str(ensure_default()) if pretrained == "default" else pretrained
        settings.setdefault("use_safetensors", True)
        super().__init__(pretrained=source, backend="causal", **settings)
        if not is_attached(self.model):
            attach(self.model)
        # Forked for every batch: what cannot be used is refused before a task is loaded, and said
        # once.
        self._empty = kvfold.make_cache(self.model, method, budget=budget, **given)
        _require_budget_of_a_row(self._empty.spec.budget)
        layers = self._empty.own_layers
        self._keeps_everything = all(type(layer) is CacheLayer for layer in layers)

    def get_model_info(self) -> dict[str, object]:
        """What lm-eval writes into its results: how caches are made, and what they have held."""
        spec = self._empty.spec
        return super().get_model_info() | {
            "kvfold_version": kvfold.__version__,
            "kvfold_method": spec.method,
            "kvfold_budget": spec.budget,
            "kvfold_scope": spec.scope,
            "kvfold_options": spec.options,
            "kvfold_held": self._holdings.to_dict(),
        }

    def _detect_batch_size(self, *requests: Any, **settings: Any) -> int:
        """The largest batch that fits, tried on caches that belong to no task."""
        held, self._holdings = self._holdings, Holdings()
        try:
            return super()._detect_batch_size(*requests, **settings)
        finally:
            self._holdings = held

    def _model_call(
        self,
        inps: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[B, T, V]` of whole rows `[B, T]`, read into a new cache."""
        cache = self._empty.fork()
        with torch.no_grad(), self._autocast():
            logits = self.model(inps, **{CACHE_KEYWORD: cache}).logits
        self._holdings.add(cache.report())
        return logits

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any
    ) -> torch.Tensor:
        """Contexts `[B, T]` and what follows them, generated from a new cache."""
        cache = self._empty.fork()
        rows = super()._model_generate(
            context, max_length, stop, **{CACHE_KEYWORD: cache}, **settings
        )
        self._holdings.add(cache.report())
        return rows

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """How likely continuations are, and whether each of their tokens is the likeliest."""
        if self._keeps_everything:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        wanted = [self._continuation(context, tokens) for _, context, tokens in requests]
        size = override_bs or self._rows(requests)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(wanted)
        hidden = disable_tqdm or self.rank != 0
        with tqdm(total=len(wanted), disable=hidden, desc="scoring from the cache") as bar:
            for batch in batches(wanted, size, self.max_length):
                for place, answer in zip(batch, self._score(wanted, batch), strict=True):
                    answers[place] = answer
                    if (texts := requests[place][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                bar.update(len(batch))
        return answers

    def _continuation(self, context: list[int], tokens: list[int]) -> Continuation:
        """A request within the model's length: what is too long loses its beginning, as in `hf`."""
        if not 0 < len(tokens) <= self.max_length:
            raise ConfigError(
                f"a continuation of {len(tokens)} tokens cannot be scored: it needs at least one, "
                f"and at most the model's length of {self.max_length}; give a greater max_length "
                "or leave its task out"
            )
        room = self.max_length + 1 - len(tokens)
        return Continuation(tuple(context[-room:]), tuple(tokens))

    def _rows(self, requests: Sequence[Request]) -> int:
        """Rows of a batch."""
        if self.batch_size != "auto":
            return self.batch_size
        longest = max(requests, key=lambda request: len(request[1]) + len(request[2]))
        return self._detect_batch_size([longest])

    def _score(
        self, wanted: Sequence[Continuation], batch: Sequence[int]
    ) -> list[tuple[float, bool]]:
        cache = self._empty.fork()
        with self._autocast():
            found = score(
                self.model,
                cache,
                [wanted[place] for place in batch],
                pad=self.tokenizer.pad_token_id,
                dtype=self.softmax_dtype or torch.float32,
            )
        self._holdings.add(cache.report())
        return [(one.log_probability, one.is_greedy) for one in found]

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)


def register() -> None:
    """Make both models known to lm-eval, as `kvfold` and `kvfold-diffusion`; again changes nothing.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    require_harness(_HF)
    from lm_eval.api.registry import model_registry  # pyright: ignore[reportMissingImports]

    model_registry.register("kvfold", target=KVFoldLM)
    model_registry.register("kvfold-diffusion", target=KVFoldDiffusionLM)


def _require_budget_of_a_row(budget: str | None) -> None:
    """Refuse bytes: rows of a batch share them, so scores would depend on neighbours."""
    if budget is not None and Budget.parse(budget).unit == "bytes":
        raise BudgetError(
            f"{budget} would be shared by the rows of a batch, and scores would depend on their "
            "neighbours: give a share such as 0.25, or tokens such as 512"
        )
