"""Bits where they count: within the budget, and as good as trying everything."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.transfer.allocate import Claim, allot
from kvfold.transfer.basis import Basis

LOSSES = {4: 0.0123, 8: 1e-4}


def basis(gains: list[float], heads: int = 1) -> Basis:
    """A basis whose channels take off these errors."""
    rank = len(gains)
    found = torch.tensor(gains, dtype=torch.float64)
    return Basis(
        mean=torch.zeros(rank),
        offset=torch.zeros(rank),
        encoder=torch.eye(rank),
        heads=heads,
        zz=found.diag(),
        zy=found.diag(),
        total=sum(gains) + 1.0,
        gains=found,
        steps={bits: torch.ones(rank) for bits in LOSSES},
        losses={bits: torch.full((rank,), lost) for bits, lost in LOSSES.items()},
        strength=0.0,
    )


def spent(claims: list[Claim], plans: list) -> int:
    return sum(c.basis.translator(plan).bits for c, plan in zip(claims, plans, strict=True))


def cost(claims: list[Claim], plans) -> float:
    return sum(c.weight * c.basis.error(plan) for c, plan in zip(claims, plans, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    bits=st.integers(16, 600),
    granule=st.sampled_from([2, 4]),
)
def test_plans_stay_within_the_bits(shapes, bits: int, granule: int):
    claims = [Claim(basis(sorted(gains)[::-1], heads), 1.0) for gains, heads in shapes]
    try:
        plans = allot(claims, (8, 4), bits, granule)
    except ConfigError:
        assert all(4 * granule * claim.basis.heads > bits for claim in claims)
        return
    assert spent(claims, plans) <= bits
    more = allot(claims, (8, 4), bits + 64, granule)
    assert cost(claims, more) <= cost(claims, plans) + 1e-9


def test_plans_are_as_good_as_trying_everything():
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        curves = [
            torch.rand(6, generator=generator).mul(3).exp().sort(descending=True).values.tolist()
            for _ in range(2)
        ]
        claims = [Claim(basis(curve), weight) for curve, weight in zip(curves, (1, 5), strict=True)]
        counts = [
            (wide, more) for wide in (0, 2, 4, 6) for more in (0, 2, 4, 6) if wide + more <= 6
        ]
        every = [tuple((b, n) for b, n in ((8, w), (4, m)) if n) for w, m in counts]
        for bits in (16, 32, 48, 64):
            plans = allot(claims, (8, 4), bits, 2)
            options = (p for p in itertools.product(every, repeat=2) if spent(claims, p) <= bits)
            best = min(cost(claims, option) for option in options)
            assert cost(claims, plans) <= best * 1.0001


def test_all_bits_are_the_whole_code():
    claims = [Claim(basis([5.0, 2.0, 1.0]), 1.0), Claim(basis([1.0, 0.5]), 0.01)]
    assert allot(claims, (8, 4), 1e9, 2) == [((8, 3),), ((8, 2),)]
    assert allot(claims, (4,), 1e9, 2) == [((4, 3),), ((4, 2),)]


def test_weights_decide():
    claims = [Claim(basis([1.0, 1.0]), 1.0), Claim(basis([1.0, 1.0]), 1000.0)]
    assert allot(claims, (8, 4), 16, 2) == [(), ((8, 2),)]


def test_channels_that_add_nothing_are_not_sent():
    claims = [Claim(replace(basis([1.0, 1.0, 0.0, 0.0]), total=2.0), 1.0)]
    assert allot(claims, (8, 4), 1e9, 2) == [((8, 2),)]


def test_too_few_bits_are_refused():
    with pytest.raises(ConfigError, match="7 bits a token are not enough"):
        allot([Claim(basis([1.0, 1.0]), 1.0)], (8, 4), 7, 2)
