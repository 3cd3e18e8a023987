"""Surprisal is the plain log-softmax of the model's own logits, however the prompt comes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, MiniCPM3Config, PreTrainedModel

import kvfold
from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.models import base_model
from kvfold.zoom import surprisal as module
from kvfold.zoom.surprisal import Surprisal, find_readout
from tests.tiny import SHARED, SUPPORTED, tiny_ids, tiny_model


@torch.no_grad()
def hidden_of(model: PreTrainedModel, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    return base_model(model)(input_ids=ids, use_cache=False, **inputs).last_hidden_state


@torch.no_grad()
def reference(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """All logits at once, and each token's own number looked up."""
    logs = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
    nats = torch.zeros(ids.shape, dtype=torch.float64)
    for row in range(ids.shape[0]):
        for t in range(1, ids.shape[1]):
            nats[row, t] = -logs[row, t - 1, ids[row, t]]
    return nats.float()


def assert_equal(found: torch.Tensor, expected: torch.Tensor, *, within: float = 1e-5) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert found.isfinite().all()
    assert (found - expected).norm() <= within * expected.norm()


def padded_rows(lengths: list[int], total: int) -> torch.Tensor:
    return torch.tensor([[i >= total - length for i in range(total)] for length in lengths])


@pytest.mark.parametrize("kind", SUPPORTED)
def test_it_is_the_log_softmax_of_the_models_logits(kind: str):
    model, ids = tiny_model(kind), tiny_ids(2, 40)
    found = Surprisal(model)(hidden_of(model, ids), ids)
    assert_equal(found, reference(model, ids))
    assert found[:, 0].tolist() == [0, 0]
    assert found[:, 1:].min() > 0


@pytest.mark.parametrize(
    ("kind", "options", "factor", "softcap"),
    [
        ("granite", {"logits_scaling": 8.0}, 1 / 8, None),
        ("gemma2", {"final_logit_softcapping": 5.0}, 1.0, 5.0),
        ("gemma3", {"final_logit_softcapping": 7.0}, 1.0, 7.0),
        ("llama", {}, 1.0, None),
        # What the model does not use is not used, whatever the configuration holds.
        ("llama", {"logits_scaling": 8.0, "final_logit_softcapping": 5.0}, 1.0, None),
    ],
)
def test_what_is_done_to_logits_is_found(
    kind: str, options: dict[str, float], factor: float, softcap: float | None
):
    model, ids = tiny_model(kind, seed=0, gain=3.0, **options), tiny_ids(2, 20)
    readout = find_readout(model)
    assert (readout.factor, readout.softcap) == (factor, softcap)
    assert readout.head is model.get_output_embeddings()
    assert_equal(Surprisal(model)(hidden_of(model, ids), ids), reference(model, ids))


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        (CohereConfig(**SHARED, logit_scale=0.25), 0.25),
        (
            MiniCPM3Config(
                **{**SHARED, "num_key_value_heads": 4},
                dim_model_base=16,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=8,
            ),
            0.25,
        ),
    ],
    ids=["cohere", "minicpm3"],
)
def test_factors_after_and_before_the_head(config: object, factor: float):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = tiny_ids(1, 12)
    assert find_readout(model).factor == factor
    assert_equal(Surprisal(model)(hidden_of(model, ids), ids), reference(model, ids))


