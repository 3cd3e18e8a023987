"""Answers over handed-over prefixes: what is exact where it should be, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.errors import ConfigError
from kvfold.evaluation import handover
from kvfold.evaluation.handover import (
    BASE,
    ORACLE,
    HandoverRow,
    HandoverSettings,
    _Stage,
    measure_handover,
)
from kvfold.evaluation.handover_report import draw_answers, summarise
from kvfold.transfer import BASELINES, CalibrationSettings, Codec, calibrate
from tests.tiny_folder import byte_tokenizer
from tests.transfer.pairs import tiny_pair, tiny_texts

SETTINGS = HandoverSettings(items=2, lengths=(500, 600), seed=3)
SHAPE = {"vocab_size": 259}


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(**SHAPE)


@pytest.fixture(scope="module")
def codec(pair) -> Codec:
    settings = CalibrationSettings(tokens=96, probes=1, continuation=16, patches=1, pool=2)
    return calibrate(*pair, tiny_texts(8, 96), payload=0.6, settings=settings)


@pytest.fixture(scope="module")
def rows(pair, codec: Codec, tmp_path_factory: pytest.TempPathFactory) -> list[HandoverRow]:
    folder = tmp_path_factory.mktemp("rows")
    return measure_handover(*pair, byte_tokenizer(), {"codes": codec}, SETTINGS, folder)


def by_way(rows: list[HandoverRow], index: int) -> dict[str, HandoverRow]:
    return {row.way: row for row in rows if row.index == index}


def test_every_way_answers_every_item(rows: list[HandoverRow]) -> None:
    ways = [ORACLE, BASE, *BASELINES[1:], "codes"]
    assert [(row.index, row.way) for row in rows] == [(i, way) for i in range(2) for way in ways]
    assert [row.tokens for row in rows[:: len(ways)]] == [500, 600]


def test_payloads_and_distances(rows: list[HandoverRow], codec: Codec) -> None:
    found = by_way(rows, 0)
    raw = 500 * 3 * 2 * 2 * 16 * 2
    assert {row.raw for row in found.values()} == {raw}
    assert found["raw"].payload == raw
    assert found[ORACLE].payload == found[BASE].payload == 0
    assert found["codes"].payload == codec.payload([500])
    assert found["int4"].payload < found["int8"].payload < found["rerotated"].payload == raw
    assert found["int8"].payload < found["recompute"].payload <= raw
    assert found[ORACLE].divergence < 1e-6
    assert found["codes"].divergence > 0
    assert found["raw"].divergence > 0
    assert found[BASE].divergence > 0


def test_one_model_on_both_sides_answers_as_the_oracle(pair, tmp_path: Path) -> None:
    _, model = pair
    rows = measure_handover(model, model, byte_tokenizer(), {}, SETTINGS, tmp_path)
    for index in range(2):
        found = by_way(rows, index)
        for way in (BASE, "rerotated", "recompute"):
            assert found[way].divergence < 1e-3
        assert found[BASE].answer == found[ORACLE].answer


def test_answers_are_those_of_generate(pair, rows: list[HandoverRow]) -> None:
    tokenizer, (_, consumer) = byte_tokenizer(), pair
    items = handover.held_out_items(tokenizer, SETTINGS.lengths, SETTINGS.seed)
    for index in range(2):
        item = next(items)
        ids = torch.tensor([[*item.passage, *item.question]])
        options = {"max_new_tokens": handover._LIMIT, "do_sample": False, "pad_token_id": 0}
        out = consumer.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert by_way(rows, index)[ORACLE].answer == expected
        assert by_way(rows, index)[ORACLE].expected == item.answer


def test_rows_are_gone_on_with(
    pair, codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*pair, byte_tokenizer(), {"codes": codec})
    one = HandoverSettings(items=1, lengths=(500, 600), seed=3)
    first = measure_handover(*arguments, one, tmp_path)
    asked: list[int] = []
    own = _Stage.rows

    def rows(self: _Stage, index: int, item, keys):
        asked.append(index)
        return own(self, index, item, keys)

    monkeypatch.setattr(_Stage, "rows", rows)
    found = measure_handover(*arguments, SETTINGS, tmp_path, resume=True)
    assert asked == [1]
    assert found[: len(first)] == first
    measure_handover(*pair, byte_tokenizer(), {"other": codec}, SETTINGS, tmp_path, resume=True)
    assert asked == [1, 0, 1]
    with pytest.raises(ConfigError, match="holds results"):
        measure_handover(*arguments, SETTINGS, tmp_path)


def test_nothing_to_ask_is_refused(pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 items of"):
        measure_handover(*pair, byte_tokenizer(), {}, HandoverSettings(items=0), tmp_path)


def row(index: int, way: str, f1: float, payload: int = 10) -> HandoverRow:
    return HandoverRow(
        key=f"{index}{way}",
        index=index,
        tokens=100,
        way=way,
        payload=payload,
        raw=40,
        divergence=0.5 * index,
        expected="a / b .",
        answer="a / b ." if f1 == 1 else "a / c .",
        f1=f1,
        is_exact=f1 == 1,
    )


def test_what_is_lost_is_paired_with_the_oracle() -> None:
    rows = [row(i, ORACLE, i % 2, 0) for i in range(10)]
    rows += [row(i, "codes", (i % 2) / 2) for i in range(10)]
    oracle, codes = summarise(rows, seed=0)
    assert (oracle.share, codes.share) == (0, 0.25)
    assert (oracle.f1.mean, codes.f1.mean, codes.lost.mean) == (0.5, 0.25, 0.25)
    assert codes.kept == 0.5
    assert oracle.lost.low == oracle.lost.high == 0
    assert codes.lost.low < 0.25 < codes.lost.high
    # Half of what the oracle's own scatter is, item by item.
    assert codes.lost.high - codes.lost.low == pytest.approx(
        (oracle.f1.high - oracle.f1.low) / 2, rel=1e-6
    )
    assert (oracle.exact.mean, codes.exact.mean) == (0.5, 0)
    assert codes.divergence.mean == 2.25


def test_the_picture_has_every_way() -> None:
    rows = [row(i, way, 1.0) for way in (ORACLE, BASE, "raw", "codes") for i in range(2)]
    figure = draw_answers(summarise(rows, seed=0), "a to $b$")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert {"raw", "codes", "the producer alone"} <= set(labels)
