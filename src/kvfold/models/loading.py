"""Loads a model and its tokenizer by name or folder, ready for batched generation."""

from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvfold.errors import (
    ArtifactError,
    ConfigError,
    KVFoldError,
    TransferError,
    UnsupportedModelError,
)
from kvfold.models.adapter import AdapterArtifact, find_adapter
from kvfold.models.default import ensure_default
from kvfold.models.home import Progress
from kvfold.models.hub import cached_snapshot, first_line, hub_commit
from kvfold.models.placement import parse_device, parse_dtype

_CHECKED_PARAMETERS = 1_000_000_000


def load_model(
    name: str | Path = "default",
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer.

    Args:
        name: `default`; `specialist`, which is `default` with the adapter of
            `kvfold.models.adapter.SHIPPED`; a folder with a saved model or an adapter; or a model's
            name on the Hugging Face Hub.
        dtype: `float32`, `bfloat16`, `float16` (or fp32, bf16, fp16), `auto` for the checkpoint's,
            or a torch dtype. None is float32 on the CPU and the checkpoint's elsewhere.
        device: `cpu`, `cuda`, `cuda:1`, `mps`. None is CUDA where there is one, else the CPU.
        progress: Receives a line about each stage of fetching the default model.

    Returns:
        The model in eval mode, and its tokenizer, padding on the left with a pad token set.

    Raises:
        ConfigError: There is no such model, dtype or device, or no network to fetch it.
        ArtifactError: The weights are damaged, incomplete or not finite.
        UnsupportedModelError: It is not a causal language model that transformers knows.
    """
    place, wanted = parse_device(device), parse_dtype(dtype)
    if dtype is None and place.type == "cpu":
        wanted = torch.float32
    model, tokenizer = _load_adapted(name, wanted, progress) or _load(name, wanted, progress)
    _prepare_padding(model, tokenizer)
    torch.nn.Module.to(model, place)
    return model, tokenizer


def _load_adapted(
    name: str | Path, dtype: torch.dtype | None, progress: Progress | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """A base model with an adapter's changes in its weights; None for any other name."""
    path = find_adapter(name)
    if path is None:
        return None
    adapter = AdapterArtifact.from_pretrained(path)
    model, tokenizer = _load(adapter.base, torch.float32, progress)
    adapter.merge(model)
    wanted = dtype or load_config(adapter.base, progress=progress).dtype or torch.float32
    return cast("PreTrainedModel", torch.nn.Module.to(model, wanted)), tokenizer


def _load(
    name: str | Path, dtype: torch.dtype | None, progress: Progress | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model, its weights checked, on the CPU."""
    source, local = _resolve(name, progress)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local, trust_remote_code=False
        )
        model, missing = _weights(source, dtype, local=local)
    except SafetensorError as error:
        raise ArtifactError(
            f"the weights of {name} are damaged ({first_line(error)}): fetch them again"
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise _loading_error(name, error) from error
    _require_complete(str(name), model, missing)
    return model, tokenizer


def load_config(
    name: str | Path = "default", *, progress: Progress | None = None
) -> PreTrainedConfig:
    """Reads a model's configuration alone; `name` and the errors are those of `load_model`."""
    source, local = _resolve(name, progress)
    try:
        return AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _loading_error(name, error) from error


def skeleton(name: str | Path = "default", *, progress: Progress | None = None) -> PreTrainedModel:
    """Builds a model on the meta device from its configuration: modules and shapes, no weights."""
    config = load_config(name, progress=progress)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    except ValueError as error:
        raise _loading_error(name, error) from error


def _weights(
    source: str, dtype: torch.dtype | None, *, local: bool
) -> tuple[PreTrainedModel, set[str]]:
    """Returns the model and the names of tensors that its files lack."""
    loaded = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype or "auto",
        local_files_only=local,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    return model, set(report["missing_keys"])


def _resolve(name: str | Path, progress: Progress | None) -> tuple[str, bool]:
    """Returns what `from_pretrained` takes, and whether it must keep off the network.

    Of an adapter it is the base model's.
    """
    if (adapter := find_adapter(name)) is not None:
        return _resolve(AdapterArtifact.from_pretrained(adapter).base, progress)
    if not str(name).strip():
        raise ConfigError("the model name is empty: give 'default', a folder or a Hub name")
    if str(name) == "default":
        return str(ensure_default(progress)), True
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"the folder {name} has no config.json: give a folder written by save_pretrained"
            )
        return str(folder), True
    if folder.exists():
        raise ConfigError(f"{name} is a file: give the folder of a saved model")
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"there is no folder {name}: give 'default', a folder or a Hub name")
    return name, _must_stay_local(name)


def _must_stay_local(name: str) -> bool:
    try:
        hub_commit(name)
    except TransferError as error:
        if cached_snapshot(name, ("config.json",)) is None:
            raise ConfigError(
                f"there is no folder {name!r}, and as a name on the Hugging Face Hub it is not on "
                f"this machine yet: {error}. Connect to a network, or give a model folder"
            ) from error
        return True
    return False


def _loading_error(name: str | Path, error: Exception) -> KVFoldError:
    first = first_line(error)
    if isinstance(error, RuntimeError):
        return ArtifactError(f"the weights of {name} do not fit its config.json: {first}")
    if "safetensors" in str(error) and isinstance(error, OSError):
        return ConfigError(f"{name} has no weights in safetensors: save them so ({first})")
    if "Unrecognized configuration class" in first or "model type" in str(error):
        return UnsupportedModelError(f"{name} is not a causal language model for kvfold: {first}")
    return ConfigError(f"{name} cannot be loaded as a causal language model: {first}")


def _require_complete(name: str, model: PreTrainedModel, missing: set[str]) -> None:
    if missing:
        raise ArtifactError(
            f"the weights of {name} lack {len(missing)} tensors, such as {min(missing)}: "
            "fetch or save the model again"
        )
    if model.num_parameters() < _CHECKED_PARAMETERS:
        require_finite(name, model)


def require_finite(name: str, model: torch.nn.Module) -> None:
    """Raises ArtifactError, naming the tensor, if any weight is not a finite number."""
    for path, weight in model.named_parameters():
        # A sum is one pass without a mask: it is not finite if any weight is not.
        if not weight.is_floating_point() or torch.isfinite(weight.sum(dtype=torch.float32)):
            continue
        bad = int((~torch.isfinite(weight)).sum())
        if bad:
            raise ArtifactError(
                f"the weights of {name} are damaged: {bad} values of {path} are NaN or infinite; "
                "fetch the model again, or load it in another dtype"
            )


def _prepare_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token or tokenizer.unk_token
    generation = model.generation_config
    if generation is not None and generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
