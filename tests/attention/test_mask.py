"""The lazy mask at the positions held, against brute force over columns."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from kvfold.attention import LazyMask
from kvfold.attention.mask import mask_function
from kvfold.errors import ConfigError
from tests.contract import left_padded

PADS = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
                     [0, 1, 1, 1, 0, 0, 1, 1, 1, 1]]).bool()  # fmt: skip
"""No padding, left padding, and padding between turns."""


def every_third_or_near(batch: object, head: object, query: torch.Tensor, key: torch.Tensor):
    """A rule with holes, over columns."""
    return (key <= query) & ((key % 3 == 0) | (query - key < 2))


def by_brute_force(
    rule: object, padding: torch.Tensor, positions: torch.Tensor, start: int
) -> torch.Tensor:
    """The rule asked of every pair of columns, `[B, P, Q, T]`."""
    rows, places, total = positions.shape
    queries = padding.shape[1] - start
    seen = torch.zeros(rows, places, queries, total, dtype=torch.bool)
    for b in range(rows):
        columns = padding[b].nonzero().flatten().tolist()
        for p in range(places):
            for q in range(queries):
                for t in range(total):
                    position = int(positions[b, p, t])
                    if position >= 0:
                        pair = torch.tensor(start + q), torch.tensor(columns[position])
                        seen[b, p, q, t] = bool(rule(b, p, *pair))
    return seen


@pytest.mark.parametrize(
    "rule",
    [causal_mask_function, sliding_window_causal_mask_function(3), every_third_or_near],
    ids=["causal", "sliding", "holes"],
)
@pytest.mark.parametrize("padding", [PADS[:1], PADS], ids=["plain", "padded"])
@pytest.mark.parametrize("start", [6, 9])
def test_visible_equals_brute_force(rule: object, padding: torch.Tensor, start: int):
    tokens = padding.long().cumsum(-1) - 1
    queries = tokens[:, start:].masked_fill(~padding[:, start:], -1)
    # Slots in any order, some empty, two heads that hold other tokens.
    generator = torch.Generator().manual_seed(start)
    held = torch.stack([torch.randperm(10, generator=generator) for _ in range(2 * len(padding))])
    held = held.view(len(padding), 2, 10)
    held = held.masked_fill(held > tokens[:, -1:, None], -1)
    held[:, 0, 3] = -1
    mask = LazyMask(start, 10 - start, rule, padding if len(padding) > 1 else None)
    actual = mask.visible(held.int(), queries)
    real = (queries >= 0)[:, None, :, None].expand_as(actual)
    expected = by_brute_force(rule, padding, held, start)
    assert torch.equal(actual[real], expected[real])


def test_padding_queries_see_something_so_that_their_output_is_finite():
    mask = LazyMask(0, 4, padding=torch.tensor([[0, 0, 1, 1]]).bool())
    positions, queries = torch.tensor([[[-1, -1, 0, 1]]]), torch.tensor([[-1, -1, 0, 1]])
    seen = mask.visible(positions, queries)
    assert seen.any(-1).all()
    assert seen[0, 0, 2:].tolist() == [[False, False, True, False], [False, False, True, True]]


def test_new_tokens():
    assert LazyMask(3, 2).new_tokens() is None
    mask = LazyMask(3, 2, padding=PADS)
    assert torch.equal(mask.new_tokens(), PADS[:, 3:5])


@pytest.mark.parametrize("padding", [PADS, torch.ones_like(PADS)], ids=["padded", "plain"])
def test_a_mask_that_does_not_reach_the_queries(padding: torch.Tensor):
    with pytest.raises(ConfigError, match="10 columns, but the cache has seen 8 tokens and 3 are"):
        mask_function(3, 3, 11, 8, 0, attention_mask=padding)


def test_a_mask_of_tokens_alone_is_dropped():
    mask = mask_function(2, 4, 10, 6, 0, attention_mask=torch.ones(2, 10, dtype=torch.bool))
    assert mask.padding is None
    mask = mask_function(3, 4, 10, 6, 0, attention_mask=PADS)
    assert mask.padding is PADS
    assert (mask.query_offset, mask.query_length, mask.is_causal) == (6, 4, True)


@pytest.mark.parametrize("rule", [causal_mask_function, sliding_window_causal_mask_function(3)])
def test_dense_is_the_mask_of_transformers(rule: object):
    options = {
        "batch_size": 2, "q_length": 6, "kv_length": 10, "q_offset": 4, "kv_offset": 0,
        "mask_function": rule, "attention_mask": left_padded([10, 6], 10).bool(),
    }  # fmt: skip
    assert torch.equal(mask_function(**options).dense, sdpa_mask(**options))
