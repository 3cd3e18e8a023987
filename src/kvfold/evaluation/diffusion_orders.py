"""What a task of lm-evaluation-harness asks of a written text, in the words of diffusion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from kvfold.diffusion import Sampler
from kvfold.errors import ConfigError

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of a text's length; the first that is given counts."""
_CHANCE = ("top_p", "top_k", "min_p", "typical_p")
"""Settings of chance, which say nothing where the likeliest token is taken."""


@dataclass(frozen=True, slots=True)
class Order:
    """How a text is to be written."""

    length: int
    """Tokens."""
    until: tuple[str, ...]
    """Texts before the first of which it ends."""
    sampler: Sampler
    """With the task's temperature."""

    def cut(self, text: str) -> str:
        """What stands before the first of the texts that end it."""
        for end in filter(None, self.until):
            text = text.partition(end)[0]
        return text


def read_order(given: Mapping[str, object], length: int, sampler: Sampler) -> Order:
    """Read the generation settings of a request.

    Args:
        given: As the task and `--gen_kwargs` have them: `until`, `max_gen_toks`, `do_sample`,
            `temperature`, and options of the sampler.
        length: Where the task gives none.
        sampler: Whose options hold where the task gives none.

    Raises:
        ConfigError: A setting is none of these, or has a value that cannot be used.
    """
    rest = dict(given)
    until = rest.pop("until", None)
    lengths = [found for name in _LENGTHS if (found := rest.pop(name, None)) is not None]
    options = _sampling(rest, sampler)
    known = {field.name for field in fields(sampler)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"the task asks for {unknown[0]}={options[unknown[0]]!r}, which this sampler has not: "
            f"give --gen_kwargs with until, max_gen_toks, do_sample or {', '.join(sorted(known))}"
        )
    return Order(
        length=_length(lengths[0] if lengths else length),
        until=_texts(until),
        sampler=replace(sampler, **options),
    )


def _sampling(rest: Mapping[str, object], sampler: Sampler) -> dict[str, object]:
    """Options of the sampler; a task that wants no chance wants temperature 0."""
    options = dict(rest)
    by_chance = options.pop("do_sample", None)
    if by_chance is False:
        options["temperature"] = 0.0
    elif by_chance and "temperature" not in options:
        options["temperature"] = sampler.temperature or 1.0
    if options.get("temperature", sampler.temperature) == 0:
        for name in _CHANCE:
            options.pop(name, None)
    return options


def _texts(given: object) -> tuple[str, ...]:
    """One text, several, or none."""
    if given is None or isinstance(given, str):
        return (given,) if given else ()
    if not isinstance(given, list | tuple):
        raise ConfigError(f"until is {given!r}: give a text or a list of texts")
    return tuple(map(str, given))


def _length(given: object) -> int:
    try:
        return int(str(given))
    except ValueError as error:
        raise ConfigError(f"max_gen_toks is {given!r}: give a whole number") from error


def order_batches(
    requests: Sequence[tuple[Sequence[int], Mapping[str, object]]], size: int
) -> Iterator[list[int]]:
    """Which requests to write together: those of the same settings, long contexts first.

    Args:
        requests: Context tokens and generation settings.
        size: Most rows of a batch.

    Yields:
        Places in `requests`; each comes once.
    """
    groups: dict[str, list[int]] = {}
    for place, (_, given) in enumerate(requests):
        groups.setdefault(json.dumps(given, sort_keys=True, default=str), []).append(place)
    for places in groups.values():
        places.sort(key=lambda place: -len(requests[place][0]))
        for begin in range(0, len(places), size):
            yield places[begin : begin + size]
