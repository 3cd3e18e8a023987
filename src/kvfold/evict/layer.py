"""A cache layer that keeps to a budget: after a prompt in one cut, then a slot at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvfold.attention.grouped import attention_probabilities
from kvfold.budget import Budget
from kvfold.cache.forward import Forward
from kvfold.cache.layer import CacheLayer
from kvfold.cache.slots import Slots, headroom
from kvfold.evict.allowance import row_allowance
from kvfold.evict.policy import NewTokens, Observation, Policy, Scope
from kvfold.ops.selection import keep_indices, protected, turns_to_go, victim

TURN = "turn"
"""Field where one scoring serves several tokens, of the first layer alone with scope token: the
slots that go next are numbered up to -1, all others are 0."""
_TURNS_PART = 16
"""In a large cache one scoring serves so many tokens that this part of what is held goes."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What all layers of one cache share."""

    policy: Policy
    """Scores the tokens."""
    budget: Budget
    """How many may stay."""
    scope: Scope
    """What shares one kept set."""
    sinks: int
    """First tokens that always stay, in at most a quarter of the budget."""
    recent: int
    """Last tokens that always stay, in at most half of the budget."""
    layers: int
    """Evicting layers in the cache, for a budget in bytes."""

    def takes_turns(self, index: int) -> bool:
        """Whether a layer notes which slots go next, since one scoring serves several tokens."""
        return self.policy.interval > 1 and (self.scope != "token" or index == 0)


