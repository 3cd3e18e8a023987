"""The student: lossless when all is expanded, blind to the future, and as a slow loop has it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvfold.attention import Scoring
from kvfold.models import frozen
from kvfold.ops.divergence import kl_divergence
from kvfold.zoom.gates import Gates
from kvfold.zoom.judge import judge, left_out, wanted
from kvfold.zoom.student import Heard, Lesson, hear
from kvfold.zoom.student_attention import (
    ExactTokens,
    SpanTokens,
    straight_through,
    student_attention,
)
from kvfold.zoom.teacher import Dividing, Division, ReadText, Teacher, divide
from tests.contract import assert_close, attached
from tests.tiny import tiny_ids, tiny_model
from tests.zoom.running import plain_logits

DIVIDING = Dividing(sinks=2, window=8, shortest=4, longest=8)
POSITIONS = torch.tensor([50, 77, 91, 119])
KINDS = ["llama", "qwen3", "gemma2", "gemma3", "smollm3", "granite"]


def lesson_of(kind: str, ids: torch.Tensor) -> tuple[Lesson, Gates]:
    teacher = Teacher(attached(kind), DIVIDING)
    gates = Gates(teacher.shape, generator=torch.Generator().manual_seed(0))
    return Lesson.make(teacher, teacher.read(ids), POSITIONS), gates


def with_thresholds(gates: Gates, value: float) -> Gates:
    with torch.no_grad():
        gates.thresholds.fill_(value)
    return gates


# The teacher ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_says_what_the_model_says(kind: str) -> None:
    ids = tiny_ids(1, 120)
    lesson, _ = lesson_of(kind, ids[0])
    assert_close(lesson.logits, plain_logits(attached(kind), ids)[0, POSITIONS])


def test_a_text_is_divided_into_anchors_and_spans() -> None:
    lesson, _ = lesson_of("llama", tiny_ids(1, 120)[0])
    division = lesson.text.division
    assert bool((division.span_of[:2] == -1).all()), "sinks are anchors"
    assert int((division.span_of == -1).sum()) < 20
    for span, length in enumerate(division.lengths.tolist()):
        assert 4 <= length <= 8
        places = division.places[span, :length]
        assert (division.span_of == span).nonzero().flatten().tolist() == places.tolist()
        assert int(division.ends[span]) == int(places[-1])
        assert math.isclose(float(division.weights[span].sum()), 1, rel_tol=1e-5)
        assert float(division.weights[span, length:].sum()) == 0
    seen = division.seen(POSITIONS, DIVIDING.window)
    assert torch.equal(seen, division.ends[None] < POSITIONS[:, None] - 8)


@pytest.mark.parametrize("seed", range(3))
def test_no_span_depends_on_what_follows_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    surprisal = torch.rand(90, generator=generator) ** 8
    how = Dividing(sinks=2, most_anchors=0.2, shortest=3, longest=6)
    whole = spans_of(divide(surprisal, how))
    assert len({end - begin for begin, end in whole}) > 1
    for count in range(10, 90):
        found = spans_of(divide(surprisal[:count], how))
        assert [s for s in found if s[1] < count - 1] == [s for s in whole if s[1] < count - 1]


def spans_of(division: Division) -> list[tuple[int, int]]:
    """First and last token of each span."""
    return list(zip(division.places[:, 0].tolist(), division.ends.tolist(), strict=True))


def test_anchors_stand_out_from_what_came_before() -> None:
    surprisal = torch.ones(60)
    surprisal[[20, 40, 41]] = torch.tensor([5.0, 3.0, 9.0])
    surprisal[50] = torch.nan
    division = divide(surprisal, Dividing(sinks=1, most_anchors=0.05, shortest=1, longest=100))
    assert (division.span_of == -1).nonzero().flatten().tolist() == [0, 20, 40, 41]
    none = divide(surprisal, Dividing(sinks=1, most_anchors=0.0, shortest=1, longest=100))
    assert (none.span_of == -1).nonzero().flatten().tolist() == [0]


def test_a_text_of_no_surprise_has_even_weights() -> None:
    division = divide(torch.zeros(20), Dividing(sinks=0, shortest=3, longest=8))
    assert division.lengths.tolist() == [8, 8, 4]
    expected = division.is_token / division.lengths[:, None]
    assert torch.equal(division.weights, expected)


def test_the_mass_of_spans_is_the_models_own() -> None:
    ids = tiny_ids(1, 120)
    lesson, _ = lesson_of("llama", ids[0])
    with torch.no_grad():
        found = tiny_model(attn_implementation="eager")(ids, output_attentions=True).attentions
    division = lesson.text.division
    for layer, masses in zip(found, lesson.masses, strict=True):
        for span in range(len(division.lengths)):
            is_in = division.span_of == span
            expected = layer[0][:, POSITIONS][:, :, is_in].sum(-1) * lesson.seen[:, span]
            assert torch.allclose(masses[0].flatten(0, 1)[..., span], expected, atol=1e-5)


def test_far_attention_is_what_is_far_back() -> None:
    lesson, _ = lesson_of("llama", tiny_ids(1, 120)[0])
    text: ReadText = lesson.text
    rows = text.layers[0].rows(POSITIONS)
    distance = 40
    expected = [rows[0, :, :, number, : place - distance].sum(-1).mean() for number, place in
                enumerate(POSITIONS.tolist())]  # fmt: skip
    assert_close(text.far_mass(POSITIONS, distance), torch.stack(expected))


# The student ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_everything_expanded_at_full_rank_is_the_full_cache(kind: str) -> None:
    lesson, gates = lesson_of(kind, tiny_ids(1, 120)[0])
    heard = hear(attached(kind), with_thresholds(gates, -1), lesson)
    assert float(heard.choices.expanded.detach()) == 1
    assert_close(heard.logits.detach(), lesson.logits, 1e-4)


def test_summaries_alone_say_something_else() -> None:
    lesson, gates = lesson_of("qwen3", tiny_ids(1, 120)[0])
    with torch.no_grad():
        gates.route.mul_(0.01)
    heard = hear(attached("qwen3"), with_thresholds(gates, 2), lesson)
    assert float(heard.choices.expanded.detach()) == 0
    assert float(kl_divergence(lesson.logits, heard.logits.detach()).mean()) > 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_changed_token_changes_nothing_before_it(kind: str) -> None:
    ids = tiny_ids(1, 120)[0]
    first = said_on(kind, ids)
    for place in (60, 90, 100, 119):
        changed = ids.clone()
        changed[place] = (changed[place] + 5) % 250 + 3
        second, before = said_on(kind, changed), place > POSITIONS
        assert torch.allclose(second[before], first[before], atol=1e-5)
        at = (place <= POSITIONS).nonzero()[0]
        assert not torch.allclose(second[at], first[at], atol=1e-3)


def said_on(kind: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits at the positions of a text, some spans expanded."""
    lesson, gates = lesson_of(kind, ids)
    gates.gain.fill_(30.0)
    heard = hear(attached(kind), with_thresholds(gates, 0.9), lesson)
    assert 0.01 < float(heard.choices.expanded.detach()) < 0.99
    return heard.logits.detach()


