"""Copies, files, beams and gradients: a `sekv` cache goes on as if nothing had happened."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache, prefill
from kvfold.errors import ConfigError
from tests.contract import assert_close, left_padded
from tests.tiny import tiny_ids, tiny_model
from tests.zoom.running import has_folded, layers_of, one_by_one, run, wide

FOLLOW = 24
STARTS = {"nothing": (0, 0), "before": (25, 3), "folded": (300, 0), "between folds": (300, 9)}
"""Tokens of a prompt and generated ones at which something happens to the cache."""


def fresh(budget: float = 0.4, **options: object) -> KVCache:
    return kvfold.make_cache(wide(), "sekv", budget=budget, **options)


def filled(start: str, rows: int = 2, **options: object) -> KVCache:
    held, (prompt, more) = fresh(**options), STARTS[start]
    if prompt:
        run(wide(), held, [tiny_ids(rows, prompt), *one_by_one(tiny_ids(rows, more, seed=1))])
    return held


def go_on(held: KVCache, rows: int = 2) -> torch.Tensor:
    return run(wide(), held, [tiny_ids(rows, 5, seed=3), *one_by_one(tiny_ids(rows, FOLLOW))])


def through_a_file(held: KVCache, folder: Path) -> KVCache:
    held.save(folder / "cache.safetensors")
    return kvfold.load_cache(folder / "cache.safetensors", wide())


WAYS: dict[str, Callable[[KVCache, Path], KVCache]] = {
    "fork": lambda held, folder: held.fork(),
    "copy": lambda held, folder: copy.deepcopy(held),
    "file": through_a_file,
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_goes_on_identically(way: str, start: str, tmp_path: Path):
    held = filled(start)
    other = WAYS[way](held, tmp_path)
    assert other.report().bytes_slow <= held.report().bytes_slow
    assert [each.expanded for each in layers_of(other)] == [
        each.expanded for each in layers_of(held)
    ]
    expected = go_on(filled(start))
    assert_close(go_on(other), expected)
    assert_close(go_on(held), expected)
    for one, two in zip(layers_of(held), layers_of(other), strict=True):
        shapes = [{name: t.shape for name, t in each.state()} for each in (one, two)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_padded_rows_goes_on_identically(way: str, tmp_path: Path):
    held, mask = fresh(), left_padded([300, 220], 300)
    run(wide(), held, [tiny_ids(2, 300)], mask)
    other = WAYS[way](held, tmp_path)
    one, two = (run(wide(), each, one_by_one(tiny_ids(2, FOLLOW)), mask) for each in (held, other))
    assert_close(two, one)


@pytest.mark.parametrize("more", [0, 9, 15])
def test_a_file_keeps_to_the_budget(more: int, tmp_path: Path):
    """What is read back has no more room than what was written."""
    held = fresh(0.4)
    run(wide(), held, [tiny_ids(1, 400), *one_by_one(tiny_ids(1, more))])
    assert layers_of(held)[0].expanded > 1
    loaded = through_a_file(held, tmp_path)
    assert loaded.report().share <= 0.4
    assert layers_of(loaded)[0].slots.capacity == layers_of(held)[0].slots.capacity
    for token in one_by_one(tiny_ids(1, 40)):
        run(wide(), loaded, [token])
        assert loaded.report().share <= 0.4


def test_reading_back_twice(tmp_path: Path):
    held = filled("between folds")
    once = through_a_file(held, tmp_path)
    twice = through_a_file(once, tmp_path)
    assert_close(go_on(twice), go_on(held))


def test_a_copy_shares_nothing():
    held = filled("folded")
    other = held.fork()
    expected = go_on(held.fork())
    go_on(other)
    other.reset()
    assert_close(go_on(held), expected, 1e-6)


def test_a_copy_has_no_weights_and_no_model():
    """What it costs to copy is what the cache holds."""
    model = tiny_model("llama", head_dim=32, num_hidden_layers=2)
    kvfold.attach(model)
    held = kvfold.make_cache(model, "sekv", budget=0.4)
    run(model, held, [tiny_ids(1, 300)])
    copied: dict[int, object] = {}
    copy.deepcopy(held, copied)
    parameters = {id(each) for each in model.parameters()} | {id(each) for each in model.modules()}
    assert not parameters & set(copied)
    known = weakref.ref(model)
    del model
    copied.clear()
    gc.collect()
    assert known() is None, "the cache keeps no model alive"


def test_reorder():
    held, ids = filled("between folds"), tiny_ids(2, 300)
    held.reorder_cache(torch.tensor([1, 1]))
    follow = tiny_ids(1, FOLLOW).expand(2, -1)
    together = run(wide(), held, one_by_one(follow))
    assert_close(together[1:], together[:1])
    expected = fresh()
    run(wide(), expected, [ids, *one_by_one(tiny_ids(2, 9, seed=1))])
    alone = run(wide(), expected, one_by_one(follow))
    assert_close(together[1], alone[1])


@pytest.mark.parametrize("lengths", [[20, 26], [300, 190]], ids=str)
def test_swapped_rows_swap_all_that_is_known_of_them(lengths: list[int]):
    """Before the first spans, what queries were like; afterwards, what is divided for good."""
    total = max(lengths)
    ids, follow, mask = tiny_ids(2, total), tiny_ids(2, FOLLOW), left_padded(lengths, total)
    straight, swapped = fresh(), fresh()
    for held in (straight, swapped):
        run(wide(), held, [ids], mask)
    swapped.reorder_cache(torch.tensor([1, 0]))
    for name in ("moment", "settled"):
        for one, two in zip(layers_of(straight), layers_of(swapped), strict=True):
            known, other = getattr(one, name), getattr(two, name)
            assert (known is None) == (other is None)
            assert known is None or torch.equal(other, known.flip(0))
    expected = run(wide(), straight, one_by_one(follow), mask)
    actual = run(wide(), swapped, one_by_one(follow.flip(0)), mask.flip(0))
    assert has_folded(swapped)
    assert_close(actual.flip(0), expected)


@pytest.mark.parametrize("start", ["before", "folded", "between folds"])
def test_repeat_and_select(start: str):
    expected = go_on(filled(start))
    held = filled(start)
    held.batch_repeat_interleave(3)
    held.batch_select_indices(torch.tensor([0, 4]))
    assert_close(go_on(held), expected)
    held = filled(start)
    held.batch_repeat_interleave(2)
    held.batch_select_indices(torch.tensor([True, False, False, True]))
    assert_close(go_on(held), expected)


def test_reset():
    held = filled("between folds")
    held.reset()
    assert held.get_seq_length() == 0
    assert_close(go_on(held, 3), go_on(fresh(), 3), 1e-7)


def test_crop_is_refused_after_a_fold():
    held = filled("folded")
    with pytest.raises(ConfigError, match="evicted or repacked"):
        held.crop(-1)
    assert held.get_seq_length() == 300


def test_crop_before_a_fold():
    held, ids = fresh(), tiny_ids(1, 25)
    run(wide(), held, [ids, tiny_ids(1, 5, seed=9)])
    held.crop(-5)
    actual = run(wide(), held, one_by_one(tiny_ids(1, 20)))
    plain = fresh()
    run(wide(), plain, [ids])
    expected = run(wide(), plain, one_by_one(tiny_ids(1, 20)))
    assert not has_folded(held) or has_folded(plain)
    assert_close(actual[:, :5], expected[:, :5])
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prompt", [20, 300])
def test_generate_equals_the_loop(prompt: int, rows: int):
    ids, held = tiny_ids(rows, prompt), fresh()
    tokens = wide().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, do_sample=False,
        eos_token_id=None, **{CACHE_KEYWORD: held},
    )[:, prompt:]  # fmt: skip
    assert has_folded(held)
    logits = run(wide(), fresh(), [ids, *one_by_one(tokens[:, :-1])])
    assert logits.argmax(-1).tolist() == tokens.tolist()


def test_generate_goes_on_after_a_turn():
    ids, held = tiny_ids(1, 300), fresh()
    for _ in range(2):
        ids = torch.cat([ids, tiny_ids(1, 20, seed=5)], dim=1)
        ids = wide().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
            eos_token_id=None, **{CACHE_KEYWORD: held},
        )  # fmt: skip
    loop = fresh()
    pieces = [ids[:, :320], *one_by_one(ids[:, 320:349]), ids[:, 349:370],
              *one_by_one(ids[:, 370:399])]  # fmt: skip
    logits = run(wide(), loop, pieces)
    assert logits[:, 30:].argmax(-1).tolist() == ids[:, 370:].tolist()


@pytest.mark.parametrize("lengths", [[300, 300], [300, 210]], ids=str)
def test_beams(lengths: list[int]):
    """A beam's logits are those of its own tokens, however often rows were swapped."""
    ids, held, mask = tiny_ids(2, 300), fresh(), left_padded(lengths, 300)
    output = wide().generate(
        ids, attention_mask=mask, max_new_tokens=24, num_beams=3, do_sample=False,
        eos_token_id=None, output_scores=True, return_dict_in_generate=True,
        length_penalty=0.0, **{CACHE_KEYWORD: held},
    )  # fmt: skip
    tokens = output.sequences[:, 300:]
    # The caches of beams have a common past, and three times the rows share three times the bytes.
    six = [each.repeat_interleave(3, dim=0) for each in (ids, tokens, mask)]
    pieces = [six[0], *one_by_one(six[1][:, :-1])]
    logits = run(wide(), fresh(), pieces, six[2])[::3].log_softmax(-1)
    expected = logits.gather(2, tokens[..., None]).sum((1, 2))
    assert_close(output.sequences_scores, expected, 1e-3)


