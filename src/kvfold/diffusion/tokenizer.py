"""Tokenizers of diffusion models, without the code that some of them ship."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvfold.diffusion.description import family_of, read_config
from kvfold.diffusion.model import model_folder
from kvfold.errors import ConfigError
from kvfold.models.hub import first_line


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Args:
        name: As `DiffusionModel.from_pretrained` takes it.

    Raises:
        ConfigError: There is no such model, or it has no tokenizer that transformers knows.
    """
    folder = model_folder(name)
    known = family_of(read_config(folder)).tokenizer
    options = {"tokenizer_type": known} if known else {}
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{name} has no tokenizer that can be loaded ({first_line(error)}): give token ids"
        ) from error