@pytest.mark.parametrize("sizes", [[30, 1, 9], [1, 39], [17, 23]], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
def test_chunks_equal_the_whole(kind: str, sizes: list[int]):
    model, ids = tiny_model(kind), tiny_ids(2, 40)
    hidden, surprisal = hidden_of(model, ids), Surprisal(model)
    whole, parts, before, start = surprisal(hidden, ids), [], None, 0
    for size in sizes:
        chunk = slice(start, start + size)
        parts.append(surprisal(hidden[:, chunk], ids[:, chunk], before=before))
        before, start = hidden[:, start + size - 1], start + size
    assert_equal(torch.cat(parts, dim=1), whole, within=1e-6)
    assert torch.cat(parts, dim=1)[:, sizes[0]].min() > 0


@pytest.mark.parametrize("split", [None, 4, 12, 31], ids=str)
def test_a_padded_row_equals_the_single_row(split: int | None):
    model, ids, lengths = tiny_model("llama"), tiny_ids(4, 40), [40, 28, 1, 9]
    mask = padded_rows(lengths, 40)
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    inputs = {"attention_mask": mask.long(), "position_ids": positions}
    hidden, surprisal = hidden_of(model, ids, **inputs), Surprisal(model)
    if split is None:
        found = surprisal(hidden, ids, tokens=mask)
    else:
        first = surprisal(hidden[:, :split], ids[:, :split], tokens=mask[:, :split])
        rest = surprisal(
            hidden[:, split:],
            ids[:, split:],
            tokens=mask[:, split:],
            before=hidden[:, split - 1],
            begun=mask[:, split - 1],
        )
        found = torch.cat([first, rest], dim=1)
    for row, length in enumerate(lengths):
        assert not found[row, : 40 - length + 1].any()
        assert_equal(
            found[row, 40 - length :][None], reference(model, ids[row : row + 1, -length:])
        )


def test_what_padding_holds_does_not_matter():
    model, ids = tiny_model("llama"), tiny_ids(1, 12)
    hidden, mask = hidden_of(model, ids), padded_rows([7], 12)
    spoilt = hidden.masked_fill(~mask[..., None], torch.nan)
    surprisal = Surprisal(model)
    assert torch.equal(surprisal(spoilt, ids, tokens=mask), surprisal(hidden, ids, tokens=mask))


@pytest.mark.parametrize("batch", [1, 3, 200])
def test_few_rows_of_the_vocabulary_are_in_memory(batch: int):
    model, ids = tiny_model("llama"), tiny_ids(batch, 7 if batch == 200 else 300)
    hidden, surprisal, rows = hidden_of(model, ids), Surprisal(model), []
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    handle = head.register_forward_hook(
        lambda _, inputs, output: rows.append(output[..., 0].numel())
    )
    surprisal(hidden, ids)
    handle.remove()
    assert max(rows) <= max(128, batch)
    assert sum(rows) == ids.numel()


def test_nothing_is_differentiated_and_nothing_is_left_on_the_model():
    model, ids = tiny_model("llama"), tiny_ids(1, 12)
    model.train()
    found = Surprisal(model)(base_model(model)(input_ids=ids).last_hidden_state, ids)
    assert not found.requires_grad
    assert model.training
    assert not base_model(model)._forward_hooks


def test_an_attached_model_gives_the_same():
    model, ids = tiny_model("qwen3"), tiny_ids(1, 20)
    expected = reference(model, ids)
    with kvfold.attach(model):
        assert_equal(Surprisal(model)(hidden_of(model, ids), ids), expected)


def test_half_precision_scores_in_float32():
    model, ids = tiny_model("llama", gain=1.0).bfloat16(), tiny_ids(2, 40)
    found = Surprisal(model)(hidden_of(model, ids), ids)
    assert_equal(found, reference(model, ids), within=1e-6)


def test_a_token_that_cannot_be_is_a_large_number():
    model, ids = tiny_model("llama"), tiny_ids(1, 12)
    hidden = hidden_of(model, ids) * 1e4
    found = Surprisal(model)(hidden, ids)
    assert found.isfinite().all()
    assert found.max() > 1e3


def test_logits_made_another_way_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("granite", logits_scaling=8.0)
    monkeypatch.setattr(module, "_FACTORS", ())
    with pytest.raises(
        UnsupportedModelError, match="GraniteForCausalLM makes its logits"
    ) as caught:
        Surprisal(model)
    assert "\n" not in str(caught.value)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(tiny_model("llama").config))
    with pytest.raises(ConfigError, match="load it first"):
        Surprisal(model)


def test_hidden_states_of_other_tokens_are_refused():
    model, ids = tiny_model("llama"), tiny_ids(1, 12)
    with pytest.raises(ConfigError, match=r"\[1, 12, 64\] were given for token ids \[1, 11\]"):
        Surprisal(model)(hidden_of(model, ids), ids[:, 1:])
