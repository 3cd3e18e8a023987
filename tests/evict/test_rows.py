"""Each row of a left-padded batch equals the same row run alone."""

import pytest
import torch

import kvfold
from tests.contract import BASIC, EVICTING, assert_close, attached, left_padded, teacher_forced
from tests.tiny import tiny_ids

LENGTHS = [60, 43, 10]


@pytest.mark.parametrize("budget", [0.25, 32], ids=str)
@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_padded_row_equals_single_run(method: str, scope: str, budget: float | int):
    model, prompt, follow = attached(), tiny_ids(3, 60), tiny_ids(3, 40, seed=1)
    batch = kvfold.make_cache(model, method, budget=budget, scope=scope)
    together = teacher_forced(model, batch, prompt, follow, mask=left_padded(LENGTHS, 60))
    for row, length in enumerate(LENGTHS):
        single = kvfold.make_cache(model, method, budget=budget, scope=scope)
        alone = teacher_forced(
            model, single, prompt[row : row + 1, 60 - length :], follow[row : row + 1]
        )
        assert_close(together[row], alone[0])


@pytest.mark.parametrize("budget", [48, 0.7], ids=str)
@pytest.mark.parametrize(("method", "scope"), BASIC)
def test_padding_that_fits_in_the_budget(method: str, scope: str, budget: float | int):
    model, prompt, follow = attached(), tiny_ids(2, 30), tiny_ids(2, 40, seed=1)
    batch = kvfold.make_cache(model, method, budget=budget, scope=scope)
    together = teacher_forced(model, batch, prompt, follow, mask=left_padded([30, 12], 30))
    for row, length in enumerate([30, 12]):
        single = kvfold.make_cache(model, method, budget=budget, scope=scope)
        alone = teacher_forced(
            model, single, prompt[row : row + 1, 30 - length :], follow[row : row + 1]
        )
        assert_close(together[row], alone[0])


@pytest.mark.parametrize("kind", ["gemma3", "mistral_window", "qwen3", "smollm3"])
def test_padded_row_equals_single_run_in_other_families(kind: str):
    model, prompt, follow = attached(kind), tiny_ids(2, 60), tiny_ids(2, 20, seed=1)
    batch = kvfold.make_cache(model, "h2o", budget=24)
    together = teacher_forced(model, batch, prompt, follow, mask=left_padded([60, 21], 60))
    for row, length in enumerate([60, 21]):
        single = kvfold.make_cache(model, "h2o", budget=24)
        alone = teacher_forced(
            model, single, prompt[row : row + 1, 60 - length :], follow[row : row + 1]
        )
        assert_close(together[row], alone[0])


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_padding_in_a_later_turn(method: str, scope: str):
    model, first, second = attached(), tiny_ids(2, 40), tiny_ids(2, 12, seed=1)
    follow = tiny_ids(2, 15, seed=2)
    mask = torch.cat([left_padded([40, 25], 40), left_padded([5, 12], 12)], dim=1)
    batch = kvfold.make_cache(model, method, budget=24, scope=scope)
    teacher_forced(model, batch, first, first[:, :0], mask=mask[:, :40])
    together = teacher_forced(model, batch, second, follow, mask=mask)
    for row, (one, two) in enumerate([(40, 5), (25, 12)]):
        single = kvfold.make_cache(model, method, budget=24, scope=scope)
        rows = slice(row, row + 1)
        teacher_forced(model, single, first[rows, 40 - one :], first[rows, :0])
        alone = teacher_forced(model, single, second[rows, 12 - two :], follow[rows])
        assert_close(together[row], alone[0])


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_short_second_turn_under_a_ratio(method: str, scope: str):
    model, first, second = attached(), tiny_ids(2, 60), tiny_ids(2, 3, seed=1)
    between, follow = tiny_ids(2, 5, seed=2), tiny_ids(2, 15, seed=3)
    batch = kvfold.make_cache(model, method, budget=0.4, scope=scope)
    mask = left_padded([60, 41], 60)
    teacher_forced(model, batch, first, between, mask=mask)
    mask = torch.cat([mask, mask.new_ones(2, 8)], dim=1)
    together = teacher_forced(model, batch, second, follow, mask=mask)
    for row, length in enumerate([60, 41]):
        single = kvfold.make_cache(model, method, budget=0.4, scope=scope)
        rows = slice(row, row + 1)
        teacher_forced(model, single, first[rows, 60 - length :], between[rows])
        assert_close(together[row], teacher_forced(model, single, second[rows], follow[rows])[0])


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_padded_prompt_in_chunks(method: str, scope: str):
    model, prompt, follow = attached(), tiny_ids(2, 60), tiny_ids(2, 10, seed=1)
    batch = kvfold.make_cache(model, method, budget=16, scope=scope)
    mask = left_padded([60, 25], 60)
    together = teacher_forced(model, batch, prompt, follow, mask=mask, chunk_size=30)
    # The short row's own chunks, as the batch cuts them: none of it is in the first.
    for row, length in enumerate([60, 25]):
        single = kvfold.make_cache(model, method, budget=16, scope=scope)
        rows = slice(row, row + 1)
        alone = teacher_forced(
            model, single, prompt[rows, 60 - length :], follow[rows], chunk_size=30
        )
        assert_close(together[row], alone[0])


def test_what_stands_in_empty_slots_does_not_matter(monkeypatch: pytest.MonkeyPatch):
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        fresh = new_empty(tensor, *arguments, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    model, prompt, follow = attached(), tiny_ids(2, 40), tiny_ids(2, 30, seed=1)
    mask = left_padded([40, 9], 40)
    expected = teacher_forced(
        model, kvfold.make_cache(model, "h2o", budget=0.5), prompt, follow, mask=mask
    )
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    actual = teacher_forced(
        model, kvfold.make_cache(model, "h2o", budget=0.5), prompt, follow, mask=mask
    )
    assert torch.isfinite(actual).all()
    assert torch.equal(actual, expected)
