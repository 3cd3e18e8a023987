"""Every cache: exact where it must be, equal to a slow notebook elsewhere, blind to neighbours."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache as once

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.diffusion import (
    CACHES,
    PRESETS,
    DelayedCache,
    DiffusionCache,
    DiffusionModel,
    DreamSampler,
    DualCache,
    LLaDASampler,
    PrefixCache,
    Sampler,
    SpaCache,
    ValueCache,
    generate,
    make_cache,
    stream,
)
from kvfold.diffusion.caches import drift
from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.generate import Writing
from kvfold.errors import ConfigError
from tests.contract import assert_close
from tests.diffusion.checkpoints import HIDDEN, LAYERS, MASK, prompts_of, tiny_diffusion
from tests.diffusion.slow import SlowRules, slow_drift, slow_tokens

STYLES = ("llada", "dream")
SAMPLING: dict[str, Sampler] = {
    "llada": LLaDASampler(block_length=5, steps=11),
    "llada-threshold": LLaDASampler(block_length=5, threshold=0.3),
    "llada-guided": LLaDASampler(block_length=5, steps=8, cfg_scale=0.5),
    "dream": DreamSampler(steps=10),
    "dream-factor": DreamSampler(factor=1.3),
}
LENGTH = 13

EXACT: dict[str, DiffusionCache] = {
    "prefix": PrefixCache(refresh=1),
    "dual": DualCache(refresh=1),
    "dkv": DelayedCache(refresh=1),
    "dllm-refresh": ValueCache(refresh=1),
    "dllm-ratio": ValueCache(ratio=1.0),
    "spa-refresh": SpaCache(refresh=1, rank=4),
    "spa-ratio": SpaCache(ratio=1),
    "spa-code": SpaCache(ratio=1.0, rank=4, **PRESETS["code"]),
    "spa-paper": SpaCache(ratio=1.0, rank=4, **PRESETS["paper"]),
    "spa-curve": SpaCache(ratio=1.0, curve="llada-8b", kv_refresh="selected"),
    "spa-dense": SpaCache(dense_layers=99),
}
"""Caches that must not change anything."""

OWN = {"rank": 6, "refresh": 9, "refresh_generated": 4, "ratio": 0.3}
SPARSE: dict[str, DiffusionCache] = {
    **{name: make_cache(name) for name in CACHES},
    "spa-code": SpaCache(**OWN, **PRESETS["code"]),
    "spa-paper": SpaCache(**OWN, **PRESETS["paper"]),
    "spa-least": SpaCache(ratio=1e-3, rank=1),
    "dkv-never": DelayedCache(refresh=None),
    "dual-often": DualCache(refresh=3),
}
"""Caches that do."""


class Recorded:
    """A generation that notes the canvas and the logits of every step."""

    def __init__(self, writing: Writing) -> None:
        self.canvases: list[Canvas] = []
        self.logits: list[torch.Tensor] = []
        writing._watch = self._note
        self.found = writing.result()

    def _note(self, canvas: Canvas, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        self.canvases.append(replace(canvas))
        self.logits.append(logits)


def recorded(
    model: DiffusionModel,
    prompts: list[list[int]],
    cache: DiffusionCache | str,
    sampler: Sampler,
    length: int = LENGTH,
) -> Recorded:
    return Recorded(stream(model, prompts, cache, length=length, sampler=sampler))


@once
def without(style: str, sampling: str) -> Recorded:
    """The same without a cache, made once."""
    return recorded(tiny_diffusion(style), prompts_of(5, 9, 7), "none", SAMPLING[sampling])


@pytest.mark.parametrize("sampling", ["llada-threshold", "llada-guided", "dream"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", EXACT)
def test_a_cache_that_spares_nothing_changes_nothing(name: str, style: str, sampling: str) -> None:
    model, prompts = tiny_diffusion(style), prompts_of(5, 9, 7)
    expected = without(style, sampling)
    found = recorded(model, prompts, EXACT[name], SAMPLING[sampling])
    assert found.found.tokens == expected.found.tokens
    assert len(found.logits) == len(expected.logits)
    for actual, wanted in zip(found.logits, expected.logits, strict=True):
        assert_close(actual.nan_to_num(neginf=0), wanted.nan_to_num(neginf=0))


def ending(style: str) -> DiffusionModel:
    """A model many of whose tokens end a text, so that rows leave at different times."""
    model = tiny_diffusion(style)
    ends = {"llada": range(2, MASK, 9), "dream": range(3, MASK, 8)}[style]
    return DiffusionModel(model.decoder, replace(model.traits, eos_ids=frozenset(ends)))


@pytest.mark.parametrize("sampling", ["llada-threshold", "dream-factor"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", [*CACHES, "spa-code", "spa-paper"])
def test_a_row_is_what_it_is_alone(name: str, style: str, sampling: str) -> None:
    assert_rows_alone(ending(style), SPARSE[name], SAMPLING[sampling])


def assert_rows_alone(
    model: DiffusionModel,
    cache: DiffusionCache,
    sampler: Sampler,
    prompts: list[list[int]] | None = None,
    length: int = LENGTH,
) -> None:
    prompts = prompts or prompts_of(4, 11, 7, 8, seed=3)
    together = generate(model, prompts, cache, length=length, sampler=sampler)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], cache, length=length, sampler=sampler)
        assert alone.tokens[0] == together.tokens[row]


@pytest.mark.parametrize("name", [*CACHES, "spa-paper"])
def test_a_row_is_what_it_is_alone_while_others_are_in_other_blocks(name: str) -> None:
    sampler = LLaDASampler(block_length=3, threshold=0.4)
    prompts = prompts_of(4, 9, 6, 8, 5, 7, seed=1)
    assert_rows_alone(ending("llada"), SPARSE[name], sampler, prompts, length=21)


def test_rows_left_at_different_times_in_that_test() -> None:
    model, prompts = ending("llada"), prompts_of(4, 11, 7, 8, seed=3)
    sampler = SAMPLING["llada-threshold"]
    rows = [len(canvas.ids) for canvas in recorded(model, prompts, "dual", sampler).canvases]
    assert len(set(rows)) >= 3


def block_causal() -> DiffusionModel:
    """A model whose tokens see their own block of four places and those before."""
    model = ending("dream")
    traits = replace(model.traits, topology="block_causal", block_length=4)
    return DiffusionModel(model.decoder, traits)


@pytest.mark.parametrize("name", EXACT)
def test_a_cache_that_spares_nothing_changes_nothing_under_blocks(name: str) -> None:
    model, prompts, sampler = block_causal(), prompts_of(5, 9, 7), SAMPLING["llada-threshold"]
    expected = recorded(model, prompts, "none", sampler)
    found = recorded(model, prompts, EXACT[name], sampler)
    assert found.found.tokens == expected.found.tokens
    assert_close(found.logits[-1].nan_to_num(neginf=0), expected.logits[-1].nan_to_num(neginf=0))


@pytest.mark.parametrize("name", SPARSE)
def test_a_row_is_what_it_is_alone_under_blocks(name: str) -> None:
    assert_rows_alone(block_causal(), SPARSE[name], SAMPLING["llada-threshold"])


@pytest.mark.parametrize("name", SPARSE)
def test_half_precision_is_held_and_ends(name: str) -> None:
    model = ending("dream")
    half = DiffusionModel(deepcopy(model.decoder).bfloat16(), model.traits)
    writing = stream(half, prompts_of(4, 9), SPARSE[name], length=9)
    assert MASK not in writing.result().ids
    kept = [tensor for tensor in owned(writing._state) if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in kept} <= {torch.bfloat16}


def places(field: torch.Tensor) -> set[int]:
    return set(field[0].nonzero()[:, 0].tolist())


def fresh_of(name: str, canvases: list[Canvas], shift: int) -> list[set[int]]:
    """What a cache recomputes in each step of a single row, by its definition."""
    found, block = [], -1
    for canvas in canvases:
        everything = set(range(canvas.width))
        start, end = int(canvas.start), int(canvas.end)
        sources = {place - shift for place in places(canvas.wanted)}
        own = {
            "none": everything,
            "prefix": set(range(start - shift, canvas.width)),
            "dual": set(range(start - shift, end)),
            "dkv": places(canvas.masked) | places(canvas.changed),
        }[name]
        whole = canvas.step % 8 == 0 if name == "dkv" else start != block
        found.append(everything if whole else own | sources)
        block = start
    return found


@pytest.mark.parametrize("sampling", ["llada-threshold", "dream"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["none", "prefix", "dual", "dkv"])
def test_frozen_tokens_equal_a_slow_notebook(name: str, style: str, sampling: str) -> None:
    model, prompt = tiny_diffusion(style), prompts_of(5)
    shift = model.traits.shift
    run = recorded(model, prompt, name, SAMPLING[sampling], length=8)
    steps = [canvas.ids[0].tolist() for canvas in run.canvases]
    expected = slow_tokens(model, steps, fresh_of(name, run.canvases, shift))
    for canvas, logits, outputs in zip(run.canvases, run.logits, expected, strict=True):
        hidden = torch.stack([outputs[place - shift] for place in sorted(places(canvas.wanted))])
        compare(model, logits, hidden)


def compare(model: DiffusionModel, logits: torch.Tensor, hidden: torch.Tensor) -> None:
    wanted = model.decoder.logits(hidden)
    wanted[:, model.traits.never] = 0
    assert_close(logits.nan_to_num(neginf=0), wanted, tolerance=2e-5)


DRIFTING: dict[str, tuple[DiffusionCache, SlowRules]] = {
    "dllm": (
        ValueCache(ratio=0.3, refresh=9, refresh_generated=4),
        SlowRules([0.3] * LAYERS, True, None, 9, 4, False, False, False),
    ),
    "spa-code": (
        SpaCache(**OWN, **PRESETS["code"]),
        SlowRules([1.0, 0.3, 0.3], False, 6, 9, 4, True, False, False),
    ),
    "spa-paper": (
        SpaCache(**OWN, **PRESETS["paper"]),
        SlowRules([0.3] * LAYERS, False, 6, 9, 4, False, True, True),
    ),
    "spa-mixed": (
        SpaCache(rank=16, refresh=20, refresh_generated=20, ratio=0.2, kv_refresh="selected"),
        SlowRules([0.2] * LAYERS, False, 16, 20, 20, False, False, False),
    ),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", DRIFTING)
def test_drifting_tokens_equal_a_slow_notebook(
    name: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt, (cache, rules) = tiny_diffusion(style), prompts_of(5), DRIFTING[name]
    selected: list[list[int]] = []
    start = 5 - model.traits.shift

    def noting(signal: torch.Tensor, reference: torch.Tensor, count: int) -> torch.Tensor:
        chosen = choose(signal, reference, count)
        selected.append(sorted((chosen[0] + start).tolist()))
        return chosen

    choose: Callable[..., torch.Tensor] = drift.most_drifted
    monkeypatch.setattr(drift, "most_drifted", noting)
    run = recorded(model, prompt, cache, SAMPLING["llada"], length=11)
    steps = [canvas.ids[0].tolist() for canvas in run.canvases]
    expected = slow_drift(model, steps, start, rules)
    sparse = [
        layer
        for number, (_, layers) in enumerate(expected)
        for layer, share in zip(layers, rules.shares, strict=True)
        if share < 1 and number % rules.refresh and number % rules.refresh_generated
    ]
    assert selected == sparse
    assert len(sparse) > 10
    for canvas, logits, (outputs, _) in zip(run.canvases, run.logits, expected, strict=True):
        wanted = [place - model.traits.shift for place in sorted(places(canvas.wanted))]
        compare(model, logits, torch.stack([outputs[place] for place in wanted]))


def test_the_most_drifted_equal_a_loop_over_single_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    signal, noise = torch.randn(2, 3, 21, 8, generator=generator)
    reference = torch.where(noise[:, :, :1] > 0.5, noise, signal)  # some have not moved
    found = drift.most_drifted(signal, reference, 9)
    for row in range(3):
        cosines = []
        for place in range(21):
            new, old = signal[row, place].double(), reference[row, place].double()
            cosines.append((min(float(new @ old / new.norm() / old.norm()), drift.STILL), place))
        assert found[row].tolist() == [place for _, place in sorted(cosines)[:9]]


@pytest.mark.parametrize(
    ("ratio", "count"), [(1e-9, 1), (0.25, 64), (0.1, 25), (0.3, 76), (1, 256)]
)
def test_a_share_is_rounded_down_but_never_to_nothing(ratio: float, count: int) -> None:
    assert drift.count_of(ratio, 256) == count


def test_shares_of_one_tenth_to_ten_tenths_of_ten_tokens_are_whole() -> None:
    assert [drift.count_of(tenths / 10, 10) for tenths in range(1, 11)] == list(range(1, 11))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=40), st.integers(1, 600))
def test_what_rounding_takes_from_a_layer_is_left_for_the_next(
    ratios: list[float], tokens: int
) -> None:
    counts = drift.counts_of(ratios, tokens)
    for ratio, count in zip(ratios, counts, strict=True):
        assert 1 <= count <= tokens
        assert ratio * tokens - 1 <= count <= max(1, ratio * tokens + 1)
    if min(ratios) * tokens >= 1:
        assert abs(sum(counts) - sum(ratios) * tokens) < 1 + 1e-6


def test_a_mean_of_a_few_tokens_is_met() -> None:
    assert drift.counts_of([0.16] * 4, 16) == [2, 3, 2, 3]
    assert drift.counts_of([0.1] * 4, 16) == [1, 2, 1, 2]
    assert drift.counts_of([0.01, 0.01, 1.0], 16) == [1, 1, 16]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", SPARSE)
def test_generations_at_once_do_not_touch_one_another(name: str, style: str) -> None:
    first, second = prompts_of(5, 8), prompts_of(6, seed=9)
    model, cache, sampler = tiny_diffusion(style), SPARSE[name], SAMPLING["llada"]
    other = tiny_diffusion("dream" if style == "llada" else "llada")
    one = stream(model, first, cache, length=LENGTH, sampler=sampler)
    two = stream(other, second, cache, length=LENGTH, sampler=sampler)
    for _ in zip(one, two, strict=False):
        pass
    alone = generate(model, first, cache, length=LENGTH, sampler=sampler)
    assert one.result().tokens == alone.tokens
    alone = generate(other, second, cache, length=LENGTH, sampler=sampler)
    assert two.result().tokens == alone.tokens


def owned(state: object) -> list[torch.Tensor]:
    """Every tensor that a state holds, in whatever it holds them."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict | list | tuple):
        members = list(state.values()) if isinstance(state, dict) else list(state)
        return [tensor for member in members for tensor in owned(member)]
    if isinstance(state, drift.DriftState) or type(state).__name__ in ("TokenState", "KVStore"):
        held = {name: value for name, value in vars(state).items() if name != "model"}
        return owned(held)
    return []


