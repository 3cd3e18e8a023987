"""Public benchmarks with their own prompts, limits and scores, from `benchmarks.json`.

The table has for each benchmark where its rows are, and for each of its tasks the prompt, the most
tokens of an answer, the score (see `kvfold.evaluation.scores`), whether the prompt goes into the
model's chat template, and strings that end an answer. All of it is as the benchmark has it:

| name | source |
|---|---|
| `longbench/...` | LongBench (arXiv 2308.14508), github.com/THUDM/LongBench |
| `infinitebench/...` | InfiniteBench (arXiv 2402.13718), github.com/OpenBMB/InfiniteBench |
| `ruler/...` | RULER (arXiv 2404.06654), github.com/NVIDIA/RULER |
| `bbh/...` | BIG-Bench Hard (arXiv 2210.09261), github.com/suzgunmirac/BIG-Bench-Hard |
| `gsm8k/...` | GSM8K (arXiv 2110.14168), github.com/openai/grade-school-math |
| `hotpotqa/...`, `cmrc2018/...` | scores as published; they have no prompts, and take LongBench's |

A prompt that is too long loses its middle, as LongBench's do. Departures: it is cut before it is
put into the chat template, so that all of it has the length asked for; an answer that ends at a
string may begin with it, and goes on then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kvfold.errors import ConfigError
from kvfold.evaluation.prompt import Prompt, frame
from kvfold.evaluation.public_data import (
    EXEMPLARS,
    GSM8K,
    HOTPOTQA,
    Source,
    problem_of,
    rows_of,
)
from kvfold.evaluation.sample import Sample, Wanted, task
from kvfold.text import encode

Row = Mapping[str, Any]
"""One line of a data set."""


@dataclass(frozen=True, slots=True)
class Item:
    """What one row comes to."""

    context: str
    """What is read, and may be cut."""
    expected: Sequence[str]
    """Right answers, or all that a right one has."""
    values: Row
    """What else stands in the prompt, by the names that it has there."""
    classes: Sequence[str] = ()
    """Classes that an answer chooses from, where there are some."""
    opening: str = ""
    """With what the answer begins, put into the model's mouth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a benchmark."""

    benchmark: str
    """That it belongs to."""
    sources: tuple[Source, ...]
    """Where its rows are."""
    prompt: str
    """With `{context}` and other names of a row's fields in it."""
    new_tokens: int
    """Most tokens of an answer."""
    metric: str
    """Name of its score."""
    chat: bool = True
    """Whether the prompt goes into the model's chat template, where it has one."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    question: str = ""
    """Where rows have the whole prompt: a pattern with which its question begins."""
    fields: str = ""
    """A pattern whose named groups, found in a row's input, stand in the prompt."""
    shots: int = 0
    """Worked examples to show, of a benchmark that leaves their number open."""

    def parts(self, item: Item) -> tuple[str, str]:
        """A prompt up to the end of what is read, and from there on."""
        before, _, after = self.prompt.partition("{context}")
        return before.format_map(item.values) + item.context, after.format_map(item.values)


def draw_task(name: str, task_: Task, wanted: Wanted) -> Iterator[Sample]:
    """Rows of a task as samples; only those whose question fits.

    Args:
        name: Of the set.
        task_: What is asked.
        wanted: What they are made for.

    Yields:
        Samples in an order that the seed gives.

    Raises:
        ConfigError: When the rows cannot be had or read.
    """
    items = _items(task_)
    wanted.generator(name).shuffle(items)
    index = 0
    for item in items:
        text, after = task_.parts(item)
        head, tail = frame(wanted.tokenizer, after, chat=task_.chat)
        question = encode(wanted.tokenizer, tail + item.opening)
        body = encode(wanted.tokenizer, text)
        kept = cut_middle(body, len(question), wanted.length - len(head))
        if kept is None:
            continue
        yield task(
            name,
            index,
            Prompt([*head, *kept], question),
            tuple(item.expected),
            classes=tuple(item.classes),
            left_out=len(body) - len(kept),
        )
        index += 1


