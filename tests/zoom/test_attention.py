"""Attention at two resolutions equals loops over single numbers, for any shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention import Scoring
from kvfold.zoom.attention import Exact, choose, zoom_attention
from kvfold.zoom.spans import Spans
from tests.zoom.reference import fold_of, make_spans, zoom_reference
from tests.zoom.running import leave_to_torch

WIDTH, LONGEST = 6, 5


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    query: torch.Tensor
    exact: Exact
    spans: Spans
    expanded: int
    scoring: Scoring


def make_case(
    lengths: list[list[int]],
    *,
    groups: int = 2,
    repeats: int = 2,
    queries: int = 1,
    exact: int = 3,
    expanded: int = 1,
    directions: int = 4,
    softcap: float | None = None,
    sinks: bool = False,
    masked: bool = False,
    folds: int = 1,
    seed: int = 0,
) -> Case:
    """Random tensors with spans of so many tokens in each row, added as often as `folds` says."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    rows, fold = len(lengths), fold_of(lengths)
    spans, total = make_spans(directions, LONGEST, None), fold.tokens.shape[1]
    moment = normal(rows, groups, WIDTH, WIDTH)
    for _ in range(folds):
        keys, values = normal(rows, groups, total, WIDTH), normal(rows, groups, total, WIDTH)
        spans.add(keys, values, fold, moment @ moment.mT)
    visible = torch.rand(rows, 1, queries, exact, generator=draw) < 0.6
    visible[..., 0] = True
    scoring = Scoring(0.9, softcap, normal(groups * repeats) if sinks else None)
    near = Exact(
        normal(rows, groups, exact, WIDTH),
        normal(rows, groups, exact, WIDTH),
        visible if masked else None,
    )
    query = 1.5 * normal(rows, groups * repeats, queries, WIDTH)
    return Case(query, near, spans, expanded, scoring)


def check(case: Case) -> None:
    """Against the loops: the masses, which spans are chosen, and the output."""
    query, exact, spans, expanded, scoring = (
        case.query, case.exact, case.spans, case.expanded, case.scoring,
    )  # fmt: skip
    expected = zoom_reference(query, exact, spans, expanded, scoring)
    grouped = (query * scoring.scaling).unflatten(1, (exact.keys.shape[1], -1))
    masses = spans.route(grouped, scoring).masses
    assert not masses.isnan().any()
    flat = masses.flatten(1, 2).double()
    assert bool((flat.isinf() == expected.masses.isinf()).all())
    highest = expected.masses.amax(-1, keepdim=True)
    counts = expected.masses > highest - 8
    error = (flat - expected.masses).abs().where(counts, 0.0)
    assert float(error.max()) < 5e-3  # exp(-8) of a sum in single precision
    assert float(error.where(expected.masses > highest - 2, 0.0).max()) < 1e-4
    outputs = [
        zoom_attention(query, exact, spans, expanded, scoring, everything)
        for everything in (None, spans.everything())
    ]
    with pytest.MonkeyPatch.context() as patch:
        leave_to_torch(patch)
        outputs.append(zoom_attention(query, exact, spans, expanded, scoring))
    for output in outputs:
        assert output.shape == query.shape
        assert torch.isfinite(output).all()
        deviation = (output - expected.output).norm() / expected.output.norm().clamp_min(1e-9)
        assert float(deviation) < 1e-5


ROWS = st.lists(
    st.lists(st.integers(1, LONGEST), min_size=0, max_size=4), min_size=1, max_size=3
).filter(lambda rows: any(rows))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=ROWS,
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    queries=st.integers(1, 4),
    exact=st.integers(1, 4),
    expanded=st.integers(1, 6),
    directions=st.integers(2, WIDTH),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    masked=st.booleans(),
    folds=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
def test_any_shape_equals_the_loops(lengths: list[list[int]], **options: int):
    check(make_case(lengths, **options))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("expanded", [1, 2, 9])
def test_all_at_once(queries: int, expanded: int):
    """Everything that can differ differs: rows, heads, a cap, sinks, a mask, two folds."""
    lengths = [[5, 3, 1], [4], []]
    check(
        make_case(
            lengths,
            groups=2,
            repeats=3,
            queries=queries,
            expanded=expanded,
            softcap=3.0,
            sinks=True,
            masked=True,
            folds=2,
            seed=7,
        )
    )


