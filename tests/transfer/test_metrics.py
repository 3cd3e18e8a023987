"""What an error costs: as attention has it, and worth knowing."""

import torch

from kvfold.models import key_weight, output_weight, value_weight
from kvfold.ops.rotary import rotate
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.metrics import hidden_metric, key_metric, value_metric
from tests.contract import attached
from tests.tiny import tiny_ids

LAYER, GROUPS, SHARED, DIM = 1, 2, 2, 16


def errors(count: int = 50) -> torch.Tensor:
    return torch.randn(count, GROUPS * DIM, generator=torch.Generator().manual_seed(0)).double()


def cost(error: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    return ((error @ metric) * error).sum(-1)


def queries_of(endpoint: Endpoint) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = endpoint.read(tiny_ids(2, 60), hidden=[LAYER]).inputs(LAYER)
    return inputs, endpoint.project(LAYER, "query", inputs)


def test_a_values_error_costs_what_the_output_projections_make_of_it():
    endpoint = Endpoint(attached())
    found = cost(errors(), value_metric(endpoint, LAYER))
    weight = output_weight(endpoint.model, LAYER).double().detach()
    expected = torch.zeros(50, dtype=torch.float64)
    for head in range(GROUPS * SHARED):
        group = head // SHARED
        of_head = weight[:, head * DIM : (head + 1) * DIM]
        part = errors()[:, group * DIM : (group + 1) * DIM]
        expected += (part @ of_head.T).square().sum(-1)
    torch.testing.assert_close(found, expected)


def test_a_keys_error_costs_its_products_with_queries_from_anywhere():
    endpoint = Endpoint(attached())
    inputs, queries = queries_of(endpoint)
    found = cost(errors(), key_metric(endpoint, LAYER, inputs))
    # Distances over which every pair, with a frequency of its own, turns whole times.
    expected, turns = torch.zeros(50, dtype=torch.float64), 24
    frequencies = torch.arange(1, DIM // 2 + 1).repeat(2).double().view(1, 1, 1, DIM)
    per_head = queries.double().view(len(queries), GROUPS, SHARED, DIM)
    for turn in range(turns):
        angle = 2 * torch.pi * turn / turns * frequencies
        turned = rotate(per_head, angle.cos(), angle.sin())
        parts = errors().view(50, 1, GROUPS, 1, DIM)
        products = (parts * turned[None]).sum(-1)
        expected += products.square().sum((2, 3)).mean(1) / turns
    torch.testing.assert_close(found, expected)


def test_without_rope_a_keys_error_costs_its_products_with_queries():
    endpoint = Endpoint(attached("smollm3"))
    layer = next(i for i in endpoint.layers if endpoint.pairs(i) is None)
    inputs = endpoint.read(tiny_ids(2, 60), hidden=[layer]).inputs(layer)
    queries = endpoint.project(layer, "query", inputs).double()
    per_head = queries.view(len(queries), 1, GROUPS, SHARED, DIM)
    products = (errors().view(1, 50, GROUPS, 1, DIM) * per_head).sum(-1)
    expected = products.square().sum((2, 3)).mean(0)
    torch.testing.assert_close(cost(errors(), key_metric(endpoint, layer, inputs)), expected)


def test_an_inputs_error_costs_what_it_does_to_keys_and_values():
    endpoint = Endpoint(attached())
    inputs, _ = queries_of(endpoint)
    metrics = {
        ("key", LAYER): key_metric(endpoint, LAYER, inputs),
        ("value", LAYER): value_metric(endpoint, LAYER),
    }
    weights = {("key", LAYER): 2.0, ("value", LAYER): 0.5}
    error = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).double()
    found = cost(error, hidden_metric(endpoint, LAYER, metrics, weights))
    keys = error @ key_weight(endpoint.model, LAYER).double().T
    values = error @ value_weight(endpoint.model, LAYER).double().T
    expected = 2.0 * cost(keys, metrics["key", LAYER])
    expected += 0.5 * cost(values, metrics["value", LAYER])
    torch.testing.assert_close(found, expected.detach())
