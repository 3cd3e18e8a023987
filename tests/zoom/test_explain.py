"""What is noted of a text and an answer for its picture, against the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.cache import KVCache
from kvfold.errors import ConfigError
from kvfold.zoom import attention
from kvfold.zoom import layer as layer_module
from kvfold.zoom.explain import Explainer, span_of
from kvfold.zoom.notes import Tally, TextNotes
from kvfold.zoom.picture import plot_segments
from kvfold.zoom.spans import Spans
from kvfold.zoom.tiers import RawTier
from tests.tiny import tiny_ids
from tests.zoom.running import layers_of, one_by_one, plain_logits, run, wide

WORDS = [f" w{index}" for index in range(300)]


def fresh(budget: float = 0.4, **options: object) -> KVCache:
    return kvfold.make_cache(wide(), "sekv", budget=budget, **options)


def nats_of(ids: torch.Tensor) -> torch.Tensor:
    """Of a text of one row, `[N]`, from the plain model's logits."""
    logits = plain_logits(wide(), ids)[0, :-1].log_softmax(-1)
    nats = -logits.gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), nats])


@pytest.mark.parametrize("chunk_size", [None, 23])
def test_surprisal_and_spans_are_those_of_the_prompt(chunk_size: int | None):
    held, ids = fresh(shortest=4), tiny_ids(1, 300)
    explainer = Explainer(held)
    run(wide(), held, [ids], chunk_size=chunk_size)
    explainer.start_counting()
    run(wide(), held, one_by_one(tiny_ids(1, 40, seed=1)))
    text, layer = explainer.explain(WORDS), layers_of(held)[0]
    if chunk_size is None:
        torch.testing.assert_close(text.surprisal, nats_of(ids), atol=1e-4, rtol=1e-4)
    else:
        # Later chunks are read through the smaller cache; their first token has no surprisal.
        torch.testing.assert_close(text.surprisal[:23], nats_of(ids)[:23], atol=1e-4, rtol=1e-4)
        assert (text.surprisal[::23] == 0).all()
        assert (text.surprisal > 0).sum() == 300 - len(range(0, 300, 23))
    slow = layer.spans.slow
    assert isinstance(slow, RawTier)
    positions = slow.positions[0, 0].tolist()
    for span, (start, end) in enumerate(
        zip(layer.spans.starts[0].tolist(), layer.spans.ends[0].tolist(), strict=True)
    ):
        inside = [p for p in positions[start:end] if p < 300]
        assert (text.span_of == span).nonzero().flatten().tolist() == inside
    exact = layer.slots.positions[0, 0]
    assert (text.span_of[exact[exact < 300].long()] == -1).all()


def test_anchors_are_the_first_and_the_most_surprising():
    held, ids = fresh(0.9, shortest=4, sinks=3), tiny_ids(1, 300)
    explainer = Explainer(held)
    run(wide(), held, [ids])
    text, layer = explainer.explain(WORDS), layers_of(held)[0]
    settled = int(layer.settled[0])  # type: ignore[index]
    is_anchor = text.anchors
    assert 3 < int(is_anchor.sum()) < 60
    assert is_anchor[:3].all()
    assert not is_anchor[settled:].any()
    assert (text.span_of[is_anchor] == -1).all()
    others = text.surprisal[3:settled][~is_anchor[3:settled]]
    assert text.surprisal[3:][is_anchor[3:]].min() >= others.max()


@pytest.mark.parametrize("routing", ["sketch", "summary"])
def test_expansions_are_counted_by_layer(routing: str, monkeypatch: pytest.MonkeyPatch):
    chosen: dict[int, list[int]] = {}
    zoom, highest, current = layer_module.zoom_attention, attention._highest, [0]

    def attending(query: torch.Tensor, exact: object, spans: Spans, *rest: object) -> object:
        current[0] = id(spans)
        return zoom(query, exact, spans, *rest)

    def noting(numbers: torch.Tensor, expanded: int) -> torch.Tensor:
        found = highest(numbers, expanded)
        chosen.setdefault(current[0], []).extend(found.flatten().tolist())
        return found

    held = fresh(routing=routing)
    explainer = Explainer(held)
    run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 5))])
    explainer.start_counting()
    monkeypatch.setattr(layer_module, "zoom_attention", attending)
    monkeypatch.setattr(attention, "_highest", noting)
    run(wide(), held, [*one_by_one(tiny_ids(1, 40, seed=1)), tiny_ids(1, 11)])
    shares = explainer.explain(WORDS).expanded
    assert shares is not None
    assert shares.shape == (2, len(layers_of(held)[0].spans))
    for layer, found in zip(layers_of(held), shares, strict=True):
        counts = torch.bincount(torch.tensor(chosen[id(layer.spans)]), minlength=len(found))
        torch.testing.assert_close(found, counts / (2 * 51))


