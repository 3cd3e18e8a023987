"""Learning gates: what a step does, that it learns, and that a run resumes bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.training import TrainingSettings
from kvfold.training.corpus import Excerpt
from kvfold.zoom.first_gates import Sample, fit_first, sample_layers
from kvfold.zoom.gates import Gates, GateShape
from kvfold.zoom.judge import judge
from kvfold.zoom.learner import GateLearner, ZoomSettings
from kvfold.zoom.teacher import Teacher
from kvfold.zoom.train import train_gates
from tests.contract import attached
from tests.tiny import tiny_ids, tiny_model

SMALL = ZoomSettings(
    queries=6,
    steps_a_text=2,
    first_texts=1,
    validation=2,
    sinks=2,
    window=8,
    shortest=4,
    longest=8,
)


class TinyCorpus:
    """Random tokens for the tiny models."""

    def __init__(self, length: int = 72, scored: int | None = None) -> None:
        self.length, self.scored = length, scored
        self.asked: list[int] = []

    def excerpt(self, index: int, split: str) -> Excerpt:
        self.asked.append(index)
        seed = 2 * index + (split == "validation")
        tokens = tiny_ids(1, self.length, seed=seed)[0]
        return Excerpt(tokens=tokens, kind="random", scored=self.scored)

    def describe(self) -> dict[str, object]:
        return {"kind": "random tokens", "length": self.length}


def learner(*corpora: TinyCorpus, settings: ZoomSettings = SMALL, **options: int) -> GateLearner:
    given = {"steps": 8, **options}
    return GateLearner(attached("qwen3"), corpora or (TinyCorpus(),), settings, **given)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_loss_is_the_sum_of_its_parts() -> None:
    settings = replace(SMALL, zoom=2.0, recon=3.0, budget=5.0)
    found = learner(settings=settings).step(2, generator())
    part = found.metrics
    budget = 2.5 * (part["expanded"] + 0.1 * part["ranks"])  # half of the rise
    expected = part["kl"] + 2 * part["zoom"] + 3 * part["recon"] + budget
    assert math.isclose(float(found.loss.detach()), expected, rel_tol=1e-5)
    assert all(math.isfinite(value) for value in part.values())
    assert min(part["kl"], part["zoom"], part["recon"]) > 0


def test_the_weight_of_the_budget_rises_over_the_first_half() -> None:
    found = [learner().budget_at(index) for index in range(8)]
    assert found == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1])


def test_lengths_rise_over_the_first_half() -> None:
    corpora = [TinyCorpus(length) for length in (64, 72, 80)]
    made = learner(*corpora, steps=16)
    assert [made.stage(index) for index in range(16)] == 4 * [0] + 4 * [1] + 8 * [2]
    assert [learner(steps=8).stage(index) for index in range(8)] == 8 * [0]


def test_a_text_serves_several_steps_with_other_positions() -> None:
    corpus = TinyCorpus()
    made = learner(corpus)
    first, second = made.step(0, generator(0)), made.step(1, generator(1))
    assert corpus.asked == [0]
    assert first.metrics["kl"] != second.metrics["kl"]
    made.step(2, generator(2))
    assert corpus.asked == [0, 1]


def test_processes_learn_from_texts_of_their_own() -> None:
    asked: list[int] = []
    for process in (0, 1):
        corpus = TinyCorpus()
        made = learner(corpus, process=process, processes=2)
        for index in (0, 1, 2):
            made.step(index, generator())
        asked += corpus.asked
    assert asked == [0, 2, 1, 3]


def test_half_of_the_positions_look_far_back_and_answers_are_among_them() -> None:
    made = learner(TinyCorpus(160, scored=3), settings=replace(SMALL, steps_a_text=1))
    subject = made._read(made.corpora[0], "train", 0)
    assert set(range(156, 160)) & set(subject.pool.tolist()), "where the answer is told"
    positions = made._lesson(subject, generator()).positions
    assert positions.tolist() == sorted(set(positions.tolist()))
    assert len(positions) == 6
    assert set(subject.pool.tolist()) <= set(positions.tolist())
    assert set(positions.tolist()) <= set(subject.eligible.tolist())


def test_first_gates_have_a_common_spread_and_expand_their_share() -> None:
    model = attached("qwen3")
    teacher = Teacher(model, SMALL.dividing)
    texts = [teacher.read(tiny_ids(1, 120, seed=seed)[0]) for seed in range(3)]
    positions = torch.arange(40, 120, 3)
    samples = [sample_layers(text, positions, 8) for text in texts]
    gates = Gates(teacher.shape, generator=generator())
    fit_first(gates, samples, 0.25)
    for layer in range(3):
        logits, plain = [], []
        for text in samples:
            each = text[layer]
            found = gates.logits(
                layer, each.query, each.means, gates.norms(layer, each.means), each.lengths
            )
            logits.append(found[0].flatten(0, 1)[:, each.seen])
            level = each.lengths[0].log().expand_as(each.seen)[each.seen]
            plain.append(logits[-1] - level)
        over = torch.cat(logits, -1) > gates.thresholds_of(layer)[:, None]
        assert torch.allclose(over.float().mean(-1), torch.full((4,), 0.25), atol=0.02)
        assert torch.allclose(torch.cat(plain, -1).std(-1), torch.ones(4), rtol=1e-3)


def test_no_first_texts_leave_random_directions() -> None:
    made = learner(settings=replace(SMALL, first_texts=0))
    before = made.module.route.detach().clone()
    made.prepare()
    assert torch.equal(made.module.route, before)
    assert torch.allclose(made.module.thresholds, torch.tensor(0.05))


class Planted:
    """Spans that differ in a few directions, of which each head's queries look at some."""

    shape = GateShape(layers=1, query_heads=2, head_dim=64)

    def __init__(self) -> None:
        self.rows = torch.linalg.qr(torch.randn(64, 64, generator=generator(7))).Q
        self.center = 5 * self.rows[63]

    def draw(self, seed: int) -> Sample:
        drawn = generator(seed)
        keys = torch.randn(1, 1, 40, 64, generator=drawn) * 0.3
        keys += torch.randn(1, 1, 40, 8, generator=drawn) @ self.rows[:8] * 3 + self.center
        query = torch.randn(1, 1, 2, 30, 8, generator=drawn) @ self.rows[:8]
        query += torch.randn(1, 1, 2, 30, 24, generator=drawn) @ self.rows[8:32]
        lengths, seen = torch.full((1, 40), 8), torch.ones(30, 40, dtype=torch.bool)
        return Sample(query, keys, lengths, seen)

    def logits(self, gates: Gates, sample: Sample) -> torch.Tensor:
        norms = gates.norms(0, sample.means)
        return gates.logits(0, sample.query, sample.means, norms, sample.lengths)

    def masses(self, sample: Sample) -> torch.Tensor:
        """A teacher's, which attends to the mean keys themselves."""
        return torch.softmax(sample.query @ sample.means.unsqueeze(2).mT, dim=-1)

    def caught(self, gates: Gates, seed: int = 99) -> float:
        sample = self.draw(seed)
        logits = self.logits(gates, sample)
        return float(judge(logits, logits * 0, self.masses(sample), sample.seen).caught)


