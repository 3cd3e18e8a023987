"""Calibration: targets are kept, what is recorded is so, and a stopped run goes on the same."""

import copy
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvfold
from kvfold.cache import prefill
from kvfold.errors import ArtifactError, ConfigError
from kvfold.transfer import CalibrationProgress, CalibrationSettings, Codec, calibrate
from kvfold.transfer.patch import AlignerSettings
from tests.tiny import tiny_ids, tiny_model
from tests.transfer.pairs import continued, tiny_pair, tiny_texts

QUICK = CalibrationSettings(
    probes=2,
    continuation=16,
    patches=2,
    pool=2,
    tokens=256,
    granule=2,
    sample_rows=400,
    aligner_rows=400,
    aligner=AlignerSettings(hidden=16, steps=20, batch=64),
    save_every=3,
)
REUSE = replace(QUICK, patches=0)


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def patched(pair) -> Codec:
    return calibrate(*pair, tiny_texts(12), payload=0.4, settings=replace(QUICK, least_gain=0.0))


class Stopped(Exception):
    pass


def stopping(stage: str, done: int):
    """A progress callback that stops the run."""

    def tell(progress: CalibrationProgress) -> None:
        if (progress.stage, progress.done) == (stage, done):
            raise Stopped

    return tell


def test_identity_without_a_target_is_exact_for_every_length():
    base, _ = tiny_pair()
    settings = replace(REUSE, widths=(32,), strength=0.0, dtype="float32")
    codec = calibrate(base, base, tiny_texts(8), settings=settings)
    assert codec.patched == []
    for length in (1, 2, 3, 50, 300):
        ids, follow = tiny_ids(1, length), tiny_ids(1, 30, seed=1)
        own = kvfold.make_cache(base, "full")
        prefill(base, ids, own)
        cache = codec.decode(base, codec.encode(base, ids), ids=ids)
        expected, found = (continued(base, held, follow) for held in (own, cache))
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("payload", [0.15, 0.3, 0.45])
def test_the_whole_message_keeps_to_the_payload(pair, payload: float):
    base, _ = pair
    codec = calibrate(*pair, tiny_texts(8), payload=payload, settings=REUSE)
    message = codec.encode(base, tiny_ids(1, 256))
    raw = 256 * 3 * 2 * 2 * 16 * 2
    assert payload * 0.97 < len(message) / raw <= payload
    assert codec.record["payload"] == len(message) / raw == codec.share(256)


def test_what_is_lost_falls_as_the_payload_rises(pair):
    found = [
        calibrate(*pair, tiny_texts(8), payload=payload, settings=REUSE).record["divergence"]
        for payload in (0.08, 0.15, 0.4)
    ]
    assert found == sorted(found, reverse=True)


def test_the_divergence_that_was_asked_for_is_kept_at_fewer_bytes_than_all(pair):
    texts = tiny_texts(12)
    everything = calibrate(*pair, texts, settings=REUSE)
    wanted = 1.3 * float(str(everything.record["divergence_chosen_by"]))
    codec = calibrate(*pair, texts, max_kl=wanted, settings=REUSE)
    assert codec.bits < everything.bits
    assert float(str(codec.record["divergence_chosen_by"])) <= 1.05 * wanted
    with pytest.raises(ConfigError, match="at full rank the codec still diverges"):
        calibrate(*pair, texts, max_kl=1e-7, settings=REUSE)


def test_patches_are_chosen_from_the_layers_that_matter(pair, patched: Codec):
    record = patched.record
    sensitivity, order = record["sensitivity"], record["patch_order"]
    assert isinstance(sensitivity, list) and isinstance(order, list)
    pool = sorted(range(3), key=lambda layer: -sensitivity[layer])[:2]
    assert patched.patched == sorted(layer for layer, _ in order)
    assert set(patched.patched) <= set(pool)
    reached = [divergence for _, divergence in order]
    assert reached == sorted(reached, reverse=True)
    assert patched.share(256) <= 0.4


