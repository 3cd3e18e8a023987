"""Spans as factors: what they give back, what they take, and which stay as they are."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from kvfold.ops.rotary import rotate, unrotate
from kvfold.zoom.factors import Factoring, FactorTier
from kvfold.zoom.gates import Gates, GateShape
from kvfold.zoom.turning import Turning
from tests.contract import assert_close
from tests.zoom.slow import GROUPS, WIDTH, Filled, folded, turning

LONGEST = 40
UNEVEN = [[[5, 40, 1], [7]], [[3, 3], [12, 31]], [[20], [4]]]
"""Three folds of two rows."""
TURNINGS = {
    "rope": turning(LONGEST),
    "interleaved": turning(LONGEST, interleaved=True),
    "partial": turning(LONGEST, 6),
    "nope": None,
}


def tier(rank: int = 32, kind: str = "rope", **options: object) -> FactorTier:
    settings: dict = {"is_joint": False, "is_int8": False, "longest": LONGEST, **options}
    return FactorTier(Factoring(rank, **settings), TURNINGS[kind])


def uneven(made: FactorTier, **options: object) -> Filled:
    return Filled(made, [folded(each, seed, **options) for seed, each in enumerate(UNEVEN)])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every span becomes factors, whatever they take."""
    monkeypatch.setattr(FactorTier, "_stays", lambda held, new, found: new.lengths == 0)


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("kind", TURNINGS)
@pytest.mark.usefixtures("always")
def test_full_rank_gives_the_tokens_back(kind: str, is_joint: bool):
    held = uneven(tier(32, kind, is_joint=is_joint))
    assert_close(*held.given())
    # Of 40 tokens a head has as many components as dims, and all heads together 32 here.
    assert held.tier.ranks[0].tolist()[:3] == [[5, 5], [32 if is_joint else 16] * 2, [1, 1]]


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("kind", TURNINGS)
@pytest.mark.usefixtures("always")
def test_they_are_those_of_the_keys_before_rope(kind: str, is_joint: bool):
    """Un-rotated by where the tokens really stand, cut, and rotated again: span by span."""
    rank, start, turned = 3, 100, TURNINGS[kind]
    held = uneven(tier(rank, kind, is_joint=is_joint))
    wanted, raw = held.wanted(), held.raw
    actual = held.tier.fetch(wanted)
    for number in range(len(wanted.rows)):
        row, head = int(wanted.rows[number]), int(wanted.owners[number]) % GROUPS
        first, length = int(wanted.starts[number]), int(wanted.lengths[number])
        inside = slice(first, first + length)
        keys, values = raw.keys[row, :, inside], raw.values[row, :, inside]
        angles = far_angles(kind, start, length)
        plain = keys if angles is None else unrotate(keys, *angles, interleaved=kind[0] == "i")
        keys, values = (cut(each, rank, is_joint) for each in (plain, values))
        if angles is not None:
            keys = rotate(keys, *angles, interleaved=kind[0] == "i")
        expected = torch.cat([keys, values], dim=-1)[head]
        assert_close(actual[number, :length], expected, 1e-4)
    assert (turned is None) == (kind == "nope")


