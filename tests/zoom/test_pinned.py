"""The slow tier on the host: what it gives back, in which order copies run."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.zoom import lane
from kvfold.zoom.lane import Lanes, Transport
from kvfold.zoom.pinned import PinnedTier
from kvfold.zoom.slow import DEFAULTS, slow_tiers
from kvfold.zoom.tiers import RawTier, Wanted
from tests.contract import assert_close, left_padded
from tests.tiny import tiny_ids, tiny_model
from tests.zoom.hosts import BOTH, Copied, Delayed, lanes_of, on_host, pieces
from tests.zoom.running import layers_of, one_by_one, run, wide
from tests.zoom.slow import GROUPS, WIDTH, Filled, assert_apart, folded

LONGEST = 12
UNEVEN = [[[5, 12, 1], [7]], [[3, 3], [12, 11]], [[10], [4]]]
ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def uneven(transport: Transport | None = None, dtype: torch.dtype = torch.float16) -> Filled:
    folds = [folded(each, seed, dtype=dtype) for seed, each in enumerate(UNEVEN)]
    return Filled(PinnedTier(LONGEST, lanes_of(transport)), folds)


def tier_of(held: Filled) -> PinnedTier:
    assert isinstance(held.tier, PinnedTier)
    return held.tier


def one_of(wanted: Wanted, index: int) -> Wanted:
    return Wanted(*(getattr(wanted, name)[index : index + 1] for name in wanted.__slots__))


# One layer ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_it_gives_back_what_it_was_given(make: Callable[[], Transport | None], dtype: torch.dtype):
    held = uneven(make(), dtype)
    assert torch.equal(*held.given())
    assert held.tier.width == 2 * WIDTH
    for part in ("keys", "values", "positions"):
        assert torch.equal(getattr(held.tier, part), getattr(held.raw, part))


@BOTH
def test_rows_that_move(make: Callable[[], Transport | None]):
    held, order = uneven(make()), torch.tensor([1, 1, 0])
    for each in (held.tier, held.raw):
        each.map(lambda tensor: tensor.index_select(0, order))
    held.lengths, held.starts = held.lengths[order], held.starts[order]
    assert torch.equal(*held.given())
    assert torch.equal(held.tier.keys, held.raw.keys)


@BOTH
def test_states_are_those_of_a_raw_tier(make: Callable[[], Transport | None]):
    held = uneven(make())
    state, expected = dict(held.tier.state()), dict(held.raw.state())
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    read, raw = PinnedTier(LONGEST, lanes_of(make())), RawTier(LONGEST)
    read.load(expected)
    raw.load(state)
    held.tier, held.raw = read, raw
    assert torch.equal(*held.given())


@BOTH
def test_a_copy_has_memory_of_its_own(make: Callable[[], Transport | None]):
    held = uneven(make())
    assert_apart(tier_of(held), copy.deepcopy(tier_of(held)))


@BOTH
def test_inference_mode_and_out_of_it(make: Callable[[], Transport | None]):
    with torch.inference_mode():
        held = uneven(make())
        assert torch.equal(*held.given())
    new = folded([[4, 2], [5, 1]], 7, dtype=torch.float16)
    for each in (held.tier, held.raw):
        each.add(new)
    assert torch.equal(*held.given())
    with torch.inference_mode():
        assert torch.equal(*held.given())


def test_its_bytes_are_those_of_the_tokens_and_of_what_copies_are_made_from():
    plain, held = uneven(), uneven(Delayed())
    assert plain.tier.nbytes == plain.raw.nbytes
    held.given()
    assert held.tier.nbytes == held.raw.nbytes + 2 * lane.STAGE_BYTES
    second = PinnedTier(LONGEST, tier_of(held)._lanes, 1)
    second.add(folded([[4], [4]], dtype=torch.float16))
    second.fetch(one_of(Filled(RawTier(LONGEST), [folded([[4], [4]])]).wanted(), 0))
    raw = RawTier(LONGEST)
    raw.add(folded([[4], [4]], dtype=torch.float16))
    assert second.nbytes == raw.nbytes


# Copies ---------------------------------------------------------------------------------------


def test_a_buffer_is_not_written_while_it_is_copied():
    """Each span comes on its own, and nobody looks before all were asked for."""
    stream = Delayed()
    held = uneven(stream)
    wanted = held.wanted()
    count = len(wanted.rows)
    coming = [tier_of(held).start(one_of(wanted, index)) for index in range(count)]
    order = ["copy 0", "copy 1"]
    for index in range(2, count):
        order += [f"synchronize {index - 2}", f"copy {index}"]
    assert stream.log == order
    for index, each in enumerate(coming):
        length = int(wanted.lengths[index])
        expected = held.raw.fetch(one_of(wanted, index))[0]
        assert torch.equal(each.wait()[:length], expected[:length])
    assert stream.log[len(order) :] == [f"wait {index}" for index in range(count)]


def test_the_stream_would_tell_of_a_buffer_that_is_written_too_early(
    monkeypatch: pytest.MonkeyPatch,
):
    """That is, the test above can fail."""
    monkeypatch.setattr(Copied, "synchronize", lambda self: None)
    held = uneven(Delayed())
    wanted = held.wanted()
    coming = [tier_of(held).start(one_of(wanted, index)) for index in range(3)]
    expected = held.raw.fetch(one_of(wanted, 0))[0]
    assert not torch.equal(coming[0].wait()[:1], expected[:1])


def test_much_is_copied_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane, "STAGE_BYTES", 10 * 2 * WIDTH * 2)
    stream = Delayed()
    held = uneven(stream)
    assert torch.equal(*held.given())
    parts = -(-len(held.wanted().rows) * LONGEST // 10)
    assert parts > 4
    assert [entry for entry in stream.log if entry.startswith("copy")] == [
        f"copy {index}" for index in range(parts)
    ]
    assert stream.log.count(f"wait {parts - 1}") == 1


def test_layers_share_a_lane_to_each_device():
    opened = []

    def open_(device: torch.device) -> Transport:
        opened.append(device)
        return Delayed()

    lanes = Lanes(open_)
    for index in range(3):
        tier = PinnedTier(LONGEST, lanes, index)
        tier.add(folded([[4], [4]]))
        copy.deepcopy(tier).add(folded([[4], [4]]))
    assert opened == [torch.device("cpu")]


@pytest.mark.parametrize("fails", [("host",), ("locked",), ("host", "locked")], ids=str)
def test_without_page_locked_memory(fails: tuple[str, ...], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    stream = Delayed(fails)
    held = uneven(stream)
    assert torch.equal(*held.given())
    assert torch.equal(*held.given())
    assert stream.begun == []
    (record,) = caplog.records
    assert record.name == "kvfold.zoom.lane"
    assert "cannot be page-locked for cpu (no memory to lock): spans" in record.message


def test_memory_that_runs_out_later(caplog: pytest.LogCaptureFixture):
    stream = Delayed()
    held = uneven(stream)
    coming = tier_of(held).start(held.wanted())
    stream.fails = ("host", "locked")
    new = folded([[4, 2], [5, 1]], 7, dtype=torch.float16)
    for each in (held.tier, held.raw):
        each.add(new)
    assert len(caplog.records) == 1
    assert torch.equal(*held.given())
    is_token = torch.arange(LONGEST) < held.wanted().lengths[:, None]
    expected = held.raw.fetch(held.wanted())[is_token]
    assert torch.equal(coming.wait().view(-1, LONGEST, 2 * WIDTH)[is_token], expected)


# In a cache -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_alone")
@BOTH
@pytest.mark.parametrize("routing", ["sketch", "summary"])
def test_a_cache_says_what_one_in_memory_says(make: Callable[[], Transport | None], routing: str):
    held = on_host(transport=make(), routing=routing)
    plain = kvfold.make_cache(wide(), "sekv", budget=0.4, routing=routing)
    mask = left_padded([300, 250], 300)
    pieces_ = [*pieces(), tiny_ids(2, 30, seed=2), *one_by_one(tiny_ids(2, 9, seed=3))]
    actual, expected = (run(wide(), each, pieces_, mask) for each in (held, plain))
    assert torch.equal(actual, expected)
    assert all(type(layer.spans.slow) is PinnedTier for layer in layers_of(held))
    report, other = held.report(), plain.report()
    assert report.bytes_fast == other.bytes_fast
    staged = layers_of(held)[0].spans.slow._lanes.nbytes
    assert report.bytes_slow == other.bytes_slow + staged
    assert report.details.bytes_moved == other.details.bytes_moved > 0


@pytest.mark.usefixtures("torch_alone")
@BOTH
@pytest.mark.parametrize("way", ["fork", "host to memory", "memory to host"])
def test_a_copy_goes_on_identically(
    make: Callable[[], Transport | None],
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    follow, first = one_by_one(tiny_ids(2, 30, seed=4)), pieces(more=9)
    held = (
        kvfold.make_cache(wide(), "sekv", budget=0.4)
        if way == "memory to host"
        else on_host(transport=make())
    )
    run(wide(), held, first)
    if way == "fork":
        other = held.fork()
    else:
        held.save(tmp_path / "cache.safetensors")
        if way == "memory to host":
            lanes = lanes_of(make())
            monkeypatch.setattr(
                "kvfold.zoom.slow.RawTier", lambda longest: PinnedTier(longest, lanes)
            )
        other = kvfold.load_cache(tmp_path / "cache.safetensors", wide())
    kind = RawTier if way == "host to memory" else PinnedTier
    assert all(type(layer.spans.slow) is kind for layer in layers_of(other))
    expected = run(wide(), held, follow)
    # Expanded spans stand in another order, so that sums are made in another.
    assert_close(run(wide(), other, follow), expected)


def test_the_device_of_its_tokens_chooses_the_tier_of_a_layer():
    make = slow_tiers(wide(), LONGEST, DEFAULTS, None)
    assert type(make(0, torch.device("cpu"))) is RawTier
    tiers = [make(index, torch.device("cuda", index)) for index in range(2)]
    assert [type(tier) for tier in tiers] == [PinnedTier, PinnedTier]
    assert tiers[0]._lanes is tiers[1]._lanes
    held = kvfold.make_cache(wide(), "sekv", budget=0.4)
    first, second = layers_of(held)
    second._place_spans(torch.device("cuda", 1))
    assert [type(each.spans.slow) for each in (first, second)] == [RawTier, PinnedTier]


# On CUDA --------------------------------------------------------------------------------------


@ON_CUDA
def test_on_cuda_it_gives_back_what_it_was_given(caplog: pytest.LogCaptureFixture):
    folds = [folded(each, seed, dtype=torch.float16) for seed, each in enumerate(UNEVEN)]
    held = Filled(RawTier(LONGEST), folds)
    tier, wanted = PinnedTier(LONGEST, Lanes()), held.wanted()
    for new in folds:
        tier.add(replace(new, **{name: getattr(new, name).cuda() for name in new.__slots__}))
    assert tier.tokens.device.type == "cpu"
    assert tier._held.whole("tokens").is_pinned()
    there = Wanted(*(getattr(wanted, name).cuda() for name in wanted.__slots__))
    coming = [tier.start(there) for _ in range(5)]
    is_token = torch.arange(LONGEST) < wanted.lengths[:, None]
    for each in coming:
        actual = each.wait().view(-1, LONGEST, 2 * WIDTH)
        assert actual.device.type == "cuda"
        assert torch.equal(actual.cpu()[is_token], held.raw.fetch(wanted)[is_token])
    assert copy.deepcopy(tier)._held.whole("tokens").is_pinned()
    assert caplog.records == []
    assert wanted.owners.max() < 2 * GROUPS


@ON_CUDA
@pytest.mark.parametrize("ahead", [0.0, 0.5])
def test_on_cuda_a_cache_says_what_one_on_the_cpu_says(ahead: float, tmp_path: Path):
    model = tiny_model("llama", head_dim=32, num_hidden_layers=2)
    with kvfold.attach(model):
        follow = one_by_one(tiny_ids(2, 30, seed=4))
        plain = on_host(ahead=ahead, model=model, slow="exact")
        expected = run(model, plain, [*pieces(), *follow])
        model.cuda()
        held = on_host(ahead=ahead, model=model, slow="exact")
        for layer in layers_of(held):
            layer.resolution = replace(
                layer.resolution,
                make_slow=lambda index, device, lanes=Lanes(): PinnedTier(  # noqa: B008
                    16, lanes, index, ahead
                ),
            )
        held.reset()
        actual = [run(model, held, [piece.cuda() for piece in pieces()])]
        held.save(tmp_path / "cache.safetensors")
        other = kvfold.load_cache(tmp_path / "cache.safetensors", model)
        steps = [piece.cuda() for piece in follow]
        actual += [run(model, each, steps) for each in (held, other)]
        assert all(type(layer.spans.slow) is PinnedTier for layer in layers_of(other))
        assert_close(torch.cat(actual[:2], dim=1).cpu(), expected, 1e-3)
        if not ahead:
            assert_close(actual[2], actual[1], 1e-4)
