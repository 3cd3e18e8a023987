"""Tiny random models of every family the tests speak of: built from configs, no network.

`FAMILIES` maps a kind to the config class and the options that differ from `SHARED`. Matrices are
scaled up after initialisation, so that attention is not flat and what is evicted matters.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

SHARED: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Options that all kinds share: 3 layers, 4 query heads, 2 kv heads, hidden size 64."""

WINDOW = 24
"""Sliding window, in tokens, of the kinds that have one."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 6},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}),
    "falcon": ("FalconConfig", {}),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
}
"""Kind: name of the config class, and what differs from `SHARED`."""

SUPPORTED = tuple(kind for kind in FAMILIES if kind not in {"gpt2", "falcon", "bloom"})
"""The kinds that kvfold supports; the others it refuses."""


def tiny_config(kind: str = "llama", **overrides: Any) -> PretrainedConfig:
    """The config of a tiny model.

    Args:
        kind: A key of `FAMILIES`.
        **overrides: Config options that replace the defaults.
    """
    name, options = FAMILIES[kind]
    return getattr(transformers, name)(**{**SHARED, **options, **overrides})


def tiny_model(
    kind: str = "llama", *, seed: int = 0, gain: float = 3.0, **overrides: Any
) -> PreTrainedModel:
    """A tiny random model in fp32 and eval mode; the same arguments give the same weights.

    Args:
        kind: A key of `FAMILIES`.
        seed: Of the weights; the global generator is left as it was.
        gain: Factor on every matrix.
        **overrides: Config options that replace the defaults.
    """
    config = tiny_config(kind, **overrides)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(gain)
    return model


def tiny_ids(batch: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]` without the pad, begin and end tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHARED["vocab_size"], (batch, length), generator=generator)
