"""`kvfold transfer serve`: a producer, until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.checks import check_counts, check_model
from kvfold.cli.console import JsonOption, facts, note, print_json, stdout
from kvfold.cli.options import DeviceOption, DtypeOption, load
from kvfold.cli.transfer_options import (
    PORT,
    KeyFileOption,
    check_port,
    check_seconds,
    check_tokenizer,
    codec_paths,
    read_key,
    server_context,
)
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.transfer import Codec, Producer, ServiceSettings

CodecsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Codecs of one producer that `kvfold transfer calibrate` wrote.",
        show_default="shipped",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option("--model", help="The producer: `default`, a model's folder, or a Hub name."),
]
HostOption = Annotated[
    str,
    typer.Option(help="Address to listen at; one that others reach needs --key-file or TLS."),
]
PortOption = Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")]
CertificateOption = Annotated[
    Path | None,
    typer.Option("--tls-certificate", help="PEM file; with --tls-key.", show_default=False),
]
PrivateOption = Annotated[
    Path | None,
    typer.Option("--tls-key", help="PEM file of the certificate's key.", show_default=False),
]
TtlOption = Annotated[float, typer.Option("--ttl", help="Seconds that codes are kept.")]
KeepOption = Annotated[str, typer.Option(help="Most bytes of codes that are kept.")]
ClientsOption = Annotated[int, typer.Option(help="Clients served at a time.")]


def serve(
    codecs: CodecsArgument = None,
    model: ModelOption = "default",
    host: HostOption = "127.0.0.1",
    port: PortOption = PORT,
    key_file: KeyFileOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: PrivateOption = None,
    ttl: TtlOption = 600.0,
    keep: KeepOption = "256MiB",
    clients: ClientsOption = 256,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Read prefixes with a base model and send their codes to whoever asks.

    Ends with Ctrl-C or SIGTERM, and then says what was done.
    """
    check_model(model, dtype)
    check_counts(clients=clients)
    check_port(port, least=0)
    check_seconds(ttl=ttl)
    kept = _bytes(keep)
    key, tls = read_key(key_file), server_context(tls_certificate, tls_key)
    from kvfold.transfer import Codec, ServiceSettings
    from kvfold.transfer.producer import check_reach

    settings = ServiceSettings(
        host=host, port=port, connections=clients, bytes_kept=kept, seconds_kept=ttl
    )
    check_reach(host, key, tls)
    loaded = [Codec.load(path) for path in codec_paths(codecs)]
    producer = _producer(loaded, model, dtype, device, settings, key, tls)
    try:
        asyncio.run(_serve(producer, host))
    except KeyboardInterrupt:
        # Where signals cannot be handled by the loop, this is how it ends.
        note("stopped")
    _show(producer, json_output=json_output)


def _bytes(text: str) -> int:
    from kvfold.budget import Budget

    budget = Budget.parse(text)
    if budget.unit != "bytes":
        raise ConfigError(f"--keep {text!r} is no number of bytes: give one such as 256MiB")
    return int(budget.amount)


def _producer(
    codecs: list[Codec],
    model: str,
    dtype: str | None,
    device: str | None,
    settings: ServiceSettings,
    key: bytes | None,
    tls: ssl.SSLContext | None,
) -> Producer:
    from kvfold.transfer import Producer

    loaded, tokenizer = load(model, dtype, device)
    for codec in codecs:
        check_tokenizer(codec, tokenizer, "producer")
    senders = [codec.sender(loaded) for codec in codecs]
    return Producer(senders, settings, key=key, tls=tls)


async def _serve(producer: Producer, host: str) -> None:
    """Serve until a signal comes."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not every system, nor every thread, lets a loop handle signals.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stopped.set)
    async with producer:
        note(f"serving at {host}:{producer.port}; Ctrl-C ends it")
        await stopped.wait()


def _show(producer: Producer, *, json_output: bool) -> None:
    found = producer.counts.to_dict() | {
        "kept": len(producer.store),
        "bytes_kept": producer.store.bytes,
    }
    if json_output:
        print_json(found)
        return
    named = {name.replace("_", " "): value for name, value in found.items()}
    stdout().print(facts(named, title="Served"))
