"""What a `sekv` cache reports beyond any cache's tokens and bytes, against its tensors."""

from __future__ import annotations

import json

import pytest
import torch

import kvfold
from kvfold.artifacts import json_text
from kvfold.cache import KVCache
from kvfold.zoom.folding import Folding
from kvfold.zoom.layer import ZoomLayer
from kvfold.zoom.report import ZoomReport
from kvfold.zoom.spans import Spans
from kvfold.zoom.tiers import RawTier, Wanted
from tests.contract import left_padded
from tests.tiny import tiny_ids
from tests.zoom.running import has_folded, layers_of, one_by_one, run, wide

TOKEN = 2 * 32 * 2
"""Bytes of a key and a value of 32 dims in half precision."""


def fresh(budget: float = 0.4, **options: object) -> KVCache:
    return kvfold.make_cache(wide(), "sekv", budget=budget, **options)


def details_of(held: KVCache) -> ZoomReport:
    details = held.report().details
    assert isinstance(details, ZoomReport)
    return details


def test_tokens_are_counted_by_resolution():
    held, lengths = fresh(shortest=4), [300, 220]
    run(wide(), held, [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 9, seed=1))],
        left_padded(lengths, 300))  # fmt: skip
    layer, slow = layers_of(held)[0], layers_of(held)[0].spans.slow
    assert layer.settled is not None
    assert isinstance(slow, RawTier)
    anchors = window = folded = spans = 0
    for row, length in enumerate(lengths):
        exact = [p for p in layer.slots.positions[row, 0].tolist() if p >= 0]
        stays = sum(p < int(layer.settled[row]) for p in exact)
        inside = int((slow.positions[row, 0] >= 0).sum())
        anchors, window, folded = anchors + stays, window + len(exact) - stays, folded + inside
        spans += int((layer.spans.lengths[row] > 0).sum())
        assert len(exact) + inside == length + 9
    found = details_of(held)
    assert min(anchors, window, folded) > 2
    assert (found.anchors, found.window, found.spans) == (anchors / 2, window / 2, spans / 2)
    assert found.span_tokens == pytest.approx(folded / spans)
    assert found.rank is None


@pytest.mark.usefixtures("torch_alone")
def test_what_a_query_expands_is_a_share_of_the_spans(monkeypatch: pytest.MonkeyPatch):
    chosen, expand = [], Spans.expand

    def noting(self: Spans, wanted: torch.Tensor) -> object:
        chosen.append(wanted.shape[-1])
        return expand(self, wanted)

    held = fresh()
    run(wide(), held, [tiny_ids(1, 300)])
    monkeypatch.setattr(Spans, "expand", noting)
    run(wide(), held, one_by_one(tiny_ids(1, 1)))
    found, spans = details_of(held), len(layers_of(held)[0].spans)
    assert found.expanded == chosen
    assert found.expanded_share == [each / spans for each in chosen]
    assert 0 < found.expanded_share[0] < 1


@pytest.mark.usefixtures("torch_alone")
def test_no_more_than_all_spans_are_expanded():
    held = fresh(0.99, shortest=4, longest=8)
    run(wide(), held, [tiny_ids(1, 100), *one_by_one(tiny_ids(1, 3))])
    found, layer = details_of(held), layers_of(held)[0]
    assert found.expanded_share == [1, 1]
    pool = layer.spans.pool
    assert pool is not None
    assert held.report().bytes_fast == sum(
        each.slots.nbytes + each.spans.bytes_fast + pool.nbytes for each in layers_of(held)
    )


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("follow", [[1] * 20, [30]], ids=["tokens", "a prompt"])
def test_moved_bytes_are_those_of_the_tokens_that_were_fetched(
    follow: list[int], monkeypatch: pytest.MonkeyPatch
):
    fetched, fetch = [0], RawTier.fetch

    def counting(self: RawTier, wanted: Wanted) -> torch.Tensor:
        fetched[0] += int(wanted.lengths.sum())
        return fetch(self, wanted)

    monkeypatch.setattr(RawTier, "fetch", counting)
    held = fresh()
    run(wide(), held, [tiny_ids(1, 300)])
    assert details_of(held).bytes_moved == 0
    run(wide(), held, [tiny_ids(1, count, seed=step) for step, count in enumerate(follow)])
    assert details_of(held).bytes_moved == fetched[0] * TOKEN > 0


def test_the_peak_is_the_most_that_any_forward_left(monkeypatch: pytest.MonkeyPatch):
    """Before it was folded: the window is at its fullest then."""
    seen, after_forward = [], Folding.after_forward

    def noting(self: Folding, layers: list, outcome: object) -> None:
        seen.append((layers[0].spans.is_empty, sum(layer.bytes_fast for layer in layers)))
        after_forward(self, layers, outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(Folding, "after_forward", noting)
    held = fresh()
    run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 50))])
    found, report = details_of(held), held.report()
    assert found.bytes_prompt == max(nbytes for first, nbytes in seen if first)
    assert found.bytes_prompt >= 300 / 350 * report.bytes_full
    assert found.bytes_peak == max(nbytes for first, nbytes in seen if not first)
    assert report.bytes_fast <= found.bytes_peak <= 0.4 * report.bytes_full


