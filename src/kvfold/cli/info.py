"""`kvfold info`: the environment, and the anatomy of a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.artifacts import format_bytes
from kvfold.cli.console import JsonOption, facts, note, print_json, stdout

if TYPE_CHECKING:
    from kvfold.models.anatomy import Anatomy
    from kvfold.models.rope import RopeAnatomy


def info(
    model: Annotated[
        str | None,
        typer.Argument(help="A model's name, its folder, or `default`.", show_default=False),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show the environment, and what a model is made of.

    The model's weights are not loaded: `kvfold info default` tells its layers, heads, RoPE and
    the bytes that one token takes in its KV cache.
    """
    from kvfold.environment import environment

    anatomy = _anatomy(model) if model is not None else None
    if json_output:
        document = anatomy.to_dict() if anatomy is not None else None
        print_json({"environment": environment(), "model": document})
        return
    stdout().print(facts(_readable(environment()), title="Environment"))
    if anatomy is not None:
        stdout().print(facts(_summary(anatomy), title=f"Model {model}"))


def _anatomy(name: str) -> Anatomy:
    from kvfold.models.anatomy import anatomy_of
    from kvfold.models.loading import skeleton

    return anatomy_of(skeleton(name, progress=note))


def _readable(values: dict[str, object]) -> dict[str, object]:
    memory = values.pop("memory_bytes")
    shown = {name.replace("_", " "): value for name, value in values.items()}
    return {**shown, "memory": format_bytes(memory) if isinstance(memory, int) else None}


def _summary(anatomy: Anatomy) -> dict[str, object]:
    import torch

    fp32, bf16 = (anatomy.kv_bytes_per_token(kind) for kind in (torch.float32, torch.bfloat16))
    kinds = Counter(
        f"{layer.kind} ({layer.window} tokens)" if layer.window else layer.kind
        for layer in anatomy.layers
    )
    unrotated = [layer.index for layer in anatomy.layers if layer.rope == "nope"]
    longest = anatomy.max_positions
    return {
        "architecture": anatomy.architecture,
        "parameters": f"{anatomy.parameters:,}",
        "layers": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "hidden size": anatomy.hidden_size,
        "vocabulary": anatomy.vocabulary,
        "positions": longest,
        "query heads": anatomy.query_heads,
        "kv heads": anatomy.kv_heads,
        "head dim": anatomy.head_dim,
        "q, k, v projections": anatomy.qkv_layout,
        "q and k norm": anatomy.qk_norm,
        "rope": ", ".join(_rope(rope) for rope in anatomy.ropes) or "none",
        "layers without rope": ", ".join(map(str, unrotated)) or "none",
        "tied embeddings": "yes" if anatomy.tied_embeddings else "no",
        "KV cache per token": f"{format_bytes(fp32)} in fp32, {format_bytes(bf16)} in bf16",
        "KV cache at full length": format_bytes(anatomy.kv_bytes(longest)) if longest else None,
    }


def _rope(rope: RopeAnatomy) -> str:
    scaling = "" if rope.scaling == "default" else f", {rope.scaling} scaling"
    layers = "" if rope.kind == "all" else f" in {rope.kind} layers"
    return f"theta {rope.theta:g} over {rope.rotary_dims} dims{scaling}{layers}"
