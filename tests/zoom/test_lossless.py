"""With every span expanded the cache says what the plain model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.cache import KVCache
from kvfold.zoom import folding
from kvfold.zoom.factors import FactorTier
from kvfold.zoom.layer import ZoomLayer
from tests.contract import assert_close, attached, left_padded
from tests.tiny import tiny_ids
from tests.zoom.running import has_folded, layers_of, one_by_one, plain_logits, run

PROMPT, SECOND, COUNT = 150, 20, 40
KINDS = ["llama", "qwen3", "gemma2", "gemma3"]


def check(
    kind: str,
    budget: float,
    mask: torch.Tensor | None,
    rows: int,
    tolerance: float = 1e-5,
    count: int = COUNT,
    **options: object,
) -> KVCache:
    """A prompt, a second one and generated tokens, against one forward over all of them."""
    model, ids = attached(kind), tiny_ids(rows, PROMPT + SECOND + count)
    held = kvfold.make_cache(model, "sekv", budget=budget, **options)
    pieces = [
        ids[:, :PROMPT], ids[:, PROMPT : PROMPT + SECOND], *one_by_one(ids[:, PROMPT + SECOND :]),
    ]  # fmt: skip
    actual = run(model, held, pieces, mask)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(rows, SECOND + count)], dim=1)
    for layer in layers_of(held):
        assert layer.spans.means.shape[2] >= 5
        assert layer.expanded >= layer.spans.means.shape[2]
    expected = plain_logits(model, ids, mask)
    ends = [PROMPT - 1, *range(PROMPT + SECOND - 1, PROMPT + SECOND + count)]
    assert_close(actual, expected[:, ends], tolerance)
    assert has_folded(held)
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_budget(kind: str):
    """All spans fit as they are held, in half precision: which is all that is lost."""
    held = check(kind, 0.98, None, 1, 0.01, directions=2, shortest=8, longest=16)
    assert layers_of(held)[0].spans.slow.keys.dtype == torch.float16
    assert held.report().share <= 0.98 or kind.startswith("gemma")


@pytest.mark.parametrize("lengths", [[150], [150, 150, 150], [150, 97, 60]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_all_spans_expanded(kind: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch):
    """With anchors and spans of all lengths, each row its own."""
    check_all(kind, lengths, monkeypatch)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_256_generated_tokens(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Of three left-padded rows: the window is folded again and again."""
    monkeypatch.setattr(ZoomLayer, "_affordable", lambda layer: 1000)
    mask = left_padded([150, 97, 60], PROMPT)
    held = check(kind, 0.5, mask, 3, slow="exact", directions=4, count=256)
    assert int(layers_of(held)[0].slots.counts.max()) < 60


def test_all_spans_expanded_from_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    check_all("llama", [150, 97, 60], monkeypatch, disk=tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "smollm3"])
@pytest.mark.parametrize("factors", ["head", "joint"])
def test_all_spans_expanded_as_factors(factors: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """At full rank, however much they take; rows of several lengths, layers without RoPE."""
    lengths = [150, 97, 60]
    monkeypatch.setattr(FactorTier, "_stays", lambda held, new, found: new.lengths == 0)
    held = check_all(kind, lengths, monkeypatch, factors=factors, rank=32)
    tier = layers_of(held)[0].spans.slow
    assert torch.equal(tier.ranks, layers_of(held)[0].spans.lengths[..., None].expand(-1, -1, 2))


def check_all(
    kind: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, **options: object
) -> KVCache:
    monkeypatch.setattr(folding, "_ANCHOR_PART", 8)
    monkeypatch.setattr(ZoomLayer, "_affordable", lambda layer: 1000)
    mask = left_padded(lengths, PROMPT) if min(lengths) < PROMPT else None
    held = check(
        kind, 0.5, mask, len(lengths), slow="exact",
        directions=4, shortest=3, longest=12, deviations=1.5, **options,
    )  # fmt: skip
    layer = layers_of(held)[0]
    if len(lengths) > 1:
        stays = (layer.slots.positions[:, 0] >= 0).sum(-1).tolist()
        assert len(set(stays)) > 1, "rows keep different numbers of tokens"
    assert len(set(layer.spans.lengths[0].tolist())) > 2, "spans of several lengths"
    sizes = (layer.slots.counts + layer.spans.lengths.sum(-1)).tolist()
    assert sizes == [length + SECOND + COUNT for length in lengths], "each token once"
    return held


def test_padding_within_a_later_prompt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ZoomLayer, "_affordable", lambda layer: 1000)
    model, ids = attached(), tiny_ids(2, 130)
    mask = torch.cat([left_padded([90, 70], 90), left_padded([12, 40], 40)], dim=1)
    held = kvfold.make_cache(
        model, "sekv", budget=0.5, slow="exact", directions=4, shortest=3, longest=12
    )
    ends = torch.tensor([89, 129])
    actual = run(model, held, [ids[:, :90], ids[:, 90:]], mask)
    assert_close(actual, plain_logits(model, ids, mask)[:, ends])
    follow = tiny_ids(2, 20, seed=4)
    actual = run(model, held, one_by_one(follow), torch.cat([mask, mask.new_ones(2, 1)], dim=1))
    mask = torch.cat([mask, mask.new_ones(2, 20)], dim=1)
    expected = plain_logits(model, torch.cat([ids, follow], dim=1), mask)
    assert_close(actual, expected[:, 130:])
