"""The Hugging Face Hub: whether it answers, what it has, and what is already on this machine."""

import os
import re
import threading
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)

from kvfold.errors import ArtifactError, ConfigError, TransferError

_SECONDS = 5.0
_TRUE = {"1", "ON", "YES", "TRUE"}
_REPOSITORY = re.compile(r"(?!.*\.safetensors$)[\w-][\w.-]*/[\w-][\w.-]*")
"""What can be the name of a Hub repository, and is none of a file."""


def hub_offline() -> bool:
    """Says whether the user forbade the Hub (`HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`)."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in _TRUE for name in names)


def hub_commit(repository: str) -> str:
    """Asks the Hub for the newest commit of a model, within a few seconds.

    Raises:
        TransferError: The Hub cannot be reached or is forbidden.
        ConfigError: The Hub has no such model, or it needs a licence to be accepted.
    """
    if hub_offline():
        raise TransferError("the Hugging Face Hub is switched off by HF_HUB_OFFLINE")
    answer: list[str | None] = []
    failure: list[Exception] = []

    def ask() -> None:
        try:
            answer.append(HfApi().model_info(repository, timeout=_SECONDS).sha)
        except Exception as error:
            failure.append(error)

    # Looking a name up can hang far longer than any timeout of the request itself.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    if failure:
        raise _refusal(repository, failure[0]) from failure[0]
    if not answer or answer[0] is None:
        raise TransferError(f"the Hugging Face Hub did not answer within {_SECONDS:.0f} s")
    return answer[0]


def _refusal(repository: str, error: Exception) -> ConfigError | TransferError:
    if isinstance(error, GatedRepoError):
        return ConfigError(
            f"the model {repository!r} is gated: accept its licence on the Hugging Face Hub and "
            "run `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return ConfigError(
            f"no folder and no model on the Hugging Face Hub is called {repository!r}: "
            "give 'default', a folder with a saved model, or a name such as 'Qwen/Qwen3-0.6B'"
        )
    return TransferError(f"the Hugging Face Hub cannot be reached ({first_line(error)})")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of the error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cached_snapshot(repository: str, files: tuple[str, ...]) -> Path | None:
    """Returns the Hub's local folder of a model if all named files are in it, else None."""
    found = [try_to_load_from_cache(repository, name) for name in files]
    paths = [Path(path) for path in found if isinstance(path, str)]
    return paths[0].parent if len(paths) == len(files) else None


def locate_artifact(name: str | Path, file: str, missing: str) -> str:
    """What the name of something learnt stands for, wherever the process may go.

    Args:
        name: A file, a folder that holds one, or a Hub repository.
        file: Name of the file in a folder or repository.
        missing: What is said when there is none: `there is no policy at {name}: give ...`.

    Returns:
        The file with its whole path; a name of nothing on this machine, if the Hub may know it.

    Raises:
        ArtifactError: When the name is of something else, or of nothing.
    """
    path = os.path.join(name, file) if os.path.isdir(name) else os.fspath(name)
    if os.path.isfile(path):
        return os.path.abspath(path)
    if isinstance(name, Path) or os.path.lexists(name) or not _REPOSITORY.fullmatch(name):
        raise ArtifactError(missing.format(name=name))
    return name


def fetch_artifact(name: str | Path, file: str, missing: str) -> Path:
    """The file that a name stands for, from the Hub where it is not on this machine.

    Args:
        name: A file, a folder that holds one, or a Hub repository.
        file: Name of the file in a folder or repository.
        missing: See `locate_artifact`.

    Raises:
        ArtifactError: When there is none.
    """
    found = locate_artifact(name, file, missing)
    if os.path.isabs(found):
        return Path(found)
    try:
        return Path(hf_hub_download(found, file))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ArtifactError(
            f"there is nothing at {name}, and the Hub gave no {file} of that name: check it"
        ) from error
