"""What a model says about its rotary position embeddings (RoPE), without running it."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.errors import UnsupportedModelError
from kvfold.models.parts import attention_module, decoder_layers, rotary, text_config


@dataclass(frozen=True, slots=True)
class RopeAnatomy:
    """One set of rotary frequencies."""

    kind: str
    """`all`, or the kind of layer it belongs to (`full`, `sliding`)."""
    theta: float
    """Base of the frequencies."""
    rotary_dims: int
    """Leading dims of a head that are rotated."""
    scaling: str
    """`default` for none, else `linear`, `dynamic`, `yarn`, `longrope`, `llama3`."""
    attention_scaling: float
    """Factor on cosines and sines (YaRN, LongRoPE); 1 otherwise."""
    depends_on_length: bool
    """Whether the frequencies change as the sequence grows: then keys cannot be un-rotated."""


def rope_anatomies(model: PreTrainedModel) -> tuple[RopeAnatomy, ...]:
    """Reads the rotary frequencies: one set for all layers, or one for each kind of layer.

    Raises:
        UnsupportedModelError: The configuration or the module does not tell.
    """
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    kinds = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if not kinds:
        return (_rope(model, "", parameters),)
    # A saved configuration comes back with its keys in another order.
    used = [name for name in sorted(kinds) if hasattr(rotary(model), f"{name}_inv_freq")]
    return tuple(_rope(model, name, kinds[name]) for name in used)


def _rope(model: PreTrainedModel, layer_type: str, parameters: dict[str, object]) -> RopeAnatomy:
    prefix = f"{layer_type}_" if layer_type else ""
    module = rotary(model)
    frequencies = getattr(module, f"{prefix}inv_freq", None)
    theta = parameters.get("rope_theta")
    if not isinstance(frequencies, Tensor) or not isinstance(theta, int | float):
        raise UnsupportedModelError(
            f"{type(model).__name__} lacks RoPE frequencies (`inv_freq`) with a `rope_theta` in "
            "its configuration: use a model with standard RoPE"
        )
    scaling = str(parameters.get("rope_type", "default"))
    return RopeAnatomy(
        kind=layer_type.removesuffix("_attention") or "all",
        theta=float(theta),
        rotary_dims=2 * frequencies.shape[-1],
        scaling=scaling,
        attention_scaling=float(getattr(module, f"{prefix}attention_scaling", 1.0)),
        depends_on_length="dynamic" in scaling or scaling == "longrope",
    )


def layer_ropes(model: PreTrainedModel) -> list[Literal["rope", "nope"]]:
    """Returns for each layer whether the model declares that it rotates queries and keys.

    Models that leave RoPE out of some layers without declaring it are found out only by running
    them: see `kvfold.models.probe_rope`.
    """
    declared = getattr(text_config(model), "no_rope_layers", None)
    ropes: list[Literal["rope", "nope"]] = []
    for index in range(len(decoder_layers(model))):
        rotates = getattr(attention_module(model, index), "use_rope", None)
        if rotates is None:
            rotates = declared[index] if declared else True
        ropes.append("rope" if rotates else "nope")
    return ropes
