"""Low-rank changes of a module's linear layers, to be learnt (LoRA, arXiv 2106.09685), by `peft`.

A linear layer of weight `W` computes with `W + alpha / R * up @ down`, where down is `[R, inputs]`
and up `[outputs, R]`. What reads is drawn, what writes begins as zero, so that at first nothing has
changed. Only the changes want a gradient.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from kvfold.errors import ConfigError
from kvfold.models.adapter import DOWN, UP, changed

_NAME = "learnt"


class LowRankChanges:
    """Changes, which are none yet, in a module that computes what it did."""

    def __init__(
        self, model: nn.Module, *, rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        """Wrap every linear layer, that of a transformers model's head excepted, and freeze all.

        Args:
            model: Its linear layers are replaced where they are; its weights are not touched.
            rank: R, of every change.
            alpha: A change is multiplied by it and divided by its rank.
            generator: Draws what reads; on the CPU.

        Raises:
            ConfigError: When the rank is below 1, or above what every layer can have.
        """
        _check(rank, model)
        self.scale = alpha / rank
        self._model = model
        self.module = _injected(model, rank, alpha, generator)

    def tensors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Down `[R, inputs]` and up `[outputs, R]` by the names of the layers."""
        weights = self.module.state_dict()
        return {
            _name_of(key): (weights[f"{key}.{DOWN}.weight"], weights[f"{key}.{UP}.weight"])
            for key, _ in self.module.named_children()
        }

    @torch.no_grad()
    def merge(self) -> None:
        """Add the changes to the weights, in float64; `remove` is to follow."""
        for name, (down, up) in self.tensors().items():
            weight = self._model.get_parameter(f"{name}.base_layer.weight")
            weight.copy_(changed(weight, down, up, self.scale))

    def remove(self) -> None:
        """Put the linear layers back, as they were before or as `merge` made them."""
        for key, _ in self.module.named_children():
            place, _, last = _name_of(key).rpartition(".")
            parent = self._model.get_submodule(place)
            wrapped = getattr(parent, last)
            if isinstance(wrapped, LoraLayer):
                setattr(parent, last, wrapped.get_base_layer())
        vars(self._model).pop("peft_config", None)


def _check(rank: int, model: nn.Module) -> None:
    most = min(
        min(layer.in_features, layer.out_features)
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
        raise ConfigError(
            f"the rank of low-rank changes is {rank!r}: give a whole number from 1 to {most}, the "
            "width of the narrowest linear layer"
        )


def _injected(
    model: nn.Module, rank: int, alpha: float, generator: torch.Generator
) -> nn.ModuleDict:
    """What is to be learnt, by the names of the layers."""
    # Only the quotient of the two is used, and need not be whole.
    config = LoraConfig(r=rank, lora_alpha=cast("int", alpha), target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, model, _NAME)
    found = nn.ModuleDict()
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            down, up = layer.lora_A[_NAME], layer.lora_B[_NAME]
            weight = cast("torch.Tensor", down.weight)
            # On the CPU, where the generator is.
            drawn = torch.empty(weight.shape, dtype=weight.dtype)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            weight.data.copy_(drawn)
            found[_key_of(name)] = nn.ModuleDict({DOWN: down, UP: up})
    model.requires_grad_(False)
    return found.requires_grad_(True)


def _key_of(name: str) -> str:
    """A layer's name as a module's key, in which no dot may stand."""
    return name.replace(".", "/")


def _name_of(key: str) -> str:
    return key.replace("/", ".")
