"""The pair that comes with the package: small, made by commands that the page names, and in use."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.errors import ArtifactError
from kvfold.evaluation.handover import BASE, ORACLE, HandoverSettings, measure_handover
from kvfold.models.adapter import SHIPPED as ADAPTERS
from kvfold.models.adapter import AdapterArtifact
from kvfold.transfer import Codec
from kvfold.transfer.artifact import SHIPPED
from tests.transfer.pairs import tiny_pair

PAGE = Path(__file__).parents[2] / "docs" / "transfer.md"


def _told(command: object) -> bool:
    """Whether the page names a command, but for how it was gone on with and shown."""
    words = str(command).replace(" --resume", "").replace(" --json", "")
    return f"`{words}`" in PAGE.read_text(encoding="utf-8")


def test_the_adapter_is_small_and_says_how_it_was_made() -> None:
    path = ADAPTERS["specialist"]
    assert path.stat().st_size < 12_000_000
    adapter = AdapterArtifact.from_pretrained(path)
    assert adapter.base == "default"
    assert adapter.facts["layers"] == 30
    assert _told(adapter.record["command"])
    assert "dirty" not in adapter.record["environment"]["commit"]


def test_the_codec_is_small_and_says_how_it_was_made() -> None:
    assert SHIPPED.stat().st_size < 12_000_000
    codec = Codec.load("shipped")
    assert codec.share(1024) <= 0.25
    assert _told(codec.record["command"])
    assert "dirty" not in codec.record["environment"]["commit"]


def test_a_folder_of_that_name_goes_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shipped").mkdir()
    with pytest.raises(ArtifactError, match="no codec at shipped"):
        Codec.load("shipped")


def test_another_pair_is_refused() -> None:
    with pytest.raises(ArtifactError, match="not the codec's producer"):
        Codec.load("shipped").sender(tiny_pair()[0])


@pytest.mark.real
def test_codes_are_answered_from_as_the_specialist_would(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    specialist, tokenizer = kvfold.load("specialist")
    settings = HandoverSettings(items=4, lengths=(256,), seed=7)
    codecs = {"codes": Codec.load("shipped")}
    rows = measure_handover(default_model[0], specialist, tokenizer, codecs, settings, tmp_path)
    f1 = {way: sum(r.f1 for r in rows if r.way == way) / 4 for way in (ORACLE, BASE, "codes")}
    assert f1[ORACLE] >= 0.75
    assert f1["codes"] >= f1[ORACLE] - 0.25
    assert f1[BASE] <= 0.25
