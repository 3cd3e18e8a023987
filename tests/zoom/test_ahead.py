"""Spans that come before they are asked for: which, and that they change nothing but the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvfold.zoom.ahead import Ahead, runners_up
from kvfold.zoom.lane import Coming, Transport
from kvfold.zoom.layer import ZoomLayer
from kvfold.zoom.pinned import PinnedTier
from kvfold.zoom.pool import Fetched
from kvfold.zoom.tiers import Wanted
from tests.contract import assert_close
from tests.tiny import tiny_ids
from tests.zoom.hosts import BOTH, on_host, pieces
from tests.zoom.running import layers_of, one_by_one, run, wide


def test_runners_up_are_those_behind_the_chosen():
    draw = torch.Generator().manual_seed(0)
    numbers = torch.rand(2, 3, 4, 1, 9, generator=draw)
    order = numbers.amax(2).argsort(-1, descending=True)
    actual = runners_up(numbers, order[..., :3].flip(-1), 2)
    assert torch.equal(actual.sort(-1).values, order[..., 3:5].sort(-1).values)


@pytest.mark.parametrize("asked", [[1, 4], [0, 5], [4, 0, 1, 5], [5]], ids=str)
def test_what_came_ahead_is_not_brought_again(asked: list[int]):
    """Two owners; ahead are spans 1 and 4 of the first, 4 and 5 of the second."""
    ahead = torch.tensor([[1, 4], [4, 5]])
    count = asked * 2
    owners = torch.tensor([0] * len(asked) + [1] * len(asked))
    spans, brought = torch.tensor(count), []

    def tokens(owners: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
        return (100 * owners + 10 * spans)[:, None, None] + torch.arange(6).view(3, 2).float()

    def fetch(owners: torch.Tensor, spans: torch.Tensor) -> Fetched:
        brought.extend(zip(owners.tolist(), spans.tolist(), strict=True))
        is_token = torch.arange(3) < (owners + spans)[:, None]
        return Fetched(tokens(owners, spans), is_token)

    first = torch.tensor([0, 0, 1, 1])
    is_token = torch.arange(3) < (first + ahead.flatten())[:, None]
    coming = Coming(tokens(first, ahead.flatten()).flatten(0, 1))
    found = Ahead(ahead, is_token, coming).serve(owners, spans, fetch)
    assert torch.equal(found.tokens, tokens(owners, spans))
    assert torch.equal(found.is_token, torch.arange(3) < (owners + spans)[:, None])
    here = {(0, 1), (0, 4), (1, 4), (1, 5)}
    pairs = zip(owners.tolist(), spans.tolist(), strict=True)
    assert brought == [pair for pair in pairs if pair not in here]


# In a cache --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_alone")
@BOTH
@pytest.mark.parametrize("routing", ["sketch", "summary"])
def test_spans_ahead_change_no_output(
    make: Callable[[], Transport | None], routing: str, monkeypatch: pytest.MonkeyPatch
):
    """At as many expanded ones; and some of what is asked for came ahead."""
    found, brought = [], []
    for ahead in (0, 3):
        fetch, count = PinnedTier.fetch, [0]

        def counting(
            self: PinnedTier,
            wanted: Wanted,
            fetch: Callable[..., torch.Tensor] = fetch,
            count: list[int] = count,
        ) -> torch.Tensor:
            count[0] += len(wanted.rows)
            return fetch(self, wanted)

        with monkeypatch.context() as patch:
            patch.setattr(PinnedTier, "fetch", counting)
            patch.setattr(
                ZoomLayer,
                "_affordable",
                lambda self, ahead=ahead: 0 if self.spans.is_empty else 4 + ahead,
            )
            held = on_host(transport=make(), ahead=ahead / 4, routing=routing)
            found.append(run(wide(), held, pieces()))
            (sizes,) = {(layer.expanded, layer.spans.ahead) for layer in layers_of(held)}
            assert sizes == (4, ahead)
            other = held.fork()
            held.reorder_cache(torch.tensor([1, 0]))
            held.reorder_cache(torch.tensor([1, 0]))
            follow = one_by_one(tiny_ids(2, 12, seed=6))
            found[-1] = torch.cat([found[-1], run(wide(), held, follow)], dim=1)
            assert_close(run(wide(), other, follow), found[-1][:, -12:])
        brought.append(count[0])
    assert torch.equal(*found)
    assert brought[1] < brought[0]


@pytest.mark.usefixtures("torch_alone")
def test_spans_ahead_are_within_the_budget():
    held, without = on_host(0.5, ahead=0.5), on_host(0.5)
    for piece in pieces(more=30):
        for each in (held, without):
            run(wide(), each, [piece])
        report = held.report()
        assert report.share <= 0.5
        for layer, other in zip(layers_of(held), layers_of(without), strict=True):
            places = layer.expanded + layer.spans.ahead
            assert places == other.expanded
            assert layer.spans.ahead == places // 3 > 0
    for layer in layers_of(held):
        spans = layer.spans
        assert spans.pool is not None
        assert spans._ahead is not None
        used = spans.pool.nbytes + spans._ahead.nbytes
        assert used == (layer.expanded + spans.ahead) * spans.bytes_expanded
        assert layer.bytes_fast == layer.slots.nbytes + spans.bytes_fast + used


def test_nothing_comes_ahead_where_all_is_expanded():
    held = on_host(0.95, ahead=0.5)
    run(wide(), held, [tiny_ids(1, 300)])
    for layer in layers_of(held):
        assert (layer.expanded, layer.spans.ahead) == (len(layer.spans), 0)
