"""The race to the first token: its arithmetic, its pacing, and what it takes for a subject."""

import pytest
import torch

from kvfold.errors import ArtifactError, ConfigError
from kvfold.transfer import BASELINES
from kvfold.transfer.entrant import OWN, Entrant
from kvfold.transfer.pace import send_paced
from kvfold.transfer.race import RaceSettings, race
from kvfold.transfer.race_picture import draw_race
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import tiny_pair, tiny_texts

QUICK = RaceSettings(bandwidths=(1e8, 1e9), continuation=8, rounds=2)


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


def test_times_add_up_by_round():
    entrant = Entrant(1000, 0.0, 1.0)
    entrant.seconds = {"prefill": [4.0, 5.0], "encode": [1.0, 1.0], "decode": [0.5, 0.25]}
    entrant.sending = {1e6: [2.0, 3.0]}
    assert entrant.total(1e6, kept=False) == [7.5, 9.25]
    assert entrant.total(1e6, kept=True) == [2.5, 3.25]
    alone = Entrant(0, 0.0, 1.0, seconds={"prefill": [4.0, 5.0]})
    assert alone.total(1e6, kept=True) == alone.total(1e9, kept=False) == [4.0, 5.0]


def test_the_crossover_is_where_sending_takes_what_is_left():
    entrant = Entrant(1000, 0.0, 1.0, seconds={"prefill": [3.0], "decode": [1.0]})
    assert entrant.crossover(3.0, kept=True) == 4000
    assert entrant.crossover(3.0, kept=False) is None
    assert entrant.crossover(1.0, kept=True) is None


@pytest.mark.parametrize(("size", "rate"), [(1, 1e6), (50_000, 8e6), (300_000, 1e8)])
def test_no_message_is_sooner_than_its_bandwidth_lets_it_be(size: int, rate: float):
    assert send_paced(bytes(size), rate) >= 8 * size / rate


def test_codes_of_a_model_to_itself_lose_nothing_and_payloads_are_whole_messages(pair):
    base, _ = pair
    codec = quick_codec(base, base, tiny_texts(4), patches=(1,))
    text, told = tiny_ids(1, 60)[0], []
    found = race({"codes": codec}, base, base, text, QUICK, lambda *at: told.append(at))
    assert list(found) == [OWN, "codes", *(name for name in BASELINES if name != "oracle")]
    assert found["codes"].payload == codec.payload([51])
    assert found["raw"].payload == 51 * 3 * 2 * 2 * 16 * 2
    assert found["codes"].divergence == pytest.approx(0, abs=1e-5)
    assert found["codes"].perplexity == pytest.approx(found[OWN].perplexity, rel=1e-3)
    assert found["int4"].divergence > found["int8"].divergence > 0
    for entrant in found.values():
        assert all(len(samples) == 2 for samples in entrant.seconds.values())
        assert set(entrant.sending) == (set(QUICK.bandwidths) if entrant.payload else set())
    assert told[-1][1] == 1.0
    assert [len(axes.patches) > 0 for axes in draw_race(found, (1e8, 1e9), "x").axes] == [
        False,
        True,
    ]


def test_what_cannot_be_raced_is_refused(pair):
    base, other = pair
    codec = quick_codec(base, other, tiny_texts(4), bits=8)
    with pytest.raises(ConfigError, match="leaves no prefix"):
        race({"codes": codec}, base, other, tiny_ids(1, 9)[0], QUICK)
    with pytest.raises(ArtifactError, match="not the codec's producer"):
        race({"codes": codec}, other, base, tiny_ids(1, 60)[0], QUICK)
    for settings in (RaceSettings(rounds=0), RaceSettings(bandwidths=(0.0,))):
        with pytest.raises(ConfigError, match="give"):
            race({}, base, other, torch.arange(99), settings)