def test_inference_mode_and_out_of_it():
    expected = go_on(filled("between folds"))
    held = fresh()
    with torch.inference_mode():
        run(wide(), held, [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 9, seed=1))])
    assert_close(go_on(held), expected, 1e-6)
    other = filled("between folds")
    with torch.inference_mode():
        assert_close(go_on(other), expected, 1e-6)
    assert torch.isfinite(go_on(other)).all()


def test_what_is_stored_has_no_gradient():
    held, ids = fresh(), tiny_ids(1, 25)
    for piece in (ids, tiny_ids(1, 300), tiny_ids(1, 1)):
        output = wide()(input_ids=piece, **{CACHE_KEYWORD: held})
        output.logits.float().square().mean().backward()
        wide().zero_grad()
        assert not any(t.requires_grad for layer in layers_of(held) for _, t in layer.state())
        held.fork()
    assert has_folded(held)


def test_the_same_prompt_twice_gives_the_same():
    assert torch.equal(go_on(filled("folded")), go_on(filled("folded")))


def test_logits_do_not_depend_on_who_asks_for_a_report():
    expected = go_on(filled("folded"))
    held, logits = filled("folded"), []
    for piece in [tiny_ids(2, 5, seed=3), *one_by_one(tiny_ids(2, FOLLOW))]:
        logits.append(prefill(wide(), piece, held))
        held.report()
    assert torch.equal(torch.stack(logits, dim=1), expected)
