"""What holds for every policy in every scope, whoever wrote it."""

import pytest
import torch

import kvfold
from kvfold.attention import Scoring
from kvfold.budget import Budget
from kvfold.cache import KVCache
from tests.contract import (
    EVICTING,
    assert_close,
    attached,
    held_positions,
    held_tensors,
    left_padded,
    teacher_forced,
)
from tests.tiny import tiny_ids, tiny_model


def greedy(held: KVCache, prompt: torch.Tensor, count: int) -> list[int]:
    """Tokens that follow the prompt of one row."""
    logits, tokens = kvfold.prefill(attached(), prompt, held), []
    for _ in range(count):
        tokens.append(int(logits.argmax(-1)))
        logits = kvfold.prefill(attached(), torch.tensor([tokens[-1:]]), held)
    return tokens


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_the_same_prompt_twice_gives_the_same(method: str, scope: str):
    prompt = tiny_ids(1, 50)
    caches = [kvfold.make_cache(attached(), method, budget=0.3, scope=scope) for _ in range(2)]
    one, two = (greedy(held, prompt, 20) for held in caches)
    assert one == two
    assert held_positions(caches[0]) == held_positions(caches[1])


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_whole_budget_equals_full(method: str, scope: str):
    prompt = tiny_ids(1, 50)
    full = greedy(kvfold.make_cache(attached(), "full"), prompt, 12)
    for whole in (1.0, 500):
        held = kvfold.make_cache(attached(), method, budget=whole, scope=scope)
        assert greedy(held, prompt, 12) == full
        assert held.report().tokens_kept == [62, 62, 62]


