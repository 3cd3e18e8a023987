"""Routing by mean keys, with trained gates and without them."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.attention import Scoring
from kvfold.cache import KVCache
from kvfold.errors import ArtifactError, ConfigError
from kvfold.models import fingerprint, shape_facts
from kvfold.zoom.attention import Exact, zoom_attention
from kvfold.zoom.gates import Gates, GateShape
from kvfold.zoom.gates_artifact import GatesArtifact
from kvfold.zoom.layer import ZoomLayer
from kvfold.zoom.spans import Spans
from kvfold.zoom.summary_router import SummaryRouter
from kvfold.zoom.tiers import RawTier
from tests.contract import assert_close, attached, left_padded
from tests.tiny import tiny_ids
from tests.zoom.reference import fold_of
from tests.zoom.running import has_folded, layers_of, one_by_one, plain_logits, run, wide

ROWS, GROUPS, REPEATS, WIDTH, LONGEST = 2, 2, 3, 4, 5
LENGTHS = [[5, 3, 4, 1, 5, 2], [2, 5, 5, 3]]
SCORING = Scoring(0.7)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_gates(layers: int, heads: int, width: int, threshold: float) -> Gates:
    """Gates of which about half are open, with thresholds of the middle."""
    gates = Gates(GateShape(layers, heads, width), generator=torch.Generator().manual_seed(3))
    gates.thresholds.data.fill_(threshold)
    return gates.eval().requires_grad_(False)


def spans_of(gates: Gates | None) -> Spans:
    held, fold = Spans(SummaryRouter(gates, 0), RawTier(LONGEST), None), fold_of(LENGTHS)
    shape = (ROWS, GROUPS, fold.tokens.shape[1], WIDTH)
    held.add(normal(*shape), normal(*shape, seed=1), fold, None)
    return held


def exact(seed: int = 7) -> Exact:
    shape = (ROWS, GROUPS, 3, WIDTH)
    return Exact(normal(*shape, seed=seed), normal(*shape, seed=seed + 1), None)


def means_of(held: Spans, row: int, head: int) -> list[torch.Tensor]:
    """Mean key of each span of a row, by the weights of `fold_of`."""
    found = []
    for start, end in zip(held.starts[row].tolist(), held.ends[row].tolist(), strict=True):
        if end > start:
            weights = torch.arange(1, end - start + 1).float()
            keys = held.slow.keys[row, head, start:end]
            found.append((weights / weights.sum()) @ keys)
    return found


def test_an_unexpanded_span_scores_as_its_mean_key_and_its_length():
    held, query = spans_of(None), normal(ROWS, GROUPS, REPEATS, 2, WIDTH, seed=5)
    routed = held.route(query, SCORING)
    assert routed.gates is None
    for row in range(ROWS):
        for head in range(GROUPS):
            means = means_of(held, row, head)
            for span, mean in enumerate(means):
                expected = query[row, head] @ mean + math.log(LENGTHS[row][span])
                torch.testing.assert_close(routed.masses[row, head, :, :, span], expected)
            assert bool((routed.masses[row, head, :, :, len(means) :] == -torch.inf).all())


def test_gates_are_those_of_the_paper():
    gates = random_gates(1, GROUPS * REPEATS, WIDTH, 0.6)
    held, query = spans_of(gates), normal(ROWS, GROUPS, REPEATS, 2, WIDTH, seed=5)
    routed = held.route(query, SCORING)
    assert routed.gates is not None
    for row in range(ROWS):
        for head in range(GROUPS):
            for span, mean in enumerate(means_of(held, row, head)):
                for own in range(REPEATS):
                    weights = gates.weights(0)[head * REPEATS + own]
                    key = torch.nn.functional.normalize(weights @ mean, dim=0)
                    logits = query[row, head, own] @ weights.T @ key / math.sqrt(len(weights))
                    logits = logits + math.log(LENGTHS[row][span])
                    expected = logits - math.log(0.6 / 0.4)
                    actual = routed.gates[row, head, own, :, span]
                    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("expanded", [1, 3, 6])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_head_reads_the_tokens_it_asked_for_and_the_means_of_the_rest(
    queries: int, expanded: int
):
    gates, near = random_gates(1, GROUPS * REPEATS, WIDTH, 0.8), exact()
    held, query = spans_of(gates), normal(ROWS, GROUPS * REPEATS, queries, WIDTH, seed=5)
    scaled = (query * SCORING.scaling).unflatten(1, (GROUPS, REPEATS))
    routed = held.route(scaled, SCORING)
    assert routed.gates is not None
    asked = routed.gates > 0
    assert 0 < float(asked.float().mean()) < 1
    actual = zoom_attention(query, near, held, expanded, SCORING).unflatten(1, (GROUPS, -1))
    shared = zoom_attention(query, near, held, expanded, SCORING, held.everything())
    torch.testing.assert_close(shared.unflatten(1, (GROUPS, -1)), actual, atol=1e-5, rtol=1e-4)
    for row, head, own, one in torch.cartesian_prod(
        *(torch.arange(n) for n in (ROWS, GROUPS, REPEATS, queries))
    ).tolist():
        vector = scaled[row, head, own, one]
        highest = routed.gates[row, head, :, one].amax(0)
        chosen = set(highest.topk(min(expanded, 6)).indices.tolist())
        scores = [near.keys[row, head] @ vector]
        values = [near.values[row, head]]
        for span in range(len(LENGTHS[row])):
            start, end = int(held.starts[row, span]), int(held.ends[row, span])
            if span in chosen and asked[row, head, own, one, span]:
                scores.append(held.slow.keys[row, head, start:end] @ vector)
                values.append(held.slow.values[row, head, start:end])
            else:
                scores.append(routed.masses[row, head, own, one, span][None])
                values.append(held.means[row, head, span][None])
        expected = torch.cat(scores).softmax(0) @ torch.cat(values)
        torch.testing.assert_close(actual[row, head, own, one], expected, atol=1e-5, rtol=1e-4)


def test_a_copy_shares_the_gates_and_nothing_else():
    gates = random_gates(1, GROUPS * REPEATS, WIDTH, 0.6)
    held = spans_of(gates)
    other = copy.deepcopy(held)
    assert isinstance(other.router, SummaryRouter)
    assert other.router.gates is gates
    mine, copied = (dict(each.router.state()) for each in (held, other))
    for name, tensor in mine.items():
        assert torch.equal(tensor, copied[name])
        assert tensor.data_ptr() != copied[name].data_ptr()


# As a cache -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates of the tiny model, half open."""
    model, found = wide(), tmp_path_factory.mktemp("gates")
    config = model.config
    gates = random_gates(config.num_hidden_layers, config.num_attention_heads, 32, 0.95)
    facts, origin = shape_facts(model), fingerprint(model)
    GatesArtifact(gates, "a tiny model", facts, origin, {}).save_pretrained(found)
    return found