@pytest.mark.parametrize("budget", [0.2, 0.25, 0.5])
def test_the_budget_holds_at_every_token(budget: float, monkeypatch: pytest.MonkeyPatch):
    """Also right before a fold, when the window has grown by a token since the last."""
    shares, after_forward = [], Folding.after_forward

    def noting(self: Folding, layers: list, outcome: object) -> None:
        if not layers[0].spans.is_empty:
            fast, full = (
                sum(getattr(layer, name) for layer in layers)
                for name in ("bytes_fast", "bytes_full")
            )
            shares.append(fast / full)
        after_forward(self, layers, outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(Folding, "after_forward", noting)
    held = fresh(budget)
    run(wide(), held, [tiny_ids(1, 520), *one_by_one(tiny_ids(1, 120))])
    assert layers_of(held)[0].expanded > 1
    assert max(shares) <= budget


def test_many_sinks_take_a_quarter_of_the_budget():
    held = fresh(0.25, sinks=190)
    run(wide(), held, [tiny_ids(1, 500), *one_by_one(tiny_ids(1, 30))])
    (first, _), report = layers_of(held), held.report()
    assert first.slots.positions[0, 0, :31].tolist() == list(range(31))
    assert report.bytes_fast <= 0.25 * report.bytes_full


def test_spans_shorter_than_allowed_take_no_more_than_they_have():
    held = fresh(0.3, longest=1024)
    run(wide(), held, [tiny_ids(1, 300)])
    (first, _), report = layers_of(held), held.report()
    assert first.spans.slow.longest == int(first.spans.lengths.max()) < 300
    one = sum(layer.spans.bytes_expanded for layer in layers_of(held))
    assert report.bytes_fast <= max(0.3 * report.bytes_full, report.bytes_index + 3 * one)


def test_all_that_a_later_prompt_expands_at_once_is_in_the_peak():
    held = fresh()
    run(wide(), held, [tiny_ids(1, 300)])
    before, (first, second) = details_of(held).bytes_peak, layers_of(held)
    # One layer after the other.
    room = max(
        min(5 * each.expanded, len(each.spans)) * each.spans.bytes_expanded
        for each in (first, second)
    )
    run(wide(), held, [tiny_ids(1, 5)])
    assert before + room <= details_of(held).bytes_peak < before + 2 * room


def test_a_batch_that_shrinks_forgets_no_peak():
    held = fresh()
    run(wide(), held, [tiny_ids(3, 300), *one_by_one(tiny_ids(3, 2))])
    before = held.report().bytes_fast
    held.batch_select_indices(torch.tensor([0]))
    assert held.report().bytes_fast < before / 2
    assert details_of(held).bytes_peak == before


def test_a_tier_of_factors_has_a_rank(monkeypatch: pytest.MonkeyPatch):
    held = fresh()
    run(wide(), held, [tiny_ids(1, 300)])
    assert "at rank" not in str(held.report())
    monkeypatch.setattr(RawTier, "mean_rank", 4.25)
    assert details_of(held).rank == 4.25
    assert "tokens at rank 4.2; a query" in str(held.report())


def test_the_rank_of_factors_is_told():
    held = fresh(factors="head", rank=3, longest=24)
    run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 2))])
    found = details_of(held)
    assert found.rank is not None
    assert 1 <= found.rank <= 3
    assert found.bytes_moved > 0


def test_before_anything_is_folded():
    held = fresh()
    assert held.report().details is None
    run(wide(), held, [tiny_ids(1, 20)])
    found = details_of(held)
    assert not has_folded(held)
    assert (found.anchors, found.window, found.spans, found.span_tokens) == (0, 20, 0, 0)
    assert (found.expanded, found.expanded_share, found.bytes_moved) == ([0, 0], [0, 0], 0)
    assert (found.bytes_prompt, found.bytes_peak) == (held.report().bytes_fast, 0)


def test_as_text_and_as_data():
    held = fresh()
    run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 5))])
    report, found = held.report(), details_of(held)
    first, second = str(report).splitlines()
    assert first.startswith("sekv: keeps ")
    assert second == str(found)
    assert f"{found.spans:.0f} spans of {found.span_tokens:.1f} tokens" in second
    document = json.loads(json_text(report.to_dict()))
    assert document["details"]["bytes_moved"] == found.bytes_moved > 0
    assert document["details"]["expanded_share"] == found.expanded_share


def test_other_methods_have_no_more_to_say():
    held = kvfold.make_cache(wide(), "streaming", budget=0.5)
    run(wide(), held, [tiny_ids(1, 60)])
    report = held.report()
    assert (report.details, report.to_dict()["details"]) == (None, None)
    assert "\n" not in str(report)


def test_a_fork_goes_on_counting_and_a_reset_starts_anew():
    held = fresh()
    run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 5))])
    other = held.fork()
    assert details_of(other).bytes_moved == details_of(held).bytes_moved
    held.reset()
    run(wide(), held, [tiny_ids(1, 20)])
    assert (details_of(held).bytes_moved, details_of(held).bytes_peak) == (0, 0)
    assert all(isinstance(layer, ZoomLayer) for layer in layers_of(other))
