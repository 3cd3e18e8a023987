"""The few calls most people need."""

import subprocess
import sys

import pytest
import torch

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache
from kvfold.errors import ConfigError
from kvfold.evict import POLICIES
from tests.contract import EVICTING, attached, left_padded
from tests.tiny import tiny_ids


def test_every_public_name_is_there():
    assert sorted(kvfold.__all__) == sorted(dir(kvfold))
    assert all(getattr(kvfold, name) is not None for name in kvfold.__all__)
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        kvfold.compress  # noqa: B018


def test_importing_kvfold_does_not_import_torch():
    code = "import sys, kvfold; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_methods_are_the_policies_at_least():
    assert set(POLICIES) <= set(kvfold.methods())
    assert kvfold.methods()[0] == "full"


@pytest.mark.parametrize("method", kvfold.methods())
def test_make_cache(method: str):
    held = kvfold.make_cache(attached(), method)
    assert isinstance(held, KVCache)
    assert held.spec.method == method
    assert held.model is attached()


def test_defaults_are_full_and_a_quarter():
    assert kvfold.make_cache(attached()).spec.method == "full"
    held = kvfold.make_cache(attached(), "h2o")
    kvfold.prefill(attached(), tiny_ids(1, 100), held)
    assert held.report().tokens_kept == [25, 25, 25]


def test_the_report():
    held = kvfold.make_cache(attached(), "knorm", budget="25%", scope="layer")
    assert str(held.report()).startswith("knorm: keeps 0 of 0 tokens a layer in 0 B, 0%")
    kvfold.prefill(attached(), tiny_ids(2, 100), held)
    report = held.report()
    # 3 layers, 2 rows, 25 tokens: 2 kv heads of 16 float32 keys and values; 1 position and 2 norms
    keys_and_values, index = 3 * 2 * 25 * 2 * 2 * 16 * 4, 3 * 2 * 25 * (4 + 2 * 4)
    assert report.to_dict() == {
        "method": "knorm",
        "budget": "0.25",
        "scope": "layer",
        "rows": 2,
        "tokens_seen": 100,
        "tokens_kept": [25, 25, 25],
        "bytes_fast": keys_and_values + index,
        "bytes_slow": 0,
        "bytes_index": index,
        "bytes_full": 4 * keys_and_values,
        "details": None,
        "share": (keys_and_values + index) / (4 * keys_and_values),
    }
    assert str(report) == (
        "knorm: keeps 25 of 100 tokens a layer in 39.3 KiB, 26% of a full cache's 150.0 KiB"
    )


def test_progress_and_chunks():
    done: list[int] = []
    held = kvfold.make_cache(attached(), "full")
    kvfold.prefill(attached(), tiny_ids(1, 50), held, chunk_size=20, on_progress=done.append)
    assert done == [20, 40, 50]


def test_a_model_that_is_not_there():
    with pytest.raises(ConfigError, match="no/such-folder"):
        kvfold.load("./no/such-folder")


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_no_more_memory_is_held_than_reported(kind: str):
    held = kvfold.make_cache(attached(kind), "snapkv", budget=64)
    kvfold.prefill(attached(kind), tiny_ids(1, 30), held)
    storages = {}
    for layer in held.own_layers:
        layer.slots.map(
            lambda tensor: (
                storages.update({tensor.untyped_storage().data_ptr(): tensor.untyped_storage()})
                or tensor
            )
        )
    assert sum(storage.nbytes() for storage in storages.values()) == held.report().bytes_fast


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 0.5])
@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_prompt_under_inference_mode_and_decode_without(
    method: str, scope: str, budget: float, padded: bool
):
    ids, step = tiny_ids(2, 40), tiny_ids(2, 1, seed=1)
    mask = left_padded([40, 17], 40) if padded else torch.ones(2, 40).long()
    one, other = (
        kvfold.make_cache(attached(), method, budget=budget, scope=scope) for _ in range(2)
    )
    with torch.inference_mode():
        kvfold.prefill(attached(), ids, one, attention_mask=mask)
    kvfold.prefill(attached(), ids, other, attention_mask=mask)
    for _ in range(12):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        actual, expected = (
            kvfold.prefill(attached(), step, each, attention_mask=mask) for each in (one, other)
        )
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("budget", [16, 64])
def test_a_cache_filled_with_gradients_on_can_be_forked(budget: int):
    held = kvfold.make_cache(attached(), "h2o", budget=budget)
    for count in (30, 1, 1):
        attached()(tiny_ids(1, count), **{CACHE_KEYWORD: held})
    assert held.fork().get_seq_length() == 32
