"""`kvfold transfer ask`: a consumer that answers a prompt, with codes or without."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.artifacts import format_bytes
from kvfold.cli.checks import (
    check_budget,
    check_counts,
    check_extras,
    check_methods,
    check_model,
    check_temperature,
)
from kvfold.cli.console import JsonOption, note, print_json
from kvfold.cli.files import read_text
from kvfold.cli.generate import NewTokensOption, SeedOption, TemperatureOption
from kvfold.cli.options import DeviceOption, DtypeOption, load
from kvfold.cli.transfer_options import (
    PORT,
    CodecArgument,
    HostOption,
    KeyFileOption,
    PortOption,
    check_port,
    check_seconds,
    check_tokenizer,
    client_context,
    read_key,
)
from kvfold.cli.transfer_reply import Question, Replier, Reply, Round
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvfold.transfer import Consumer

PromptArgument = Annotated[str, typer.Argument(help="What follows the prefix, as a question.")]
PrefixOption = Annotated[
    Path, typer.Option("--prefix", help="Text file of the prefix, whose codes are asked for.")
]
ModelOption = Annotated[
    str,
    typer.Option("--model", help="The consumer: `specialist`, a model's folder, or a Hub name."),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Put both into the model's chat template, or give them as they are.",
        show_default="--chat where there is a template",
    ),
]
MethodOption = Annotated[
    str,
    typer.Option(
        help="The cache that codes are decoded into. For one that goes by queries, such as snapkv "
        "or sekv, the model reads the last tokens of the prefix itself, 64 at most."
    ),
]
BudgetOption = Annotated[
    str | None, typer.Option(help="What that method may keep.", show_default="0.25")
]
TlsOption = Annotated[bool, typer.Option("--tls", help="Connect by TLS.")]
AuthorityOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-authority",
        help="PEM file of certificates to trust; connects by TLS.",
        show_default="this machine's, with --tls",
    ),
]
ServerNameOption = Annotated[
    str | None,
    typer.Option(help="Name in the producer's certificate.", show_default="the address"),
]
ConnectOption = Annotated[float, typer.Option(help="In which the connection must be there.")]
AnswerOption = Annotated[float, typer.Option(help="In which all codes must have come.")]
RoundsOption = Annotated[
    int,
    typer.Option(
        help="After the answer, measure the first token so often again: with codes, then by itself."
    ),
]


def ask(
    codec: CodecArgument,
    prompt: PromptArgument,
    prefix: PrefixOption,
    model: ModelOption = "specialist",
    host: HostOption = "127.0.0.1",
    port: PortOption = PORT,
    key_file: KeyFileOption = None,
    tls: TlsOption = False,
    tls_authority: AuthorityOption = None,
    server_name: ServerNameOption = None,
    connect_seconds: ConnectOption = 2.0,
    answer_seconds: AnswerOption = 60.0,
    method: MethodOption = "full",
    budget: BudgetOption = None,
    max_new_tokens: NewTokensOption = 128,
    chat: ChatOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    rounds: RoundsOption = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Answer a prompt that follows a prefix which a producer has read.

    When no codes come, are late or invalid, the model reads the prefix itself and says why.
    """
    text = _checked(locals())
    loaded, tokenizer, consumer = _opened(locals())
    asked = Question(text, prompt, chat, method, budget, max_new_tokens, temperature, seed, rounds)
    write = (lambda part: None) if json_output else _write
    reply = Replier(loaded, tokenizer, consumer, asked).reply(write)
    if json_output:
        print_json(_document(reply, consumer, model))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    note(_told(reply))


def _opened(
    given: Mapping[str, Any],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Consumer]:
    """The model, its tokenizer, and what asks the producer."""
    key = read_key(given["key_file"])
    context = client_context(tls=given["tls"], authority=given["tls_authority"])
    from kvfold.transfer import Codec, Consumer, ConsumerSettings

    asking = ("host", "port", "connect_seconds", "answer_seconds", "server_name")
    settings = ConsumerSettings(**{name: given[name] for name in asking})
    codec = Codec.load(given["codec"])
    model, tokenizer = load(given["model"], given["dtype"], given["device"])
    check_tokenizer(codec, tokenizer, "consumer")
    consumer = Consumer(codec.receiver(model), settings, key=key, tls=context)
    return model, tokenizer, consumer


def _checked(given: Mapping[str, Any]) -> str:
    """Refuse what can be refused before torch is imported; returns the prefix."""
    if not given["prompt"].strip():
        raise ConfigError("the prompt is empty: give what follows the prefix")
    check_methods([given["method"]])
    check_budget(given["budget"])
    check_counts(max_new_tokens=given["max_new_tokens"])
    check_extras(rounds=given["rounds"])
    check_temperature(given["temperature"])
    check_model(given["model"], given["dtype"])
    check_port(given["port"], least=1)
    check_seconds(connect_seconds=given["connect_seconds"], answer_seconds=given["answer_seconds"])
    return read_text(given["prefix"])


def _write(part: str) -> None:
    if part:
        sys.stdout.write(part)
        sys.stdout.flush()


def _told(reply: Reply) -> str:
    """Where the cache came from, in one line."""
    prefix = reply.prefix
    if prefix.source == "producer":
        came = f"from the producer's codes, {format_bytes(prefix.bytes_received)}"
    else:
        came = f"read by the consumer itself: {prefix.reason}"
    line = (
        f"prefix of {reply.prefix_tokens} tokens {came}, in {prefix.seconds:.2f} s; first token "
        f"after {reply.first.first_token_seconds:.2f} s; {prefix.cache.report()}"
    )
    return f"{line}; {_measured(reply.rounds)}" if reply.rounds else line


def _measured(rounds: Sequence[Round]) -> str:
    from kvfold.bench.spread import Spread

    codes = Spread(tuple(each.codes.first_token_seconds for each in rounds))
    own = Spread(tuple(each.own_seconds for each in rounds))
    return f"then after {codes:.3f} s, and by itself after {own:.3f} s"


def _document(reply: Reply, consumer: Consumer, model: str) -> dict[str, object]:
    from kvfold.environment import environment

    return {
        "text": reply.text,
        "model": model,
        "prefix_tokens": reply.prefix_tokens,
        "prompt_tokens": reply.prompt_tokens,
        "new_tokens": reply.new_tokens,
        **asdict(reply.first),
        "rounds": [asdict(each) for each in reply.rounds],
        "counts": consumer.counts.to_dict(),
        "cache": reply.prefix.cache.report().to_dict(),
        "environment": environment(),
    }
