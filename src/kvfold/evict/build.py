"""From a policy's name and options to a cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import fields
from typing import get_args

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfold.budget import Budget
from kvfold.cache.cache import CacheSpec, KVCache
from kvfold.cache.layer import CacheLayer
from kvfold.cache.split import SplitLayer
from kvfold.errors import BudgetError, ConfigError
from kvfold.evict.layer import EvictingLayer, Eviction
from kvfold.evict.options import whole_number
from kvfold.evict.policy import POLICIES, Policy, Scope
from kvfold.evict.token_scope import TokenScope
from kvfold.evict.whole_heads import HeadPlan

DEFAULT_BUDGET = Budget(0.25, "ratio")
"""The share kept when none is named."""
SINKS = 4
"""First tokens that stay by default (StreamingLLM)."""
RECENT = 32
"""Last tokens that stay by default (SnapKV's window)."""

_COMMON = ("scope", "sinks", "recent")
_log = logging.getLogger(__name__)


def build_cache(
    model: PreTrainedModel, method: str, budget: Budget | None, options: dict[str, object]
) -> KVCache:
    """Build an empty cache that evicts by a policy.

    Args:
        model: An attached model.
        method: The policy's registered name.
        budget: How much may stay; a quarter without it, everything for `full`.
        options: `scope`, `sinks`, `recent`, and the policy's own.

    Raises:
        ConfigError: For an option the policy does not have, or a value it cannot use.
        BudgetError: For a budget given to `full`.
    """
    policy = _policy(method, options)
    if (concern := policy.concern(model)) is not None:
        _log.warning("%s: %s", method, concern)
    if not policy.evicts and not (budget is None or budget.is_everything):
        raise BudgetError(
            f"{method} keeps everything: leave the budget out, or take another method"
        )
    budget = budget or (DEFAULT_BUDGET if policy.evicts else Budget(1.0, "ratio"))
    plan = policy.plan(model, budget)
    eviction = Eviction(
        policy=policy,
        budget=plan.rest,
        scope=_scope(method, policy, options.get("scope")),
        sinks=whole_number(method, "sinks", options.get("sinks", SINKS)),
        recent=whole_number(method, "recent", options.get("recent", RECENT)),
        layers=evicting_layers(model),
    )
    if eviction.layers == 0 and policy.evicts:
        _log.warning(
            "%s has no full-attention layer: %s has nothing to evict", type(model).__name__, method
        )
    spec = CacheSpec(method, str(budget), eviction.scope, options | _settled(policy, options))
    if not policy.evicts or budget.is_everything:
        return KVCache(model, spec, CacheLayer)
    coordinator = TokenScope() if eviction.scope == "token" else None
    return KVCache(model, spec, layer_maker(model, eviction, plan), coordinator=coordinator)


def layer_maker(
    model: PreTrainedModel, eviction: Eviction, plan: HeadPlan
) -> Callable[[], CacheLayer | SplitLayer]:
    """What builds a cache's layers, one after the other.

    Args:
        model: Gives the number of kv heads.
        eviction: Of the heads that do not keep everything.
        plan: Which do.
    """
    heads = kv_heads(model)
    # A layer whose heads all keep everything evicts nothing, and has no number among the others.
    order = itertools.count()
    numbers = itertools.count()

    def make() -> CacheLayer | SplitLayer:
        whole, others = plan.of_layer(next(order), heads)
        if not whole:
            return EvictingLayer(eviction, next(numbers))
        if not others:
            return CacheLayer()
        return SplitLayer([(others, EvictingLayer(eviction, next(numbers))), (whole, CacheLayer())])

    return make


def kv_heads(model: PreTrainedModel) -> int:
    """The kv heads of each layer of a model."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _policy(method: str, options: dict[str, object]) -> Policy:
    kind = POLICIES[method]
    own = {field.name for field in fields(kind)}
    unknown = sorted(set(options) - own - set(_COMMON))
    if unknown:
        allowed = ", ".join(sorted(own | set(_COMMON)))
        raise ConfigError(f"{method} has no option {unknown[0]!r}: choose from {allowed}")
    return kind(**{name: value for name, value in options.items() if name in own})


def _settled(policy: Policy, options: dict[str, object]) -> dict[str, object]:
    """The options given, and those that the policy found, as the policy has them."""
    found = {field.name: (getattr(policy, field.name), field.default) for field in fields(policy)}
    return {
        name: value
        for name, (value, default) in found.items()
        if name in options or value != default
    }


def _scope(method: str, policy: Policy, scope: object) -> Scope:
    if scope is None:
        return policy.default_scope
    for known in get_args(Scope):
        if scope == known and known in policy.scopes:
            return known
    choices = ", ".join(policy.scopes)
    raise ConfigError(f"{method} is not defined for scope {scope!r}: choose from {choices}")


def evicting_layers(model: PreTrainedModel) -> int:
    """Layers of a model that can evict: those with full attention."""
    return sum(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
