"""Messages under a seal that fits, but with other things in them than the codec has."""

from dataclasses import replace

import pytest
import torch

from kvfold.errors import ConfigError, TransferError
from kvfold.transfer.codec import Codec
from kvfold.transfer.coder import encode_layer
from kvfold.transfer.ends import Receiver, Sender
from kvfold.transfer.wire import Limits, MessageReader, MessageWriter, ids_digest
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