def test_a_span_whose_mean_is_read_is_not_expanded():
    tally = Tally()
    chosen = torch.tensor([[[[0, 2]], [[2, 1]]]])
    asked = torch.tensor([[[True, False], [False, False]], [[True, True], [False, True]]])
    tally.add(chosen, asked[None, :, :, None], 3)
    assert tally.shares(4).tolist() == [[0.5, 0.5, 0.5, 0.0]]
    tally.add(chosen, None, 4)
    assert tally.shares(4).tolist() == [[0.5, 0.5, 0.75, 0.0]]
    tally.map(lambda tensor: tensor.repeat(2, 1))
    assert tally.shares(4).shape == (2, 4)


@pytest.mark.usefixtures("torch_alone")
def test_nothing_is_counted_unasked_and_counting_changes_nothing():
    ids, follow = tiny_ids(1, 300), one_by_one(tiny_ids(1, 20))
    plain, watched = fresh(), fresh()
    expected = run(wide(), plain, [ids, *follow])
    assert all(layer.notes is None and layer.spans.tally is None for layer in layers_of(plain))
    explainer = Explainer(watched)
    first = run(wide(), watched, [ids])
    explainer.start_counting()
    assert torch.equal(torch.cat([first, run(wide(), watched, follow)], dim=1), expected)


def test_rows_are_their_own():
    held = fresh(shortest=4)
    Explainer(held)
    run(wide(), held, [tiny_ids(2, 300)])
    layer = layers_of(held)[0]
    for row in range(2):
        assert isinstance(layer.spans.slow, RawTier)
        inside = layer.spans.slow.positions[row, 0]
        found = span_of(layer, row)
        assert (found >= 0).nonzero().flatten().tolist() == inside[inside >= 0].tolist()
    assert span_of(layer, 0).tolist() != span_of(layer, 1).tolist()


def test_notes_of_chunks_stand_at_their_positions():
    notes = TextNotes()
    positions = torch.tensor([[-1, 0, 1]])
    notes.note_surprisal(positions, torch.tensor([[9.0, 1.0, 2.0]]))
    positions += 7
    notes.note_surprisal(torch.tensor([[3]]), torch.tensor([[4.0]]))
    assert notes.surprisal(0, 4).tolist() == [1, 2, 0, 4]
    assert notes.surprisal(0, 2).tolist() == [1, 2]
    notes.note_anchors(torch.tensor([[2, -1, 5]]))
    assert notes.anchors(0, 4).tolist() == [False, False, True, False]


def test_the_picture_is_drawn(tmp_path: Path):
    held = fresh(shortest=4)
    explainer = Explainer(held)
    run(wide(), held, [tiny_ids(1, 300)])
    explainer.start_counting()
    run(wide(), held, one_by_one(tiny_ids(1, 4)))
    plot_segments(explainer.explain(WORDS), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_short_prompt_is_refused():
    held = fresh()
    explainer = Explainer(held)
    run(wide(), held, [tiny_ids(1, 20)])
    with pytest.raises(ConfigError, match="nothing of the prompt's 20 tokens was folded"):
        explainer.start_counting()


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("sekv", 1.0), ("tova", 0.5)])
def test_a_cache_without_spans_is_refused(method: str, budget: float | None):
    with pytest.raises(ConfigError, match="keeps no spans that could be explained: use sekv"):
        Explainer(kvfold.make_cache(wide(), method, budget=budget))
