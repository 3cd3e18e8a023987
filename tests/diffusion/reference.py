"""What the published models compute, written down plainly from their own tensors (float64)."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.diffusion.checkpoints import Tensors

LLADA_PARTS = {
    "embedding": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "layer": "model.transformer.blocks.{}",
    "first": "attn_norm",
    "second": "ff_norm",
    "qkvo": ("q_proj", "k_proj", "v_proj", "attn_out"),
    "mlp": ("ff_proj", "up_proj", "ff_out"),
}
DREAM_PARTS = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}",
    "first": "input_layernorm",
    "second": "post_attention_layernorm",
    "qkvo": tuple(f"self_attn.{name}_proj" for name in "qkvo"),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def llada_logits(config: dict[str, Any], tensors: Tensors, ids: list[int]) -> torch.Tensor:
    """Logits `[T, V]` of one text; those at i speak of token i."""
    kv = config["n_kv_heads"]
    settings = (config["n_layers"], config["n_heads"], kv, config["rope_theta"])
    return _logits(tensors, LLADA_PARTS, ids, settings, config["rms_norm_eps"])


def dream_logits(config: dict[str, Any], tensors: Tensors, ids: list[int]) -> torch.Tensor:
    """Logits `[T, V]` of one text; those at i speak of token i, and come from place i - 1."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    settings = (config["num_hidden_layers"], heads, kv, config["rope_theta"])
    logits = _logits(tensors, DREAM_PARTS, ids, settings, config["rms_norm_eps"])
    return torch.cat([logits[:1], logits[:-1]])


def _logits(
    tensors: Tensors,
    parts: dict[str, Any],
    ids: list[int],
    settings: tuple[int, int, int, float],
    epsilon: float,
) -> torch.Tensor:
    held = {name: tensor.double() for name, tensor in tensors.items()}
    layers, heads, kv_heads, theta = settings

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ held[f"{name}.weight"].T + held.get(f"{name}.bias", torch.zeros(())).double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return x * scale * held[f"{name}.weight"]

    x = held[f"{parts['embedding']}.weight"][ids]
    for layer in range(layers):
        prefix = parts["layer"].format(layer)
        normed = norm(x, f"{prefix}.{parts['first']}")
        q, k, v, o = (f"{prefix}.{name}" for name in parts["qkvo"])
        width = held[f"{q}.weight"].shape[0] // heads
        mixed = []
        for head in range(heads):
            own, shared = head * width, (head * kv_heads // heads) * width
            query = turned(linear(normed, q)[:, own : own + width], theta)
            key = turned(linear(normed, k)[:, shared : shared + width], theta)
            weights = (query @ key.T / math.sqrt(width)).softmax(-1)
            mixed.append(weights @ linear(normed, v)[:, shared : shared + width])
        x = x + linear(torch.cat(mixed, dim=-1), o)
        normed = norm(x, f"{prefix}.{parts['second']}")
        gate, up, down = (f"{prefix}.{name}" for name in parts["mlp"])
        x = x + linear(torch.nn.functional.silu(linear(normed, gate)) * linear(normed, up), down)
    return norm(x, parts["norm"]) @ held[f"{parts['head']}.weight"].T


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE over the rows of `[T, D]`, in loops over the pairs of dims half the width apart."""
    found, half = x.clone(), x.shape[-1] // 2
    for pair in range(half):
        angle = torch.arange(len(x)).double() * theta ** (-2 * pair / x.shape[-1])
        first, second = x[:, pair], x[:, pair + half]
        found[:, pair] = first * angle.cos() - second * angle.sin()
        found[:, pair + half] = second * angle.cos() + first * angle.sin()
    return found
