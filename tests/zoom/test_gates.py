"""Gates: their formula, what the rank networks see, and gradients to every part."""

import pytest
import torch

from kvfold.zoom.gates import RANK, Gates, GateShape
from tests.contract import assert_close

SHAPE = GateShape(layers=2, query_heads=6, head_dim=20)
GROUPS = 3


def made(seed: int = 0, shape: GateShape = SHAPE) -> Gates:
    gates = Gates(shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        gates.gain.uniform_(0.5, 3.0, generator=torch.Generator().manual_seed(seed + 1))
    return gates


def asked(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[2, 3, 2, 5, 20]`, mean keys `[2, 3, 7, 20]` and lengths `[2, 7]`."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, GROUPS, 2, 5, 20, generator=generator)
    means = torch.randn(2, GROUPS, 7, 20, generator=generator)
    return query, means, torch.randint(1, 33, (2, 7), generator=generator)


def test_logits_are_the_papers_formula() -> None:
    gates, (query, means, lengths) = made(), asked()
    found = gates.logits(1, query, means, gates.norms(1, means), lengths)
    assert found.shape == (2, GROUPS, 2, 5, 7)
    expected = torch.zeros_like(found)
    for row in range(2):
        for head in range(6):
            group, within = divmod(head, 2)
            weights = gates.route[1, head] * gates.gain[1, head]
            for span in range(7):
                key = weights @ means[row, group, span]
                key = key / key.norm()
                for number in range(5):
                    asks = weights @ query[row, group, within, number]
                    score = asks @ key / gates.shape.routing**0.5
                    expected[row, group, within, number, span] = score + lengths[row, span].log()
    assert_close(found.detach(), expected.detach())


def test_a_span_without_tokens_or_mean_key_has_no_say() -> None:
    gates, (query, means, lengths) = made(), asked()
    means[:, :, 3], lengths[:, 4] = 0.0, 0
    norms = gates.norms(0, means)
    assert bool((norms[:, :, 3] == 0).all())
    assert bool((norms[:, :, :3] > 0).all())
    logits = gates.logits(0, query, means, norms, lengths)
    log = lengths[:, 3].float().log()[:, None, None, None]
    assert torch.equal(logits[..., 3], log.expand(logits.shape[:-1]))
    assert bool((logits[..., 4] == -torch.inf).all())


def test_a_zero_mean_key_gives_a_finite_gradient() -> None:
    gates, (query, means, lengths) = made(), asked()
    means[:, :, 3] = 0.0
    gates.logits(0, query, means, gates.norms(0, means), lengths).sum().backward()
    assert gates.route.grad is not None
    assert bool(torch.isfinite(gates.route.grad).all())
    assert bool(gates.route.grad[0].abs().amax((-1, -2)).gt(0).all())
    assert float(gates.route.grad[1].abs().max()) == 0


def test_thresholds_start_at_the_papers_and_stay_within_bounds() -> None:
    gates = made()
    assert_close(gates.thresholds_of(0).detach().sigmoid(), torch.full((6,), 0.05))
    with torch.no_grad():
        gates.thresholds[0, :2] = torch.tensor([-3.0, 7.0])
    limits = gates.thresholds_of(0).detach()
    assert bool(torch.isfinite(limits).all())
    assert float(limits[0]) < -9
    assert float(limits[1]) > 9


@pytest.mark.parametrize("count", [1, 5, RANK])
def test_ranks_look_at_shares_and_directions_alone(count: int) -> None:
    gates = made()
    generator = torch.Generator().manual_seed(3)
    singular = torch.rand(2, 4, count, generator=generator).sort(-1, descending=True).values
    means = torch.randn(2, 4, 20, generator=generator)
    for ranks in (gates.key_ranks, gates.value_ranks):
        found = ranks(singular, means)
        assert found.shape == singular.shape
        assert bool((found > 0.5).all()), "everything is used at first"
        assert bool((found < 1).all())
        assert_close(ranks(7 * singular, 3 * means).detach(), found.detach())
    assert not torch.allclose(gates.key_ranks(singular, means), gates.value_ranks(singular, means))


def test_nothing_but_zeros_has_ranks() -> None:
    found = made().key_ranks(torch.zeros(1, 4), torch.zeros(1, 20))
    assert bool(torch.isfinite(found).all())


def test_the_routing_space_is_no_wider_than_a_head() -> None:
    assert made().route.shape == (2, 6, 20, 20)
    assert made(shape=GateShape(1, 2, 64)).route.shape == (1, 2, 32, 64)


def test_weights_come_from_the_generator() -> None:
    before = torch.random.get_rng_state()
    one, two, other = made(0), made(0), made(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    assert not torch.equal(one.route, other.route)
