"""Corpora: exact, repeatable excerpts from any source, splits apart, and errors in one line."""

from __future__ import annotations

import json
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.text import unseen_paragraphs
from kvfold.training import texts
from kvfold.training.corpus import Corpus, Excerpt, open_corpora, open_corpus
from kvfold.training.passages import Passages, read_passages
from kvfold.training.prompts import RetrievalPrompts
from kvfold.training.words import SPLITS, Split
from tests.tiny_folder import byte_tokenizer

WINDOW = 32
"""Tokens in a row that splits do not share."""
LETTERS = 192
"""The same for tokens that are letters."""


@pytest.fixture(autouse=True)
def short_reference(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A part of the reference is enough here, and sooner tokenized."""
    if request.node.get_closest_marker("real") is None:
        some = unseen_paragraphs()[:250]
        monkeypatch.setattr("kvfold.training.corpus.unseen_paragraphs", lambda: some)


def prose(count: int, seed: int = 0) -> str:
    """Numbered lines of random letters: no part repeats another."""
    generator = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz     \n"
    return "".join(generator.choice(letters) for _ in range(count))


def opened(*sources: str, length: int = 128, seed: int = 0) -> Corpus:
    return open_corpus(sources, byte_tokenizer(), length=length, seed=seed)


def text_of(excerpt: Excerpt) -> str:
    return str(byte_tokenizer().decode(excerpt.tokens.tolist()))


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text(prose(30_000), encoding="utf-8")
    return str(path)


def windows(corpus: Corpus, split: Split, count: int) -> set[tuple[int, ...]]:
    found = set()
    for index in range(count):
        tokens = corpus.excerpt(index, split).tokens.tolist()
        found |= {tuple(tokens[at : at + WINDOW]) for at in range(len(tokens) - WINDOW + 1)}
    return found


@pytest.mark.parametrize("length", [64, 65, 200, 1024, 3000])
def test_excerpts_have_exactly_the_length(length: int, book: str) -> None:
    corpus = opened("default", book, length=length)
    kinds = set()
    for split in SPLITS:
        for index in range(25):
            excerpt = corpus.excerpt(index, split)
            kinds.add(excerpt.kind)
            assert excerpt.tokens.shape == (length,)
            assert excerpt.tokens.dtype == torch.int64
            if excerpt.kind in {"reference", book}:
                assert excerpt.scored is None
            else:
                assert excerpt.scored is not None
                assert 0 < excerpt.scored < length
    assert kinds == {"reference", "retrieval", "arithmetic", book}


def test_excerpts_are_the_texts_own(book: str) -> None:
    whole = Path(book).read_text(encoding="utf-8")
    corpus = opened(book)
    assert all(text_of(corpus.excerpt(index, "train")) in whole for index in range(20))


def test_an_index_always_gives_the_same(book: str) -> None:
    one, again, other = (opened("default", book, seed=seed) for seed in (3, 3, 4))
    differ = 0
    for index in (7, 0, 7, 12):
        first, second = one.excerpt(index, "train"), again.excerpt(index, "train")
        assert torch.equal(first.tokens, second.tokens)
        assert (first.kind, first.scored) == (second.kind, second.scored)
        differ += not torch.equal(first.tokens, other.excerpt(index, "train").tokens)
        differ += not torch.equal(first.tokens, one.excerpt(index, "validation").tokens)
    assert differ == 8


def test_splits_of_a_text_share_no_window(book: str) -> None:
    corpus = opened(book)
    train, validation = windows(corpus, "train", 400), windows(corpus, "validation", 400)
    assert len(train) > 15_000
    assert len(validation) > 2_000
    assert not train & validation


def test_lengths_hold_out_the_same_text(book: str) -> None:
    short, long = open_corpora([book], byte_tokenizer(), lengths=[128, 5000], seed=0)
    assert len(long.excerpt(0, "train").tokens) == 5000
    assert not windows(short, "train", 400) & windows(long, "validation", 10)
    assert not windows(long, "train", 40) & windows(short, "validation", 100)
    # Opened one by one they would not.
    assert windows(opened(book), "train", 400) & windows(long, "validation", 10)


def test_splits_of_the_reference_share_no_passage() -> None:
    runs = read_passages(byte_tokenizer(), unseen_paragraphs(), excerpt=512, name="x")
    parts = {
        split: {
            tuple(tokens[at : at + LETTERS])
            for begin, end in runs.runs[split]
            for tokens in [runs.take(begin, end)]
            for at in range(0, len(tokens) - LETTERS + 1, 1 if split == "train" else 7)
        }
        for split in SPLITS
    }
    assert len(parts["validation"]) > 3000
    assert not parts["train"] & parts["validation"]


@pytest.mark.real
def test_splits_share_no_window_of_the_default_tokenizer(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    corpus = open_corpus(["reference"], default_model[1], length=1024, seed=0)
    train, validation = windows(corpus, "train", 300), windows(corpus, "validation", 100)
    assert len(train) > 40_000
    assert len(validation) > 5_000
    assert not train & validation


@given(total=st.integers(2, 5000), block=st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_blocks_cover_a_text_once(total: int, block: int) -> None:
    block = min(block, total // 2)
    passages = Passages(torch.arange(total), [0], block)
    covered = sorted(run for runs in passages.runs.values() for run in runs)
    assert covered[0][0] == 0
    assert covered[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(covered))
    assert all(end - begin >= block for begin, end in covered)
    held = sum(end - begin for begin, end in passages.runs["validation"])
    assert 0 < held <= max(0.15 * total + 2 * block, 2 * block)
    assert passages.runs["train"]


@given(count=st.integers(1, 400), seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS))
@settings(max_examples=100, deadline=None)
def test_windows_stay_in_their_split(count: int, seed: int, split: Split) -> None:
    passages = Passages(torch.arange(3000), list(range(0, 3000, 37)), 250)
    for choose in (passages.window, passages.aligned):
        begin, end = choose(random.Random(seed), split, count)
        assert any(low <= begin < end <= high for low, high in passages.runs[split])
        longest = max(high - low for low, high in passages.runs[split])
        assert end - begin == count or (count > longest and (begin, end) in passages.runs[split])
    if count <= longest:  # the last ones are aligned, where a piece begins before them in the run
        first = max(low for low, _ in passages.runs[split] if low <= begin)
        assert begin in passages.starts or not passages.pieces(first, begin + 1)


def test_sources_are_drawn_by_weight(book: str) -> None:
    corpus = opened("arithmetic=3", f"{book}=1", length=64)
    kinds = Counter(corpus.excerpt(index, "train").kind for index in range(800))
    assert abs(kinds["arithmetic"] / 800 - 0.75) < 0.06


def test_the_default_is_a_mix(book: str) -> None:
    facts = opened("default", book, "reference").describe()["sources"]
    assert isinstance(facts, list)
    weights = {fact["name"]: round(fact["weight"], 6) for fact in facts}
    assert weights == {
        "reference": round(1.4 / 3, 6),
        "retrieval": round(0.4 / 3, 6),
        "arithmetic": round(0.2 / 3, 6),
        book: round(1 / 3, 6),
    }


def test_the_description_is_json(book: str) -> None:
    corpus = opened("default", book)
    described = json.loads(json.dumps(corpus.describe()))
    assert (described["length"], described["seed"]) == (128, 0)
    assert {fact["name"]: fact["sha256"] for fact in described["sources"]} == corpus.hashes()
    held = described["sources"][-1]["tokens"]
    assert held["train"] + held["validation"] == pytest.approx(30_000, abs=4)
    assert 0.05 < held["validation"] / 30_000 < 0.2


def test_hashes_tell_texts_apart(book: str, tmp_path: Path) -> None:
    copy, changed = tmp_path / "copy.txt", tmp_path / "changed.txt"
    text = Path(book).read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")
    changed.write_text(f"{text[:-1]}!", encoding="utf-8")
    hashes = opened("default", book, str(copy), str(changed)).hashes()
    assert hashes[book] == hashes[str(copy)] != hashes[str(changed)]
    assert len(set(hashes.values())) == 5
    assert all(len(value) == 64 for value in hashes.values())
    again = opened("default").hashes()
    assert {name: hashes[name] for name in again} == again


def test_generated_hashes_change_with_what_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened("default").hashes()
    monkeypatch.setattr("kvfold.training.words.LISTS", ("a b c",))
    after = opened("default").hashes()
    assert before["reference"] == after["reference"]
    assert before["retrieval"] != after["retrieval"]
    assert before["arithmetic"] != after["arithmetic"]


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text(prose(600, 1), encoding="utf-8")
    (tmp_path / "a.txt").write_text(prose(600, 2), encoding="utf-8")
    (tmp_path / "z.jsonl").write_text(json.dumps({"text": "at the end"}), encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_bytes(b"\xff\xfe\x00")
    assert list(texts.read_texts(str(tmp_path))) == [prose(600, 2), prose(600, 1), "at the end"]
    assert opened(str(tmp_path)).excerpt(0, "train").kind == str(tmp_path)


def test_json_lines_are_read_by_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"one {index}", "body": f"two {index}"} for index in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert list(texts.read_texts(str(path))) == ["one 0", "one 1", "one 2"]
    assert list(texts.read_texts(f"{path}:body")) == ["two 0", "two 1", "two 2"]


def test_texts_are_cut_at_paragraphs_and_nothing_is_lost() -> None:
    text = "\n\n".join(prose(700, seed).replace("\n", " ") for seed in range(100))
    pieces = list(texts.cut([text, "short\n"]))
    assert "".join(pieces) == f"{text.rstrip()}\n\nshort\n\n"
    assert len(pieces) == 6
    assert all(texts.PIECE <= len(piece) < texts.PIECE + 800 for piece in pieces[:4])


def test_names_with_a_number_may_be_files(tmp_path: Path) -> None:
    path = tmp_path / "take=2"
    path.write_text(prose(2000), encoding="utf-8")
    assert list(opened(str(path)).hashes()) == [str(path)]
    assert list(opened(f"{path}=5").hashes()) == [str(path)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "there is no file or folder .*missing.txt: give one that exists"),
        ("missing.jsonl:body", None, "there is no file or folder .*missing.jsonl:"),
        ("latin.txt", b"caf\xe9 " * 200, r"latin.txt is not UTF-8 text \(byte 3\): convert"),
        ("empty.txt", b" \n", "empty.txt has no text: give a source"),
        (
            "short.txt",
            b"abcd " * 20,
            r"has 101 tokens, too few for excerpts of 128 .*: give at least 256 tokens$",
        ),
        (
            "bad.jsonl",
            b'{"text": "a"}\n{',
            r"line 2 of .*bad.jsonl is not JSON .*: give one object",
        ),
        ("list.jsonl", b"[1]", "line 1 of .* is no JSON object"),
        ("field.jsonl", b'{"body": "a", "n": 1}', r"no text in field 'text': .* \(body\)"),
        ("half.jsonl", b'{"text": "\\ud800"}', r"half a character \('\\ud800'\)"),
        ("nothing.jsonl", b"\n", "nothing.jsonl has no text"),
    ],
)
def test_unusable_files_are_refused(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_folders_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match="holds no text file: give a folder with some of"):
        opened(str(tmp_path))


@pytest.mark.parametrize(
    ("sources", "message"),
    [([], "no list of sources"), ("default", "no list of"), (["reference=0"], "has no weight")],
)
def test_lists_that_name_nothing_are_refused(sources: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_corpus(sources, byte_tokenizer(), length=128, seed=0)


def test_impossible_lengths_and_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="excerpts of 63 tokens are too short"):
        opened("arithmetic", length=63)
    with pytest.raises(ConfigError, match=r"reference has .* tokens, too few for excerpts"):
        opened("reference", length=10**7)
    corpus = opened("arithmetic")
    with pytest.raises(ConfigError, match="no excerpt -1 of 'train'"):
        corpus.excerpt(-1, "train")
    with pytest.raises(ConfigError, match="no excerpt 0 of 'test'"):
        corpus.excerpt(0, "test")  # type: ignore[arg-type]


def test_prompts_may_be_longer_than_the_prose() -> None:
    tokenizer = byte_tokenizer()
    passages = read_passages(tokenizer, [prose(3000)], excerpt=0, name="prose")
    prompt = RetrievalPrompts(tokenizer, passages, length=9000).draw(random.Random(0), "train")
    assert len(prompt.tokens) == 9000


Load = Callable[..., Iterator[dict[str, object]]]


def hub(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def test_data_sets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, **options: object) -> Iterator[dict[str, object]]:
        asked.append((name, config, options["split"], options["streaming"]))
        yield from ({"text": f"row {index}", "body": "b"} for index in range(10**9))

    hub(monkeypatch, load)
    monkeypatch.setattr(texts, "STREAMED", 20)
    assert list(texts.read_texts("hf:owner/name")) == ["row 0", "row 1", "row 2", "row 3"]
    assert next(texts.read_texts("hf:owner/name/config:test:body")) == "b"
    assert asked == [
        ("owner/name", None, "train", True),
        ("owner/name", "config", "test", True),
    ]
    with pytest.raises(ConfigError, match=r"row 0 of hf:.* no text in field 'x': .*\(text, body\)"):
        list(texts.read_texts("hf:owner/name::x"))


def test_data_sets_that_fail_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> Iterator[dict[str, object]]:
        yield {"text": "a"}
        raise ValueError("no such\n config")

    hub(monkeypatch, load)
    with pytest.raises(ConfigError, match=r"cannot read hf:name \(no such config\): check name"):
        list(texts.read_texts("hf:name"))
    with pytest.raises(ConfigError, match="cannot tell the data set"):
        list(texts.read_texts("hf:a/b/c/d"))


def test_data_sets_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        opened("hf:owner/name")
