"""Ends on two devices: each part of a calibration is where the model is that it is for.

The second device is torch's `meta`, which every machine has: it refuses tensors of another device,
and computes nothing.
"""

import pytest

import kvfold.transfer.consumer
import kvfold.transfer.endpoint
import kvfold.transfer.probes
from kvfold.transfer.coder import translators
from kvfold.transfer.consumer import Consumer, ConsumerSettings
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.probes import Probes
from kvfold.transfer.streams import Pair
from tests.contract import left_padded
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import tiny_pair, tiny_texts


class Read(Exception):
    pass


def test_a_model_is_given_its_texts_on_its_own_device(monkeypatch):
    endpoint, seen = Endpoint(tiny_pair()[0]), []
    endpoint.model.to("meta")

    def prefill(model, ids, cache, *, attention_mask, chunk_size):
        seen.extend([ids.device.type, attention_mask.device.type])
        raise Read

    monkeypatch.setattr(kvfold.transfer.endpoint, "prefill", prefill)
    with pytest.raises(Read):
        endpoint.read(tiny_ids(2, 8), mask=left_padded([8, 5], 8))
    assert seen == ["meta", "meta"]


def test_a_consumer_without_producer_reads_on_its_models_device(monkeypatch):
    base, other = tiny_pair()
    receiver, seen = quick_codec(base, other, tiny_texts(4)).receiver(other), []
    other.to("meta")

    def prefill(model, ids, cache, *, attention_mask):
        seen.extend([ids.device.type, attention_mask.device.type])

    monkeypatch.setattr(kvfold.transfer.consumer, "prefill", prefill)
    Consumer(receiver, ConsumerSettings(port=1))._read(tiny_ids(2, 8), left_padded([8, 5], 8))
    assert seen == ["meta", "meta"]


def test_codes_are_made_at_the_producer_and_decoded_at_the_consumer(monkeypatch):
    base, other = tiny_pair()
    codec = quick_codec(base, other, tiny_texts(4), bits=8)
    pair = Pair(Endpoint(base), Endpoint(other))
    probes = Probes(pair, tiny_texts(2), 16, hidden=False)
    other.to("meta")
    seen: list[str] = []

    def noting(name: str):
        function = getattr(kvfold.transfer.probes, name)

        def noted(coder, *rest):
            held = translators(coder).values()
            tensors = [t for c in held for t in (c.mean, c.encoder, c.decoder, c.offset)]
            seen.extend({f"{name} on {tensor.device.type}" for tensor in tensors})
            return function(coder, *rest)

        monkeypatch.setattr(kvfold.transfer.probes, name, noted)

    noting("encode_layer")
    noting("decode_layer")
    states = probes.decoded(0, codec.coders[0])
    assert seen == ["encode_layer on cpu", "decode_layer on meta"]
    assert [state.device.type for state in states] == ["meta", "meta"]
    assert [tuple(state.shape) for state in states] == [(96, 32), (96, 32)]
