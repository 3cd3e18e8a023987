"""Samplers equal the published loops, always move on, and emit nothing that is not meant."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.diffusion import (
    SAMPLERS,
    DiffusionModel,
    DreamSampler,
    Frame,
    LLaDASampler,
    Sampler,
    generate,
    stream,
)
from kvfold.diffusion.samplers.choice import best, supported, within_top_k, within_top_p
from kvfold.diffusion.samplers.noise import RowNoise
from kvfold.errors import ConfigError
from tests.diffusion.checkpoints import EOS, MASK, PAD, VOCABULARY, prompts_of, tiny_diffusion
from tests.diffusion.plain import plain_dream, plain_llada

LLADA_LOOPS = {
    "one block": LLaDASampler(),
    "few steps": LLaDASampler(steps=5),
    "blocks": LLaDASampler(block_length=4, steps=8),
    "uneven": LLaDASampler(block_length=5, steps=10),
    "more steps than tokens": LLaDASampler(block_length=4, steps=20),
    "guided": LLaDASampler(block_length=8, steps=8, cfg_scale=0.7),
    "threshold": LLaDASampler(block_length=8, threshold=0.4),
    "factor": LLaDASampler(block_length=8, factor=1.4),
}
DREAM_LOOPS = {
    "maskgit_plus": DreamSampler(),
    "few steps": DreamSampler(steps=5),
    "topk_margin": DreamSampler(steps=9, algorithm="topk_margin"),
    "entropy": DreamSampler(steps=7, algorithm="entropy"),
    "threshold": DreamSampler(threshold=0.5),
    "factor": DreamSampler(factor=1.2, algorithm="topk_margin"),
}
LENGTH = 14


def frames_of(
    model: DiffusionModel, sampler: Sampler, prompts: list[list[int]], length: int = LENGTH
) -> list[Frame]:
    writing = stream(model, prompts, "none", length=length, sampler=sampler)
    frames = list(writing)
    assert torch.equal(frames[-1].ids, writing.result().ids)
    return frames


def endless(style: str) -> DiffusionModel:
    """A model of which no token ends a text."""
    model = tiny_diffusion(style)
    return DiffusionModel(model.decoder, replace(model.traits, eos_ids=frozenset()))


@pytest.mark.parametrize("style", ["llada", "dream"])
@pytest.mark.parametrize("name", LLADA_LOOPS)
def test_llada_equals_its_loop(name: str, style: str) -> None:
    model, prompt = endless(style), prompts_of(6)[0]
    expected = plain_llada(model, prompt, LENGTH, LLADA_LOOPS[name])
    found = frames_of(model, LLADA_LOOPS[name], [prompt])
    assert [frame.ids[0].tolist() for frame in found] == expected


@pytest.mark.parametrize("style", ["llada", "dream"])
@pytest.mark.parametrize("name", DREAM_LOOPS)
def test_dream_equals_its_loop(name: str, style: str) -> None:
    model, prompt = endless(style), prompts_of(6)[0]
    expected = plain_dream(model, prompt, LENGTH, DREAM_LOOPS[name])
    found = frames_of(model, DREAM_LOOPS[name], [prompt])
    assert [frame.ids[0].tolist() for frame in found] == expected


ANY = [
    *LLADA_LOOPS.values(),
    *DREAM_LOOPS.values(),
    LLaDASampler(block_length=4, temperature=1.0),
    LLaDASampler(steps=6, remasking="random"),
    LLaDASampler(threshold=1.0),
    DreamSampler(steps=6, algorithm="origin", temperature=0.8, top_p=0.9),
    DreamSampler(algorithm="entropy", alg_temp=0.5, temperature=1.0, top_k=5),
    DreamSampler(factor=1e-9),
]


@pytest.mark.parametrize("sampler", ANY, ids=repr)
def test_every_step_decides_and_nothing_is_decided_twice(sampler: Sampler) -> None:
    model = endless("llada")
    undecided = torch.ones(3, LENGTH, dtype=torch.bool)
    before = torch.full((3, LENGTH), MASK)
    for frame in frames_of(model, sampler, prompts_of(3, 6, 4)):
        unfinished = undecided.any(dim=1)
        assert bool(frame.changed.any(dim=1)[unfinished].all()), "a row stood still"
        assert not bool((frame.changed & ~undecided).any()), "a place was decided twice"
        assert torch.equal(frame.ids[~frame.changed], before[~frame.changed])
        undecided, before = undecided & ~frame.changed, frame.ids
        assert torch.equal(frame.ids == MASK, undecided)
    assert not bool(undecided.any())


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_what_may_not_be_emitted_never_is(name: str) -> None:
    model = tiny_diffusion("dream")
    sampler = SAMPLERS[name](temperature=3.0)
    free = generate(model, prompts_of(5, 5), "none", length=32, sampler=sampler)
    often = int(free.ids.flatten().mode().values)
    padded = DiffusionModel(model.decoder, replace(model.traits, pad_id=often))
    found = generate(padded, prompts_of(5, 5), "none", length=32, sampler=sampler)
    assert often in free.ids
    assert not {MASK, often} & set(found.ids.flatten().tolist())
    assert PAD not in free.ids


def test_a_text_ends_when_all_before_its_end_is_decided() -> None:
    model = tiny_diffusion("llada")
    ends = frozenset(range(1, VOCABULARY, 2)) - {MASK}
    model = DiffusionModel(model.decoder, replace(model.traits, eos_ids=ends))
    prompts = prompts_of(4, 7, 5)
    on = generate(model, prompts, "none", length=24, sampler=LLaDASampler(block_length=6))
    off = LLaDASampler(block_length=6, stop_at_eos=False)
    whole = generate(model, prompts, "none", length=24, sampler=off)
    assert on.report.steps < whole.report.steps == 24
    assert on.report.dense < whole.report.dense
    for row, tokens in enumerate(on.tokens):
        first = next(place for place, token in enumerate(tokens) if token in ends)
        assert len(tokens) == first + 1
        assert tokens == whole.ids[row, : len(tokens)].tolist()
        assert set(on.ids[row, first:].tolist()) == {tokens[-1]}
    assert MASK not in on.ids
    assert [len(tokens) for tokens in whole.tokens] == [24] * 3


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_max_steps_decides_what_is_left(name: str) -> None:
    found = generate(
        endless("dream"), prompts_of(4, 6), "none", length=20, sampler=SAMPLERS[name](max_steps=3)
    )
    assert found.report.steps == 3
    assert MASK not in found.ids
    by_block = LLaDASampler(block_length=4, threshold=0.99, max_steps=2)
    found = generate(endless("llada"), prompts_of(4), "none", length=20, sampler=by_block)
    assert (found.report.steps, MASK in found.ids) == (2, False)


@pytest.mark.parametrize(
    "sampler",
    [
        LLaDASampler(temperature=1.0, block_length=5),
        LLaDASampler(remasking="random", steps=6),
        DreamSampler(temperature=1.0, alg_temp=0.3, algorithm="entropy", steps=9),
        DreamSampler(temperature=1.0, algorithm="origin", top_p=0.8),
    ],
    ids=repr,
)
def test_a_row_draws_the_same_whoever_is_beside_it(sampler: Sampler) -> None:
    model, prompts = tiny_diffusion("llada"), prompts_of(3, 8, 5)
    seed = torch.Generator().manual_seed(4)
    together = generate(model, prompts, "none", length=12, sampler=sampler, generator=seed)
    seed.manual_seed(4)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], "none", length=12, sampler=sampler, generator=seed)
        assert alone.tokens[0] == together.tokens[row]
    other = torch.Generator().manual_seed(5)
    differs = generate(model, prompts, "none", length=12, sampler=sampler, generator=other)
    assert not torch.equal(differs.ids, together.ids)


@pytest.mark.parametrize("sampler", [LLaDASampler(temperature=0.7), DreamSampler(temperature=0.7)])
def test_tokens_are_drawn_from_the_softmax_at_a_temperature(sampler: Sampler) -> None:
    logits, draws = torch.tensor([0.3, -0.5, 1.1, -math.inf, 0.0]), 20000
    noise = RowNoise(1, torch.device("cpu"))
    tokens, _ = sampler.propose(logits.expand(draws, -1).clone(), [draws], noise)
    found = torch.bincount(tokens, minlength=5) / draws
    assert found[3] == 0
    torch.testing.assert_close(found, (logits / 0.7).softmax(-1), atol=0.015, rtol=0)


def test_sureness_is_of_the_distribution_without_noise_in_llada() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    noise = RowNoise(1, torch.device("cpu"))
    tokens, sure = LLaDASampler(temperature=2.0).propose(logits, [6], noise)
    assert not torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(sure, logits.softmax(-1)[torch.arange(6), tokens])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-4, 4), min_size=2, max_size=9), st.floats(0.01, 1.0), st.integers(1, 9))
def test_filters_keep_the_likeliest_tokens(row: list[float], top_p: float, top_k: int) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    kept = (~within_top_k(logits, top_k).isneginf())[0].tolist()
    least = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
    assert kept == [number >= least for number in logits[0].tolist()]
    kept = (~within_top_p(logits, top_p).isneginf())[0].tolist()
    reached = 0.0
    probabilities = logits.softmax(-1)[0].tolist()
    for place in logits[0].argsort(descending=True, stable=True).tolist():
        if abs(reached - top_p) > 1e-9 and len(set(row)) == len(row):
            assert kept[place] == (reached < top_p)
        reached += probabilities[place]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 4))
def test_the_factor_rule_finds_the_largest_number(sure: list[float], factor: float) -> None:
    ordered = sorted(torch.tensor(sure).tolist(), reverse=True)
    fits = [n for n, c in enumerate(ordered, start=1) if (n + 1) * (1 - c) < factor - 1e-6]
    loose = [n for n, c in enumerate(ordered, start=1) if (n + 1) * (1 - c) < factor + 1e-6]
    found = int(supported(torch.tensor([sure]), factor))
    assert max(fits, default=0) <= found <= max(loose, default=0)


def test_of_equal_places_the_earlier_is_decided() -> None:
    scores = torch.tensor([[0.5, 0.5, -math.inf, 0.5], [-math.inf, 0.1, -math.inf, 0.2]])
    found = best(scores, torch.tensor([2, 3]))
    assert found.tolist() == [[True, True, False, False], [False, True, False, True]]


def test_the_own_sampler_of_a_model_is_the_default() -> None:
    for style, sampler in (("llada", "llada"), ("dream", "dream")):
        model, prompts = tiny_diffusion(style), prompts_of(5)
        found = generate(model, prompts, "none", length=9)
        assert found.tokens == generate(model, prompts, "none", length=9, sampler=sampler).tokens
    assert tiny_diffusion("llada").traits.eos_ids == {EOS}


@pytest.mark.parametrize(
    ("sampler", "options", "words"),
    [
        ("llada", {"steps": 0}, "steps is 0"),
        ("llada", {"max_steps": True}, "max_steps is True"),
        ("llada", {"temperature": -1.0}, "temperature is -1.0"),
        ("llada", {"temperature": "hot"}, "temperature is 'hot'"),
        ("llada", {"temperature": math.nan}, "temperature is nan"),
        ("llada", {"threshold": 1.5}, "threshold is 1.5"),
        ("llada", {"factor": 0}, "factor is 0"),
        ("llada", {"factor": 1.0, "threshold": 0.9}, "both given"),
        ("llada", {"steps": 4, "threshold": 0.9}, "steps have no meaning"),
        ("llada", {"block_length": 0}, "block_length is 0"),
        ("llada", {"remasking": "high"}, "low_confidence or random"),
        ("llada", {"remasking": "random", "threshold": 0.9}, "not random"),
        ("llada", {"cfg_scale": -0.1}, "cfg_scale is -0.1"),
        ("dream", {"algorithm": "best"}, "origin or maskgit_plus"),
        ("dream", {"alg_temp": -1}, "alg_temp is -1"),
        ("dream", {"top_p": 0.0}, "top_p is 0.0"),
        ("dream", {"top_k": 0}, "top_k is 0"),
        ("dream", {"epsilon": 0}, "epsilon is 0"),
        ("dream", {"algorithm": "entropy", "threshold": 0.9}, "maskgit_plus or topk_margin"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    sampler: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        SAMPLERS[sampler](**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "length", "sampler", "words"),
    [
        ([], 4, "llada", "there is no prompt"),
        ([[1], []], 4, "llada", "prompt 1 is \\[\\]"),
        ([7], 4, "llada", "prompt 0 is 7"),
        (["ab"], 4, "llada", "prompt 0 holds 'a'"),
        ([[1, 96]], 4, "llada", "prompt 0 holds 96"),
        ([[1.5]], 4, "llada", "prompt 0 holds 1.5"),
        ([[1]], 0, "llada", "length is 0"),
        ([[1] * 200], 57, "llada", "256 positions"),
        ([[1]], 4, "greedy", "choose one of"),
        ([[1]], 9, LLaDASampler(block_length=2, steps=4), "4 steps are too few for 5 blocks"),
    ],
)
def test_what_cannot_be_written_is_refused(
    prompts: list[list[int]], length: int, sampler: str | Sampler, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(tiny_diffusion("llada"), prompts, "none", length=length, sampler=sampler)
