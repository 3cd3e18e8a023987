"""Messages under a seal that fits, but with other things in them than the codec has."""

from dataclasses import replace

import pytest
import torch

import kvfold
from kvfold.cache import CACHE_KEYWORD, prefill
from kvfold.errors import ConfigError, TransferError
from kvfold.transfer.codec import Codec
from kvfold.transfer.coder import decode_layer, encode_layer
from kvfold.transfer.ends import Receiver, Sender
from kvfold.transfer.wire import Limits, MessageReader, MessageWriter, ids_digest
from tests.contract import left_padded
from tests.tiny import tiny_ids, tiny_model
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import tiny_pair, tiny_texts

IDS = tiny_ids(1, 12)


@pytest.fixture(scope="module")
def ends() -> tuple[Sender, Receiver]:
    base, other = tiny_pair()
    codec = quick_codec(base, other, tiny_texts(4), bits=16)
    return codec.sender(base), codec.receiver(other)


def altered(sender: Sender, change, **header) -> bytes:
    """The message of IDS with tensors of the first layer changed."""
    codec: Codec = sender.codec
    told = codec.header(ids_digest(IDS), (IDS.shape[1],))
    writer = MessageWriter(replace(told, **header))
    trace = sender.endpoint.read(IDS)
    packed = [encode_layer(coder, trace, layer) for layer, coder in enumerate(codec.coders)]
    change(packed[0])
    return writer.start + b"".join(writer.frame(i, tensors) for i, tensors in enumerate(packed))


def test_an_unchanged_message_is_taken(ends):
    sender, receiver = ends
    whole = altered(sender, lambda packed: None)
    assert whole == b"".join(sender.pieces(IDS))
    assert receiver.decode(whole, ids=IDS).get_seq_length() == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: packed.pop("key.16"),
        lambda packed: packed.update(more=torch.zeros(1)),
        lambda packed: packed.update({"key.16": packed["key.16"][:-1]}),
        lambda packed: packed.update({"key.16": packed["key.16"].float()}),
        lambda packed: packed.update({"key.16": packed["key.16"].flatten()}),
        lambda packed: packed["value.16"].fill_(torch.nan),
        lambda packed: packed["value.16"][3, 2].fill_(torch.inf),
    ],
)
def test_tensors_that_the_codec_does_not_have_are_refused(ends, change):
    sender, receiver = ends
    with pytest.raises(TransferError, match="layer 0"):
        receiver.decode(altered(sender, change), ids=IDS)


@pytest.mark.parametrize("method", ["full", "knorm", "snapkv"])
def test_what_is_decoded_has_no_graph(method: str, monkeypatch):
    """Although a patched layer's goes through weights of the consumer, which want gradients."""
    base, other = tiny_pair()
    codec, ids = quick_codec(base, other, tiny_texts(4), patches=(1,)), tiny_ids(1, 40)
    found = []

    def noted(*arguments):
        found.extend(decode_layer(*arguments))
        return found[-2:]

    monkeypatch.setattr("kvfold.transfer.ends.decode_layer", noted)
    into = None if method == "full" else kvfold.make_cache(other, method, budget=12)
    codec.decode(other, codec.encode(base, ids), ids=ids, into=into)
    assert all(weight.requires_grad for weight in other.parameters())
    assert len(found) == 2 * len(codec.coders)
    assert not any(states.requires_grad for states in found)


def test_lengths_that_do_not_fit_are_refused(ends):
    sender, receiver = ends
    for lengths in ((11,), (6, 6), (13,)):
        data = altered(sender, lambda packed: None, lengths=lengths)
        with pytest.raises(TransferError):
            receiver.decode(data, ids=tiny_ids(1, 12, seed=1))
    long = altered(sender, lambda packed: None, lengths=(5000,))
    with pytest.raises(TransferError, match="5000 tokens, more than the model's 2048"):
        receiver.decode(long)


def test_lengths_are_those_of_the_prefix_that_was_asked_for(ends):
    sender, receiver = ends
    for lengths in ((6, 6), (7, 5)):
        data = altered(sender, lambda packed: None, lengths=lengths)
        with pytest.raises(TransferError, match="other lengths"):
            receiver.decode(data, ids=IDS)


def test_no_frame_is_larger_than_the_codecs(ends):
    sender, receiver = ends
    writer = MessageWriter(sender.codec.header(ids_digest(IDS), (12,)))
    data = writer.start + writer.frame(0, {"key.16": torch.zeros(10_000)})
    with pytest.raises(TransferError, match="bytes, more than"):
        receiver.decode(data, ids=IDS)
    assert len(data) < Limits().frame
    reader = MessageReader()
    header = reader.take(writer.start[:16]) or reader.take(writer.start[16:])
    receiver.begin(header, reader, ids=IDS)
    assert reader.frame_limit < 10_000


def test_another_number_of_layers_is_refused(ends):
    sender, receiver = ends
    with pytest.raises(TransferError, match="another number of layers"):
        receiver.decode(altered(sender, lambda packed: None, layers=2), ids=IDS)


def test_the_consumer_is_attached(ends):
    codec = ends[0].codec
    model = tiny_model()
    codec = Codec(codec.coders, codec.producer, codec.producer, "", {})
    with pytest.raises(ConfigError, match="attach"):
        codec.receiver(model)


@pytest.mark.parametrize("method", ["full", "streaming"])
def test_a_cache_is_as_wide_as_the_ids_however_many_columns_are_padding(ends, method: str):
    """Every row is shorter than the ids: what goes on brings a mask over all columns."""
    sender, receiver = ends
    model = receiver.endpoint.model
    ids, follow = tiny_ids(2, 12), tiny_ids(2, 3, seed=1)
    mask = left_padded([8, 5], 12)
    message = b"".join(sender.pieces(ids, mask=mask))
    own, wide, narrow = (kvfold.make_cache(model, method) for _ in range(3))
    prefill(model, ids, own, attention_mask=mask.long())
    wide, narrow = (None, None) if method == "full" else (wide, narrow)
    cache = receiver.decode(message, ids=ids, mask=mask, into=wide)
    assert cache.get_seq_length() == own.get_seq_length() == 12
    assert (
        cache.own_layers[0].slots.positions.tolist() == own.own_layers[0].slots.positions.tolist()
    )
    whole = torch.cat([ids, follow], 1)
    attended = torch.cat([mask.long(), torch.ones(2, 3, dtype=torch.long)], 1)
    options = {"attention_mask": attended, "max_new_tokens": 4, "do_sample": False}
    given = model.generate(whole, **options, **{CACHE_KEYWORD: cache})
    # The same tokens without any padding that both rows share.
    narrow = receiver.decode(message, into=narrow)
    assert narrow.get_seq_length() == 8
    options["attention_mask"] = attended[:, 4:]
    expected = model.generate(whole[:, 4:], **options, **{CACHE_KEYWORD: narrow})
    assert torch.equal(given[:, 15:], expected[:, 11:])


def test_masks_that_are_not_padded_on_the_left_are_refused(ends):
    sender, _ = ends
    for mask, message in (
        (left_padded([8], 12).flip(-1), "pad on the left"),
        (left_padded([8], 11), "give one of the same shape"),
        (left_padded([0], 12), "no tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            next(sender.pieces(IDS, mask=mask))
