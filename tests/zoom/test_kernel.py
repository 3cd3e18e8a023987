"""The kernel: what it takes, what it leaves to torch, and that both say the same."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.attention import Scoring
from kvfold.cache import KVCache
from kvfold.errors import ArtifactError
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
    assert actual is not None
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


# Damage ---------------------------------------------------------------------------------------


def attended(spans: Spans, exact: Exact, query: torch.Tensor) -> torch.Tensor | None:
    return attend_natively(query, exact, spans, 2, Scoring(0.3))


@pytest.mark.parametrize("name", ["starts", "ends", "means"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_another_type_is_left_to_torch(name: str, dtype: torch.dtype):
    spans = spans_of([[5, 4, 9]], torch.float16)
    tensors = dict(spans._fast.state())
    spans._fast.load(tensors | {name: tensors[name].to(dtype)})
    assert attended(spans, exact_of(1, 5), query_of(1)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_exact_tokens_of_another_type_are_left_to_torch(side: str, dtype: torch.dtype):
    exact = exact_of(1, 5)
    exact = replace(exact, **{side: getattr(exact, side).to(dtype)})
    assert attended(spans_of([[5, 4, 9]], torch.float16), exact, query_of(1)) is None


@pytest.mark.parametrize("name", ["look", "center", "write"])
def test_a_sketch_of_another_size_or_type_is_left_to_torch(name: str):
    spans = spans_of([[5, 4, 9]], torch.float16)
    sketch = spans.router.sketch
    assert sketch is not None
    spans.router.sketch = replace(sketch, **{name: getattr(sketch, name).float()[:, :, :-1]})
    assert (attended(spans, exact_of(1, 5), query_of(1)) is None) == (name == "look")


@pytest.mark.parametrize(
    "change",
    [
        lambda starts, ends: (starts + 0, ends + 2 * 10**9),
        lambda starts, ends: (starts - 1, ends + 0),
        lambda starts, ends: (ends, starts),
        lambda starts, ends: (torch.zeros_like(starts), torch.full_like(ends, 36)),
    ],
    ids=["beyond", "before", "turned", "overlapping"],
)
def test_ranges_of_a_damaged_file_are_refused(change: Callable):
    spans = spans_of([[5, 4, 9]], torch.float16)
    tensors = dict(spans._fast.state())
    starts, ends = change(tensors["starts"], tensors["ends"])
    spans._fast.load(tensors | {"starts": starts, "ends": ends})
    with pytest.raises(ArtifactError, match="make the cache anew"):
        attended(spans, exact_of(1, 5), query_of(1))


def test_gradients_are_left_to_torch():
    exact = exact_of(1, 5)
    exact = replace(exact, values=exact.values.clone().requires_grad_())
    assert attended(spans_of([[5]], torch.float16), exact, query_of(1)) is None
    with torch.no_grad():
        assert attended(spans_of([[5]], torch.float16), exact, query_of(1)) is not None


def test_who_sees_nothing_is_told_nothing():
    exact = exact_of(2, 5)
    exact = replace(exact, visible=torch.zeros(2, 1, 1, 5, dtype=torch.bool))
    output = attended(spans_of([[5], []], torch.float16), exact, query_of(2))
    assert output is not None
    assert bool(output[0].isfinite().all())
    assert bool(output[1].isnan().all())


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int):
    before = torch.get_num_threads()
    spans, exact, query = spans_of([[5, 4], [7]], torch.float16), exact_of(2, 5), query_of(2)
    expected = attended(spans, exact, query)
    torch.set_num_threads(threads)
    try:
        actual = attended(spans, exact, query)
    finally:
        torch.set_num_threads(before)
    assert expected is not None
    assert actual is not None
    assert torch.equal(actual, expected)


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


@pytest.mark.parametrize("content", [b"", b"\x7fELF", None], ids=["empty", "cut", "other"])
def test_a_damaged_file_is_made_anew(anew: Path, content: bytes | None):
    """It is never loaded: that could end the process."""
    assert build.library("zoom") is not None
    (file,) = anew.iterdir()
    good = file.read_bytes()
    other = Path(ctypes.__file__).read_bytes()
    file.unlink()
    file.write_bytes(other if content is None else content)
    file.chmod(0o700)
    build.library.cache_clear()
    assert build.library("zoom") is not None
    assert [file.read_bytes() for file in anew.iterdir()] == [good]


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_run(anew: Path, what: str, caplog: pytest.LogCaptureFixture):
    assert build.library("zoom") is not None
    build.library.cache_clear()
    (anew if what == "folder" else next(anew.iterdir())).chmod(0o777)
    assert build.library("zoom") is None
    assert "could have been written by others" in caplog.text


def test_a_home_that_is_not_known_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch):
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "kvfold_home", unknown)
    build.library.cache_clear()
    assert build.library("zoom") is None
    build.library.cache_clear()


def test_a_compiler_without_threads_is_enough(anew: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = anew.parent / "plain cc"
    compiler.write_text(
        '#!/bin/sh\nfor each; do [ "$each" = -fopenmp ] && exit 1; done\nexec cc "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", f"'{compiler}'")
    assert build.library("zoom") is not None