def test_a_span_within_the_window_is_not_seen() -> None:
    lesson, gates = lesson_of("llama", tiny_ids(1, 120)[0])
    model = attached("llama")
    alone = replace(lesson, seen=torch.zeros_like(lesson.seen))
    heard = hear(model, with_thresholds(gates, 2), alone)
    assert_close(heard.logits.detach(), lesson.logits, 1e-4)


def trained_by(loss: str, threshold: float = 0.9) -> dict[str, torch.Tensor]:
    """Gradients of one loss, by parameter."""
    lesson, gates = lesson_of("qwen3", tiny_ids(1, 120)[0])
    heard = hear(attached("qwen3"), with_thresholds(gates, threshold), lesson)
    value_of(loss, heard, lesson).backward()
    return {
        name: parameter.grad
        for name, parameter in gates.named_parameters()
        if parameter.grad is not None and float(parameter.grad.abs().max()) > 0
    }


def value_of(loss: str, heard: Heard, lesson: Lesson) -> torch.Tensor:
    if loss == "kl":
        return kl_divergence(lesson.logits, heard.logits).mean()
    if loss == "zoom":
        return heard.choices.zoom
    if loss == "expanded":
        return heard.choices.expanded
    return heard.recon if loss == "recon" else heard.ranks


@pytest.mark.parametrize("loss", ["kl", "zoom", "expanded"])
def test_gradients_reach_the_routes(loss: str) -> None:
    assert bool(torch.isfinite(found := trained_by(loss)["route"]).all())
    assert bool((found.abs().amax((1, 2, 3)) > 0).all()), "of every layer"


@pytest.mark.parametrize("loss", ["kl", "expanded"])
def test_gradients_reach_the_thresholds(loss: str) -> None:
    found = trained_by(loss)["thresholds"]
    assert bool((found.abs().amax(1) > 0).all()), "of every layer"
    if loss == "expanded":
        assert bool((found <= 0).all()), "a higher one expands less"


@pytest.mark.parametrize("loss", ["kl", "recon", "ranks"])
def test_gradients_reach_the_rank_network_of_keys(loss: str) -> None:
    assert {name for name in trained_by(loss, 0.3) if name.startswith("keys")} == {
        f"keys.{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")
    }


