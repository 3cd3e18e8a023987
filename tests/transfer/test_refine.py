"""Decoders taught by the consumer: predictions come nearer, codes stay, a stopped run goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvfold.errors import ConfigError
from kvfold.ops.ridge import Moments
from kvfold.transfer import CalibrationSettings, Codec, calibrate
from kvfold.transfer.coder import translators
from kvfold.transfer.refine import Change, Decoders
from kvfold.transfer.settings import RefineSettings
from tests.tiny import tiny_ids
from tests.transfer.pairs import tiny_pair, tiny_texts
from tests.transfer.test_calibrate import QUICK, Stopped, stopping

LEARNING = replace(QUICK, least_gain=0.0, refine=RefineSettings(learning_rate=2e-3, check_every=5))
MORE = tiny_texts(132)[12:]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def before(pair) -> Codec:
    return calibrate(*pair, tiny_texts(12), payload=0.3, settings=LEARNING)


@pytest.fixture(scope="module")
def after(pair) -> Codec:
    return calibrate(*pair, tiny_texts(12), payload=0.3, settings=LEARNING, refine=MORE)


def test_predictions_come_nearer(before: Codec, after: Codec):
    gone = after.record["refined"]
    assert isinstance(gone, dict) and gone["texts"] == len(MORE)
    first, best = (
        next(p for p in gone["curve"] if p["step"] == step)["validation"]["divergence"]
        for step in (0, gone["best_step"])
    )
    assert first == pytest.approx(before.record["divergence_chosen_by"], rel=1e-4)
    assert best == pytest.approx(after.record["divergence_chosen_by"], rel=1e-4)
    assert best < 0.8 * first
    # Texts that nothing was chosen by.
    assert after.record["divergence"] < before.record["divergence"]  # pyright: ignore


def test_codes_and_payload_stay(pair, before: Codec, after: Codec):
    ids = tiny_ids(1, 40)
    lengths = [len(codec.encode(pair[0], ids)) for codec in (before, after)]
    assert lengths[0] == lengths[1]
    for first, second in zip(before.coders, after.coders, strict=True):
        for name, old in translators(first).items():
            new = translators(second)[name]
            assert torch.equal(old.encoder, new.encoder) and torch.equal(old.mean, new.mean)
            assert torch.equal(old.quantiser.steps, new.quantiser.steps)
            assert old.decoder.dtype == new.decoder.dtype
            assert not new.decoder.requires_grad and not new.offset.requires_grad
            if old.quantiser.rank:
                assert not torch.equal(old.decoder, new.decoder)


def test_decoders_that_learnt_nothing_are_what_they_were(before: Codec):
    moments = {}
    for layer, coder in enumerate(before.coders):
        for name, translator in translators(coder).items():
            rows = torch.randn(50, translator.quantiser.rank + len(translator.offset))
            moments[name, layer] = Moments(rows.shape[1])
            moments[name, layer].add(rows)
    for old, new in zip(before.coders, Decoders(before.coders, moments).coders(), strict=True):
        for name, translator in translators(old).items():
            assert torch.equal(translator.decoder, translators(new)[name].decoder)
            assert torch.equal(translator.offset, translators(new)[name].offset)


def test_a_change_counts_in_the_spreads_of_codes_and_states():
    change = Change(torch.tensor([2.0, 0.0]), torch.full((3,), 4.0))
    assert change.scale[0].item() == 2.0
    # A channel that never moves does not blow up.
    assert change.scale[1].isfinite().all()
    assert change.size.item() == 4.0


@pytest.mark.parametrize("stage", [("refining decoders", 7), ("refining decoders", 60)])
def test_a_stopped_run_goes_on_to_the_same_codec(pair, after: Codec, tmp_path: Path, stage):
    options = {"payload": 0.3, "settings": LEARNING, "refine": MORE, "folder": tmp_path}
    with pytest.raises(Stopped):
        calibrate(*pair, tiny_texts(12), **options, on_progress=stopping(*stage))
    resumed = calibrate(*pair, tiny_texts(12), **options)
    assert resumed.digest == after.digest


@pytest.mark.parametrize("form", ["joint", "shared"])
def test_every_form_of_code_is_taught(pair, form):
    settings = replace(LEARNING, form=form, patches=0)
    taught = calibrate(*pair, tiny_texts(12), payload=0.3, settings=settings, refine=MORE[:40])
    gone = taught.record["refined"]
    assert isinstance(gone, dict) and gone["best_step"] > 0


def test_what_cannot_be_taught_by_is_refused(pair):
    options = {"payload": 0.3, "settings": LEARNING}
    with pytest.raises(ConfigError, match=r"measured or refined on need at least 24"):
        calibrate(*pair, tiny_texts(12), **options, refine=[torch.tensor([1, 2, 3])])
    for wrong in ({"batch": 0}, {"check_every": 0}, {"learning_rate": 0.0}):
        settings = CalibrationSettings(refine=RefineSettings(**wrong))
        with pytest.raises(ConfigError, match="above 0"):
            calibrate(*pair, tiny_texts(12), settings=settings)
