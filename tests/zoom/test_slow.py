"""The options of the slow tier in a cache: what they say, and that a cache goes on with each."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache
from kvfold.errors import ConfigError
from kvfold.zoom.disk import DiskTier
from kvfold.zoom.factors import FactorTier
from kvfold.zoom.gates import Gates, GateShape
from kvfold.zoom.gates_artifact import GatesArtifact
from kvfold.zoom.tiers import RawTier
from tests.contract import assert_close, left_padded
from tests.tiny import tiny_ids, tiny_model
from tests.zoom.running import has_folded, layers_of, one_by_one, run, wide

FOLLOW = 24
KINDS: dict[str, dict[str, object]] = {
    "head": {"factors": "head", "rank": 4},
    "joint": {"factors": "joint", "rank": 6, "precision": "int8"},
    "disk": {},
}


def fresh(
    kind: str, folder: Path, model: PreTrainedModel | None = None, **options: object
) -> KVCache:
    own = {"disk": folder} if kind == "disk" else {"shortest": 8, **KINDS[kind]}
    return kvfold.make_cache(model or wide(), "sekv", budget=0.4, **{**own, **options})


@cache
def precise() -> PreTrainedModel:
    """In float64, where no two spans are so close that rounding decides which is expanded."""
    model = copy.deepcopy(wide()).double()
    kvfold.attach(model)
    return model


def filled(kind: str, folder: Path, rows: int = 2) -> KVCache:
    held = fresh(kind, folder)
    run(wide(), held, [tiny_ids(rows, 300), *one_by_one(tiny_ids(rows, 9, seed=1))])
    assert has_folded(held)
    return held


def go_on(held: KVCache) -> torch.Tensor:
    return run(wide(), held, [tiny_ids(2, 5, seed=3), *one_by_one(tiny_ids(2, FOLLOW))])


@pytest.mark.parametrize("way", ["fork", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_identically(kind: str, way: str, tmp_path: Path):
    held, expected = filled(kind, tmp_path), go_on(filled(kind, tmp_path))
    other = held.fork()
    if way == "file":
        held.save(tmp_path / "cache.safetensors")
        other = kvfold.load_cache(tmp_path / "cache.safetensors", wide())
        assert other.report().bytes_slow <= held.report().bytes_slow
    assert_close(go_on(other), expected)
    assert_close(go_on(held), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_move(kind: str, tmp_path: Path):
    """Each goes on as before, wherever it went."""
    held, expected = filled(kind, tmp_path), go_on(filled(kind, tmp_path))
    held.batch_repeat_interleave(3)
    held.reorder_cache(torch.tensor([4, 2, 3, 1, 0, 5]))
    held.batch_select_indices(torch.tensor([1, 0]))
    assert_close(go_on(held), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_and_out_of_it(kind: str, tmp_path: Path):
    expected = go_on(filled(kind, tmp_path))
    with torch.inference_mode():
        held = filled(kind, tmp_path)
    assert_close(go_on(held), expected, 1e-6)
    other = filled(kind, tmp_path)
    with torch.inference_mode():
        assert_close(go_on(other), expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str, tmp_path: Path):
    ids, follow = tiny_ids(1, 240), one_by_one(tiny_ids(1, 40, seed=2))
    before = torch.cat([torch.zeros(1, 60, dtype=torch.long), ids], dim=1)
    mask = left_padded([240], 300)
    actual = run(precise(), fresh(kind, tmp_path, precise()), [before, *follow], mask)
    expected = run(precise(), fresh(kind, tmp_path, precise()), [ids, *follow])
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_equals_the_loop(kind: str, tmp_path: Path):
    ids, held = tiny_ids(2, 200), fresh(kind, tmp_path)
    tokens = wide().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
        eos_token_id=None, **{CACHE_KEYWORD: held},
    )[:, 200:]  # fmt: skip
    assert has_folded(held)
    logits = run(wide(), fresh(kind, tmp_path), [ids, *one_by_one(tokens[:, :-1])])
    assert logits.argmax(-1).tolist() == tokens.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_no_model_is_kept_alive(kind: str, tmp_path: Path):
    model = tiny_model("llama", head_dim=32, num_hidden_layers=2)
    kvfold.attach(model)
    options = {"disk": tmp_path} if kind == "disk" else KINDS[kind]
    held = kvfold.make_cache(model, "sekv", budget=0.4, **options)
    run(model, held, [tiny_ids(1, 300)])
    known, other = weakref.ref(model), held.fork()
    del model
    gc.collect()
    assert known() is None
    assert other.get_seq_length() == 300


def test_factors_take_less_and_say_so():
    raw = kvfold.make_cache(wide(), "sekv", budget=0.4, longest=64, shortest=32)
    held = kvfold.make_cache(
        wide(), "sekv", budget=0.4, longest=64, shortest=32, factors="head", rank=8
    )
    for each in (raw, held):
        run(wide(), each, [tiny_ids(1, 400)])
    assert held.report().bytes_slow < 0.7 * raw.report().bytes_slow
    tier = layers_of(held)[0].spans.slow
    assert isinstance(tier, FactorTier)
    assert tier.mean_rank == 8.0
    assert layers_of(raw)[0].spans.slow.mean_rank is None
    names = {name.rpartition(".")[2] for name, _ in layers_of(held)[0].state()}
    assert {"tokens", "left", "right", "first", "ranks"} <= names


# Options --------------------------------------------------------------------------------------


def test_what_options_make(tmp_path: Path):
    def tier(**options: object) -> object:
        return layers_of(kvfold.make_cache(wide(), "sekv", **options))[1].spans.slow

    assert type(tier()) is type(tier(factors="none")) is RawTier
    assert type(tier(disk=str(tmp_path))) is DiskTier
    how = tier(factors="head")._how
    assert (how.rank, how.is_joint, how.is_int8, how.longest, how.gates) == (
        8, False, False, 16, None,
    )  # fmt: skip
    assert [tier(factors="head", longest=each)._how.rank for each in (32, 64, 200)] == [16, 32, 32]
    how = tier(factors="joint", rank=32, precision="int8", longest=64)._how
    assert (how.rank, how.is_joint, how.is_int8, how.longest) == (32, True, True, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factors": "both"}, "factors is 'both', give none or head or joint"),
        ({"factors": None}, "factors is None, give none or head or joint"),
        ({"rank": 8}, "rank is of factors: give factors=head or factors=joint"),
        ({"precision": "int8"}, "precision is of factors: give factors=head"),
        ({"precision": "int4", "factors": "head"}, "precision is 'int4', give half or int8"),
        ({"rank": 0, "factors": "head"}, "rank is 0, give a whole number from 1 to 32"),
        ({"rank": 33, "factors": "head"}, "rank is 33, give a whole number from 1 to 32"),
        ({"rank": True, "factors": "head"}, "rank is True, give a whole number"),
        ({"rank": "8", "factors": "head"}, "rank is '8', give a whole number"),
        ({"disk": ".", "factors": "head"}, "leave out factors or disk"),
        ({"disk": "/none"}, "disk is '/none', give a folder that exists"),
        ({"gates": "none", "factors": "joint"}, "gates are for routing=summary, or for the ranks"),
    ],
)
@pytest.mark.parametrize("budget", [0.25, 1.0])
def test_what_is_refused(budget: float, options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        kvfold.make_cache(wide(), "sekv", budget=budget, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("routing", ["sketch", "summary"])
def test_gates_choose_ranks(routing: str, tmp_path: Path):
    gates = Gates(GateShape(2, 4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for network in (gates.keys, gates.values):
            network[-1].weight.zero_()
            network[-1].bias.fill_(-1.0)
            network[-1].bias[:5] = 1.0
    facts = kvfold.models.shape_facts(wide())
    GatesArtifact(gates, "tiny", facts, "", {}).save_pretrained(tmp_path)
    held = kvfold.make_cache(
        wide(), "sekv", budget=0.4, routing=routing, gates=tmp_path, factors="head"
    )
    run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 3))])
    for layer in layers_of(held):
        assert layer.spans.slow.mean_rank == 5.0