class EvictingLayer(CacheLayer):
    """Keeps the tokens that a policy scores highest, within a budget.

    With scope `layer` or `head` it acts at the end of its own attention, so that a prompt is
    never held whole by more than one layer. With scope `token` it waits for `cut` and `choose`.
    """

    def __init__(self, eviction: Eviction, index: int = 0) -> None:
        """Start empty.

        Args:
            eviction: What all layers of the cache share.
            index: Which of them this is, from 0.
        """
        self.eviction = eviction
        self._index = index
        policy, shared = eviction.policy, eviction.scope != "head"
        turn = (TURN,) if eviction.takes_turns(index) else ()
        fields, common = policy.fields, policy.common
        fields, common = (fields, (*common, *turn)) if shared else ((*fields, *turn), common)
        super().__init__(Slots(shared=shared, fields=fields, common=common))
        self._chosen: torch.Tensor | None = None
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._may_be_over = False
        # The turns in order, the next one last, for as long as nothing else is allowed.
        self._queue: list[torch.Tensor] = []
        self._queued_for = -1

    @property
    def is_croppable(self) -> bool:
        """Not for good: sooner or later a token is evicted."""
        return False

    @property
    def queries_wanted(self) -> int:
        """As many as the policy looks at."""
        return self.eviction.policy.window

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._chosen, self._may_be_over, self._queued_for = None, False, -1

    def _allowed(self) -> int | torch.Tensor:
        """Tokens that each row may keep now."""
        if self.lengths is None:
            return self.eviction.budget.tokens(self.seen, self._token_cost)
        return row_allowance(self.eviction.budget, self.lengths, self._token_cost)

    def _usable(self) -> int | torch.Tensor:
        """The same, but no more than are held: storage grows after the budget does.

        Of fewer tokens fewer are protected, so that some can always go.
        """
        allowed = self._allowed()
        if isinstance(allowed, torch.Tensor):
            return allowed.minimum(self.slots.counts)
        return min(allowed, len(self.slots))

    @property
    def budgeted(self) -> int:
        """Most tokens that a row may keep now."""
        allowed = self._allowed()
        return int(allowed.max()) if isinstance(allowed, torch.Tensor) else allowed

    # A ratio grows with the text, in steps, and each step copies a layer's storage. The layers take
    # turns, one a token, and all use what they have got once the last has had its turn.

    def _even_room(self, delay: int) -> int:
        """Tokens that every row may keep with one more, a while ago, when all are of one length."""
        return self.eviction.budget.tokens(max(self.seen + 1 - delay, 0), self._token_cost)

    def _room(self, lengths: torch.Tensor, delay: int) -> torch.Tensor:
        """Tokens that each of several rows may keep with one more, a while ago, `[B]`."""
        then = (lengths + 1 - delay).clamp_min(0)
        return row_allowance(self.eviction.budget, then, self._token_cost).minimum(lengths + 1)

    @property
    def _token_cost(self) -> int:
        """Bytes of one more token of every row in all layers, where the budget asks for them."""
        if self.eviction.budget.unit != "bytes":
            return 0
        own, layers = self.slots.bytes_per_token, self.eviction.layers
        if self.eviction.scope != "token" or not self.eviction.takes_turns(0):
            return own * layers
        # The turns stand in the first layer alone.
        turn = 4 * self.slots.keys.shape[0]
        return (own - (turn if self._index == 0 else 0)) * layers + turn

    # Storing ----------------------------------------------------------------------------------

    def _insert(self, keys: torch.Tensor, values: torch.Tensor) -> slice | torch.Tensor:
        self._new = (keys, values)
        if keys.shape[2] > 1 or self.slots.is_empty:
            self._may_be_over = True
            self.forget_turns()
            start = self.slots.append(keys, values, headroom=0)
            return slice(start, len(self.slots))
        if self._chosen is None and self.make_room():
            self._chosen = self.choose_next(self.scores)
        if self._chosen is None:
            start = self.slots.append(keys, values, headroom=0)
            return slice(start, len(self.slots))
        slot, self._chosen = self._chosen, None
        self.slots.put(slot, keys, values)
        self.has_evicted = True
        return slot

    def make_room(self) -> bool:
        """Prepare storage for one more token a row.

        Returns:
            Whether a slot has to be chosen for it: rows of several lengths have room at different
            times, so theirs always is.
        """
        last = self.eviction.layers - 1
        if self.lengths is None:
            self._reserve(self._even_room(self._index))
            return len(self.slots) >= self._even_room(last)
        self._reserve(int(self._room(self.lengths, self._index).max()))
        missing = int(self._room(self.lengths, last).max()) - len(self.slots)
        if missing > 0:
            self.slots.extend(missing)
        return True

    def _reserve(self, room: int) -> None:
        """Allocate the next slot, and some beyond it, if there is room for it."""
        held = len(self.slots)
        if self.slots.capacity < min(room, held + 1):
            self.slots.reserve(min(room, held + 2 * headroom(held)))

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Decide which slot the next token could take, after `make_room`.

        Args:
            scores: `[B, P, T]`, of this layer, or of all where they share the kept set.

        Returns:
            `[B, P, 1]`.
        """
        return victim(scores, self.slots.positions, self.shielded(), self.has_room())

    def choose_next(self, score: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Decide by new scores, or by the turns of older ones; see `choose`.

        Args:
            score: Gives new ones.
        """
        if not self.eviction.takes_turns(self._index):
            return self.choose(score())
        room = self.has_room()
        if room is None:
            return self._next_in_turn(score)
        turns, shielded = self.slots.field(TURN), self.shielded()
        turns_left = turns.masked_fill(shielded, 0).amin(dim=-1, keepdim=True)
        is_used_up = (turns_left >= 0) & ~room.view(-1, 1, 1)
        if bool(is_used_up.any()):
            new = turns_to_go(score(), shielded, self._turns())
            turns.copy_(torch.where(is_used_up, new, turns))
        return self.choose(turns)

    def _next_in_turn(self, score: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The same where all rows are of one length: their turns are used up together.

        What is protected only gets less while the budget is the same, so the order stands.
        """
        allowed = min(self.budgeted, len(self.slots))
        if self._queued_for != allowed:
            self._queue, self._queued_for = self._in_turn(), allowed
        if not self._queue:
            turns = turns_to_go(score(), self.shielded(), self._turns())
            self.slots.field(TURN).copy_(turns)
            self._queue = self._in_turn()
        return self._queue.pop()

    def _turns(self) -> int | torch.Tensor:
        """Tokens for which one scoring serves: in a large cache, a small part of it.

        One number, or one a row `[B]` where they are of several lengths.
        """
        least, part = self.eviction.policy.interval, _TURNS_PART
        if self.lengths is None:
            return max(least, len(self.slots) // part)
        return (self.slots.counts // part).clamp_min(least)

    def _in_turn(self) -> list[torch.Tensor]:
        """The slots of each turn `[B, P, 1]`, the next one last."""
        turns = self.slots.field(TURN).masked_fill(self.shielded(), 0)
        count = int((turns < 0).sum(-1).min())
        first = turns.topk(count, dim=-1, largest=False).indices
        return list(first.flip(-1).split(1, dim=-1)) if count else []

    def forget_turns(self) -> None:
        """Ask anew at the next token: what was asked before a new prompt may no longer hold."""
        if self.eviction.takes_turns(self._index) and not self.slots.is_empty:
            self.slots.field(TURN).zero_()
            self._queued_for = -1

    def has_room(self) -> torch.Tensor | None:
        """Rows that may fill an empty slot, `[B]`; None where all are of one length."""
        if self.lengths is None:
            return None
        return self.slots.counts < self._room(self.lengths, self.eviction.layers - 1)

    def use(self, chosen: torch.Tensor) -> None:
        """Let the next token take a slot that was chosen, `[B, P, 1]`."""
        self._chosen = chosen

    def scores(self) -> torch.Tensor:
        """The policy's scores, the mean over heads that share the kept set: `[B, P, T]`."""
        scores = self.eviction.policy.score(self.slots)
        if self.slots.shared:
            return scores if scores.shape[1] == 1 else scores.mean(dim=1, keepdim=True)
        return scores.expand(-1, self.slots.positions.shape[1], -1)

    def shielded(self) -> torch.Tensor:
        """The slots that may not go, empty ones included: `[B, P, T]`."""
        return protected(
            self.slots.positions,
            self.row_lengths,
            self._usable(),
            sinks=self.eviction.sinks,
            recent=self.eviction.recent,
        )

    # After attention --------------------------------------------------------------------------

    def _observe(self, probabilities: torch.Tensor, positions: torch.Tensor) -> None:
        policy, count = self.eviction.policy, probabilities.shape[3]
        weight = self._weight() if count == 1 and policy.stride > 1 else 1.0
        if policy.window == 0 or (isinstance(weight, float) and weight == 0):
            return
        queries: int | torch.Tensor = count
        if self.lengths is not None:
            tokens = positions >= 0
            probabilities = probabilities * tokens[:, None, None, :, None]
            queries = tokens.sum(-1)
        policy.observe(self.slots, Observation(probabilities.detach(), queries, weight))

    def _weight(self) -> float | torch.Tensor:
        """Queries that the newest token stands for: the stride in its turn, else 0."""
        stride = self.eviction.policy.stride
        phase = (self.row_lengths + self._index) % stride
        if isinstance(phase, int):
            return float(stride) if phase == 0 else 0.0
        return (phase == 0) * float(stride)

    def _arrive(self, forward: Forward) -> None:
        if self._new is None:
            return
        tokens = NewTokens(*self._new, forward.positions)
        self._new = None
        for name, numbers in self.eviction.policy.start(tokens).items():
            self.slots.note(self._inserted, name, numbers)

    def _settle(self, forward: Forward) -> None:
        if forward.positions.shape[1] > 1:
            self._look_back(forward)
        if self.eviction.scope != "token" and self.is_over:
            self.cut(self.scores())

    def _look_back(self, forward: Forward) -> None:
        """Show the policy the attention of the last queries of a prompt."""
        window = min(self.eviction.policy.window, forward.query.shape[2])
        if window == 0:
            return
        last, query = forward.positions[:, -window:], forward.query[:, :, -window:]
        keys, scoring = self.slots.keys, forward.scoring
        if self._all_visible(forward.mask):
            probabilities = attention_probabilities(query, keys, scoring, causal=True)
        else:
            seen = forward.mask.visible(self.slots.positions, last)
            probabilities = attention_probabilities(query, keys, scoring, visible=seen)
        self._observe(probabilities, last)

    @property
    def is_over(self) -> bool:
        """Whether a row may hold more than its budget, or padding takes up slots."""
        if not self._may_be_over or self.lengths is not None:
            return self._may_be_over
        return len(self.slots) > self.eviction.budget.tokens(self.seen, self._token_cost)

    def cut(self, scores: torch.Tensor) -> None:
        """Keep what the budget allows and free the rest.

        Args:
            scores: `[B, P, T]`, of this layer, or of all where they share the kept set.
        """
        allowed = self._allowed()
        is_over = self.slots.counts > allowed
        self.has_evicted = True
        indices, held = keep_indices(scores, self.slots.positions, self.shielded(), allowed)
        self.slots.keep(indices, held)
        self._chosen, self._may_be_over, self._queued_for = None, False, -1
        if self.eviction.takes_turns(self._index):
            self._start_turns(scores.gather(-1, indices), is_over)

    def _start_turns(self, scores: torch.Tensor, is_over: torch.Tensor) -> None:
        """Note which slots go next by the scores of the cut, in rows that it was needed for.

        Some layers note fewer, so that later not all ask for new scores at the same token.
        """
        interval = self.eviction.policy.interval
        count = 1 + self._index % interval * (self._turns() // interval)
        turns = turns_to_go(scores, self.shielded(), count)
        self.slots.field(TURN).copy_(turns * is_over.view(-1, 1, 1))

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        rows = 0 if self.slots.is_empty else len(self.slots.keys)
        super()._change_rows(change)
        self._chosen, self._queued_for = None, -1
        if self.eviction.budget.unit == "bytes" and not self.slots.is_empty:
            # Bytes are for the whole batch: with more rows, each may keep less.
            self._may_be_over |= len(self.slots.keys) > rows

    def load(self, tensors: dict[str, torch.Tensor], seen: int, *, has_evicted: bool) -> None:
        """Take back what `state` gave."""
        super().load(tensors, seen, has_evicted=has_evicted)
        self._may_be_over = self.eviction.budget.unit == "bytes"
