"""From a checkpoint's config.json to our own description of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from kvfold.diffusion.families import ACTIVATION_NAMES, FAMILIES, Family
from kvfold.diffusion.shape import DecoderShape, Traits
from kvfold.errors import ArtifactError, ConfigError, UnsupportedModelError

Config = Mapping[str, object]

_ABSENT = object()


def read_config(folder: Path) -> Config:
    """The configuration in a folder.

    Raises:
        ConfigError: There is none.
        ArtifactError: It is not JSON with an object in it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: give the folder of a saved model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON ({error}): fetch the model again") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{path} holds no settings: fetch the model again")
    return config


def family_of(config: Config) -> Family:
    """The family that a configuration names.

    Raises:
        ConfigError: There is none of that name.
    """
    return FAMILIES[str(config.get("model_type", "")).lower()]


def shape_of(config: Config, family: Family) -> DecoderShape:
    """The decoder's sizes and flags.

    Raises:
        UnsupportedModelError: A size is missing, or a setting has no counterpart in our decoder.
    """
    for key, allowed in family.demands.items():
        given = _lookup(config, key)
        if given is not _ABSENT and given not in allowed:
            raise UnsupportedModelError(
                f"the model's {key} is {given!r}, which this decoder does not know: only "
                f"{' or '.join(map(repr, allowed))}"
            )
    found = dict(family.defaults)
    for name, keys in family.keys.items():
        values = (_lookup(config, key) for key in keys)
        given = next((value for value in values if value not in (_ABSENT, None)), _ABSENT)
        if given is not _ABSENT:
            found[name] = given
    found |= family.fixed
    return _shape(found)


def traits_of(
    config: Config,
    family: Family,
    shape: DecoderShape,
    *,
    mask_token_id: int | None = None,
    prediction: str | None = None,
) -> Traits:
    """What a sampler must know; what is given here goes before what the configuration says.

    Raises:
        ConfigError: The mask token or the prediction is not told, or cannot be.
    """
    section = config.get("diffusion")
    told = {**config, **(section if isinstance(section, dict) else {})}
    mask = mask_token_id if mask_token_id is not None else told.get("mask_token_id")
    where = prediction or told.get("prediction") or family.prediction
    if not _is_token(mask, shape):
        raise ConfigError(
            f"the model has no mask token (its config.json says {mask!r}): give mask_token_id, a "
            f"token from 0 to {shape.vocabulary - 1}, and only to a model trained to fill it"
        )
    if where not in ("same", "shifted"):
        raise ConfigError(
            f"the prediction is {where!r}: give 'same' or 'shifted' (the token at a place is "
            "predicted there, or one place before)"
        )
    topology, block = told.get("topology", "bidirectional"), told.get("block_length")
    if topology not in ("bidirectional", "block_causal"):
        raise ConfigError(f"the topology is {topology!r}: give 'bidirectional' or 'block_causal'")
    if topology == "block_causal" and (not isinstance(block, int) or block < 1):
        raise ConfigError(f"the topology is block_causal and block_length {block!r}: give tokens")
    return Traits(
        mask_id=int(str(mask)),
        prediction=where,
        topology=topology,
        block_length=int(str(block)) if topology == "block_causal" else None,
        eos_ids=_ends(told.get("eos_token_id"), family, shape),
        pad_id=_pad(told.get("pad_token_id"), shape),
        sampler=str(told.get("sampler") or family.sampler),
    )


def _lookup(config: Config, key: str) -> object:
    """The value under a key, in which dots step into sections."""
    value: object = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _shape(found: dict[str, object]) -> DecoderShape:
    hidden, heads = found.get("hidden"), found.get("query_heads")
    if "head_dim" not in found and isinstance(hidden, int) and isinstance(heads, int) and heads:
        found["head_dim"] = hidden // heads
    name = str(found.get("activation"))
    found["activation"] = ACTIVATION_NAMES.get(name, name)
    missing = [field.name for field in fields(DecoderShape)[:8] if field.name not in found]
    if missing:
        raise UnsupportedModelError(
            f"the model's config.json does not tell the decoder's {missing[0]}: fetch it again"
        )
    return DecoderShape(**found)  # type: ignore[arg-type]


def _is_token(value: object, shape: DecoderShape) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= int(str(value)) < shape.vocabulary


def _ends(given: object, family: Family, shape: DecoderShape) -> frozenset[int]:
    named = given if isinstance(given, list) else [given]
    return frozenset(token for token in {*named, *family.eos_ids} if _is_token(token, shape))


def _pad(given: object, shape: DecoderShape) -> int | None:
    return given if isinstance(given, int) and _is_token(given, shape) else None
