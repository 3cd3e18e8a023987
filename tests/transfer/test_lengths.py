"""Texts of several lengths: none is cut, each counts, and a stopped run goes on the same."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.transfer import Codec, calibrate
from kvfold.transfer.batches import batches
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.probes import Probes
from kvfold.transfer.refine import DecoderLearner
from kvfold.transfer.settings import RefineSettings
from kvfold.transfer.streams import Pair
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import tiny_pair, tiny_texts
from tests.transfer.test_calibrate import QUICK, Stopped, stopping

LEARNING = replace(QUICK, least_gain=0.0, refine=RefineSettings(learning_rate=2e-3, check_every=2))


def mixed(count: int, lengths: tuple[int, ...] = (40, 64)) -> list[torch.Tensor]:
    """Texts of the lengths in turn, no two alike."""
    texts = tiny_texts(count, max(lengths))
    return [text[: lengths[index % len(lengths)]] for index, text in enumerate(texts)]


TEXTS, MORE = mixed(12), mixed(23)[12:]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def whole(pair) -> Codec:
    return calibrate(*pair, TEXTS, payload=0.4, settings=LEARNING, refine=MORE)


@given(lengths=st.lists(st.integers(1, 4), max_size=20), size=st.integers(1, 5))
def test_a_batch_holds_one_length_and_no_text_is_lost_or_cut(lengths: list[int], size: int):
    texts = [torch.full((length,), index) for index, length in enumerate(lengths)]
    found = batches(texts, size)
    assert all(1 <= len(batch) <= size for batch in found)
    rows = sorted(chain(*(batch.tolist() for batch in found)))
    assert rows == sorted(text.tolist() for text in texts)
    for length in set(lengths):
        # As few as can be, and in the order in which they were given.
        own = [batch for batch in found if batch.shape[1] == length]
        assert len(own) == -(-lengths.count(length) // size)
        assert torch.equal(
            torch.cat(own)[:, 0], torch.tensor([i for i, n in enumerate(lengths) if n == length])
        )


def test_lengths_in_turn_are_batches_in_turn():
    assert [tuple(batch.shape) for batch in batches(mixed(7, (5, 9)), 2)] == [
        *((2, 5), (2, 9)),
        *((2, 5), (1, 9)),
    ]


@pytest.mark.parametrize("patches", [(), (1,)])
def test_probes_of_two_lengths_tell_the_mean_over_texts(pair, patches: tuple[int, ...]):
    ends = Pair(*map(Endpoint, pair))
    coders = quick_codec(*pair, tiny_texts(4), bits=4, patches=patches).coders
    short, long = [text[:30] for text in tiny_texts(2)], tiny_texts(5, 70)[2:]

    def divergence(probes: Probes) -> float:
        return probes.divergence(probes.all_decoded(coders))

    alone = [Probes(ends, texts, 16, hidden=True) for texts in (short, long)]
    both = Probes(ends, [short[0], *long, short[1]], 16, hidden=True)
    told = [divergence(probes) for probes in alone]
    assert told[0] != pytest.approx(told[1], rel=0.01)
    assert divergence(both) == pytest.approx((2 * told[0] + 3 * told[1]) / 5, rel=1e-5)
    assert both.divergence({}) == 0
    for layer in range(3):
        expected = torch.cat([probes.own[layer][0] for probes in alone])
        assert len(expected) == 2 * 14 + 3 * 54
        torch.testing.assert_close(both.own[layer][0], expected)
        assert len(both.own_inputs[layer]) == len(expected)
    assert all(error > 0 for error in both.growth(both.all_decoded(coders))[1:])


def test_mixed_lengths_are_learnt_from_whole(pair, whole: Codec, monkeypatch):
    seen: list[torch.Size] = []
    loss = DecoderLearner._loss

    def noted(self: DecoderLearner, ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape)
        return loss(self, ids)

    monkeypatch.setattr(DecoderLearner, "_loss", noted)
    again = calibrate(*pair, TEXTS, payload=0.4, settings=LEARNING, refine=MORE)
    assert again.digest == whole.digest
    assert seen == [(2, 40), (2, 64), (2, 40), (2, 64), (2, 40), (1, 64)]
    record = whole.record
    assert record["lengths"] == [40, 64] and record["texts"] == 8
    assert whole.share(256) == record["payload"] <= 0.4  # pyright: ignore
    refined = record["refined"]
    assert isinstance(refined, dict) and refined["curve"][-1]["step"] == 6


@pytest.mark.parametrize(
    ("stage", "done"),
    [("reading for moments", 5), ("reading for decoders", 4), ("refining decoders", 3)],
)
def test_a_stopped_run_of_mixed_lengths_goes_on(pair, whole, tmp_path: Path, stage, done):
    options = {"payload": 0.4, "settings": LEARNING, "refine": MORE, "folder": tmp_path}
    with pytest.raises(Stopped):
        calibrate(*pair, TEXTS, **options, on_progress=stopping(stage, done))
    assert calibrate(*pair, TEXTS, **options).digest == whole.digest
    with pytest.raises(ConfigError, match="with other texts"):
        calibrate(*pair, mixed(12, (40, 50)), **options)


def test_a_text_that_is_too_short_is_named(pair):
    short = torch.tensor([1, 2, 3])
    with pytest.raises(ConfigError, match=r"text 1 to refine on has 3 tokens: .* at least 24"):
        calibrate(*pair, TEXTS, settings=LEARNING, refine=[*MORE[:1], short])
    with pytest.raises(ConfigError, match=r"text 11 has 3 tokens: .* at least 24"):
        calibrate(*pair, [*TEXTS[:11], short], settings=LEARNING)
    with pytest.raises(ConfigError, match="text 0 to refine on is not a row of token ids"):
        calibrate(*pair, TEXTS, settings=LEARNING, refine=[torch.zeros(2, 40, dtype=torch.long)])
