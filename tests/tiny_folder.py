"""A tiny random model with a tokenizer of bytes, saved as a folder for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model

POSITIONS = 2048
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(*, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, after the pad, begin and end tokens."""
    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def save_tiny(folder: Path, **overrides: Any) -> str:
    """Save the model and the tokenizer; returns the folder as text."""
    options = {"vocab_size": 259, "max_position_embeddings": POSITIONS, **overrides}
    tiny_model(**options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
