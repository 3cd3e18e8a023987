"""The method `sekv` as a cache: rows, turns, budgets, and texts made to break it."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.attention import LazyMask, Scoring
from kvfold.cache import KVCache
from kvfold.errors import ArtifactError, ConfigError, UnsupportedModelError
from tests.contract import assert_close, attached, left_padded
from tests.tiny import tiny_ids, tiny_model
from tests.zoom.running import has_folded, layers_of, one_by_one, run, wide


def fresh(budget: float = 0.3, **options: object) -> KVCache:
    return kvfold.make_cache(wide(), "sekv", budget=budget, **options)


def tensors_of(held: KVCache) -> dict[int, torch.Tensor]:
    """Every tensor that the cache holds, by where its memory starts."""
    found = {}
    for layer in layers_of(held):
        for name, tensor in layer.state():
            if name != "room":  # two numbers, a tensor in a file alone
                found[tensor.untyped_storage().data_ptr()] = tensor
    return found


# Rows -----------------------------------------------------------------------------------------


def test_padding_changes_nothing():
    """Anchors, window, budget and spans go by tokens, so that of a row alone all is the same."""
    ids, second, follow = tiny_ids(1, 240), tiny_ids(1, 30, seed=1), tiny_ids(1, 40, seed=2)
    mask = torch.cat([left_padded([240], 300), left_padded([30], 37)], dim=1)
    padded, plain = fresh(0.5), fresh(0.5)
    zeros = [torch.zeros(1, count, dtype=torch.long) for count in (60, 7)]
    pieces = [torch.cat([zeros[0], ids], dim=1), torch.cat([zeros[1], second], dim=1)]
    actual = run(wide(), padded, [*pieces, *one_by_one(follow)], mask)
    expected = run(wide(), plain, [ids, second, *one_by_one(follow)])
    assert has_folded(plain)
    assert layers_of(padded)[0].expanded == layers_of(plain)[0].expanded > 1
    # Sums over packed codes are some ten times as large as the scores they give.
    assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("lengths", [[240, 200, 161], [300, 29, 3]], ids=str)
def test_a_padded_row_equals_the_row_alone(lengths: list[int]):
    """Where one span is expanded at a time; beyond, the rows of a batch share the bytes."""
    total = lengths[0]
    ids, second, follow = tiny_ids(3, total), tiny_ids(3, 30, seed=1), tiny_ids(3, 60, seed=2)
    mask = torch.cat([left_padded(lengths, total), left_padded([30, 30, 4], 30)], dim=1)
    batch = fresh(0.1)
    together = run(wide(), batch, [ids, second, *one_by_one(follow)], mask)
    assert layers_of(batch)[0].expanded == 1
    for index, length in enumerate(lengths):
        own, new = slice(index, index + 1), [30, 30, 4][index]
        single = fresh(0.1)
        alone = run(
            wide(), single,
            [ids[own, total - length :], second[own, 30 - new :], *one_by_one(follow[own])],
        )  # fmt: skip
        assert has_folded(single)
        # Of thousands of codes one may be rounded the other way, since sums are ordered otherwise.
        assert_close(together[own], alone, 1e-3)


def test_a_row_whose_first_span_comes_late_has_directions_of_its_own():
    held, follow = fresh(slow="exact"), tiny_ids(2, 90, seed=1)
    run(wide(), held, [tiny_ids(2, 300), *one_by_one(follow)], left_padded([300, 7], 300))
    for layer in layers_of(held):
        keys, tokens = layer.spans.slow.keys[1], layer.spans.slow.positions[1, 0] >= 0
        query = torch.randn(1, 2, 20, 32, generator=torch.Generator().manual_seed(0))
        query = query.expand(2, -1, -1, -1)
        scores, level = layer.spans.router.estimate(query)
        estimated = (scores + level)[1][..., tokens]
        true = query[1] @ keys[:, tokens].mT
        pairs = torch.stack([estimated.flatten(), true.flatten()])
        assert float(pairs.corrcoef()[0, 1]) > 0.6
        assert layer.moment is None


def test_short_prompts_do_not_pile_up():
    """Turns of a few tokens, of another length in each row, are folded as they become enough."""
    held, mask = fresh(0.5), left_padded([100, 90], 100)
    run(wide(), held, [tiny_ids(2, 100)], mask)
    for turn in range(20):
        new = [12, 5] if turn % 2 else [3, 12]
        mask = torch.cat([mask, left_padded(new, 12)], dim=1)
        run(wide(), held, [tiny_ids(2, 12, seed=turn)], mask)
    layer = layers_of(held)[0]
    assert int(layer.slots.counts.max()) <= 90
    assert int(layer.slots.counts.min()) >= 8


def test_equal_rows_are_equal():
    ids = tiny_ids(1, 240).expand(3, -1)
    together = run(wide(), fresh(), [ids, *one_by_one(tiny_ids(1, 40, seed=2).expand(3, -1))])
    assert_close(together[1:], together[:1].expand(2, -1, -1))


def test_rows_differ_in_spans():
    held = fresh(shortest=4)
    run(wide(), held, [tiny_ids(2, 300)])
    starts = layers_of(held)[0].spans.starts
    assert starts[0].tolist() != starts[1].tolist()


# Turns ----------------------------------------------------------------------------------------


def test_a_second_prompt_equals_its_tokens_one_by_one():
    """As long as nothing is folded in between."""
    ids, second = tiny_ids(2, 300), tiny_ids(2, 12, seed=1)
    at_once, single = fresh(shortest=16), fresh(shortest=16)
    for held in (at_once, single):
        run(wide(), held, [ids])
        assert has_folded(held)
    folds = layers_of(single)[0].spans.starts.shape
    expected = run(wide(), single, one_by_one(second))[:, -1]
    actual = run(wide(), at_once, [second])[:, -1]
    assert layers_of(single)[0].spans.starts.shape == folds
    assert_close(actual, expected)


def test_queries_of_a_prompt_see_what_each_would_see():
    """All logits of a second prompt, more than a block of queries long."""
    ids, second = tiny_ids(1, 300), tiny_ids(1, 14, seed=1)
    at_once, single = fresh(shortest=16), fresh(shortest=16)
    run(wide(), at_once, [ids])
    run(wide(), single, [ids])
    expected = run(wide(), single, one_by_one(second))
    with torch.no_grad():
        actual = wide()(second, **{kvfold.cache.CACHE_KEYWORD: at_once}).logits
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("budget", "count", "is_shared"), [(0.15, 20, False), (0.5, 20, True), (0.15, 90, True)]
)
def test_queries_of_a_prompt_bring_no_span_twice(budget: float, count: int, is_shared: bool):
    """Of a long one, or where those that expand at once would bring as many as there are."""
    ids, second = tiny_ids(2, 300), tiny_ids(2, count, seed=1)
    held = fresh(budget, shortest=16)
    run(wide(), held, [ids])
    alone = held.fork()
    layers = layers_of(held)
    run(wide(), held, [second])
    for layer, before in zip(layers, layers_of(alone), strict=True):
        tokens = int(before.spans.lengths.sum()) * 2
        assert (layer.spans.moved == tokens) == is_shared
        assert layer.spans.moved > 0


@pytest.mark.parametrize("count", [1, 40, 300])
def test_a_second_prompt_that_folds(count: int):
    held = fresh()
    logits = run(wide(), held, [tiny_ids(2, 200), tiny_ids(2, count, seed=1)])
    logits = run(wide(), held, [*one_by_one(tiny_ids(2, 30, seed=2))])
    assert torch.isfinite(logits).all()
    assert held.get_seq_length() == 230 + count


def test_folded_tokens_are_held_once_each():
    held = fresh()
    run(wide(), held, [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 50, seed=1))])
    for layer in layers_of(held):
        for index in range(2):
            exact, inside = (
                slots.positions[index, 0].tolist() for slots in (layer.slots, layer.spans.slow)
            )
            assert sorted(p for p in exact + inside if p >= 0) == list(range(350))


def test_keys_and_values_of_spans_are_those_of_their_tokens():
    ids = tiny_ids(2, 300)
    held, full = fresh(slow="exact"), kvfold.make_cache(wide(), "full")
    run(wide(), held, [ids])
    run(wide(), full, [ids])
    layer, plain = layers_of(held)[0], full.parts[0]
    for index in range(2):
        where = layer.spans.slow.positions[index, 0]
        tokens = where >= 0
        for side in ("keys", "values"):
            actual = getattr(layer.spans.slow, side)[index][:, tokens]
            assert torch.equal(actual, getattr(plain.slots, side)[index][:, where[tokens].long()])


def test_generated_tokens_are_summarised_evenly():
    """Nobody asked the model how surprising they are."""
    held = fresh(slow="exact", longest=16)
    run(wide(), held, [tiny_ids(1, 100), *one_by_one(tiny_ids(1, 60, seed=1))])
    spans = layers_of(held)[0].spans
    start, length = int(spans.starts[0, -1]), int(spans.lengths[0, -1])
    mean = spans.slow.values[0, :, start : start + length].mean(1)
    torch.testing.assert_close(spans.means[0, :, -1], mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [7, 64])
def test_chunked_prefill(chunk_size: int):
    held, ids = fresh(0.5), tiny_ids(1, 300)
    run(wide(), held, [ids], chunk_size=chunk_size)
    assert torch.isfinite(run(wide(), held, one_by_one(tiny_ids(1, 5)))).all()
    assert has_folded(held)
    assert held.report().share <= 0.5


def test_chunks_before_the_first_fold_change_nothing():
    ids = tiny_ids(1, 30)
    whole, parts = fresh(), fresh()
    assert_close(
        run(wide(), parts, [ids], chunk_size=7), run(wide(), whole, [ids])
    )  # fmt: skip
    assert not has_folded(whole)
    torch.testing.assert_close(layers_of(parts)[0].moment, layers_of(whole)[0].moment)


# Budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.15, 0.25, 0.5])
@pytest.mark.parametrize("length", [200, 333, 600])
def test_the_budget_is_kept_at_every_token(length: int, budget: float):
    held = fresh(budget)
    run(wide(), held, [tiny_ids(1, length)])
    seen = []
    for token in one_by_one(tiny_ids(1, 50, seed=1)):
        run(wide(), held, [token])
        report, floor = held.report(), layers_of(held)[0].expanded == 1
        seen.append(floor)
        assert report.share <= budget or floor
        most = report.bytes_full * 1.01 + layers_of(held)[0].spans.bytes_slow * 0.1
        assert report.bytes_slow <= most
    if (length, budget) in [(333, 0.5), (600, 0.25), (600, 0.5)]:
        assert not any(seen), "the budget allows more than one span"


@pytest.mark.parametrize("budget", [0.25, 0.5])
def test_the_budget_is_kept_by_a_batch(budget: float):
    held = fresh(budget)
    run(wide(), held, [tiny_ids(3, 500)], left_padded([500, 450, 300], 500))
    mask = left_padded([500, 450, 300], 500)
    for token in one_by_one(tiny_ids(3, 40, seed=1)):
        run(wide(), held, [token], mask)
        assert held.report().share <= budget


@pytest.mark.usefixtures("torch_alone")
def test_the_report_counts_tensors():
    held = fresh()
    run(wide(), held, [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 20, seed=1))])
    report = held.report()
    expanded = sum(layer.spans.pool.nbytes for layer in layers_of(held))
    held_bytes = sum(t.untyped_storage().nbytes() for t in tensors_of(held).values())
    settled = sum(layer.settled.nbytes for layer in layers_of(held))
    counted = report.bytes_fast + report.bytes_slow - expanded
    # `settled` is one tensor for all layers, or one for each.
    assert 0 <= held_bytes - counted <= settled
    assert report.bytes_full == 2 * 320 * 2 * 2 * 2 * 32 * 4
    assert report.tokens_seen == 320


def test_the_report_counts_what_waits_for_the_first_spans():
    held = fresh()
    run(wide(), held, [tiny_ids(1, 20)])
    report = held.report()
    assert sum(t.untyped_storage().nbytes() for t in tensors_of(held).values()) == (
        report.bytes_fast + report.bytes_slow
    )


def test_more_budget_expands_more():
    expanded = []
    for budget in (0.15, 0.25, 0.5, 0.8):
        held = fresh(budget)
        run(wide(), held, [tiny_ids(1, 500)])
        expanded.append(layers_of(held)[0].expanded)
    assert expanded == sorted(expanded)
    assert expanded[0] < expanded[-1]


# Adversarial texts and models -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["one", "two", "random", "end tokens"])
def test_adversarial_texts(what: str):
    ids = {
        "one": torch.full((1, 500), 7),
        "two": torch.tensor([7, 90]).repeat(250)[None],
        "random": tiny_ids(1, 500, seed=3),
        "end tokens": torch.full((1, 500), 2),
    }[what]
    held = fresh(0.15)
    logits = run(wide(), held, [ids, ids[:, :33], *one_by_one(ids[:, :40])])
    assert torch.isfinite(logits).all()
    assert has_folded(held)


@pytest.mark.parametrize("length", range(1, 61))
def test_boundary_lengths(length: int):
    held = fresh(0.05)
    logits = run(wide(), held, [tiny_ids(2, length), *one_by_one(tiny_ids(2, 4, seed=1))])
    assert torch.isfinite(logits).all()
    assert held.get_seq_length() == length + 4


@pytest.mark.parametrize("lengths", [[60, 1], [40, 33, 2], [17, 5]], ids=str)
def test_rows_of_very_different_lengths(lengths: list[int]):
    """Some have no span while others have."""
    held, total = fresh(0.1), max(lengths)
    mask = left_padded(lengths, total)
    pieces = [tiny_ids(len(lengths), total), *one_by_one(tiny_ids(len(lengths), 60, seed=1))]
    together = run(wide(), held, pieces, mask)
    assert torch.isfinite(together).all()
    assert has_folded(held)


def test_a_text_given_as_embeddings_is_divided_evenly():
    held, model = fresh(), wide()
    ids = tiny_ids(1, 400)
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad():
        model(inputs_embeds=embedded[:, :200], **{kvfold.cache.CACHE_KEYWORD: held})
        run(model, held, [ids[:, 200:240]])
        logits = model(inputs_embeds=embedded[:, 240:], **{kvfold.cache.CACHE_KEYWORD: held}).logits
    assert has_folded(held)
    assert held.report().tokens_seen == 400
    assert torch.isfinite(logits).all()


# Faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["router", "slow"])
def test_an_interrupted_fold_is_not_gone_on_with(part: str, monkeypatch: pytest.MonkeyPatch):
    """Its layers hold different tokens: every later use says so, until all is forgotten."""
    held, prompt = fresh(), tiny_ids(1, 300)
    run(wide(), held, [prompt])

    def no_memory(*given: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(getattr(layers_of(held)[1].spans, part), "add", no_memory)
        run(wide(), held, one_by_one(tiny_ids(1, 20)))
    for use in (lambda: run(wide(), held, [tiny_ids(1, 1)]), held.report, held.fork):
        with pytest.raises(ArtifactError, match=r"was interrupted.*read the text again"):
            use()
    held.reset()
    assert_close(run(wide(), held, [prompt]), run(wide(), fresh(), [prompt]))


@pytest.mark.parametrize(
    ("name", "number"), [("v_proj", 1e7), ("k_proj", 1e7), ("v_proj", float("nan"))]
)
def test_numbers_that_spans_cannot_hold_are_refused_before_any_fold(name: str, number: float):
    model = tiny_model("llama", head_dim=32, num_hidden_layers=2)
    getattr(model.model.layers[1].self_attn, name).weight.data[0] = number
    with kvfold.attach(model):
        held = kvfold.make_cache(model, "sekv", budget=0.3)
        with pytest.raises(ConfigError, match=r"layer 1 .*slow='exact'"):
            run(model, held, [tiny_ids(1, 300)])
        assert all(layer.spans.is_empty for layer in layers_of(held))
        assert held.get_seq_length() == 300
        if number == number:
            exact = kvfold.make_cache(model, "sekv", budget=0.3, slow="exact")
            assert torch.isfinite(run(model, exact, [tiny_ids(1, 300), tiny_ids(1, 1)])).all()


@pytest.mark.parametrize("options", [{}, {"factors": "head"}, {"factors": "joint"}], ids=str)
def test_without_zoom_nothing_is_brought(options: dict[str, object]):
    held = fresh(zoom=False, **options)
    pieces = [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 3)), tiny_ids(1, 70), tiny_ids(1, 9)]
    assert torch.isfinite(run(wide(), held, pieces)).all()
    assert held.report().details.bytes_moved == 0  # type: ignore[union-attr]


def test_ids_by_position_are_found():
    held, model = fresh(), wide()
    with torch.no_grad():
        model.get_decoder()(tiny_ids(1, 200), **{kvfold.cache.CACHE_KEYWORD: held})
    assert has_folded(held)


def test_bfloat16():
    model = tiny_model("llama", head_dim=32, num_hidden_layers=2).bfloat16()
    with kvfold.attach(model):
        held = kvfold.make_cache(model, "sekv", budget=0.3)
        logits = run(model, held, [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 30, seed=1))])
        assert has_folded(held)
        assert torch.isfinite(logits).all()
        assert layers_of(held)[0].spans.slow.keys.dtype == torch.bfloat16
        report = held.report()
        assert report.bytes_slow <= report.bytes_full * 1.1


def test_half_precision_model():
    model = tiny_model("llama", head_dim=32, num_hidden_layers=2).half()
    with kvfold.attach(model):
        held = kvfold.make_cache(model, "sekv", budget=0.3)
        logits = run(model, held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 30, seed=1))])
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["mistral_window", "gemma2", "gemma3", "smollm3", "granite"])
def test_other_families(kind: str):
    model = attached(kind)
    held = kvfold.make_cache(model, "sekv", budget=0.3, directions=8)
    logits = run(model, held, [tiny_ids(2, 200), *one_by_one(tiny_ids(2, 30, seed=1))],
                 left_padded([200, 150], 200))  # fmt: skip
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("length", [10, 300])
def test_a_mask_that_is_not_causal_is_refused(length: int):
    """Before the first spans as well: later is too late."""
    held = fresh()
    run(wide(), held, [tiny_ids(1, length)])
    layer = layers_of(held)[0]
    layer.store(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32))
    mask = LazyMask(length, 1, function=lambda batch, head, query, key: key <= query + 3)
    with pytest.raises(UnsupportedModelError, match="causal"):
        layer.attend(torch.zeros(1, 4, 1, 32), mask, Scoring(0.2))


def test_another_batch_is_refused():
    held = fresh()
    run(wide(), held, [tiny_ids(2, 300)])
    with pytest.raises(ConfigError, match="rows"):
        run(wide(), held, [tiny_ids(3, 4)])
