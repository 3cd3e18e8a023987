"""Where a decoder keeps its parts: the stack, its layers, attention, norms, RoPE and head.

Everything is found by structure (which modules are there and what they are called), never by a
model's name. `missing_parts` lists in words what kvfold needs and cannot find.
"""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvfold.errors import UnsupportedModelError

_STACK_NAMES = ("layers", "h", "blocks")
_OUTPUT_NAMES = ("o_proj", "dense", "out_proj")
_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm")
_STACK_WANTED = "a list of decoder layers (`layers`)"
_POST_NORM_NAMES = ("post_attention_layernorm", "post_feedforward_layernorm")
_QUERY_NORM_NAMES = ("q_norm", "q_layernorm", "query_layernorm")
_KEY_NORM_NAMES = ("k_norm", "k_layernorm", "key_layernorm")


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Returns the configuration of the text decoder, also inside a multimodal model."""
    return model.config.get_text_config(decoder=True)


def base_model(model: PreTrainedModel) -> nn.Module:
    """Returns the module that holds the stack of decoder layers.

    Raises:
        UnsupportedModelError: There is no module with a list of decoder layers.
    """
    for module in _stack_candidates(model):
        if _layer_list(module) is not None:
            return module
    raise _unsupported(model, [_STACK_WANTED])


def _layer_list(module: nn.Module) -> nn.ModuleList | None:
    lists = (getattr(module, name, None) for name in _STACK_NAMES)
    return next((layers for layers in lists if isinstance(layers, nn.ModuleList)), None)


def _stack_candidates(model: PreTrainedModel) -> Iterator[nn.Module]:
    decoder = model.get_decoder()
    yield decoder
    yield from (child for _, child in decoder.named_children())
    yield model.base_model
    yield from (child for _, child in model.base_model.named_children())


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the list of decoder layers, in order."""
    layers = _layer_list(base_model(model))
    assert layers is not None
    return layers


def attention_module(model: PreTrainedModel, index: int) -> nn.Module:
    """Returns the self-attention module of decoder layer `index`.

    Raises:
        UnsupportedModelError: The layer has no self-attention with q/k/v projections.
    """
    attention = find_attention(decoder_layers(model)[index])
    if attention is None:
        raise _unsupported(model, [_attention_wanted(index)])
    return attention


def find_attention(layer: nn.Module) -> nn.Module | None:
    """Returns the first child of a layer with q/k/v projections, separate or fused, if any."""
    for module in layer.children():
        if is_separate(module) or is_fused(module):
            return module
    return None


def is_separate(attention: nn.Module) -> bool:
    """Says whether query, key and value have a projection each."""
    return all(find_module(attention, (name,)) for name in ("q_proj", "k_proj", "v_proj"))


def is_fused(attention: nn.Module) -> bool:
    """Says whether one projection yields query, key and value, concatenated in this order."""
    return find_module(attention, ("qkv_proj",)) is not None


def output_projection(model: PreTrainedModel, index: int) -> nn.Module:
    """Returns the projection that follows the attention of layer `index`."""
    found = find_module(attention_module(model, index), _OUTPUT_NAMES)
    if found is None:
        raise _unsupported(model, [f"an attention output projection in layer {index}"])
    return found


def query_norm(model: PreTrainedModel, index: int) -> nn.Module | None:
    """Returns the norm between query projection and RoPE, or None."""
    return find_module(attention_module(model, index), _QUERY_NORM_NAMES)


def key_norm(model: PreTrainedModel, index: int) -> nn.Module | None:
    """Returns the norm between key projection and RoPE, or None."""
    return find_module(attention_module(model, index), _KEY_NORM_NAMES)


def input_norm(model: PreTrainedModel, index: int) -> nn.Module:
    """Returns the norm before the attention of layer `index`.

    A layer that normalises after the attention and the MLP (OLMo 2) feeds its input to the
    attention as it is: the identity is returned.
    """
    found = find_input_norm(decoder_layers(model)[index])
    if found is None:
        raise _unsupported(model, [f"a norm before (or after) the attention of layer {index}"])
    return found


def find_input_norm(layer: nn.Module) -> nn.Module | None:
    """Returns a layer's input norm, the identity for a post-norm layer, or None."""
    found = find_module(layer, ("input_layernorm",))
    if found is None and all(find_module(layer, (name,)) for name in _POST_NORM_NAMES):
        return nn.Identity()
    return found


def rotary(model: PreTrainedModel) -> nn.Module:
    """Returns the module that computes the cosines and sines of RoPE for the whole stack."""
    found = find_module(base_model(model), ("rotary_emb",))
    if found is None:
        raise _unsupported(model, ["a rotary position embedding (`rotary_emb`)"])
    return found


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Returns the norm after the last decoder layer."""
    found = find_module(base_model(model), _FINAL_NORM_NAMES)
    if found is None:
        raise _unsupported(model, ["a norm after the last layer"])
    return found


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Returns the projection from hidden states [B, T, M] to logits [B, T, V]."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise _unsupported(model, ["a language-model head"])
    return head


def find_module(parent: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """Returns the first of the named children that is a module."""
    for name in names:
        child = getattr(parent, name, None)
        if isinstance(child, nn.Module):
            return child
    return None


def missing_parts(model: PreTrainedModel) -> list[str]:
    """Names, in words, every part that kvfold needs and the model lacks."""
    if getattr(model.config, "is_encoder_decoder", False):
        return ["a decoder-only stack (this is an encoder-decoder)"]
    missing: list[str] = []
    try:
        stack = base_model(model)
    except UnsupportedModelError:
        missing.append(_STACK_WANTED)
        stack = model.get_decoder()
    else:
        missing += _missing_in_layers(decoder_layers(model))
    if find_module(stack, ("rotary_emb",)) is None:
        missing.append("a rotary position embedding (`rotary_emb`)")
    if not isinstance(model.get_output_embeddings(), nn.Module):
        missing.append("a language-model head")
    return missing


def _missing_in_layers(layers: nn.ModuleList) -> list[str]:
    if not len(layers):
        return ["at least one decoder layer"]
    for index, layer in enumerate(layers):
        attention = find_attention(layer)
        if attention is None:
            return [_attention_wanted(index)]
        if find_module(attention, _OUTPUT_NAMES) is None:
            return [f"an attention output projection in layer {index}"]
        if find_input_norm(layer) is None:
            return [f"a norm before (or after) the attention of layer {index}"]
    return []


def _attention_wanted(index: int) -> str:
    return (
        f"self-attention with query, key and value projections (q_proj, k_proj, v_proj, or one "
        f"qkv_proj) in layer {index}"
    )


def _unsupported(model: PreTrainedModel, missing: list[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} lacks {'; '.join(missing)}: "
        "use a decoder-only model with RoPE, such as Llama, Qwen, Gemma, Phi-3 or SmolLM"
    )


def require_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError, naming what is missing, unless all parts are found."""
    missing = missing_parts(model)
    if missing:
        raise _unsupported(model, missing)
