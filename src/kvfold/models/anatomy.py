"""One view on the inside of any supported decoder.

`anatomy_of` reads sizes off the modules themselves (also on the meta device, without weights) and
the rest off the configuration. What is not found is refused by name, see `kvfold.models.parts`.
"""

from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvfold.models import parts
from kvfold.models.projections import HeadShape, head_shape
from kvfold.models.rope import RopeAnatomy, layer_ropes, rope_anatomies

NormKind = Literal["none", "head", "full"]
"""No norm on queries and keys, one over each head, or one over all heads together."""


@dataclass(frozen=True, slots=True)
class LayerAnatomy:
    """What is particular to one decoder layer."""

    index: int
    """Position in the stack, from 0."""
    kind: str
    """`full`, `sliding`, or the configuration's own word for another kind, such as `chunked`."""
    window: int | None
    """Tokens a query of a windowed layer sees, itself included."""
    rope: Literal["rope", "nope"]
    """Whether queries and keys are rotated by position, as the model declares it."""
    attention_path: str
    """Dotted path of the attention module from the model."""
    heads: HeadShape
    """Head counts and sizes."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The facts about a decoder that KV-cache methods need."""

    architecture: str
    """Class of the model."""
    dtype: str
    """Of the weights, such as `float32`."""
    parameters: int
    """Number of weights, tied ones once."""
    hidden_size: int
    """M."""
    vocabulary: int
    """V."""
    max_positions: int | None
    """Positions the model was made for."""
    qkv_layout: Literal["separate", "fused"]
    """Whether query, key and value have projections of their own."""
    qkv_bias: bool
    """Whether the key projection adds a bias."""
    qk_norm: NormKind
    """Norm between projection and RoPE."""
    ropes: tuple[RopeAnatomy, ...]
    """One for all layers, or one for each kind of layer that has its own."""
    tied_embeddings: bool
    """Whether input and output embeddings are one tensor."""
    attention_softcap: float | None
    """Cap on attention scores (Gemma 2)."""
    logit_softcap: float | None
    """Cap on the final logits (Gemma 2)."""
    query_scale: float
    """Factor on query-key products, usually 1 / sqrt(D)."""
    layers: tuple[LayerAnatomy, ...]
    """In order."""

    @property
    def query_heads(self) -> int:
        """H, of the first layer."""
        return self.layers[0].heads.query_heads

    @property
    def kv_heads(self) -> int:
        """G, of the first layer."""
        return self.layers[0].heads.kv_heads

    @property
    def head_dim(self) -> int:
        """D, of the first layer."""
        return self.layers[0].heads.head_dim

    @property
    def value_head_dim(self) -> int:
        """D of values, of the first layer."""
        return self.layers[0].heads.value_head_dim

    def rope_of(self, index: int) -> RopeAnatomy | None:
        """Returns the RoPE of layer `index`, or None for a layer without."""
        layer = self.layers[index]
        if layer.rope == "nope":
            return None
        return next(rope for rope in self.ropes if rope.kind in ("all", layer.kind))

    def kv_bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Returns the bytes a full cache grows by with every token, windowed layers left out.

        Args:
            dtype: Of the cache; the weights' when None.
        """
        return sum(self._layer_bytes(layer, dtype) for layer in self.layers if not layer.window)

    def windowed_bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Returns the bytes a token takes in the windowed layers, while it is in their windows."""
        return sum(self._layer_bytes(layer, dtype) for layer in self.layers if layer.window)

    def kv_bytes(self, tokens: int, dtype: torch.dtype | None = None) -> int:
        """Returns the bytes a plain cache holds after `tokens` tokens of one sequence.

        A windowed layer holds one token less than its window: the query's own is not cached yet.
        """
        held = (min(tokens, layer.window - 1) if layer.window else tokens for layer in self.layers)
        sizes = (self._layer_bytes(layer, dtype) for layer in self.layers)
        return sum(count * size for count, size in zip(held, sizes, strict=True))

    def _layer_bytes(self, layer: LayerAnatomy, dtype: torch.dtype | None) -> int:
        element = (dtype or getattr(torch, self.dtype)).itemsize
        return element * (layer.heads.rows("key") + layer.heads.rows("value"))

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON, with head counts and KV bytes a token added."""
        return {
            **asdict(self),
            "query_heads": self.query_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_head_dim": self.value_head_dim,
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "windowed_bytes_per_token": self.windowed_bytes_per_token(),
        }


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """Reads the anatomy of a decoder, with weights or on the meta device.

    Raises:
        UnsupportedModelError: The model lacks parts that kvfold needs; the message names them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        ...                      num_key_value_heads=2, intermediate_size=128, vocab_size=257)
        >>> anatomy_of(LlamaForCausalLM(config)).kv_bytes_per_token(torch.float32)
        512
    """
    parts.require_supported(model)
    config, attention = parts.text_config(model), parts.attention_module(model, 0)
    layers = _layers(model)
    return Anatomy(
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters(),
        hidden_size=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        max_positions=getattr(config, "max_position_embeddings", None),
        qkv_layout="separate" if parts.is_separate(attention) else "fused",
        qkv_bias=_has_bias(attention),
        qk_norm=_norm_kind(parts.key_norm(model, 0), layers[0].heads),
        ropes=rope_anatomies(model),
        tied_embeddings=_tied(model),
        attention_softcap=getattr(config, "attn_logit_softcapping", None),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        query_scale=float(getattr(attention, "scaling", layers[0].heads.head_dim ** -0.5)),
        layers=layers,
    )


def _layers(model: PreTrainedModel) -> tuple[LayerAnatomy, ...]:
    config = parts.text_config(model)
    paths = {module: path for path, module in model.named_modules()}
    named = getattr(config, "layer_types", None)
    cached = DynamicCache(config=config).layers
    found = []
    for index, rope in enumerate(layer_ropes(model)):
        window = getattr(cached[index], "sliding_window", None)
        plain = "sliding_attention" if window else "full_attention"
        found.append(
            LayerAnatomy(
                index=index,
                kind=(named[index] if named else plain).removesuffix("_attention"),
                window=window,
                rope=rope,
                attention_path=paths[parts.attention_module(model, index)],
                heads=head_shape(model, index),
            )
        )
    return tuple(found)


def _norm_kind(norm: nn.Module | None, heads: HeadShape) -> NormKind:
    if norm is None:
        return "none"
    weight = getattr(norm, "weight", None)
    full = isinstance(weight, torch.Tensor) and tuple(weight.shape) == (heads.rows("key"),)
    return "full" if full and heads.kv_heads > 1 else "head"


def _has_bias(attention: nn.Module) -> bool:
    module = parts.find_module(attention, ("k_proj", "qkv_proj"))
    return getattr(module, "bias", None) is not None


def _tied(model: PreTrainedModel) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return getattr(head, "weight", None) is getattr(embedding, "weight", 0)
