"""What an error of a consumer's state costs, before anything is measured (ours).

Attention sees a key only through products with queries, and a value only through the output
projection. With `q` the queries that share a kv head and `W_o` their output weights:

    value   M_v = sum over the heads of W_o^T W_o
    key     M_k = E[q q^T], without RoPE; with it, the mean over all turns of a pair of dims:
            half of the pair's energy on both
    hidden  M_h = w_k W_k^T M_k W_k + w_v W_v^T M_v W_v, with what a unit of key and value error
            costs as measured

An error `e` costs `e M e^T`. Only the shape counts: the size is measured afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvfold.models import key_weight, output_weight, value_weight
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.streams import Place


@torch.no_grad()
def value_metric(consumer: Endpoint, layer: int) -> torch.Tensor:
    """`[G * D, G * D]`, one block a kv head."""
    heads = consumer.anatomy.layers[layer].heads
    weight = output_weight(consumer.model, layer).double().cpu()
    by_group = weight.view(len(weight), heads.kv_heads, -1, heads.value_head_dim)
    blocks = torch.einsum("mghd,mghe->gde", by_group, by_group)
    return torch.block_diag(*blocks)


@torch.no_grad()
def key_metric(consumer: Endpoint, layer: int, inputs: torch.Tensor) -> torch.Tensor:
    """`[G * D, G * D]`, one block a kv head.

    Args:
        consumer: Whose queries count.
        layer: Index of the layer.
        inputs: What its attention was given, `[N, M]`.
    """
    heads = consumer.anatomy.layers[layer].heads
    queries = consumer.project(layer, "query", inputs).double().cpu()
    by_group = queries.view(len(queries), heads.kv_heads, -1, heads.head_dim)
    energy = torch.einsum("nghd,nghe->gde", by_group, by_group) / len(queries)
    pairs = consumer.pairs(layer)
    if pairs is None:
        return torch.block_diag(*energy)
    first, second = pairs
    diagonal = energy.diagonal(dim1=1, dim2=2).clone()
    both = (diagonal[:, first] + diagonal[:, second]) / 2
    diagonal[:, first] = diagonal[:, second] = both
    return diagonal.flatten().diag()


@torch.no_grad()
def hidden_metric(
    consumer: Endpoint,
    layer: int,
    metrics: Mapping[Place, torch.Tensor],
    weights: Mapping[Place, float],
) -> torch.Tensor:
    """`[M, M]`, of the metrics and measured weights of the layer's keys and values.

    A norm between projection and RoPE is left out.
    """
    found = None
    for name, weight in (("key", key_weight), ("value", value_weight)):
        matrix, place = weight(consumer.model, layer).double().cpu(), (name, layer)
        cost = weights.get(place, 1.0) * matrix.mT @ metrics[place] @ matrix
        found = cost if found is None else found + cost
    assert found is not None
    return found