def fresh(folder: Path | str = "none", budget: float = 0.4, **options: object) -> KVCache:
    options = {"routing": "summary", "gates": str(folder), **options}
    return kvfold.make_cache(wide(), "sekv", budget=budget, **options)


def follow(held: KVCache, rows: int = 2) -> torch.Tensor:
    return run(wide(), held, [tiny_ids(rows, 5, seed=3), *one_by_one(tiny_ids(rows, 24))])


@pytest.mark.parametrize("trained", [False, True])
def test_states(trained: bool, folder: Path, tmp_path: Path):
    """A fork, a file and other rows go on as if nothing had happened."""
    held = fresh(folder if trained else "none")
    run(wide(), held, [tiny_ids(2, 200)])
    assert has_folded(held)
    expected = follow(held.fork())
    held.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", wide())
    assert_close(follow(loaded), expected)
    held.reorder_cache(torch.tensor([1, 0]))
    pieces = [tiny_ids(2, 5, seed=3).flip(0), *one_by_one(tiny_ids(2, 24).flip(0))]
    assert_close(run(wide(), held, pieces).flip(0), expected)


@pytest.mark.parametrize("trained", [False, True])
def test_rows_and_budgets(trained: bool, folder: Path):
    ids, mask, more = tiny_ids(2, 300), left_padded([300, 180], 300), tiny_ids(2, 20, seed=1)
    batch, single = (fresh(folder if trained else "none", 0.12) for _ in range(2))
    together = run(wide(), batch, [ids, *one_by_one(more)], mask)
    # One span is expanded in any case; then a row alone is as it is in the batch.
    assert layers_of(batch)[0].expanded == 1
    alone = run(wide(), single, [ids[1:, 120:], *one_by_one(more[1:])])
    assert layers_of(single)[0].expanded == 1
    assert_close(together[1:], alone, 1e-4)
    held = fresh(folder if trained else "none", 0.5)
    run(wide(), held, [ids, *one_by_one(more)], mask)
    assert held.report().share <= 0.5


def test_all_expanded_equals_the_plain_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ZoomLayer, "_affordable", lambda layer: 1000)
    ids = tiny_ids(2, 220)
    held = fresh(slow="exact")
    actual = run(wide(), held, [ids[:, :200], *one_by_one(ids[:, 200:])])
    assert_close(actual, plain_logits(wide(), ids)[:, 199:])


def test_a_saved_cache_knows_its_gates(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """By their whole path and their weights, wherever they are named from."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    monkeypatch.chdir(tmp_path)
    held = kvfold.make_cache(wide(), "sekv", routing="summary", gates=Path("own"))
    run(wide(), held, [tiny_ids(2, 200)])
    expected = follow(held.fork())
    held.save(tmp_path / "cache.safetensors")
    monkeypatch.chdir(folder)
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", wide())
    assert not caplog.records
    assert_close(follow(loaded), expected)
    artifact = GatesArtifact.from_pretrained(own)
    artifact.gates.thresholds.add_(0.01)
    artifact.save_pretrained(own)
    kvfold.load_cache(tmp_path / "cache.safetensors", wide())
    assert "the gates are others" in caplog.text


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ArtifactError, match="there are no gates at"):
        fresh(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="routing is 'mean', give sketch or summary"):
        fresh(routing="mean")
    with pytest.raises(ConfigError, match="gates is 3"):
        kvfold.make_cache(wide(), "sekv", routing="summary", gates=3)
    with pytest.raises(ArtifactError, match="this model differs"):
        kvfold.make_cache(attached(), "sekv", routing="summary", gates=str(folder))