def cut_middle(body: Sequence[int], question: int, room: int) -> list[int] | None:
    """What is left of a text that goes before a question, when the middle of both is cut.

    Args:
        body: The text.
        question: Tokens of the question, all of which are kept.
        room: Tokens that both may have.

    Returns:
        The first half of the room and the rest of the last one; None where there is no room for
        the question and one token.
    """
    if question >= room:
        return None
    if len(body) + question <= room:
        return list(body)
    last = max(room // 2 - question, 0)
    first = min(room // 2, room - question)
    return [*body[:first], *body[len(body) - last :]]


def _items(task_: Task) -> list[Item]:
    try:
        rows = [rows_of(source) for source in task_.sources]
        return list(_READERS[task_.benchmark](task_, *rows))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"a row of {task_.sources[0].file} is not as {task_.benchmark} has it "
            f"({type(error).__name__}: {error}): fetch the file again"
        ) from error


def _longbench(task_: Task, rows: Iterable[Row]) -> Iterator[Item]:
    for row in rows:
        yield Item(row["context"], row["answers"], row, row["all_classes"] or ())


def _infinitebench(task_: Task, rows: Iterable[Row]) -> Iterator[Item]:
    """Of four options the right one's letter is right, too; answers may be numbers."""
    for row in rows:
        answer, options = row["answer"], row.get("options") or ()
        if isinstance(answer, list) and answer and isinstance(answer[0], list):
            (answer,) = answer
        expected = list(map(str, answer)) if isinstance(answer, list) else [str(answer)]
        if options and len(expected) == 1:
            expected.append("ABCD"[list(options).index(expected[0])])
        yield Item(row["context"], expected, {**row, **_named(task_.fields, row["input"])})


def _named(pattern: str, text: str) -> dict[str, str]:
    """What the named groups of a pattern find."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{text!r} has nothing like {pattern}")
    return found.groupdict()


def _ruler(task_: Task, rows: Iterable[Row]) -> Iterator[Item]:
    """Rows have the whole prompt, whose question comes last, and how the answer begins."""
    for row in rows:
        text = row["input"]
        *_, begin = (found.start() for found in re.finditer(task_.question, text))
        values = {"input": text[begin:]}
        yield Item(text[:begin], row["outputs"], values, opening=row.get("answer_prefix", ""))


def _bbh(task_: Task, rows: Iterable[Row], shown: Sequence[Row]) -> Iterator[Item]:
    """Worked examples stand in a file of their own, after a line that is not shown."""
    examples = shown[0]["text"].partition("-----\n")[2].strip()
    for row in rows:
        yield Item(examples, [row["target"]], row)


def _cmrc2018(task_: Task, rows: Iterable[Row]) -> Iterator[Item]:
    for paragraph in (each for row in rows for each in row["paragraphs"]):
        for row in paragraph["qas"]:
            expected = [answer["text"] for answer in row["answers"]]
            yield Item(paragraph["context"], expected, {"input": row["question"]})


def _hotpotqa(task_: Task, rows: Iterable[Row]) -> Iterator[Item]:
    """Ten paragraphs, told as LongBench does."""
    for row in rows:
        titles, told = row["context"]["title"], row["context"]["sentences"]
        passages = [
            f"Passage {number}:\n{title}\n{''.join(sentences)}"
            for number, (title, sentences) in enumerate(zip(titles, told, strict=True), start=1)
        ]
        yield Item("\n\n".join(passages), [row["answer"]], {"input": row["question"]})


def _gsm8k(task_: Task, rows: Iterable[Row]) -> Iterator[Item]:
    """Worked problems, the same before every question, are among those that are never asked."""
    every = list(map(problem_of, rows))
    examples = "\n\n".join(
        f"Question: {shown.question}\nAnswer: {shown.worked}\n#### {shown.result}"
        for shown in every[-EXEMPLARS:][: task_.shots]
    )
    for problem in every[:-EXEMPLARS]:
        yield Item(examples, [problem.result], {"input": problem.question})


_READERS: dict[str, Callable[..., Iterator[Item]]] = {
    "longbench": _longbench,
    "infinitebench": _infinitebench,
    "ruler": _ruler,
    "bbh": _bbh,
    "cmrc2018": _cmrc2018,
    "hotpotqa": _hotpotqa,
    "gsm8k": _gsm8k,
}
"""From a task and the rows of each of its sources to items, by benchmark."""


_SHARED = {each.file: each for each in (GSM8K, HOTPOTQA)}
"""Files that other sets are made from, too."""


def _source(name: str, known: Mapping[str, str]) -> Source:
    """A source as the table has it, for one task."""
    if known["file"] in _SHARED:
        return _SHARED[known["file"]]
    values = {key: value.replace("{task}", name) for key, value in known.items()}
    file, url = values["file"], values.get("url")
    options: dict[str, str] = {} if url is None else {"data_files": url}
    if "field" in values:
        options["field"] = values["field"]
    if file.endswith(".txt"):
        options["sample_by"] = "document"
    library = "text" if file.endswith(".txt") else "json"
    advice = values.get("get", f"from {url}")
    return Source(file, None if url is None else library, options=options, advice=advice)


def _read() -> dict[str, Task]:
    table = json.loads(files("kvfold.evaluation").joinpath("benchmarks.json").read_text("utf-8"))
    return {
        f"{benchmark}/{name}": Task(
            benchmark=benchmark,
            sources=tuple(_source(name, each) for each in known["sources"]),
            **{**values, "stop": tuple(values.get("stop", ()))},
        )
        for benchmark, known in table.items()
        for names, values in known["tasks"].items()
        for name in names.split()
    }


TASKS = _read()
"""Every task by its name, `benchmark/task`."""
