"""The features of tokens against a slow reference in loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.evict.features import attention_statistics, feature_matrix, value_norms
from kvfold.evict.policies.distill import STRIDE, WINDOW
from tests.contract import attached, features_of, left_padded, teacher_forced
from tests.tiny import tiny_ids


def reference(probabilities: torch.Tensor, queries: list[int]) -> torch.Tensor:
    """Mass, spread and weighted mass of `[B, G, R, Q, T]`, in loops: `[3, B, T]`."""
    batch, groups, repeats, count, total = probabilities.shape
    found = torch.zeros(3, batch, total, dtype=torch.float64)
    for row in range(batch):
        for query in range(count - queries[row], count):
            heads = [
                probabilities[row, group, repeat, query].double()
                for group in range(groups)
                for repeat in range(repeats)
            ]
            entropy = sum(
                -float(p) * math.log(float(p)) for head in heads for p in head if float(p) > 0
            ) / len(heads)
            for token in range(total):
                masses = [float(head[token]) for head in heads]
                mean = sum(masses) / len(masses)
                variance = sum((mass - mean) ** 2 for mass in masses) / len(masses)
                new = torch.tensor([mean, variance, mean * entropy], dtype=torch.float64)
                found[:, row, token] += new / queries[row]
    return found


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    count=st.integers(1, 7),
    total=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_statistics_equal_the_reference(
    batch: int, groups: int, repeats: int, count: int, total: int, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(batch, groups, repeats, count, total, generator=generator)
    probabilities = logits.softmax(-1)
    queries = [int(torch.randint(1, count + 1, (), generator=generator)) for _ in range(batch)]
    for row, some in enumerate(queries):
        probabilities[row, :, :, : count - some] = 0
    found = attention_statistics(probabilities, torch.tensor(queries)).transpose(0, 1)
    assert torch.allclose(found.double(), reference(probabilities, queries), atol=1e-6)


def test_a_row_of_padding_alone_changes_nothing():
    nothing = attention_statistics(torch.zeros(1, 1, 2, 3, 4), torch.tensor([0]))
    assert torch.equal(nothing, torch.zeros(1, 3, 4))


def test_features_of_a_small_example():
    features = feature_matrix(
        mass=torch.tensor([[[0.5, 0.25, 0.0]]]),
        norm=torch.tensor([[[1.0, 2.0, 3.0]]]),
        spread=torch.tensor([[[0.1, 0.2, 0.0]]]),
        weighted=torch.tensor([[[0.25, 0.5, 0.0]]]),
        positions=torch.tensor([[[0, 10, -1]]]),
    )
    expected = [[0.5, 1.0, 0.1, 0.5, 0.0], [0.25, 2.0, 0.2, 2.0, 1.0], [0.0, 3.0, 0.0, 0.0, 0.0]]
    assert torch.allclose(features[0], torch.tensor(expected))


def test_value_norms_are_means_over_heads():
    values = torch.tensor([[[[3.0, 4.0]], [[0.0, 1.0]]]])
    assert torch.equal(value_norms(values), torch.tensor([[[3.0]]]))


@pytest.mark.parametrize("length", [30, 100])
def test_prompt_features_are_those_of_the_models_own_attention(length: int):
    from tests.tiny import tiny_model

    model, tokens = attached(), tiny_ids(1, length)
    cache = kvfold.make_cache(model, "distill", budget=1000, scope="token", recent=0, sinks=0)
    kvfold.prefill(model, tokens, cache)
    plain = tiny_model(attn_implementation="eager")
    with torch.no_grad():
        output = plain(tokens, output_attentions=True, use_cache=True)
    window = min(WINDOW, length)
    layers = [attention[:, :, -window:] for attention in output.attentions]
    statistics = torch.stack(
        [reference(layer[:, None].float(), [window]) for layer in layers]
    ).mean(0) * (window / WINDOW)
    found = features_of(cache)[0].double()
    assert torch.allclose(found[:, 0], statistics[0, 0], atol=1e-6)
    assert torch.allclose(found[:, 2], statistics[1, 0], atol=1e-6)
    assert torch.allclose(found[:, 3], statistics[2, 0] / statistics[0, 0], rtol=1e-4)
    assert torch.equal(found[:, 4], torch.arange(length).double().div(length - 1).float().double())


def test_decode_features_do_not_depend_on_how_a_text_came_in():
    model, tokens = attached(), tiny_ids(1, 90)
    token_by_token = kvfold.make_cache(model, "distill", budget=1000, scope="token")
    teacher_forced(model, token_by_token, tokens[:, :80], tokens[:, 80:])
    padded = kvfold.make_cache(model, "distill", budget=1000, scope="token")
    teacher_forced(
        model,
        padded,
        torch.cat([tiny_ids(1, 7), tokens[:, :80]], dim=1).expand(2, -1),
        tokens[:, 80:].expand(2, -1),
        mask=left_padded([80, 87], 87),
    )
    # A cut packs the tokens of a padded row, in order.
    found = features_of(padded)[0, :90]
    assert torch.allclose(found, features_of(token_by_token)[0], atol=1e-5)


def test_one_generated_token_of_four_is_looked_at_and_counts_for_all():
    model = attached()
    cache = kvfold.make_cache(model, "distill", budget=1000)
    kvfold.prefill(model, tiny_ids(1, 80), cache)
    for step in range(80, 96):
        before = [part.slots.field("mass").clone() for part in cache.parts]
        kvfold.prefill(model, tiny_ids(1, 1, seed=step), cache)
        for index, part in enumerate(cache.parts):
            mass = part.slots.field("mass")
            is_looked_at = (step + 1 + index) % STRIDE == 0
            assert torch.equal(mass[..., :-1], before[index]) != is_looked_at
            # What 64 queries distribute is 1 on average, however they are sampled.
            assert mass.sum().item() == pytest.approx(1.0, abs=1e-4)