def far_angles(kind: str, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    if kind == "nope":
        return None
    far = turning(start + length, 6 if kind == "partial" else WIDTH, interleaved=kind[0] == "i")
    return far.cosines[start:], far.sines[start:]


def cut(tokens: torch.Tensor, rank: int, is_joint: bool) -> torch.Tensor:
    """The nearest `[G, T, D]` of a rank, by head or over all."""
    matrices = tokens.movedim(0, 1).flatten(1)[None] if is_joint else tokens
    left, singular, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    near = (left[..., :rank] * singular[..., None, :rank]) @ right[..., :rank, :]
    return (near[0].unflatten(1, (GROUPS, -1)).movedim(1, 0) if is_joint else near).float()


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.usefixtures("always")
def test_more_rank_is_nearer(is_joint: bool, is_int8: bool):
    options = {"is_joint": is_joint, "is_int8": is_int8}
    errors = [uneven(tier(rank, **options)).error() for rank in (1, 2, 4, 8, 16, 32)]
    assert all(one >= two for one, two in itertools.pairwise(errors))
    assert errors[0] > 0.5
    assert errors[2] < 0.9 * errors[1]
    assert errors[-1] < 0.01


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.usefixtures("always")
def test_eight_bits_are_nearly_as_good(is_joint: bool):
    half, int8 = (
        uneven(tier(6, is_joint=is_joint, is_int8=each), dtype=torch.float16)
        for each in (False, True)
    )
    assert half.error() <= int8.error() <= 1.01 * half.error()
    assert int8.tier.nbytes < 0.7 * half.tier.nbytes


@pytest.mark.usefixtures("always")
def test_one_decomposition_of_all_heads_takes_less_and_loses_more():
    """Left vectors are held once; where heads have nothing in common it is the worse for it."""
    head, joint = (uneven(tier(6, is_joint=each)) for each in (False, True))
    assert joint.tier.nbytes < head.tier.nbytes
    assert joint.error() > head.error()


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.usefixtures("always")
def test_heads_that_are_alike_share_all(is_joint: bool):
    new = folded([[40]])
    for side in (new.keys, new.values):
        side[:, 1] = 2 * side[:, 0]
    held = Filled(tier(16, is_joint=is_joint), [new])
    assert held.error() < 1e-5


@pytest.mark.usefixtures("always")
def test_bfloat16_spans_have_float16_components():
    """With as many bytes, and nothing lost but what the tokens themselves are rounded to."""
    held = uneven(tier(32), dtype=torch.bfloat16)
    assert dict(held.tier.state())["right"].dtype == torch.float16
    assert held.error() < 2**-8


@pytest.mark.usefixtures("always")
def test_large_numbers_stay_within_half_precision():
    new = folded([[40]])
    new = type(new)(*(side.mul(6000).half() for side in (new.keys, new.values)),
                    new.positions, new.lengths, new.mean_keys)  # fmt: skip
    # The largest singular value alone is beyond what half precision holds.
    held = Filled(tier(16), [new])
    assert held.raw.keys[0, 0].double().norm() > 65504
    assert held.error() < 1e-2


# What they take -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("rank", [1, 4, 16, 32])
def test_no_span_takes_more_than_its_tokens(rank: int, is_joint: bool, is_int8: bool):
    options = {"is_joint": is_joint, "is_int8": is_int8}
    has_factors, dtype, size = set(), torch.float16, 2
    for length in range(1, 41):
        held = Filled(tier(rank, **options), [folded([[length] * 3], dtype=dtype)] * 3)
        # An index stands for the positions, which makes 6 bytes more for a single token.
        index = max(10 - 4 * length, 0) * 9
        assert held.tier.nbytes <= held.raw.nbytes + index
        used = int(held.tier.ranks[0, 0].sum())
        least = min(rank, length, WIDTH * (GROUPS if is_joint else 1))
        number, left = (1 if is_int8 else size), (1 if is_joint else GROUPS)
        of_one = number * (left * length + GROUPS * WIDTH) + (4 * GROUPS if is_int8 else 0)
        is_smaller = 2 * least * of_one < 2 * length * GROUPS * WIDTH * size
        assert used == (2 * least if is_smaller else 0)
        has_factors.add(used > 0)
        if not used:
            assert torch.equal(*held.given())
    assert rank != 4 or has_factors == ({True} if is_int8 else {True, False})


def test_spans_of_all_lengths_side_by_side():
    """Some as they are, some as factors, in rows of their own."""
    held = Filled(tier(4), [folded([list(range(1, 41)), [40] * 9], dtype=torch.float16)])
    ranks = held.tier.ranks.sum(-1)
    assert ranks[0].tolist() == [0] * 5 + [8] * 35
    assert ranks[1].tolist() == [8] * 9 + [0] * 31
    assert held.tier.nbytes < held.raw.nbytes
    assert held.tier.mean_rank == 4.0
    actual, expected = held.given()
    raw = held.wanted().lengths <= 5
    raw = raw.repeat_interleave(held.wanted().lengths)
    assert torch.equal(actual[raw], expected[raw])
    assert not torch.equal(actual[~raw], expected[~raw])


def test_rows_that_would_hold_more_side_by_side_stay_as_they_are():
    """One row has factors alone and the other tokens alone: both would have room for both."""
    new = folded([[40], [4] * 9])
    held = Filled(tier(11), [new])
    assert held.tier.ranks.sum() == 0
    assert held.tier.mean_rank is None
    assert held.tier.nbytes <= held.raw.nbytes + 10 * 18
    assert int(Filled(tier(11), [folded([[40], [40]])]).tier.ranks.sum()) == 44


def test_room_to_grow_is_less_than_raw_tokens_have():
    folds = [folded([[20, 30, 40]], seed) for seed in range(12)]
    held = Filled(tier(4), folds)
    assert int((held.tier.ranks == 0).sum()) == 0
    assert held.tier.nbytes < 0.6 * held.raw.nbytes


# Gates ----------------------------------------------------------------------------------------


def gates(keys: list[int], values: list[int]) -> Gates:
    """Gates that use these components, whatever they see."""
    made = Gates(GateShape(1, 4, WIDTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for network, used in ((made.keys, keys), (made.values, values)):
            network[-1].weight.zero_()
            network[-1].bias.fill_(-1.0)
            network[-1].bias[used] = 1.0
    return made.requires_grad_(False)


@pytest.mark.usefixtures("always")
def test_components_that_gates_leave_out_are_not_held():
    chosen = uneven(tier(16, gates=gates([0, 1, 2], [0])))
    assert chosen.tier.ranks[0, 1].tolist() == [3, 1]
    three, one = uneven(tier(3)), uneven(tier(1))
    actual, keys, values = (each.given()[0] for each in (chosen, three, one))
    expected = torch.cat([keys[:, :WIDTH], values[:, WIDTH:]], dim=-1)
    assert_close(actual, expected)
    assert chosen.tier.nbytes < three.tier.nbytes


@pytest.mark.usefixtures("always")
def test_components_between_others_may_be_left_out():
    """Also by a rank; the first is always held."""
    first, third = uneven(tier(1)), uneven(tier(3))
    second = uneven(tier(2))
    actual = uneven(tier(3, gates=gates([2, 9], [2]))).given()[0]
    expected = first.given()[0] + third.given()[0] - second.given()[0]
    assert_close(actual, expected, 1e-4)


@pytest.mark.usefixtures("always")
def test_a_component_is_held_if_any_head_needs_it():
    made = gates([0], [0])
    with torch.no_grad():  # the second component, where the mean key's first dim is positive
        made.keys[0].weight.zero_()
        made.keys[0].bias.zero_()
        made.keys[0].weight[0, 32] = 100.0
        made.keys[2].weight.zero_()
        made.keys[2].bias.zero_()
        made.keys[2].weight[0, 0] = 100.0
        made.keys[4].weight[1, 0] = 100.0
    new = folded([[20, 20, 20, 20]])
    new.mean_keys[0, :, :, 0] = torch.tensor([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]])
    held = Filled(tier(8, gates=made), [new])
    assert held.tier.ranks[0].tolist() == [[2, 1], [2, 1], [2, 1], [1, 1]]


# State ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("is_joint", [False, True])
def test_state_copies_and_rows(is_joint: bool, is_int8: bool):
    options = {"is_joint": is_joint, "is_int8": is_int8}
    held = uneven(tier(4, **options))
    assert 0 < int((held.tier.ranks.sum(-1) == 0).sum()) < 10
    expected = held.given()[0]
    read = tier(4, **options)
    read.load({name: tensor.clone() for name, tensor in held.tier.state()})
    other, after = copy.deepcopy(held), folded(UNEVEN[0], 9)
    assert len(read) == len(held.tier)
    assert read.nbytes <= held.tier.nbytes
    held.tier.map(lambda tensor: tensor.index_select(0, torch.tensor([1, 1])))
    held.tier.add(after)
    wanted = other.wanted(rows=[1])
    is_token = torch.arange(LONGEST) < wanted.lengths[:, None]
    moved = type(wanted)(
        torch.zeros_like(wanted.rows),
        wanted.owners % GROUPS,
        wanted.spans,
        wanted.starts,
        wanted.lengths,
    )
    assert torch.equal(held.tier.fetch(moved)[is_token], other.tier.fetch(wanted)[is_token])
    assert torch.equal(other.given()[0], expected)
    other.tier = read
    assert torch.equal(other.given()[0], expected)
    read.add(after)
    assert torch.equal(other.given()[0], expected)


def test_the_angles_are_not_copied():
    held = tier(4)
    other = copy.deepcopy(held)
    assert isinstance(held._turning, Turning)
    assert other._turning is held._turning