@pytest.mark.parametrize("name", SPARSE)
def test_reported_bytes_are_the_bytes_held(name: str) -> None:
    model, cache = tiny_diffusion("dream"), SPARSE[name]
    writing = stream(model, prompts_of(5, 8), cache, length=LENGTH)
    next(iter(writing))
    factors = 0
    if isinstance(cache, SpaCache):
        proxies = model.proxies(cache.rank or 16)
        factors = sum(
            p.weight.nbytes + (p.bias.nbytes if p.bias is not None else 0) for p in proxies
        )
    large = [tensor for tensor in owned(writing._state) if tensor.ndim > 1]
    held = sum(tensor.nbytes for tensor in large)
    assert writing._state.nbytes == held + factors
    assert writing.result().report.bytes_held == held + factors


def test_work_is_counted_as_it_is_done() -> None:
    model, prompts = tiny_diffusion("llada"), prompts_of(6, 6)
    sampler = LLaDASampler(block_length=4, stop_at_eos=False)
    report = generate(model, prompts, "dual", length=8, sampler=sampler).report
    assert (report.steps, report.rows, report.dense) == (8, 2, 8 * 2 * 14)
    # Each of two blocks begins with all 14 tokens and goes on with its 4, three times.
    assert set(report.queries) == set(report.keys) == {2 * 2 * (14 + 3 * 4)}
    assert report.logits == 2 * 2 * (4 + 3 + 2 + 1)
    assert report.query_shares == [pytest.approx(104 / 224)] * LAYERS
    assert report.bytes_held == 2 * LAYERS * 2 * 15 * HIDDEN * 4
    cache = SpaCache(ratio=0.25, refresh=4, refresh_generated=2, dense_layers=1)
    report = generate(model, prompts, cache, length=8, sampler=sampler).report
    # Steps 0 and 4 run all 14 tokens, 2 and 6 the 8 generated ones, the others 2 of them.
    assert report.queries == (2 * (2 * 14 + 6 * 8), *[2 * (2 * 14 + 2 * 8 + 4 * 2)] * 2)
    assert report.keys == (2 * (2 * 14 + 6 * 8),) * 3
    assert report.to_dict()["share"] == pytest.approx(report.share)
    assert "tokens in 8 steps" in str(report)


