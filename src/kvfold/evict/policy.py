"""What an eviction policy is: a score for every token that a cache holds.

A policy is a frozen description. Whatever it notes of the tokens of one sequence stands in the
slots of the cache, never on the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache import METHODS, KVCache, Method
from kvfold.cache.slots import Slots
from kvfold.evict.whole_heads import HeadPlan
from kvfold.registry import Registry

Scope = Literal["token", "layer", "head"]
"""What shares one kept set: all layers and heads, the heads of one layer, or no one."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The attention of some new queries."""

    probabilities: torch.Tensor
    """`[B, G, H/G, Q, T]` in float32 over the slots in use; zero for padding queries."""
    queries: int | torch.Tensor
    """How many of the Q queries are tokens: all, or one number a row `[B]`."""
    weight: float | torch.Tensor = 1.0
    """Queries that each stands for, one number or one a row `[B]`: more than 1 where a policy looks
    at some alone, 0 where it passes over a row."""

    @property
    def heads(self) -> int:
        """Query heads that share a kv head."""
        return self.probabilities.shape[2]

    def share_of(self, window: int) -> float | torch.Tensor:
        """The queries as a share of a window, at most 1: one number, or one a row `[B, 1, 1]`."""
        share = self.queries * self.weight / window
        if isinstance(share, torch.Tensor):
            return share.clamp(max=1).view(-1, 1, 1)
        return min(share, 1.0)

    def mass(self) -> torch.Tensor:
        """What each slot receives from all queries and heads of its group: `[B, G, T]`."""
        return self.probabilities.sum(dim=(2, 3))

    def mean_mass(self) -> torch.Tensor:
        """What each slot receives from a query and head of its group, on average: `[B, G, T]`."""
        count = self.probabilities.shape[3]
        packed = self.probabilities.flatten(2, 3)
        # A product with ones sums several times faster than a reduction over few rows.
        ones = packed.new_full((1, packed.shape[2]), 1 / packed.shape[2])
        mean = torch.matmul(ones, packed)[:, :, 0]
        if count == 1 or isinstance(self.queries, int):
            return mean
        return mean * (count / self.queries.clamp(min=1)).view(-1, 1, 1)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that have just been stored."""

    keys: torch.Tensor
    """`[B, G, N, D]`, rotated."""
    values: torch.Tensor
    """`[B, G, N, D]`."""
    positions: torch.Tensor
    """Logical positions, `[B, N]` or `[1, N]`; negative for padding."""


@dataclass(frozen=True)
class Policy(ABC):
    """Scores the tokens of one layer; the lowest go first.

    A subclass is a frozen dataclass: its fields are the method's options. To add one, write a file
    in `kvfold/evict/policies`, decorate the class with `register_policy("name")` and import it in
    the folder's `__init__`; every contract test then covers it.
    """

    summary: ClassVar[str]
    """One line for the command line's help."""
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "token")
    """The scopes it is defined for."""
    fields: ClassVar[tuple[str, ...]] = ()
    """What it notes of each slot and kv head."""
    common: ClassVar[tuple[str, ...]] = ()
    """What it notes of each slot for all heads; only with scopes that share them."""
    evicts: ClassVar[bool] = True
    """False for the policy that keeps everything."""

    @property
    def window(self) -> int:
        """Last queries of a prompt whose attention it wants to see; 0 for none at any time."""
        return 0

    @property
    def stride(self) -> int:
        """Generated tokens of which one is looked at, and stands for all of them."""
        return 1

    @property
    def interval(self) -> int:
        """Generated tokens for which one scoring serves."""
        return 1

    @property
    def default_scope(self) -> Scope:
        """The scope when none is asked for."""
        return self.scopes[0]

    def plan(self, model: PreTrainedModel, budget: Budget) -> HeadPlan:
        """Which kv heads keep everything, and what the others keep; none unless it knows better."""
        return HeadPlan({}, budget)

    def concern(self, model: PreTrainedModel) -> str | None:
        """What a user should know before using it on a model; None when there is nothing."""
        return None

    def start(self, tokens: NewTokens) -> dict[str, torch.Tensor]:
        """What to note of new tokens, `[B, G, N]` a field, or `[B, 1, N]` a common one; else 0."""
        return {}

    def observe(self, slots: Slots, seen: Observation) -> None:
        """Learn from attention, by writing the slots' fields in place."""
        raise NotImplementedError(f"{type(self).__name__} has a window but no observe()")

    @abstractmethod
    def score(self, slots: Slots) -> torch.Tensor:
        """How much each slot deserves to stay: `[B, G, T]`, or `[B, 1, T]` for all heads."""

    def score_together(self, layers: Sequence[Slots]) -> torch.Tensor:
        """One score for all layers, which hold the same tokens in the same slots: `[B, 1, T]`.

        Their mean, unless a policy knows better.
        """
        return mean_over_layers([self.score(slots).mean(1, keepdim=True) for slots in layers])


def mean_over_layers(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of tensors of one shape, on the device of the first."""
    total = numbers[0].clone()
    for each in numbers[1:]:
        total += each.to(total.device)
    return total / len(numbers)


def _build(
    model: PreTrainedModel, method: str, budget: Budget | None, options: dict[str, object]
) -> KVCache:
    from kvfold.evict.build import build_cache

    return build_cache(model, method, budget, options)


POLICIES: Registry[type[Policy]] = Registry("policy")
"""Every eviction policy by its name."""


def register_policy(name: str) -> Callable[[type[Policy]], type[Policy]]:
    """Decorate a policy class to make it a method of that name, which `make_cache` takes."""

    def add(policy: type[Policy]) -> type[Policy]:
        METHODS.register(name, Method(_build, policy.summary))
        return POLICIES.register(name, policy)

    return add
