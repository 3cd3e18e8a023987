"""A cache on disk: one safetensors file that knows the model it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvfold.attention import require_attached
from kvfold.cache.cache import CacheSpec, KVCache
from kvfold.cache.layer import CacheLayer
from kvfold.cache.split import SplitLayer
from kvfold.errors import ArtifactError, KVFoldError
from kvfold.models import fingerprint
from kvfold.tensorfile import read_sealed, write_sealed

FORMAT = 3
"""Version of the file format."""

Build = Callable[[PreTrainedModel, CacheSpec], KVCache]


def save_cache(cache: KVCache, path: str | Path) -> None:
    """Write a cache under a temporary name, then rename it.

    Raises:
        ArtifactError: When the model is gone, a layer is of a kind that cannot be read back, or
            the file cannot be written.
    """
    if cache.model is None:
        raise ArtifactError("the cache's model no longer exists: save it while the model does")
    record = {
        "format": FORMAT,
        "fingerprint": fingerprint(cache.model),
        "dtype": str(cache.model.dtype),
        "spec": asdict(cache.spec),
        "layers": [_facts(layer) for layer in cache.layers],
    }
    tensors = {
        f"{index}.{name}": tensor
        for index, layer in enumerate(cache.layers)
        for name, tensor in _tensors(layer).items()
    }
    write_sealed(Path(path), record, tensors)


def load_cache(
    path: str | Path,
    model: PreTrainedModel,
    build: Build,
    options: Mapping[str, object] | None = None,
) -> KVCache:
    """Read a cache back for the model it was made with.

    Args:
        path: A file written by `save_cache`.
        model: The same model, attached.
        build: Makes an empty cache from its description.
        options: Of the method, in place of those that the cache was made with.

    Raises:
        ArtifactError: When the file is missing, damaged, of another format, model or dtype.
        ConfigError: When the model is not attached, or an option of the cache cannot be used here.
    """
    record, tensors = _read(Path(path))
    if record.get("format") != FORMAT:
        raise ArtifactError(
            f"{path} has cache format {record.get('format')}, this version reads {FORMAT}: "
            "write the cache again"
        )
    if record.get("fingerprint") != fingerprint(model):
        raise ArtifactError(
            f"{path} was written with another model: load that model, or prefill again"
        )
    if record.get("dtype") != str(model.dtype):
        raise ArtifactError(
            f"{path} was written in {record.get('dtype')}, but the model runs in {model.dtype}: "
            "load the model in that dtype, or prefill again"
        )
    require_attached(model)
    try:
        spec = CacheSpec(**record["spec"])
        cache = build(model, replace(spec, options={**spec.options, **(options or {})}))
        tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        for index, (layer, facts) in enumerate(zip(cache.layers, record["layers"], strict=True)):
            _restore(layer, facts, _of_layer(tensors, index))
    except KVFoldError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} is not a whole kvfold cache ({error}): write it again") from (
            error
        )
    return cache


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    if path.is_dir():
        raise ArtifactError(f"{path} is a folder: give the file that the cache was saved to")
    try:
        return read_sealed(path)
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no file {path}: check the name") from error
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged or not a kvfold cache ({error}): write it again"
        ) from error


def _of_layer(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    prefix = f"{index}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _facts(layer: object) -> dict[str, object]:
    if isinstance(layer, CacheLayer | SplitLayer):
        evicted = [part.has_evicted for part in layer.parts]
        return {"seen": layer.seen, "has_evicted": evicted, "heads": _heads(layer)}
    return {"seen": getattr(layer, "cumulative_length", None)}


def _heads(layer: CacheLayer | SplitLayer) -> list[list[int]] | None:
    """The kv heads of each part; None where there are no parts."""
    return list(layer.heads) if isinstance(layer, SplitLayer) else None


def _tensors(layer: object) -> dict[str, torch.Tensor]:
    if isinstance(layer, CacheLayer | SplitLayer):
        return {
            f"{index}.{name}": tensor
            for index, part in enumerate(layer.parts)
            for name, tensor in part.state()
        }
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ArtifactError(f"a {type(layer).__name__} cannot be saved: prefill again instead")
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        return {"keys": layer.keys, "values": layer.values}
    return {}


def _restore(layer: object, facts: dict, tensors: dict[str, torch.Tensor]) -> None:
    if not tensors:
        return
    if isinstance(layer, CacheLayer | SplitLayer):
        if _heads(layer) != facts["heads"]:
            raise ValueError("its policy now lets other kv heads keep everything")
        for index, (part, evicted) in enumerate(
            zip(layer.parts, facts["has_evicted"], strict=True)
        ):
            part.load(_of_layer(tensors, index), facts["seen"], has_evicted=evicted)
        return
    if not isinstance(layer, DynamicLayer):
        raise TypeError(f"a {type(layer).__name__} cannot be read back")
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = facts["seen"]
