"""The kernel: what it takes, what it leaves to torch, and that both say the same."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.attention import Scoring
from kvfold.cache import KVCache
from kvfold.native import build
from kvfold.zoom.attention import Exact, zoom_attention
from kvfold.zoom.kernel import attend_natively
from kvfold.zoom.notes import Tally
from kvfold.zoom.spans import Spans
from tests.tiny import tiny_ids
from tests.zoom.reference import fold_of, make_spans
from tests.zoom.running import layers_of, leave_to_torch, one_by_one, run, wide

GROUPS, HEADS, WIDTH, LONGEST = 2, 6, 16, 9
pytestmark = pytest.mark.skipif(build.library("zoom") is None, reason="no C compiler is here")


def fresh() -> KVCache:
    return kvfold.make_cache(wide(), "sekv", budget=0.4)


def spans_of(lengths: list[list[int]], dtype: torch.dtype | None, seed: int = 0) -> Spans:
    draw, fold = torch.Generator().manual_seed(seed), fold_of(lengths)
    shape = (len(lengths), GROUPS, fold.tokens.shape[1], WIDTH)
    spans = make_spans(6, LONGEST, dtype)
    moment = torch.eye(WIDTH).expand(len(lengths), GROUPS, -1, -1)
    for _ in range(2):
        keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
        spans.add(keys, values, fold, moment)
    return spans


def exact_of(rows: int, count: int, room: int = 0, seed: int = 1) -> Exact:
    """With room for more behind, as slots have."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(rows, GROUPS, count + room, WIDTH, generator=draw)[:, :, :count]
        for _ in range(2)
    )
    return Exact(keys, values, None)


def query_of(rows: int, seed: int = 2) -> torch.Tensor:
    return 2 * torch.randn(rows, HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.lists(st.integers(1, LONGEST), max_size=40), min_size=1, max_size=3).filter(
        lambda rows: any(rows)
    ),
    count=st.integers(1, 40),
    room=st.integers(0, 3),
    expanded=st.integers(0, 90),
    precision=st.sampled_from([torch.float16, None]),
    is_masked=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_it_says_what_torch_says(
    lengths: list[list[int]],
    count: int,
    room: int,
    expanded: int,
    precision: torch.dtype | None,
    is_masked: bool,
    seed: int,
):
    spans, exact = spans_of(lengths, precision, seed), exact_of(len(lengths), count, room, seed)
    if is_masked:
        draw = torch.Generator().manual_seed(seed)
        visible = torch.rand(len(lengths), 1, 1, count, generator=draw) < 0.5
        visible[..., -1] = True
        exact = Exact(exact.keys, exact.values, visible)
    query, scoring = query_of(len(lengths), seed), Scoring(0.3)
    actual = attend_natively(query, exact, spans, expanded, scoring)
    # A row with a size of 1 somewhere may be laid out so that torch takes it.
    if actual is None:
        assert 1 in (len(lengths), count, len(spans))
        return
    with pytest.MonkeyPatch.context() as patch:
        leave_to_torch(patch)
        expected = zoom_attention(query, exact, spans, expanded, scoring)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_long_generations_say_the_same(monkeypatch: pytest.MonkeyPatch):
    pieces = [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 100, seed=1))]
    actual = run(wide(), fresh(), pieces)
    leave_to_torch(monkeypatch)
    torch.testing.assert_close(actual, run(wide(), fresh(), pieces), atol=1e-4, rtol=1e-3)


def test_what_is_read_is_counted():
    spans = spans_of([[5, 4, 9]], torch.float16)
    attend_natively(query_of(1), exact_of(1, 5), spans, 6, Scoring(0.3))
    assert spans.moved == 2 * GROUPS * 18


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_no_number_that_is_none_is_hidden(number: float):
    spans, query = spans_of([[5, 4, 9]], torch.float16), query_of(1)
    query[0, 0, 0, 0] = number
    output = attend_natively(query, exact_of(1, 5), spans, 2, Scoring(0.3))
    assert output is not None
    assert bool(output[0, 0].isnan().all())
    assert bool(output[0, 1:].isfinite().all())


def test_scores_far_apart_stay_finite():
    spans, query = spans_of([[5, 4, 9] * 5], torch.float16), query_of(1)
    output = attend_natively(1e3 * query, exact_of(1, 5), spans, 2, Scoring(1.0))
    assert output is not None
    assert bool(output.isfinite().all())


def test_what_it_is_not_for_is_left_to_torch():
    spans, exact, query = spans_of([[5, 4]], torch.float16), exact_of(1, 5), query_of(1)
    plain = Scoring(0.3)
    assert attend_natively(query, exact, spans, 1, plain) is not None
    assert attend_natively(query.expand(-1, -1, 2, -1), exact, spans, 1, plain) is None
    assert attend_natively(query.bfloat16(), exact, spans, 1, plain) is None
    assert attend_natively(query.clone().requires_grad_(), exact, spans, 1, plain) is None
    assert attend_natively(query, exact, spans, 1, Scoring(0.3, softcap=5.0)) is None
    assert attend_natively(query, exact, spans, 1, Scoring(0.3, None, torch.zeros(HEADS))) is None
    assert attend_natively(query, exact, spans_of([[5]], torch.bfloat16), 1, plain) is None
    spans.tally = Tally()
    assert attend_natively(query, exact, spans, 1, plain) is None


def test_a_cache_uses_it():
    held = fresh()
    run(wide(), held, [tiny_ids(1, 300), *one_by_one(tiny_ids(1, 5))])
    assert all(layer.spans.pool is None and layer.spans.moved > 0 for layer in layers_of(held))


# Building -------------------------------------------------------------------------------------


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, and nothing loaded yet."""
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path))
    build.library.cache_clear()
    yield tmp_path / "native"
    build.library.cache_clear()


def test_it_is_compiled_once(anew: Path, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(build.library("zoom"), ctypes.CDLL)
    (file,) = anew.iterdir()
    monkeypatch.setattr(build.subprocess, "run", None)
    build.library.cache_clear()
    assert build.library("zoom") is not None
    assert list(anew.iterdir()) == [file]


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_without_a_compiler_torch_works(anew: Path, compiler: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", compiler)
    assert build.library("zoom") is None
    spans, exact = spans_of([[5, 4]], torch.float16), exact_of(1, 5)
    assert attend_natively(query_of(1), exact, spans, 1, Scoring(0.3)) is None
    assert bool(zoom_attention(query_of(1), exact, spans, 1, Scoring(0.3)).isfinite().all())
    assert not anew.exists() or list(anew.iterdir()) == []


def test_it_can_be_switched_off(anew: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.library("zoom") is None
    assert not anew.exists()


def test_a_damaged_file_is_left_alone(anew: Path):
    assert build.library("zoom") is not None
    build.library.cache_clear()
    for file in anew.iterdir():
        other = file.with_suffix(".other")
        other.write_bytes(file.read_bytes()[:100])
        other.replace(file)
    build.library("zoom")
    spans, exact = spans_of([[5, 4]], torch.float16), exact_of(1, 5)
    assert bool(zoom_attention(query_of(1), exact, spans, 1, Scoring(0.3)).isfinite().all())
