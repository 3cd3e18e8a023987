"""Tokenizers load from the published layouts, and their own code is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from kvfold.diffusion import load_tokenizer
from kvfold.errors import ConfigError
from tests.diffusion.checkpoints import DREAM_CONFIG, LLADA_CONFIG
from tests.tiny_folder import byte_tokenizer

TEXT = "naïve 42"


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_a_tokenizer_of_files_that_name_code_of_their_own(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    write(tmp_path, "vocab.json", {token: index for index, token in enumerate(alphabet)})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    specials = {"256": "<|endoftext|>", "257": "<|mask|>"}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {
            index: {"content": token, "special": True} for index, token in specials.items()
        },
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    }
    write(tmp_path, "tokenizer_config.json", settings)
    write(tmp_path, "config.json", DREAM_CONFIG)
    (tmp_path / "tokenization_dream.py").write_text("raise SystemExit('it was run')\n")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (257, 256)
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT


def test_a_tokenizer_that_transformers_knows(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    code = {"AutoConfig": "configuration_llada.LLaDAConfig"}
    write(tmp_path, "config.json", LLADA_CONFIG | {"auto_map": code})
    (tmp_path / "configuration_llada.py").write_text("raise SystemExit('it was run')\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", LLADA_CONFIG)
    with pytest.raises(ConfigError, match="give token ids"):
        load_tokenizer(tmp_path)
