"""A diffusion model as a folder that `DiffusionModel.from_pretrained` reads again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvfold.artifacts import json_text, write_files
from kvfold.diffusion.description import Config, family_of
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.shape import DecoderShape
from kvfold.diffusion.weights import SINGLE, their_name
from kvfold.tensorfile import write_tensors


def llama_config(shape: DecoderShape) -> Config:
    """The configuration, in Llama's keys, of a decoder without biases or norms of heads."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied_head,
        "hidden_act": shape.activation,
    }


def save_model(
    model: DiffusionModel,
    folder: Path,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write tokenizer, configuration and weights, in this order, each whole.

    Args:
        model: Of a family that holds no sign of its own for diffusion, such as Llama.
        folder: Where to; made if it is missing.
        config: Of that family, with the model's sizes; the traits are added to it.
        tokenizer: The model's.

    Raises:
        ArtifactError: When a file cannot be written.
    """
    family = family_of(config)
    text = json_text({**config, "diffusion": _section(model)})
    write_files(folder, {})
    tokenizer.save_pretrained(folder)
    write_files(folder, {"config.json": lambda path: path.write_text(text, encoding="utf-8")})
    tensors = {
        their_name(name, family): tensor.detach().cpu()
        for name, tensor in model.decoder.state_dict().items()
    }
    write_tensors(folder / SINGLE, tensors, {"format": "pt"})


def _section(model: DiffusionModel) -> Mapping[str, object]:
    traits = model.traits
    return {
        "mask_token_id": traits.mask_id,
        "prediction": traits.prediction,
        "topology": traits.topology,
        "block_length": traits.block_length,
        "eos_token_id": sorted(traits.eos_ids),
        "pad_token_id": traits.pad_id,
        "sampler": traits.sampler,
    }
