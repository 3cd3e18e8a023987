"""The default model as it really is."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.models import (
    anatomy_of,
    default_status,
    fingerprint,
    load_model,
    probe_rope,
    skeleton,
)

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model("default", device="cpu")


def test_known_facts(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = loaded
    anatomy = anatomy_of(model)
    assert (len(anatomy.layers), anatomy.query_heads, anatomy.kv_heads) == (30, 9, 3)
    assert (anatomy.hidden_size, anatomy.head_dim, anatomy.vocabulary) == (576, 64, 49152)
    assert anatomy.kv_bytes_per_token(torch.float32) == 46080
    assert anatomy.kv_bytes_per_token(torch.bfloat16) == 23040
    assert (anatomy.parameters, anatomy.max_positions) == (134_515_008, 8192)
    assert anatomy.tied_embeddings
    assert anatomy.ropes[0].theta == 1e5
    assert probe_rope(model) == ["rope"] * 30
    assert anatomy_of(skeleton("default")).layers == anatomy.layers
    assert tokenizer.model_max_length == 8192
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert (tokenizer.bos_token, tokenizer.unk_token) == ("<|im_start|>", "<|endoftext|>")
    assert default_status().present


def test_it_answers(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = loaded
    prompts = ["The capital of France is", "Two days after Monday comes"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    found = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(found[0], skip_special_tokens=True).startswith(
        "The capital of France is Paris"
    )


def test_it_keeps_its_chat_template_and_stops(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = found[0, inputs["input_ids"].shape[1] :]
    assert "Rome" in tokenizer.decode(answer)
    assert int(answer[-1]) == tokenizer.eos_token_id


def test_both_dtypes_have_one_fingerprint(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    other, _ = load_model("default", dtype="bfloat16", device="cpu")
    assert fingerprint(other) == fingerprint(loaded[0])
