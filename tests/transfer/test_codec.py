"""What a codec carries: exact where nothing is left out, refused where the ends do not fit."""

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.cache import CACHE_KEYWORD, prefill
from kvfold.errors import ArtifactError, ConfigError, TransferError
from kvfold.ops.divergence import kl_divergence
from kvfold.transfer.codec import Codec
from tests.contract import left_padded, teacher_forced
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import continued, tiny_pair, tiny_texts


def own_logits(model, ids: torch.Tensor, follow: torch.Tensor) -> torch.Tensor:
    own = kvfold.make_cache(model, "full")
    prefill(model, ids, own)
    return continued(model, own, follow)


def decoded_logits(
    codec: Codec, base, other, ids: torch.Tensor, follow: torch.Tensor
) -> torch.Tensor:
    cache = codec.decode(other, codec.encode(base, ids), ids=ids)
    return continued(other, cache, follow)


def mean_kl(codec: Codec, base, other) -> float:
    ids, follow = tiny_ids(1, 60, seed=7), tiny_ids(1, 20, seed=8)
    expected = own_logits(other, ids, follow)
    return float(kl_divergence(expected, decoded_logits(codec, base, other, ids, follow)).mean())


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def codec(pair) -> Codec:
    return quick_codec(*pair, tiny_texts(6), bits=8, patches=(1,))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "smollm3", "olmo2"])
@pytest.mark.parametrize("patches", [(), (1,)])
def test_one_model_on_both_sides_at_full_rank_gives_its_own_tokens(kind: str, patches: tuple):
    base, _ = tiny_pair(kind)
    codec = quick_codec(base, base, tiny_texts(4), patches=patches)
    for length in (1, 2, 17, 40):
        ids, follow = tiny_ids(1, length), tiny_ids(1, 30, seed=1)
        expected = own_logits(base, ids, follow)
        found = decoded_logits(codec, base, base, ids, follow)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_generate_goes_on_from_a_decoded_cache(pair):
    base, _ = pair
    codec = quick_codec(base, base, tiny_texts(4))
    prompt = tiny_ids(1, 50)
    cache = codec.decode(base, codec.encode(base, prompt[:, :40]))
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    found = base.generate(prompt, **{CACHE_KEYWORD: cache}, **options)
    assert torch.equal(found, base.generate(prompt, **options))
    whole = codec.decode(base, codec.encode(base, prompt))
    whole.crop(-1)
    assert torch.equal(found, base.generate(prompt, **{CACHE_KEYWORD: whole}, **options))


@pytest.mark.parametrize("form", ["regression", "joint", "shared"])
def test_what_is_lost_falls_as_the_rank_rises(pair, form):
    texts = tiny_texts(8)
    losses = [mean_kl(quick_codec(*pair, texts, rank=r, form=form), *pair) for r in (4, 12, 32)]
    assert losses[0] > losses[1] > losses[2]


def test_more_bits_lose_less(pair):
    losses = [mean_kl(quick_codec(*pair, tiny_texts(8), bits=bits), *pair) for bits in (4, 8, 32)]
    assert losses[0] > losses[1] >= losses[2] * 0.99
    assert losses[1] == pytest.approx(losses[2], rel=0.05)


def test_keys_are_turned_with_the_consumers_own_angles():
    base, other = tiny_pair(drift=0.0, theta=1e6)
    codec, ids = quick_codec(base, other, tiny_texts(8)), tiny_ids(1, 60, seed=7)
    own = []
    for model in (base, other):
        own.append(kvfold.make_cache(model, "full"))
        prefill(model, ids, own[-1])
    cache = codec.decode(other, codec.encode(base, ids), ids=ids)
    # Both have the same keys before RoPE in the first layer, and only there.
    keys = [held.layers[0].keys for held in (cache, own[1], own[0])]
    torch.testing.assert_close(keys[0], keys[1], rtol=1e-3, atol=1e-4)
    assert float((keys[0] - keys[2]).norm() / keys[2].norm()) > 0.1


def test_padded_rows_are_rows_of_their_own(pair, codec):
    base, other = pair
    ids, mask, follow = tiny_ids(3, 40), left_padded([40, 9, 23], 40), tiny_ids(3, 5, seed=1)
    message = codec.encode(base, ids, mask=mask)
    cache = codec.decode(other, message, ids=ids, mask=mask)
    longer = torch.cat([mask, mask.new_ones(3, 1)], 1)
    found = teacher_forced(other, cache, follow[:, :1], follow[:, 1:], mask=longer)
    for row, length in enumerate((40, 9, 23)):
        alone = ids[row : row + 1, 40 - length :]
        expected = decoded_logits(codec, base, other, alone, follow[row : row + 1])
        assert float(kl_divergence(expected[0], found[row]).max()) < 1e-2


