"""States without position: what is read, put together again, is the model's own cache."""

import pytest
import torch
from transformers import DynamicCache

import kvfold
from kvfold.cache import prefill
from kvfold.errors import ConfigError, TransferError, UnsupportedModelError
from kvfold.transfer.assemble import Assembly
from kvfold.transfer.endpoint import Endpoint
from tests.contract import attached, left_padded, teacher_forced
from tests.tiny import SUPPORTED, tiny_ids, tiny_model


def assembled(endpoint: Endpoint, ids: torch.Tensor, mask: torch.Tensor | None = None):
    trace = endpoint.read(ids, mask=mask)
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(-1).tolist()
    assembly = Assembly(endpoint, lengths)
    for layer in reversed(endpoint.layers):
        assembly.put(layer, trace.keys(layer), trace.values(layer))
    return assembly.finish()


@pytest.mark.parametrize("kind", SUPPORTED)
def test_what_is_read_and_put_together_goes_on_like_the_models_own_cache(kind: str):
    model, ids, follow = attached(kind), tiny_ids(1, 40), tiny_ids(1, 8, seed=1)
    own = kvfold.make_cache(model, "full")
    prefill(model, ids, own)
    expected = teacher_forced(model, own, follow[:, :1], follow[:, 1:])
    cache = assembled(Endpoint(model), ids)
    found = teacher_forced(model, cache, follow[:, :1], follow[:, 1:])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert cache.report().to_dict() == own.report().to_dict() | {
        "bytes_fast": cache.report().bytes_fast,
        "bytes_index": cache.report().bytes_index,
        "share": cache.report().share,
    }


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_padded_rows_are_rows_of_their_own(kind: str):
    model, ids, follow = attached(kind), tiny_ids(2, 40), tiny_ids(2, 6, seed=1)
    mask = left_padded([40, 23], 40)
    cache = assembled(Endpoint(model), ids, mask)
    longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
    found = teacher_forced(model, cache, follow[:, :1], follow[:, 1:], mask=longer)
    for row, length in enumerate((40, 23)):
        single = assembled(Endpoint(model), ids[row : row + 1, 40 - length :])
        alone = follow[row : row + 1]
        expected = teacher_forced(model, single, alone[:, :1], alone[:, 1:])
        torch.testing.assert_close(found[row], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_keys_and_values_of_the_attentions_input_are_those_of_the_cache(kind: str):
    endpoint = Endpoint(attached(kind))
    trace = endpoint.read(tiny_ids(2, 12), hidden=endpoint.layers)
    for layer in endpoint.layers:
        inputs = trace.inputs(layer)
        for part, rows in (("key", trace.keys(layer)), ("value", trace.values(layer))):
            found = endpoint.project(layer, part, inputs)
            torch.testing.assert_close(found, rows, rtol=1e-4, atol=1e-5)


def test_reading_in_chunks_gives_the_same():
    endpoint = Endpoint(attached())
    ids = tiny_ids(1, 30)
    whole, parts = (endpoint.read(ids, hidden=[1], chunk_size=size) for size in (None, 7))
    torch.testing.assert_close(parts.keys(2), whole.keys(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.inputs(1), whole.inputs(1), rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_attached_can_be_read_and_gets_no_cache():
    model = tiny_model()
    before = len(model.model.layers[0].self_attn._forward_pre_hooks)
    trace = Endpoint(model).read(tiny_ids(1, 9), hidden=[0])
    assert isinstance(trace.keys(0), torch.Tensor)
    assert len(model.model.layers[0].self_attn._forward_pre_hooks) == before == 0
    with pytest.raises(ConfigError, match="attach"):
        Assembly(Endpoint(model), [9])


def test_keys_that_depend_on_the_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="RoPE that changes"):
        Endpoint(tiny_model(rope_parameters=rope))


def test_layers_come_once_and_all():
    endpoint = Endpoint(attached())
    trace = endpoint.read(tiny_ids(1, 9))
    assembly = Assembly(endpoint, [9])
    assembly.put(1, trace.keys(1), trace.values(1))
    with pytest.raises(TransferError, match="layer 1 came twice"):
        assembly.put(1, trace.keys(1), trace.values(1))
    with pytest.raises(TransferError, match="layer 3"):
        assembly.put(3, trace.keys(1), trace.values(1))
    with pytest.raises(TransferError, match=r"layers \[0, 2\] did not arrive"):
        assembly.finish()


def test_the_cache_can_be_saved_and_read_back(tmp_path):
    model = attached()
    cache = assembled(Endpoint(model), tiny_ids(1, 20))
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    follow = tiny_ids(1, 6, seed=1)
    one, two = (
        teacher_forced(model, each, follow[:, :1], follow[:, 1:]) for each in (cache, loaded)
    )
    assert torch.equal(one, two)


def test_what_is_read_is_what_a_plain_cache_holds():
    model, ids = attached(), tiny_ids(1, 10)
    plain = DynamicCache(config=model.config)
    prefill(model, ids, plain)
    endpoint = Endpoint(model)
    values = plain.layers[1].values.transpose(1, 2).flatten(2)[0]
    torch.testing.assert_close(endpoint.read(ids).values(1), values)
    weight = endpoint.project(1, "key", endpoint.read(ids, hidden=[1]).inputs(1))
    torch.testing.assert_close(endpoint.read(ids).keys(1), weight, rtol=1e-4, atol=1e-5)