@torch.no_grad()
def test_first_gates_look_where_queries_and_spans_vary() -> None:
    planted = Planted()
    gates = Gates(planted.shape, generator=generator())
    before = planted.caught(gates)
    fit_first(gates, [[planted.draw(seed)] for seed in range(8)], 0.25)
    assert before < 0.75
    assert planted.caught(gates) > 0.85


def test_the_loss_of_the_gates_teaches_them_where_to_look() -> None:
    planted = Planted()
    gates = Gates(planted.shape, generator=generator())
    gates.gain.fill_(5.0)
    optimiser = torch.optim.AdamW(gates.parameters(), lr=3e-3)
    with torch.no_grad():
        before = planted.caught(gates)
    for seed in range(200):
        sample = planted.draw(seed)
        logits = planted.logits(gates, sample)
        loss = judge(logits, logits.detach(), planted.masses(sample), sample.seen).zoom
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        assert before < 0.75
        assert planted.caught(gates) > 0.85


def test_training_lowers_every_loss_on_texts_never_seen(tmp_path: Path) -> None:
    settings = TrainingSettings(steps=10, learning_rate=2e-3, validate_every=10)
    method = replace(SMALL, queries=24)
    trained = train_gates(attached("qwen3"), [TinyCorpus(120)], tmp_path, settings, method)
    curve = trained.artifact.record["curve"]
    first, last = curve[0]["validation"], curve[-1]["validation"]
    assert trained.artifact.record["best_step"] == 10
    assert all(last[name] < first[name] for name in ("loss", "zoom", "recon", "kl"))


def run(folder: Path, **options: object):
    settings = TrainingSettings(steps=6, learning_rate=1e-2, validate_every=2, checkpoint_every=1)
    corpora = [TinyCorpus(64), TinyCorpus(72)]
    return train_gates(attached("qwen3"), corpora, folder, settings, SMALL, **options)


@pytest.mark.parametrize("after", [2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, after: int) -> None:
    whole = run(tmp_path / "whole")

    def stop(progress: object) -> None:
        if progress.step == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", on_progress=stop)
    resumed = run(tmp_path / "parts", resume=True)
    for name, weight in whole.artifact.gates.state_dict().items():
        assert torch.equal(resumed.artifact.gates.state_dict()[name], weight), name
    kept = ("curve", "best_step", "best_metrics")
    assert all(resumed.artifact.record[k] == whole.artifact.record[k] for k in kept)
    assert whole.curve.read_bytes().startswith(b"\x89PNG")
    assert whole.gates.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"queries": 0},
        {"steps_a_text": 0},
        {"zoom": -1.0},
        {"recon": float("inf")},
        {"budget": float("nan")},
        {"first_texts": -1},
        {"first_expanded": 0.0},
        {"first_expanded": 1.0},
        {"validation": 0},
        {"sinks": -1},
        {"window": -1},
        {"deviations": float("nan")},
        {"most_anchors": 1.5},
        {"shortest": 0},
        {"shortest": 9},
        {"longest": 33},
    ],
)
def test_settings_that_cannot_be_trained_with_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        learner(settings=replace(SMALL, **wrong))


def test_texts_without_a_span_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no span: give longer texts"):
        learner(TinyCorpus(5)).step(0, generator())
    with pytest.raises(ConfigError, match="no position sees a span"):
        learner(settings=replace(SMALL, window=70)).step(0, generator())


def test_texts_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the model's 2048 positions"):
        learner(TinyCorpus(2049)).step(0, generator())


def test_no_corpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one corpus"):
        GateLearner(attached(), (), SMALL, steps=8)


def test_models_that_gates_cannot_be_trained_for_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no full-attention layer"):
        GateLearner(attached("mistral_window"), [TinyCorpus()], SMALL, steps=8)
    with pytest.raises(ConfigError, match="not kvfold's"):
        GateLearner(tiny_model(), [TinyCorpus()], SMALL, steps=8)