def test_all_expanded_is_attention_over_all_tokens():
    case = make_case([[5, 3, 2], [4, 5, 1]], expanded=3, queries=2)
    keys = torch.cat([case.exact.keys, case.spans.slow.keys], dim=2).repeat_interleave(2, dim=1)
    values = torch.cat([case.exact.values, case.spans.slow.values], dim=2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.query, keys, values.repeat_interleave(2, dim=1), scale=case.scoring.scaling
    )
    actual = zoom_attention(case.query, case.exact, case.spans, 3, case.scoring)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_missing_spans_weigh_nothing():
    case = make_case([[5, 3], [4], []])
    grouped = case.query.unflatten(1, (2, -1))
    missing = case.spans.route(grouped, case.scoring).masses[:, 0, 0, 0].isinf().tolist()
    assert missing == [[False, False], [False, True], [True, True]]


def test_the_spans_of_one_row_do_not_matter_to_another():
    """A row that has fewer tokens gives what it gives alone, whatever stands in its place."""
    case = make_case([[5, 5, 5], [4]])
    moment = torch.eye(WIDTH).expand(2, 2, -1, -1)
    query = 20 * case.query.unflatten(1, (2, -1))
    keys, values = case.spans.slow.keys.clone(), case.spans.slow.values
    keys[1, :, 4:] = query[1, :, 0]
    together, alone = make_spans(4, LONGEST, None), make_spans(4, LONGEST, None)
    for _ in range(2):
        together.add(keys, values, fold_of([[5, 5, 5], [4]]), moment)
        alone.add(keys[1:, :, :4], values[1:, :, :4], fold_of([[4]]), moment[1:])
    expected = alone.route(query[1:], case.scoring).masses
    actual = together.route(query, case.scoring).masses[1:, ..., [0, 3]]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def chosen(scores: list[list[float]], expanded: int = 1) -> list[int]:
    """By two heads of one group, from scores of one exact token and spans."""
    held = torch.tensor(scores).view(1, 1, len(scores), 1, -1)
    return choose(held, slice(1, held.shape[-1]), expanded).flatten().tolist()


def test_a_span_that_one_head_needs_is_chosen():
    """The largest share of any head counts, not the mean over heads."""
    assert chosen([[0.0, 3.0, 3.0, -9.0], [0.0, -9.0, -9.0, 6.0]]) == [2]


def test_a_head_that_looks_elsewhere_has_no_say():
    assert chosen([[0.0, 3.0, -9.0], [0.0, -9.0, 2.0]]) == [0]
    assert chosen([[9.0, 3.0, -9.0], [0.0, -9.0, 2.0]]) == [1]


def test_a_head_that_attends_to_nothing_has_no_say():
    """The same by a learned logit of attending to nothing."""
    case = make_case([[3, 3, 3, 3]], repeats=3, sinks=True, seed=3)
    for sinks in ([9.0, -9.0, -9.0], [-9.0, -9.0, 9.0]):
        held = torch.tensor(sinks * 2)
        check(replace(case, scoring=replace(case.scoring, sinks=held)))


def test_queries_choose_for_themselves():
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, 2.0, 1.0]]).view(1, 1, 1, 2, 3)
    assert choose(scores, slice(1, 3), 1).flatten().tolist() == [1, 0]


def test_half_precision_spans_are_read_in_the_models_precision():
    case = make_case([[5, 3]], queries=2)
    half = make_spans(4, LONGEST, torch.float16)
    half.add(
        case.spans.slow.keys, case.spans.slow.values, fold_of([[5, 3]]),
        torch.eye(WIDTH).expand(1, 2, -1, -1),
    )  # fmt: skip
    actual = zoom_attention(case.query, case.exact, half, 2, case.scoring)
    expected = zoom_attention(case.query, case.exact, case.spans, 2, case.scoring)
    assert actual.dtype == torch.float32
    assert half.slow.keys.dtype == half.means.dtype == torch.float16
    torch.testing.assert_close(actual, expected, atol=5e-3, rtol=5e-3)
