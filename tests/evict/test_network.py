"""The policy network: its own generator draws its weights, and the global one is left alone."""

import random
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.errors import ConfigError
from kvfold.evict.learner import DistillSettings
from kvfold.evict.network import PolicyNetwork
from kvfold.evict.train import train_policy
from kvfold.training import TrainingSettings
from kvfold.training.corpus import Excerpt
from tests.contract import attached, teacher_forced
from tests.tiny import tiny_ids


class TinyCorpus:
    """Random tokens for the tiny models."""

    def excerpt(self, index: int, split: str) -> Excerpt:
        seed = 2 * index + (split == "validation")
        return Excerpt(tokens=tiny_ids(1, 72, seed=seed)[0], kind="random", scored=None)

    def describe(self) -> dict[str, object]:
        return {"kind": "random tokens"}


def weights(seed: int) -> torch.Tensor:
    network = PolicyNetwork(generator=torch.Generator().manual_seed(seed))
    return torch.cat([weight.flatten() for weight in network.parameters()])


def test_the_generator_decides_the_weights():
    torch.manual_seed(1)
    one = weights(0)
    torch.manual_seed(2)
    assert torch.equal(weights(0), one)
    assert not torch.equal(weights(1), one)
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    for index, inputs in ((0, 5), (3, 128), (6, 128)):
        layer = network.layers[index]
        assert 0.9 * inputs**-0.5 < layer.weight.abs().max() <= inputs**-0.5
        assert (layer.bias == 0).all()


@pytest.mark.parametrize("method", kvfold.methods())
def test_a_cache_leaves_the_global_generators_alone(method: str):
    torch_before, before = torch.get_rng_state(), random.getstate()
    cache = kvfold.make_cache(attached(), method, budget=1.0 if method == "full" else 0.3)
    teacher_forced(attached(), cache, tiny_ids(1, 90), tiny_ids(1, 12, seed=1))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == before


def test_training_leaves_the_global_generators_alone(tmp_path: Path):
    torch_before, before = torch.get_rng_state(), random.getstate()
    settings = TrainingSettings(steps=1, validate_every=1, checkpoint_every=1)
    method = DistillSettings(budgets=(0.3,), horizon=8, rollouts=2, ranker_texts=1, validation=1)
    train_policy(attached(), TinyCorpus(), tmp_path, settings, method)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == before


def test_features_that_are_not_used_do_not_matter():
    network = PolicyNetwork(features=("mass", "norm"), generator=torch.Generator().manual_seed(0))
    features, held = torch.rand(1, 9, 5), torch.tensor([9])
    changed = features.clone()
    changed[..., 2:] = torch.rand(1, 9, 3)
    assert torch.equal(network(changed, held), network(features, held))
    changed[..., 1] += 1
    assert not torch.equal(network(changed, held), network(features, held))
    with pytest.raises(ConfigError, match="features height: choose from mass, norm"):
        PolicyNetwork(features=("height",), generator=torch.Generator())