def test_a_patched_codec_travels_and_is_stored(pair, patched: Codec, tmp_path: Path):
    base, other = pair
    loaded = Codec.load(patched.save(tmp_path))
    assert loaded.digest == patched.digest
    ids = tiny_ids(1, 40)
    assert loaded.encode(base, ids) == patched.encode(base, ids)
    one, two = (
        continued(other, codec.decode(other, patched.encode(base, ids)), ids)
        for codec in (loaded, patched)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("stage", "done"),
    [
        ("reading for moments", 4),
        ("reading for patches", 8),
        ("choosing patches", 1),
        ("reading for decoders", 5),
    ],
)
def test_a_stopped_calibration_goes_on_as_if_it_had_not(pair, patched, tmp_path, stage, done):
    options = {"payload": 0.4, "settings": replace(QUICK, least_gain=0.0)}
    with pytest.raises(Stopped):
        calibrate(
            *pair, tiny_texts(12), folder=tmp_path, on_progress=stopping(stage, done), **options
        )
    told: list[CalibrationProgress] = []
    codec = calibrate(*pair, tiny_texts(12), folder=tmp_path, on_progress=told.append, **options)
    assert codec.digest == patched.digest
    if stage == "reading for decoders":
        assert told[0] == CalibrationProgress("reading for decoders", 4, 8)


def test_another_target_in_the_same_folder_reads_no_text_for_its_moments(pair, tmp_path):
    options = {"settings": REUSE, "folder": tmp_path}
    calibrate(*pair, tiny_texts(8), payload=0.4, **options)
    told: list[CalibrationProgress] = []
    codec = calibrate(*pair, tiny_texts(8), payload=0.2, on_progress=told.append, **options)
    assert "reading for moments" not in {progress.stage for progress in told}
    assert codec.digest == calibrate(*pair, tiny_texts(8), payload=0.2, settings=REUSE).digest


def test_states_of_other_runs_are_refused(pair, tmp_path: Path):
    calibrate(*pair, tiny_texts(8), payload=0.4, settings=REUSE, folder=tmp_path)
    with pytest.raises(ConfigError, match="with other texts"):
        calibrate(*pair, tiny_texts(9), payload=0.4, settings=REUSE, folder=tmp_path)
    with pytest.raises(ConfigError, match="with other settings"):
        settings = replace(REUSE, granule=4)
        calibrate(*pair, tiny_texts(8), payload=0.4, settings=settings, folder=tmp_path)
    state = tmp_path / "payload-0.4" / "weights.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match="damaged or not a calibration's state"):
        calibrate(*pair, tiny_texts(8), payload=0.4, settings=REUSE, folder=tmp_path)


def test_traces_are_not_kept(pair):
    """What a pass holds does not grow with the texts."""
    from kvfold.transfer.endpoint import Endpoint
    from kvfold.transfer.streams import Gathering, Pair

    ends = Pair(*map(Endpoint, pair))
    places = [("key", 0), ("hidden", 1)]
    sizes = []
    for count in (4, 8):
        gathering = Gathering({place: ends.widths(place) for place in places}, both=True)
        for text in tiny_texts(count):
            for place, a, b in ends.read(text[None], places):
                gathering.add(place, torch.cat([a, b], 1), torch.arange(16 // count))
        sizes.append(sum(tensor.nbytes for tensor in gathering.entry().tensors.values()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"payload": 0.2, "max_kl": 0.1}, "give one"),
        ({"payload": 0.0}, "not a share"),
        ({"payload": float("nan")}, "not a share"),
        ({"max_kl": -1.0}, "not above 0"),
        ({"payload": 0.3, "settings": replace(REUSE, tokens=8)}, "no room beside the headers"),
        ({"payload": 1e-4}, "give a larger payload"),
        ({"settings": replace(REUSE, widths=(5,))}, "widths"),
        ({"settings": replace(REUSE, granule=3)}, "granule"),
        ({"settings": replace(REUSE, probes=4)}, "8 texts are too few: give at least 9"),
        ({"settings": replace(REUSE, continuation=60)}, "at least 68"),
    ],
)
def test_what_cannot_be_done_is_refused(pair, options, message):
    with pytest.raises(ConfigError, match=message):
        calibrate(*pair, tiny_texts(8), **{"settings": REUSE, **options})


