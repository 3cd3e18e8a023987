"""What the commands of `kvfold transfer` share: codecs, addresses, and secrets from files."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvfold.transfer import Codec

PORT = 8471
"""That producers listen at by default."""
KEY_BYTES = 16
"""A shared key has at least so many."""

CodecArgument = Annotated[
    Path,
    typer.Argument(
        help="A codec that `kvfold transfer calibrate` wrote: folder or file; or `shipped`, for "
        "default to specialist."
    ),
]
CodecsArgument = Annotated[
    list[Path] | None,
    typer.Argument(help="Codecs of this pair, side by side.", show_default="shipped"),
]
HostOption = Annotated[str, typer.Option(help="Address of the producer.")]
PortOption = Annotated[int, typer.Option(help="Port of the producer.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help=f"File with a key that both sides share, at least {KEY_BYTES} bytes: messages are "
        "sealed with it, others refused.",
        show_default=False,
    ),
]


def codec_paths(named: list[Path] | None) -> tuple[Path, ...]:
    """The codecs that were named; without any, the one that comes with the package."""
    return tuple(named or [Path("shipped")])


def load_codecs(paths: Iterable[Path]) -> dict[str, Codec]:
    """Codecs by the names of their folders.

    Raises:
        ConfigError: When two have one name.
        ArtifactError: When one is not there, or damaged.
    """
    from kvfold.transfer import Codec

    paths = list(paths)
    codecs = {_codec_name(path): Codec.load(path) for path in paths}
    if len(codecs) < len(paths):
        raise ConfigError("two codecs have one name: give folders of different names")
    return codecs


def _codec_name(path: Path) -> str:
    folder = path.parent if path.is_file() else path
    return f"codes {folder.resolve().name}"


def read_key(path: Path | None) -> bytes | None:
    """The shared key of a file, without blanks around it.

    Raises:
        ConfigError: When it cannot be read, or is too short to be a secret.
    """
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key file {str(path)!r}: {error.strerror}; give the path of a file "
            "that both sides have"
        ) from error
    if len(key) < KEY_BYTES:
        raise ConfigError(
            f"the key in {str(path)!r} has {len(key)} bytes: make one of at least {KEY_BYTES}, "
            "as with `openssl rand -hex 32`"
        )
    return key


def server_context(certificate: Path | None, private: Path | None) -> ssl.SSLContext | None:
    """TLS of a producer; None when no files are named.

    Raises:
        ConfigError: When one is missing, or they cannot be used.
    """
    if certificate is None and private is None:
        return None
    if certificate is None or private is None:
        raise ConfigError("TLS needs both files: give --tls-certificate and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot use the certificate {str(certificate)!r} with its key ({error}): give two "
            "PEM files that belong together"
        ) from error
    return context


def client_context(*, tls: bool, authority: Path | None) -> ssl.SSLContext | None:
    """TLS of a consumer; None without.

    Args:
        tls: Trust those that this machine trusts.
        authority: PEM file of certificates to trust instead.

    Raises:
        ConfigError: When it cannot be used.
    """
    if authority is None:
        return ssl.create_default_context() if tls else None
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot use {str(authority)!r} as certificates to trust ({error}): give a PEM file"
        ) from error


def check_port(port: int, *, least: int) -> None:
    """Refuse what is no port.

    Raises:
        ConfigError: Naming the range.
    """
    if not least <= port <= 65535:
        raise ConfigError(f"--port {port} is no port: give {least} to 65535")


def check_seconds(**seconds: float) -> None:
    """Refuse times that are not above 0, each given by its option's name.

    Raises:
        ConfigError: Naming the option.
    """
    for name, value in seconds.items():
        if not 0 < value < float("inf"):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {value:g} is no time: give seconds above 0")


def check_tokenizer(codec: Codec, tokenizer: PreTrainedTokenizerBase, end: str) -> None:
    """Refuse a tokenizer that is not the codec's.

    Raises:
        ConfigError: Naming the end.
    """
    from kvfold.transfer import tokenizer_digest

    if codec.tokenizer and codec.tokenizer != tokenizer_digest(tokenizer):
        raise ConfigError(
            f"the {end}'s tokenizer is not the codec's: use the model that the codec was "
            "calibrated with, tokenizer included"
        )
