"""How soon a first token comes over codes that travel a real link, beside the consumer alone.

    python -m bench.namespaces --out handover
    python -m bench.namespaces --producer BASE --consumer SPECIALIST --codec CODEC --rates 100,1000

Linux, as root, with iproute2: `bench/link.py` makes two network namespaces and the link. A producer
(`kvfold transfer serve`) runs in one. In the other, once a rate and round, a process of its own
(`kvfold transfer ask --rounds 1`) asks uncounted, so that the producer has the codes and all is
warm; then it asks once more, and then reads prefix and prompt itself. What these two took is
compared: they are neighbours in time, in one process. Rates take turns. Before each process the
link is measured with plain bytes, since a busy machine may carry less than it is asked to.

Prints a table and writes `namespaces.json`. Both ends share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.link import ADDRESSES, Link, LinkError, ended_by_signals, joined
from kvfold.artifacts import format_bytes, json_text, write_files
from kvfold.cli.console import note, stdout, table
from kvfold.errors import ConfigError, KVFoldError

if TYPE_CHECKING:
    from kvfold.bench.spread import Spread

NAME = "namespaces.json"
PROMPT = "\n\nQ: city of Edda; trade of Hugo\nA:"
"""In the form that the shipped consumer was taught."""
STAGES = ("connect", "wait", "receive", "decode", "first_token")
"""Of `kvfold transfer ask`, in their order."""
SHORT = ("source", "reason", "rounds", "prefix_tokens", "prompt_tokens")
"""What is kept of what it says."""
SERVING = "serving at "

Sample = dict[str, Any]
"""What one asking process told, its rate in bits a second, and what the link carried before it."""


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; the exit code."""
    options = _options(arguments)
    try:
        with ended_by_signals(), joined() as link:
            samples, served, environment = _measured(link, options)
    except (LinkError, KVFoldError) as error:
        note(str(error))
        return 2
    rows = {
        rate: _row([each for each in samples if each["rate"] == rate]) for rate in options.rates
    }
    _show(rows, samples[0])
    document = {
        "command": shlex.join(["python", "-m", "bench.namespaces", *_told(arguments)]),
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "rates": [{"rate": rate, **_plain(row)} for rate, row in rows.items()],
        "samples": samples,
        "served": served,
        "environment": environment,
    }
    (file,) = write_files(
        options.out, {NAME: lambda path: path.write_text(json_text(document), encoding="utf-8")}
    )
    note(f"wrote {file}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--producer", default="default", help="model of the producer")
    parser.add_argument("--consumer", default="specialist", help="model of the consumer")
    parser.add_argument("--codec", default="shipped", help="of the two")
    parser.add_argument(
        "--tokens", type=_count, default=1024, help="of a prefix from Python's reference"
    )
    parser.add_argument("--prefix", help="text file of the prefix, in its place")
    parser.add_argument("--prompt", default=PROMPT, help="what follows the prefix")
    parser.add_argument("--rates", type=_rates, default="100,1000,10000", help="Mbit/s of the link")
    parser.add_argument(
        "--rounds", type=_count, default=5, help="in which all rates take their turn"
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the result")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _rates(text: str) -> tuple[float, ...]:
    """Bits a second."""
    try:
        found = tuple(1e6 * float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} are no Mbit/s above 0, such as 100,1000")
    return found


def _told(arguments: Sequence[str]) -> list[str]:
    """The arguments but where to, which is nobody else's."""
    given = iter(arguments)
    told = []
    for word in given:
        if word == "--out":
            next(given, None)
        elif not word.startswith("--out="):
            told.append(word)
    return told


# What is measured ---------------------------------------------------------------------------------


def _measured(
    link: Link, options: argparse.Namespace
) -> tuple[list[Sample], dict[str, int], dict[str, Any]]:
    """A sample a rate and round, what the producer did, and what the asking was done on."""
    environment: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvfold-") as name:
        folder = Path(name)
        key, prefix = folder / "key", _prefix(options, folder)
        key.write_text(secrets.token_hex(32), encoding="utf-8")
        samples: list[Sample] = []
        with _serving(link, options, key) as producer:
            for number in range(1, options.rounds + 1):
                for rate in options.rates:
                    note(f"round {number} of {options.rounds}: {rate / 1e6:g} Mbit/s")
                    link.limit(rate)
                    carried = link.carried(rate)
                    told = _asked(link, options, key, prefix)
                    environment = told["environment"]
                    short = {name: told[name] for name in SHORT}
                    samples.append({"rate": rate, "carried": carried, **short})
            producer.terminate()
            served = json.loads(producer.communicate(timeout=60)[0])
    return samples, served, environment


def _prefix(options: argparse.Namespace, folder: Path) -> Path:
    """The file of the prefix."""
    if options.prefix is not None:
        return Path(options.prefix).resolve()
    from kvfold.models import load_model
    from kvfold.text import text_tokens

    _, tokenizer = load_model(options.consumer)
    path = folder / "prefix.txt"
    text = tokenizer.decode(
        text_tokens(tokenizer, options.tokens), clean_up_tokenization_spaces=False
    )
    path.write_text(str(text), encoding="utf-8")
    return path


@contextmanager
def _serving(link: Link, options: argparse.Namespace, key: Path) -> Iterator[subprocess.Popen[str]]:
    """A producer in the first namespace, once it listens; it is ended afterwards."""
    given = (options.codec, "--model", options.producer, "--host", ADDRESSES[0])
    command = _kvfold(link, link.first, "serve", *given, "--key-file", str(key), "--json")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as producer:
        try:
            assert producer.stderr is not None
            line = said = ""
            while SERVING not in line:
                said, line = line or said, producer.stderr.readline()
                if not line:
                    raise ConfigError(f"the producer did not start: {said.strip()}")
            yield producer
        finally:
            producer.kill()


def _asked(link: Link, options: argparse.Namespace, key: Path, prefix: Path) -> dict[str, Any]:
    """What one asking process tells.

    Raises:
        ConfigError: When it fails, or does without the producer's codes.
    """
    given = (options.codec, options.prompt, "--raw", "--model", options.consumer)
    given = (*given, "--prefix", str(prefix), "--host", ADDRESSES[0], "--key-file", str(key))
    patience = ("--connect-seconds", "20", "--answer-seconds", "120")
    measured = ("--max-new-tokens", "1", "--rounds", "1", "--json")
    command = _kvfold(link, link.second, "ask", *given, *patience, *measured)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ConfigError(f"asking failed: {said}")
    told = json.loads(done.stdout)
    for each in (told, told["rounds"][0]["codes"]):
        if each["source"] != "producer":
            raise ConfigError(f"the consumer read the prefix itself: {each['reason']}")
    return told


def _kvfold(link: Link, namespace: str, *arguments: str) -> list[str]:
    return link.inside(namespace, sys.executable, "-m", "kvfold", "transfer", *arguments)


# What is told -------------------------------------------------------------------------------------


def _row(samples: Sequence[Sample]) -> dict[str, Spread]:
    """Spreads over the rounds of one rate; times in seconds, `sooner` is own over codes."""
    from kvfold.bench.spread import Spread, divide

    codes = [each["rounds"][0]["codes"] for each in samples]
    own = [each["rounds"][0]["own_seconds"] for each in samples]
    totals = [each["first_token_seconds"] for each in codes]
    return {
        "carried": Spread(tuple(each["carried"] for each in samples)),
        "bytes": Spread(tuple(each["bytes_received"] for each in codes)),
        **{name: Spread(tuple(each["stages"][name] for each in codes)) for name in STAGES},
        "codes": Spread(tuple(totals)),
        "own": Spread(tuple(own)),
        "sooner": divide(own, totals),
    }


def _plain(row: Mapping[str, Spread]) -> dict[str, object]:
    return {name: spread.to_dict() for name, spread in row.items()}


def _show(rows: Mapping[float, Mapping[str, Spread]], sample: Sample) -> None:
    times = (*STAGES, "codes", "own")
    columns = ("Mbit/s", "carried", "payload", *(f"ms {name.replace('_', ' ')}" for name in times))
    lines = [
        (
            f"{rate / 1e6:g}",
            f"{row['carried'].times(1e-6):.0f}",
            format_bytes(int(row["bytes"].median)),
            *(f"{row[name].times(1000):.0f}" for name in times),
            f"{row['sooner']:.2f}",
        )
        for rate, row in rows.items()
    ]
    title = f"prefix of {sample['prefix_tokens']} tokens, prompt of {sample['prompt_tokens']}"
    stdout().print(table((*columns, "times as soon"), lines, title=title))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