@pytest.mark.parametrize("budget", ["0.3", "20"])
@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_tokens_and_bytes_stay_within_the_budget_at_every_step(
    method: str, scope: str, budget: str
):
    model, tokens = attached(), tiny_ids(2, 90)
    held = kvfold.make_cache(model, method, budget=budget, scope=scope)
    bounds = [40, *range(41, 80), 90]
    for start, end in zip([0, *bounds], bounds, strict=False):
        kvfold.prefill(model, tokens[:, start:end], held)
        report, most = held.report(), Budget.parse(budget).tokens(end)
        assert max(report.tokens_kept) <= most
        assert report.tokens_seen == end
        tensors = held_tensors(held)
        assert report.bytes_fast == sum(t.nbytes for t in tensors)
        every = [part.slots for part in held.parts]
        keys_and_values = sum(
            slots.capacity * (slots.keys[:, :, 0].nbytes + slots.values[:, :, 0].nbytes)
            for slots in every
        )
        assert report.bytes_fast - report.bytes_index == keys_and_values
        # 3 layers, 2 rows, 2 kv heads, head size 16, float32, keys and values
        assert keys_and_values <= most * 3 * 2 * 2 * 16 * 4 * 2
    assert report.bytes_full == 90 * 3 * 2 * 2 * 16 * 4 * 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_growing_budget_copies_one_layer_a_token(method: str, scope: str, padded: bool):
    model = attached()
    held = kvfold.make_cache(model, method, budget=0.5, scope=scope)
    mask = left_padded([150, 60], 150) if padded else torch.ones(2, 150).long()
    kvfold.prefill(model, tiny_ids(2, 150), held, attention_mask=mask)
    before, copied = [layer.slots.capacity for layer in held.own_layers], []
    for step in range(40):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        kvfold.prefill(model, tiny_ids(2, 1, seed=step), held, attention_mask=mask)
        now = [layer.slots.capacity for layer in held.own_layers]
        copied.append(sum(a != b for a, b in zip(before, now, strict=True)))
        before = now
    assert max(copied) == 1
    assert sum(copied) >= 9
    assert len(set(before)) == 1


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_each_padded_row_stays_within_its_own_budget(method: str, scope: str):
    model, lengths = attached(), [60, 30, 5]
    held = kvfold.make_cache(model, method, budget=0.4, scope=scope)
    mask = left_padded(lengths, 60)
    kvfold.prefill(model, tiny_ids(3, 60), held, attention_mask=mask)
    for step in range(25):
        mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        kvfold.prefill(model, tiny_ids(3, 1, seed=step), held, attention_mask=mask)
        most = [Budget(0.4, "ratio").tokens(length + step + 1) for length in lengths]
        for layer in held_positions(held):
            assert all(
                len(head) <= limit for row, limit in zip(layer, most, strict=True) for head in row
            )
    assert held_tensors(held)[0].shape[2] <= most[0]


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_sinks_survive_a_thousand_evictions(method: str, scope: str):
    model = tiny_model(num_hidden_layers=1)
    kvfold.attach(model)
    held = kvfold.make_cache(model, method, budget=24, scope=scope, sinks=4, recent=8)
    generator = torch.Generator().manual_seed(0)

    def step(count: int) -> None:
        keys, values = torch.randn(2, 1, 2, count, 16, generator=generator)
        held.update(keys, values, 0)
        query = torch.randn(1, 4, count, 16, generator=generator)
        held.own_layers[0].attend(query, None, Scoring(0.25))
        held.end_of_forward()

    step(30)
    for _ in range(1000):
        step(1)
    for head in held_positions(held)[0][0]:
        assert head[:4] == [0, 1, 2, 3]
        assert head[-8:] == list(range(1022, 1030))
        assert len(head) == 24


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_fork_goes_its_own_way(method: str, scope: str):
    model, prompt, follow = attached(), tiny_ids(2, 50), tiny_ids(2, 12, seed=1)
    held = kvfold.make_cache(model, method, budget=0.4, scope=scope)
    teacher_forced(model, held, prompt, follow[:, :3])
    fork = held.fork()
    before = held_positions(held)
    one = teacher_forced(model, fork, follow[:, 3:4], follow[:, 4:])
    assert held_positions(held) == before
    assert held.get_seq_length() == 53
    assert torch.equal(teacher_forced(model, held, follow[:, 3:4], follow[:, 4:]), one)


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_reset_starts_anew(method: str, scope: str):
    model, prompt, follow = attached(), tiny_ids(2, 50), tiny_ids(2, 12, seed=1)
    held = kvfold.make_cache(model, method, budget=0.4, scope=scope)
    teacher_forced(
        model, held, tiny_ids(2, 30, seed=5), follow[:, :2], mask=left_padded([30, 20], 30)
    )
    held.reset()
    assert held.report().tokens_seen == 0
    again = teacher_forced(model, held, prompt, follow)
    fresh = kvfold.make_cache(model, method, budget=0.4, scope=scope)
    assert torch.equal(again, teacher_forced(model, fresh, prompt, follow))


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_rows_can_be_repeated_selected_and_reordered(method: str, scope: str):
    model, prompt, follow = attached(), tiny_ids(3, 50), tiny_ids(3, 10, seed=1)
    # The third row is the first again: what follows must go on as if it had always been there.
    order = [2, 0, 0]

    def fresh() -> KVCache:
        return kvfold.make_cache(model, method, budget=0.4, scope=scope)

    mask = left_padded([50, 31, 44], 50)
    separate = fresh()
    expected = teacher_forced(model, separate, prompt[order], follow, mask=mask[order])
    for change in ("reorder_cache", "batch_select_indices"):
        held = fresh()
        kvfold.prefill(model, prompt, held, attention_mask=mask)
        getattr(held, change)(torch.tensor(order))
        longer = torch.cat([mask[order], mask.new_ones(3, 1)], dim=1)
        actual = teacher_forced(model, held, follow[:, :1], follow[:, 1:], mask=longer)
        assert_close(actual, expected[:, 1:])


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_repeated_rows_equal_rows_run_as_often(method: str, scope: str):
    model, prompt, follow = attached(), tiny_ids(2, 50), tiny_ids(4, 10, seed=1)
    held = kvfold.make_cache(model, method, budget=20, scope=scope)
    kvfold.prefill(model, prompt, held)
    held.batch_repeat_interleave(2)
    actual = teacher_forced(model, held, follow[:, :1], follow[:, 1:])
    twice = kvfold.make_cache(model, method, budget=20, scope=scope)
    expected = teacher_forced(model, twice, prompt.repeat_interleave(2, 0), follow)
    assert_close(actual, expected[:, 1:])


@pytest.mark.parametrize("method", [name for name, scope in EVICTING if scope == "token"])
def test_token_scope_needs_no_hook(method: str):
    unhooked = tiny_model()
    unhooked.set_attn_implementation("kvfold")
    prompt, follow = tiny_ids(2, 50), tiny_ids(2, 15, seed=1)
    logits = [
        teacher_forced(
            model, kvfold.make_cache(model, method, budget=0.4, scope="token"), prompt, follow
        )
        for model in (attached(), unhooked)
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_bfloat16(method: str, scope: str):
    model = tiny_model(gain=1.0).to(torch.bfloat16)
    kvfold.attach(model)
    prompt, follow = tiny_ids(2, 40), tiny_ids(2, 8, seed=1)
    held = kvfold.make_cache(model, method, budget=16, scope=scope)
    assert torch.isfinite(teacher_forced(model, held, prompt, follow)).all()
    assert held.report().tokens_kept == [16, 16, 16]
    assert held.own_layers[0].keys.dtype == torch.bfloat16
