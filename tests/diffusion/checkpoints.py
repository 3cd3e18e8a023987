"""Tiny random checkpoints in the very file layout and names of the published models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file

from kvfold.diffusion import DiffusionModel

Tensors = dict[str, torch.Tensor]

VOCABULARY, MASK, EOS, PAD = 96, 90, 91, 92
HIDDEN, LAYERS, HEADS, MLP = 32, 3, 4, 48

LLADA_CONFIG: dict[str, Any] = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "block_type": "llama",
    "d_model": HIDDEN,
    "embedding_size": VOCABULARY,
    "eos_token_id": EOS,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "mask_token_id": MASK,
    "max_sequence_length": 256,
    "mlp_hidden_size": MLP,
    "mlp_ratio": 4,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "n_layers": LAYERS,
    "pad_token_id": EOS,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": VOCABULARY,
    "weight_tying": False,
}
"""As published with LLaDA-8B-Instruct, but for the sizes."""

DREAM_CONFIG: dict[str, Any] = {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "bos_token_id": PAD,
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "mask_token_id": MASK,
    "max_position_embeddings": 256,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
"""As published with Dream-v0-Instruct-7B, but for the sizes."""


def random(shape: tuple[int, ...], generator: torch.Generator, gain: float = 3.0) -> torch.Tensor:
    """A matrix of inputs of size one, or the weights of a norm."""
    if len(shape) == 1:
        return 1 + 0.2 * torch.randn(shape, generator=generator)
    return gain * torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def llada_tensors(seed: int = 0) -> Tensors:
    """Weights in LLaDA's own names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.transformer.wte.weight": random((VOCABULARY, HIDDEN), generator),
        "model.transformer.ln_f.weight": random((HIDDEN,), generator),
        "model.transformer.ff_out.weight": random((VOCABULARY, HIDDEN), generator),
    }
    for layer in range(LAYERS):
        prefix = f"model.transformer.blocks.{layer}"
        for name in ("attn_norm", "ff_norm"):
            tensors[f"{prefix}.{name}.weight"] = random((HIDDEN,), generator)
        for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
            tensors[f"{prefix}.{name}.weight"] = random((HIDDEN, HIDDEN), generator, 1.5)
        for name in ("ff_proj", "up_proj"):
            tensors[f"{prefix}.{name}.weight"] = random((MLP, HIDDEN), generator, 1.5)
        tensors[f"{prefix}.ff_out.weight"] = random((HIDDEN, MLP), generator, 1.5)
    # A faint mask leaves room for what attention says, or all places would say the same.
    tensors["model.transformer.wte.weight"][MASK] *= 0.1
    return tensors


def dream_tensors(seed: int = 0) -> Tensors:
    """Weights in Dream's names, which are Qwen2's: biases at queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": random((VOCABULARY, HIDDEN), generator),
        "model.norm.weight": random((HIDDEN,), generator),
        "lm_head.weight": random((VOCABULARY, HIDDEN), generator),
    }
    widths = {"q_proj": HIDDEN, "k_proj": HIDDEN // 2, "v_proj": HIDDEN // 2}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = random((HIDDEN,), generator)
        for name, width in widths.items():
            tensors[f"{prefix}.self_attn.{name}.weight"] = random((width, HIDDEN), generator, 1.5)
            bias = 0.3 * torch.randn(width, generator=generator)
            tensors[f"{prefix}.self_attn.{name}.bias"] = bias
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random((HIDDEN, HIDDEN), generator, 1.5)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}.mlp.{name}.weight"] = random((MLP, HIDDEN), generator, 1.5)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random((HIDDEN, MLP), generator, 1.5)
    tensors["model.embed_tokens.weight"][MASK] *= 0.1
    return tensors


STYLES = {"llada": (LLADA_CONFIG, llada_tensors), "dream": (DREAM_CONFIG, dream_tensors)}
"""Style: the configuration, and what makes the weights."""


def save(folder: Path, config: dict[str, Any], tensors: Tensors, *, shards: int = 1) -> Path:
    """Write a checkpoint: config.json, and one file of weights or several with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places, names = {}, sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = names[shard::shards]
        save_file({name: tensors[name] for name in held}, folder / file)
        places |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@cache
def tiny_diffusion(style: str = "llada") -> DiffusionModel:
    """A tiny model of a style, loaded from its files; shared, so not to be changed."""
    config, tensors = STYLES[style]
    return DiffusionModel.from_pretrained(save(Path(mkdtemp()), config, tensors()), device="cpu")


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of so many tokens, without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]
