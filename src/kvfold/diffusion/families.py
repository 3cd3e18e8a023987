"""How checkpoints of other makes map onto our decoder, as data: no family has code of its own.

A family says under which keys a configuration gives the decoder's sizes, what the tensors are
called, which settings our decoder has no counterpart for, and the habits that a configuration does
not tell. A checkpoint of an autoregressive make that was adapted to diffusion tells them itself, in
a section `diffusion` of its config.json (`mask_token_id`, `prediction`, `topology`, `block_length`,
`eos_token_id`, `pad_token_id`, `sampler`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvfold.diffusion.shape import Prediction
from kvfold.registry import Registry


@dataclass(frozen=True, slots=True)
class Family:
    """One make of checkpoints."""

    keys: Mapping[str, tuple[str, ...]]
    """Field of `DecoderShape`: keys of the configuration, of which the first that is given counts;
    a dot steps into a section."""
    names: Mapping[str, str]
    """Our tensors' names without `.weight` or `.bias`, and theirs; `{}` is the layer's number."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of `DecoderShape` that every checkpoint of the family shares."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Fields of `DecoderShape` when the configuration is silent."""
    demands: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Settings that must have one of these values where they are given."""
    spare: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of names of tensors that are not needed."""
    prediction: Prediction | None = None
    """Where tokens are predicted, if the make is born a diffusion model."""
    sampler: str = "llada"
    """Its authors' sampler."""
    tokenizer: str | None = None
    """Kind of tokenizer that its files are of, where they name code of their own."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text besides those that the configuration names."""


ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""A configuration's name of an activation, and ours."""

_HUGGING_FACE_KEYS = {
    "vocabulary": ("vocab_size",),
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "query_heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim",),
    "mlp": ("intermediate_size",),
    "positions": ("max_position_embeddings",),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta"),
    "norm_epsilon": ("rms_norm_eps",),
    "tied_head": ("tie_word_embeddings",),
    "activation": ("hidden_act",),
}
_HUGGING_FACE_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.query": "model.layers.{}.self_attn.q_proj",
    "layers.{}.key": "model.layers.{}.self_attn.k_proj",
    "layers.{}.value": "model.layers.{}.self_attn.v_proj",
    "layers.{}.output": "model.layers.{}.self_attn.o_proj",
    "layers.{}.query_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.key_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.gate": "model.layers.{}.mlp.gate_proj",
    "layers.{}.up": "model.layers.{}.mlp.up_proj",
    "layers.{}.down": "model.layers.{}.mlp.down_proj",
}
_PLAIN_ROPE = {
    "rope_scaling.rope_type": (None, "default"),
    "rope_scaling.type": (None, "default"),
    "rope_interleaved": (False, None),
    "rope_parameters.rope_type": ("default",),
    "rope_parameters.partial_rotary_factor": (None, 1, 1.0),
    "use_sliding_window": (False, None),
}
_BIAS_KEYS = {"qkv_bias": ("attention_bias",), "output_bias": ("attention_bias",)}
_NO_BIAS = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "tied_head": False}

FAMILIES: Registry[Family] = Registry("kind of diffusion model (`model_type`)")
"""Every family by its `model_type` in lower case."""

FAMILIES.register(
    "llada",
    Family(
        keys={
            "vocabulary": ("embedding_size", "vocab_size"),
            "hidden": ("d_model",),
            "layers": ("n_layers",),
            "query_heads": ("n_heads",),
            "kv_heads": ("n_kv_heads", "n_heads"),
            "mlp": ("mlp_hidden_size",),
            "positions": ("max_sequence_length",),
            "rope_theta": ("rope_theta",),
            "norm_epsilon": ("rms_norm_eps",),
            "qkv_bias": ("include_qkv_bias",),
            "tied_head": ("weight_tying",),
            "activation": ("activation_type",),
        },
        names={
            "embedding": "model.transformer.wte",
            "norm": "model.transformer.ln_f",
            "head": "model.transformer.ff_out",
            "layers.{}.attention_norm": "model.transformer.blocks.{}.attn_norm",
            "layers.{}.query": "model.transformer.blocks.{}.q_proj",
            "layers.{}.key": "model.transformer.blocks.{}.k_proj",
            "layers.{}.value": "model.transformer.blocks.{}.v_proj",
            "layers.{}.output": "model.transformer.blocks.{}.attn_out",
            "layers.{}.mlp_norm": "model.transformer.blocks.{}.ff_norm",
            "layers.{}.gate": "model.transformer.blocks.{}.ff_proj",
            "layers.{}.up": "model.transformer.blocks.{}.up_proj",
            "layers.{}.down": "model.transformer.blocks.{}.ff_out",
        },
        defaults=_NO_BIAS | {"norm_epsilon": 1e-5, "rope_theta": 10000.0},
        demands={
            "block_type": ("llama",),
            "layer_norm_type": ("rms",),
            "rope": (True,),
            "alibi": (False,),
            "attention_layer_norm": (False,),
            "input_emb_norm": (False,),
            "scale_logits": (False,),
            "include_bias": (False,),
            "bias_for_layer_norm": (False, None),
            "multi_query_attention": (False, None),
        },
        prediction="same",
        eos_ids=frozenset({126081, 126348}),
    ),
)
_QWEN2 = Family(
    keys=_HUGGING_FACE_KEYS,
    names=_HUGGING_FACE_NAMES,
    fixed={"qkv_bias": True},
    defaults=_NO_BIAS | {"rope_theta": 10000.0},
    demands=_PLAIN_ROPE,
)
FAMILIES.register("qwen2", _QWEN2)
FAMILIES.register(
    "dream",
    replace(
        _QWEN2,
        prediction="shifted",
        sampler="dream",
        tokenizer="qwen2",
        eos_ids=frozenset({151643, 151645}),
    ),
)
FAMILIES.register(
    "llama",
    Family(
        keys={**_HUGGING_FACE_KEYS, **_BIAS_KEYS, "mlp_bias": ("mlp_bias",)},
        names=_HUGGING_FACE_NAMES,
        defaults=_NO_BIAS | {"rope_theta": 10000.0},
        demands=_PLAIN_ROPE,
    ),
)
FAMILIES.register(
    "mistral",
    Family(
        keys=_HUGGING_FACE_KEYS,
        names=_HUGGING_FACE_NAMES,
        defaults=_NO_BIAS | {"rope_theta": 10000.0},
        demands=_PLAIN_ROPE | {"sliding_window": (None,)},
    ),
)
FAMILIES.register(
    "qwen3",
    Family(
        keys={**_HUGGING_FACE_KEYS, **_BIAS_KEYS},
        names=_HUGGING_FACE_NAMES,
        fixed={"query_key_norm": True},
        defaults=_NO_BIAS | {"rope_theta": 10000.0},
        demands=_PLAIN_ROPE,
    ),
)