def test_a_proxy_follows_its_weights() -> None:
    model = tiny_diffusion("dream")
    first = model.proxies(8)
    assert model.proxies(8) is first
    with torch.no_grad():
        model.decoder.blocks[0].value.weight.mul_(1.0)
    assert model.proxies(8) is not first


def test_weights_made_under_inference_mode_have_proxies():
    with torch.inference_mode():
        model = tiny_diffusion.__wrapped__("llada")
        first = model.proxies(8)
    assert model.proxies(8) is first


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sparse", {}, "choose one of"),
        ("none", {"ratio": 0.5}, "none has no option 'ratio': choose from none"),
        ("spa", {"ration": 0.5}, "spa has no option 'ration': choose from ratio"),
        ("spa", {"ratio": 0}, "spa: ratio is 0"),
        ("spa", {"ratio": 2.0}, "spa: ratio is 2.0"),
        ("spa", {"ratio": "half"}, "spa: ratio is 'half'"),
        ("spa", {"rank": 0}, "spa: rank is 0"),
        ("spa", {"refresh": 0}, "spa: refresh is 0"),
        ("spa", {"refresh_generated": 1.5}, "spa: refresh_generated is 1.5"),
        ("spa", {"kv_refresh": "some"}, "all or selected"),
        ("spa", {"reference": "first"}, "last_step or last_update"),
        ("spa", {"residual": "input"}, "change or output"),
        ("spa", {"dense_layers": -1}, "dense_layers is -1"),
        ("spa", {"curve": "bell"}, "choose one of uniform"),
        ("spa", {"curve": 3}, "curve is 3"),
        ("dllm", {"ratio": 1.01}, "dllm: ratio is 1.01"),
        ("dllm", {"refresh": True}, "dllm: refresh is True"),
        ("dual", {"refresh": 0}, "dual: refresh is 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_cache(name, **options)


def test_a_rank_above_the_width_of_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 1 to 16"):
        generate(tiny_diffusion("dream"), prompts_of(4), SpaCache(rank=17), length=4)


def test_a_made_cache_takes_no_options() -> None:
    made = DualCache()
    assert make_cache(made) is made
    with pytest.raises(ConfigError, match="give its name"):
        make_cache(made, refresh=3)