def test_the_payload_is_the_length_of_the_message(pair, codec):
    base, _ = pair
    for lengths in ([1], [40], [33, 7]):
        ids = tiny_ids(len(lengths), max(lengths))
        message = codec.encode(base, ids, mask=left_padded(lengths, max(lengths)))
        assert len(message) == codec.payload(lengths)
    raw = 3 * 2 * 2 * 16 * 2 * 40
    assert codec.share(40) == codec.payload([40]) / raw
    assert codec.bits / 8 * 1000 < codec.payload([1000]) < codec.bits / 8 * 1000 + 3000


def test_other_models_are_refused(pair, codec):
    base, other = pair
    with pytest.raises(ArtifactError, match="not the codec's producer: the weights differ"):
        codec.encode(other, tiny_ids(1, 5))
    message = codec.encode(base, tiny_ids(1, 5))
    with pytest.raises(ArtifactError, match="not the codec's consumer: the weights differ"):
        codec.decode(base, message)
    smaller = tiny_pair(num_hidden_layers=2)[0]
    with pytest.raises(ArtifactError, match="layers 2 instead of 3"):
        codec.encode(smaller, tiny_ids(1, 5))


def test_codes_of_another_prefix_or_codec_are_refused(pair, codec):
    base, other = pair
    ids = tiny_ids(1, 12)
    message = codec.encode(base, ids)
    with pytest.raises(TransferError, match="another prefix"):
        codec.decode(other, message, ids=tiny_ids(1, 12, seed=3))
    with pytest.raises(TransferError, match="another prefix"):
        codec.decode(other, message, ids=ids[:, :11])
    rival = quick_codec(*pair, tiny_texts(6), bits=8)
    with pytest.raises(TransferError, match="another codec"):
        rival.decode(other, message, ids=ids)
    named = Codec(codec.coders, codec.producer, codec.consumer, "a tokenizer", {})
    with pytest.raises(TransferError, match="another tokenizer"):
        named.decode(other, message, ids=ids)


def test_prefixes_that_cannot_be_read_are_refused(pair, codec):
    base, _ = pair
    with pytest.raises(ConfigError, match="no tokens"):
        codec.encode(base, tiny_ids(1, 0))
    with pytest.raises(ConfigError, match="no tokens"):
        codec.encode(base, tiny_ids(2, 5), mask=left_padded([5, 0], 5))
    with pytest.raises(ConfigError, match="pad on the left"):
        codec.encode(base, tiny_ids(1, 3), mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(ConfigError, match="same shape"):
        codec.encode(base, tiny_ids(1, 3), mask=torch.ones(1, 4))
    with pytest.raises(ConfigError, match="2048 positions"):
        codec.encode(base, tiny_ids(1, 2049))


def test_a_saved_codec_is_the_same_codec(pair, codec, tmp_path: Path):
    base, other = pair
    path = codec.save(tmp_path / "folder")
    assert [file.name for file in path.parent.iterdir()] == ["codec.safetensors"]
    for name in (path, path.parent):
        loaded = Codec.load(name)
        assert loaded.digest == codec.digest
        assert loaded.record == codec.record
    ids = tiny_ids(1, 12)
    assert loaded.encode(base, ids) == codec.encode(base, ids)
    cache = loaded.decode(other, codec.encode(base, ids), ids=ids)
    assert cache.report().tokens_seen == 12


def test_damaged_and_foreign_files_are_refused(codec, tmp_path: Path):
    path = codec.save(tmp_path)
    whole = path.read_bytes()
    for length in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="damaged or not a kvfold codec"):
            Codec.load(path)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(ArtifactError, match="checksum"):
        Codec.load(path)
    with pytest.raises(ArtifactError, match="there is no codec"):
        Codec.load(tmp_path / "nothing")


def test_files_with_other_facts_are_refused(codec, tmp_path: Path):
    for change, message in (
        ({"format": 2}, "format 2 for scd"),
        ({"method": "distill"}, "format 1 for distill"),
        ({"coders": []}, "0 layers"),
        ({"producer": {}}, "does not hold a codec"),
        ({"producer": {**codec.producer, "head_dim": 8}}, "key rows of"),
    ):
        with pytest.raises(ArtifactError, match=message):
            Codec.load(rewritten(codec, tmp_path, change))


def rewritten(codec: Codec, folder: Path, change: dict) -> Path:
    """The codec's file with parts of its header changed, under a checksum that fits."""
    import json

    from safetensors import safe_open

    from kvfold.tensorfile import digest_of, write_tensors

    path = codec.save(folder)
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["kvfold"]) | change
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = json.dumps(header)
    write_tensors(path, tensors, {"kvfold": text, "sha256": digest_of(text, tensors)})
    return path