@pytest.mark.parametrize("loss", ["kl", "recon", "ranks"])
def test_gradients_reach_the_rank_network_of_values(loss: str) -> None:
    assert {name for name in trained_by(loss, 0.3) if name.startswith("values")} == {
        f"values.{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")
    }


def test_the_model_gets_no_gradient_and_is_as_before() -> None:
    model = attached("qwen3")
    lesson, gates = lesson_of("qwen3", tiny_ids(1, 120)[0])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    kl_divergence(lesson.logits, hear(model, gates, lesson).logits).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert parameter.requires_grad
        assert torch.equal(parameter, before[name])
    with pytest.raises(KeyError), frozen(model):
        raise KeyError
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_compact_text_teaches_nearly_the_same() -> None:
    lesson, gates = lesson_of("llama", tiny_ids(1, 120)[0])
    before = hear(attached("llama"), with_thresholds(gates, 0.9), lesson)
    lesson.text.compact()
    after = hear(attached("llama"), gates, lesson)
    assert lesson.text.layers[0].query is None
    assert_close(after.logits.detach(), before.logits.detach(), 1e-2)


# Attention against a loop ---------------------------------------------------------------------

GROUPS, REPEATS, QUERIES, TOKENS, WIDTH, LONGEST = 2, 3, 4, 11, 6, 4
LENGTHS = [4, 2, 3]


def drawn(seed: int) -> tuple[torch.Tensor, ExactTokens, SpanTokens]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    spans = len(LENGTHS)
    is_token = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    division = Division(
        torch.zeros(spans, LONGEST, dtype=torch.int64),
        is_token,
        torch.zeros(spans, LONGEST),
        torch.zeros(TOKENS, dtype=torch.int64),
    )
    exact = ExactTokens(
        random(1, GROUPS, TOKENS, WIDTH),
        random(1, GROUPS, TOKENS, WIDTH),
        torch.rand(QUERIES, TOKENS, generator=generator) < 0.6,
        random(1, GROUPS, QUERIES, WIDTH),
        random(1, GROUPS, QUERIES, WIDTH),
    )
    seen = torch.rand(QUERIES, spans, generator=generator) < 0.7
    expand = torch.rand(1, GROUPS, REPEATS, QUERIES, spans, generator=generator) < 0.5
    tokens = SpanTokens(
        random(1, GROUPS, spans, WIDTH),
        random(1, GROUPS, spans, WIDTH),
        random(1, GROUPS, spans * LONGEST, WIDTH),
        random(1, GROUPS, spans * LONGEST, WIDTH),
        division,
        seen,
        expand.float(),
    )
    return 2 * random(1, GROUPS, REPEATS, QUERIES, WIDTH), exact, tokens


def loop(
    query: torch.Tensor, exact: ExactTokens, spans: SpanTokens | None, scoring: Scoring
) -> torch.Tensor:
    """One softmax for each head and query, over a list of what it sees."""
    output = torch.zeros_like(query)
    for group in range(GROUPS):
        for repeat in range(REPEATS):
            for number in range(QUERIES):
                asks = query[0, group, repeat, number]
                rows = [
                    (asks @ exact.own_keys[0, group, number], exact.own_values[0, group, number])
                ]
                for token in range(TOKENS):
                    if exact.visible[number, token]:
                        key, value = (t[0, group, token] for t in (exact.keys, exact.values))
                        rows.append((asks @ key, value))
                extra = [torch.zeros(())] * len(rows)
                for span, length in enumerate([] if spans is None else LENGTHS):
                    assert spans is not None
                    if not spans.seen[number, span]:
                        continue
                    if spans.expand[0, group, repeat, number, span]:
                        for token in range(span * LONGEST, span * LONGEST + length):
                            rows.append((asks @ spans.keys[0, group, token],
                                         spans.values[0, group, token]))  # fmt: skip
                            extra.append(torch.zeros(()))
                    else:
                        rows.append((asks @ spans.means[0, group, span],
                                     spans.value_means[0, group, span]))  # fmt: skip
                        extra.append(torch.tensor(float(length)).log())
                scores = scoring.capped(torch.stack([score for score, _ in rows]))
                scores = scores + torch.stack(extra)
                if scoring.sinks is not None:
                    sink = scoring.sinks.view(GROUPS, REPEATS)[group, repeat]
                    scores = torch.cat([scores, sink[None]])
                weights = torch.softmax(scores, 0)[: len(rows)]
                values = torch.stack([value for _, value in rows])
                output[0, group, repeat, number] = weights @ values
    return output