def test_texts_that_are_no_token_ids_are_refused(pair):
    for bad in (torch.zeros(2, 40, dtype=torch.long), torch.zeros(40)):
        with pytest.raises(ConfigError, match="text 0 is not a row of token ids"):
            calibrate(*pair, [bad, *tiny_texts(8)], settings=REUSE)


def test_models_of_other_shapes_and_unattached_consumers_are_refused(pair):
    wide = tiny_model(hidden_size=128)
    kvfold.attach(wide)
    with pytest.raises(ConfigError, match="hidden_size 128 instead of 64"):
        calibrate(pair[0], wide, tiny_texts(8), settings=REUSE)
    with pytest.raises(ConfigError, match="attach"):
        calibrate(pair[0], tiny_model(), tiny_texts(8), settings=REUSE)


def test_the_models_are_left_as_they_were(pair):
    base, other = pair
    before = [copy.deepcopy(model.state_dict()) for model in pair]
    calibrate(base, other, tiny_texts(8), payload=0.3, settings=QUICK)
    for model, state in zip(pair, before, strict=True):
        assert all(torch.equal(state[name], w) for name, w in model.state_dict().items())
        modules = model.modules()
        attentions = [m for m in modules if m.__class__.__name__.endswith("Attention")]
        assert all(not m._forward_pre_hooks for m in attentions)


def test_errors_of_what_layers_are_given_are_recorded_with_and_without_patches(
    pair, patched: Codec
):
    growth, curve = patched.record["growth"], patched.record["curve"]
    assert isinstance(growth, dict) and isinstance(curve, list)
    for errors in growth.values():
        # The first layer is given the embeddings of the continuation, which nothing changes.
        assert errors[0] == 0 and all(error > 0 for error in errors[1:])
    assert set(growth) == {"as made", *(["without patches"] if patched.patched else [])}
    shares, found = zip(*curve, strict=True)
    assert list(shares) == sorted(shares)
    assert found[-1] < found[0]
    exact = calibrate(pair[0], pair[0], tiny_texts(8), settings=replace(REUSE, widths=(32,)))
    assert "curve" not in exact.record
    assert max(exact.record["growth"]["as made"]) < 1e-2  # pyright: ignore


def test_a_layer_whose_room_is_below_one_step_is_not_patched(pair):
    """So much divergence is allowed that a layer's own codes are smaller than a step."""
    codec = calibrate(*pair, tiny_texts(12), max_kl=0.5, settings=replace(QUICK, granule=4))
    pool = codec.record["pool"]
    assert isinstance(pool, list) and len(pool) < QUICK.pool
    assert set(codec.patched) <= set(pool)
    assert float(str(codec.record["divergence_chosen_by"])) <= 0.5


def test_a_divergence_that_other_texts_exceed_is_warned_of(pair, caplog):
    texts = tiny_texts(12)
    with caplog.at_level(logging.WARNING):
        codec = calibrate(*pair, texts, max_kl=0.5, settings=REUSE)
    assert float(str(codec.record["divergence"])) <= 0.5
    assert "no choice was made by" not in caplog.text
    # What is chosen by is of another kind, and easier, than what is measured on.
    texts[-4:-2] = [torch.full_like(text, 7) for text in texts[-4:-2]]
    with caplog.at_level(logging.WARNING):
        codec = calibrate(*pair, texts, max_kl=0.02, settings=REUSE)
    assert float(str(codec.record["divergence"])) > 0.02
    assert "more than the 0.02 wanted" in caplog.text


def test_a_pass_for_decoders_keeps_no_rows(pair, tmp_path: Path):
    calibrate(*pair, tiny_texts(8), payload=0.4, settings=REUSE, folder=tmp_path)
    journal = tmp_path / "payload-0.4" / "decoders.safetensors"
    samples = {
        name: tensor for name, tensor in load_file(journal).items() if name.endswith(".sample")
    }
    assert len(samples) == 6
    assert all(len(tensor) == 0 for tensor in samples.values())
