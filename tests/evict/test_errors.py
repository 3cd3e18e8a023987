"""What cannot be is refused in one clear sentence, before anything is stored."""

import pytest
import torch

import kvfold
from kvfold.budget import Budget
from kvfold.cache import CACHE_KEYWORD
from kvfold.errors import BudgetError, ConfigError
from tests.contract import BASIC, attached, held_tensors, left_padded
from tests.tiny import tiny_ids


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("h20", {}, "unknown method 'h20': choose one of distill, full, h2o"),
        ("h2o", {"kernel": 3}, "h2o has no option 'kernel': choose from queries, recent, scope"),
        ("h2o", {"scope": "row"}, "not defined for scope 'row': choose from head, layer, token"),
        ("streaming", {"scope": "head"}, "not defined for scope 'head': choose from layer, token"),
        ("h2o", {"scope": ["head"]}, "not defined for scope"),
        ("h2o", {"sinks": -1}, "sinks is -1, give a whole number of at least 0"),
        ("tova", {"recent": 1.5}, "recent is 1.5, give a whole number"),
        ("tova", {"recent": True}, "recent is True, give a whole number"),
        ("h2o", {"queries": 0}, "queries is 0, give a whole number of at least 1"),
        ("snapkv", {"queries": "many"}, "queries is 'many'"),
        ("snapkv", {"kernel": 4}, "kernel 4 is even"),
        ("random", {"seed": 1.5}, "seed is 1.5"),
        ("random", {"seed": "x"}, "seed is 'x'"),
        ("full", {"sinks": -1}, "sinks is -1"),
    ],
)
def test_options(method: str, options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        kvfold.make_cache(attached(), method, **options)


@pytest.mark.parametrize("budget", [0, 2, -1, "abc", "200%"])
def test_budgets(budget: object):
    with pytest.raises(BudgetError, match=r"budget"):
        kvfold.make_cache(attached(), "h2o", budget=budget)


def test_full_takes_no_budget():
    with pytest.raises(BudgetError, match="full keeps everything: leave the budget out"):
        kvfold.make_cache(attached(), "full", budget=0.5)
    assert kvfold.make_cache(attached(), "full", budget=1.0).report().tokens_seen == 0


def test_a_dense_mask():
    held = kvfold.make_cache(attached(), "h2o", budget=16)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(ConfigError, match="prepared 4-dimensional attention mask"):
        attached()(tiny_ids(1, 9), attention_mask=mask, **{CACHE_KEYWORD: held})


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_another_number_of_rows(method: str):
    held = kvfold.make_cache(attached(), method)
    kvfold.prefill(attached(), tiny_ids(2, 40), held)
    with pytest.raises(ConfigError, match="holds 2 rows but the input has 3"):
        kvfold.prefill(attached(), tiny_ids(3, 1), held)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_the_new_tokens_alone(padded: bool):
    model, held = attached(), kvfold.make_cache(attached(), "h2o", budget=16)
    kvfold.prefill(model, tiny_ids(2, 40), held)
    mask = left_padded([9, 5 if padded else 9], 9)
    with pytest.raises(ConfigError, match="9 columns, but the cache has seen 40 tokens"):
        kvfold.prefill(model, tiny_ids(2, 9), held, attention_mask=mask)
    with pytest.raises(ConfigError, match="9 columns, but the cache has seen 40 tokens"):
        model(tiny_ids(2, 9), attention_mask=mask, **{CACHE_KEYWORD: held})


def test_prompts_that_cannot_be_run():
    model, held = attached(), kvfold.make_cache(attached(), "h2o", budget=16)
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        kvfold.prefill(model, tiny_ids(1, 0), held)
    with pytest.raises(ConfigError, match="chunk size 0 is below 1"):
        kvfold.prefill(model, tiny_ids(1, 5), held, chunk_size=0)
    with pytest.raises(ConfigError, match="2049 tokens are more than the model's 2048 positions"):
        kvfold.prefill(model, tiny_ids(1, 2049), held)
    assert held.get_seq_length() == 0


def test_offloading():
    with pytest.raises(ConfigError, match="cannot be offloaded"):
        kvfold.make_cache(attached(), "h2o").own_layers[0].offload()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("amount", ["40KiB", "70kB", "100KiB"])
@pytest.mark.parametrize(("method", "scope"), BASIC)
def test_bytes_bound_everything_held(method: str, scope: str, amount: str, rows: int):
    model, tokens, limit = attached(), tiny_ids(rows, 70), int(Budget.parse(amount).amount)
    held = kvfold.make_cache(model, method, budget=amount, scope=scope)
    for start, end in [(0, 60), *((t, t + 1) for t in range(60, 70))]:
        kvfold.prefill(model, tokens[:, start:end], held)
        assert sum(tensor.nbytes for tensor in held_tensors(held)) <= limit
        assert held.report().bytes_fast <= limit
    # Nor is much left unused: less than one more token of every row.
    layer = held.own_layers[0]
    if held.report().tokens_kept[0] < 70:
        assert limit - held.report().bytes_fast < 3 * layer.slots.bytes_per_token


def test_too_few_bytes_name_what_is_needed():
    held = kvfold.make_cache(attached(), "streaming", budget="5KiB")
    # 3 layers of 2 kv heads: keys and values of 16 float32 each, and one int32 position a layer
    needed = 8 * 3 * (2 * 2 * 16 * 4 + 4)
    with pytest.raises(BudgetError, match=f"give at least {needed} bytes"):
        kvfold.prefill(attached(), tiny_ids(1, 30), held)