SCORINGS = {
    "plain": Scoring(1.0),
    "capped": Scoring(1.0, softcap=2.0),
    "sinks": Scoring(1.0, sinks=torch.linspace(-1, 2, GROUPS * REPEATS)),
}


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("seed", range(4))
def test_attention_equals_a_loop(seed: int, scoring: Scoring) -> None:
    query, exact, spans = drawn(seed)
    found = student_attention(query, exact, spans, scoring)
    assert_close(found, loop(query, exact, spans, scoring))
    found = student_attention(query, exact, None, scoring)
    assert_close(found, loop(query, exact, None, scoring))


def test_what_was_not_chosen_has_no_weight_however_high_its_score() -> None:
    query, exact, spans = drawn(0)
    far = replace(spans, keys=300 * spans.keys, expand=torch.zeros_like(spans.expand))
    far.expand.requires_grad_(True)
    found = student_attention(query, exact, far, SCORINGS["plain"])
    assert_close(found.detach(), loop(query, exact, far, SCORINGS["plain"]).detach())
    found.sum().backward()
    assert far.expand.grad is not None
    assert bool(torch.isfinite(far.expand.grad).all())
    assert float(far.expand.grad.abs().max()) < 1e4


def test_the_gradient_of_a_choice_is_what_a_little_of_it_would_do() -> None:
    query, exact, spans = drawn(1)
    expand = spans.expand.double().requires_grad_(True)
    double = {
        name: getattr(spans, name).double() for name in ("means", "value_means", "keys", "values")
    }
    tokens = replace(spans, **double, expand=expand)
    shown = replace(
        exact,
        **{
            name: getattr(exact, name).double()
            for name in ("keys", "values", "own_keys", "own_values")
        },
    )
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(5)).double()

    def value(chosen: torch.Tensor) -> torch.Tensor:
        output = student_attention(
            query.double() / 4, shown, replace(tokens, expand=chosen), SCORINGS["plain"]
        )
        return (output * weights).sum()

    value(expand).backward()
    assert expand.grad is not None
    for place in [(0, 0, 0, 1, 0), (0, 1, 2, 3, 2), (0, 1, 0, 0, 1)]:
        # Not below 0 or above 1: what was not chosen at all has no part in the highest score.
        step = torch.zeros_like(expand)
        step[place] = 1e-6 if expand[place] == 0 else -1e-6
        moved = (value(expand + step) - value(expand)) / step[place]
        assert math.isclose(
            float(expand.grad[place]), float(moved.detach()), rel_tol=1e-3, abs_tol=1e-6
        )


# Judging --------------------------------------------------------------------------------------


def test_a_decision_is_hard_forwards_and_soft_backwards() -> None:
    soft = torch.tensor([0.2, 0.7], requires_grad=True)
    hard = straight_through(torch.tensor([True, False]), soft)
    assert hard.tolist() == [1.0, 0.0]
    (hard * torch.tensor([3.0, 5.0])).sum().backward()
    assert soft.grad is not None
    assert soft.grad.tolist() == [3.0, 5.0]


def test_the_fewest_spans_that_cover_nine_tenths() -> None:
    masses = torch.tensor([[0.1, 0.5, 0.0, 0.05, 0.3], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert wanted(masses).tolist() == [[True, True, False, False, True], [False] * 5]
    assert wanted(torch.tensor([0.95, 0.05])).tolist() == [True, False]


def test_what_is_judged_of_choices() -> None:
    masses = torch.zeros(1, 1, 1, 2, 12)
    masses[..., 0, 3], masses[..., 0, 5], masses[..., 1, 1] = 0.6, 0.2, 0.4
    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[1, 4:] = False
    logits = torch.full_like(masses, -1.0)
    logits[..., 0, 3], logits[..., 0, 7] = 2.0, 1.0
    logits[..., 1, 9] = 9.0  # not seen
    found = judge(logits, (logits > 0).float(), masses, seen)
    # 12 + 4 spans are seen, of which two were expanded; one of three wanted ones was found.
    assert math.isclose(float(found.expanded), 2 / 16)
    assert math.isclose(float(found.recall), 1 / 3, rel_tol=1e-6)
    # The first query's best two of 12 catch 0.6 of 0.8; the second's best of 4 the first, nothing.
    assert math.isclose(float(found.caught), (0.75 + 0.0) / 2, rel_tol=1e-6)
    log = torch.nn.functional.logsigmoid
    one = torch.ones(())
    positives = -10 * (log(2 * one) + log(-one) + log(-one))
    negatives = -(log(-one) + 9 * log(one) + 3 * log(one))
    assert math.isclose(float(found.zoom), float((positives + negatives) / 16), rel_tol=1e-5)


def test_what_ranks_leave_out_is_a_share_of_the_squares() -> None:
    singular = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    ranks = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    assert math.isclose(float(left_out(ranks, singular)), (4 / 25 + 1) / 2, rel_tol=1e-6)
    assert float(left_out(ranks, torch.zeros(2, 2))) == 0
