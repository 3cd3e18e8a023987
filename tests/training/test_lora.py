"""Low-rank changes: nothing at first, merged they are what was learnt, removed they leave none."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

from kvfold.errors import ConfigError
from kvfold.training.lora import LowRankChanges


def network() -> nn.Module:
    """An embedding of 11 tokens, a block of two matrices with biases, a last matrix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = OrderedDict[str, nn.Module](
            wide=nn.Linear(8, 20), act=nn.GELU(), narrow=nn.Linear(20, 6)
        )
        return nn.Sequential(nn.Embedding(11, 8), nn.Sequential(block), nn.Linear(6, 9, bias=False))


def changes_of(model: nn.Module, *, rank: int = 3, seed: int = 1) -> LowRankChanges:
    generator = torch.Generator().manual_seed(seed)
    return LowRankChanges(model, rank=rank, alpha=1.5 * rank, generator=generator)


def learn(changes: LowRankChanges) -> None:
    """Put numbers where zeros were."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, up in changes.tensors().values():
            up.copy_(torch.randn(up.shape, generator=generator))


IDS = torch.arange(11)


def test_at_first_nothing_has_changed() -> None:
    model, state = network(), torch.random.get_rng_state()
    changes = changes_of(model)
    assert torch.equal(model(IDS), network()(IDS))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {name: [tuple(t.shape) for t in pair] for name, pair in changes.tensors().items()} == {
        "1.wide": [(3, 8), (20, 3)],
        "1.narrow": [(3, 20), (6, 3)],
        "2": [(3, 6), (9, 3)],
    }
    same, other = changes_of(network()), changes_of(network(), seed=7)
    for name, (down, up) in changes.tensors().items():
        assert torch.equal(down, same.tensors()[name][0])
        assert not torch.equal(down, other.tensors()[name][0])
        assert not up.any()


def test_merged_changes_are_what_the_wrapped_module_computed() -> None:
    model = network()
    changes = changes_of(model)
    learn(changes)
    wrapped, tensors = model(IDS), changes.tensors()
    assert not torch.allclose(wrapped, network()(IDS), atol=1e-2)
    changes.merge()
    changes.remove()
    torch.testing.assert_close(model(IDS), wrapped, rtol=1e-5, atol=1e-5)
    plain = network().state_dict()
    assert model.state_dict().keys() == plain.keys()
    for name, weight in model.state_dict().items():
        expected = plain[name]
        if (layer := name.removesuffix(".weight")) in tensors:
            down, up = tensors[layer]
            expected = (expected.double() + 1.5 * up.double() @ down.double()).float()
        assert torch.equal(weight, expected), name


def test_removed_changes_leave_the_module_as_it_was() -> None:
    model, plain = network(), network()
    changes = changes_of(model)
    learn(changes)
    changes.remove()
    assert str(model) == str(plain)
    assert vars(model).keys() == vars(plain).keys()
    assert torch.equal(model(IDS), plain(IDS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changes_of(model)


def test_only_changes_want_a_gradient() -> None:
    model = network()
    changes = changes_of(model)
    model(IDS).sum().backward()
    learning = {id(weight) for weight in changes.module.parameters()}
    assert len(learning) == 6
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == (id(weight) in learning), name


@pytest.mark.parametrize("rank", [0, -1, 7, 2.0, True])
def test_ranks_that_no_layer_can_have_are_refused(rank: int) -> None:
    model = network()
    with pytest.raises(ConfigError, match=f"is {rank}: give a whole number from 1 to 6"):
        changes_of(model, rank=rank)
    assert str(model) == str(network())
