"""How faithful methods are to the full cache on held-out samples, eviction while decoding included.

A batch of prompts is read by the full cache once. What follows, a text's continuation or the full
cache's own answer, is then forced into each method's cache a token at a time, so that it evicts at
every step, and its next-token distributions are compared. The one after the prompt itself is left
out: it is computed while the prompt is still whole. Tasks are answered by each method, too.

By protocol `aware` the question is in the prompt that a cache is cut after; by `agnostic` the cache
is cut before, and reads the question and the answer's opening later, as a chat's next turn. What is
compared is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.api import make_cache
from kvfold.bench.memory import peak_resident
from kvfold.cache import KVCache
from kvfold.evaluation.fidelity_batch import BatchRunner, Found, Reference
from kvfold.evaluation.fidelity_found import Fidelity, Subject
from kvfold.evaluation.fidelity_rows import Row, RowStore, key_of
from kvfold.evaluation.fidelity_settings import EVERYTHING, FULL, FidelitySettings, MethodSpec
from kvfold.evaluation.prompt import require_positions
from kvfold.evaluation.sample import Sample
from kvfold.evaluation.samples import SETS, VERSION, draw_samples
from kvfold.evaluation.verdict import NO_VERDICT, judge_answer
from kvfold.evict.layer import EvictingLayer
from kvfold.models import fingerprint

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of all that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which batches one process does: every so many, from one of the first on."""

    index: int = 0
    """Of the first."""
    count: int = 1
    """Processes that share the batches."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A method at a budget."""

    spec: MethodSpec
    budget: str
    empty: KVCache
    """Forked for each batch, so that a policy is read and its concerns are told once."""
    policy: str | None
    """Hash of a learned policy's weights."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Samples that are run together.

    They are of one set and length. Where questions are read later, these have one length, too, so
    that nothing has to be padded between a prompt and its question.
    """

    name: str
    """What it is called in progress."""
    length: int
    """That the samples were made for."""
    samples: list[Sample]
    """One at least."""


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: FidelitySettings | None = None,
    *,
    folder: str | Path,
    resume: bool = False,
    name: str = "model",
    command: str = "kvfold.evaluation.fidelity.evaluate",
    on_progress: Progress | None = None,
) -> Fidelity:
    """Judge methods by what the full cache says.

    Args:
        model: A model from `kvfold.load`, or one that is attached.
        tokenizer: Its tokenizer.
        settings: Methods, budgets, samples.
        folder: Where the rows are written as they come; made if missing.
        resume: Take the rows that are there and belong to the same configuration.
        name: What the model was loaded by, for the record.
        command: What makes this result again, for the record.
        on_progress: Told about each stage.

    Returns:
        What was found.

    Raises:
        ConfigError: For methods, budgets or samples that cannot be had, prompts longer than the
            model, and a folder with results that are not to be gone on with.
        ArtifactError: When rows cannot be read or written.

    Example:
        >>> settings = FidelitySettings(sets=("prose",), samples=4)
        >>> evaluate(model, tokenizer, settings, folder="out").rows[0].method
        'full'
    """
    settings = settings or FidelitySettings()
    store = RowStore(Path(folder), Row.from_dict, resume=resume)
    judge = _Judge(model, tokenizer, settings, store)
    peak = peak_resident() if judge.judge(on_progress, Part()) else None
    return Fidelity(command, judge.subject(name), settings, tuple(judge.rows()), process_peak=peak)


def evaluate_part(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: FidelitySettings,
    *,
    folder: str | Path,
    part: Part,
    on_progress: Progress | None = None,
) -> None:
    """Do a part of an evaluation, beside processes that do the others, and leave its rows.

    When all parts are done, `evaluate` with `resume` gives what was found.

    Args:
        model: An attached model, the same in all processes.
        tokenizer: Its tokenizer.
        settings: Methods, budgets, samples, the same in all processes.
        folder: Where the rows of all processes are; those that are there are taken.
        part: What this process does.
        on_progress: Told about each stage.

    Raises:
        ConfigError: For methods, budgets or samples that cannot be had.
        ArtifactError: When rows cannot be read or written.
    """
    store = RowStore(Path(folder), Row.from_dict, resume=True)
    _Judge(model, tokenizer, settings, store).judge(on_progress, part)


class _Judge:
    """Runs every method on every batch of samples."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: FidelitySettings,
        store: RowStore,
    ) -> None:
        _require_positions(model, settings)
        self._model, self._tokenizer = model, tokenizer
        self._settings, self._store = settings, store
        self._runner = BatchRunner(model, tokenizer, protocol=settings.protocol)
        self._identity = fingerprint(model)
        pairs = ((MethodSpec(FULL, FULL), EVERYTHING), *settings.pairs)
        self._runs = [_prepare(model, spec, budget) for spec, budget in pairs]
        self._samples = draw_all(tokenizer, settings)

    def subject(self, name: str) -> Subject:
        """The record of what is judged."""
        return Subject(
            model=name,
            fingerprint=self._identity,
            dtype=str(self._model.dtype).removeprefix("torch."),
            device=str(self._model.device),
            samples=digests(self._settings, self._samples),
            policies={run.spec.label: run.policy for run in self._runs if run.policy is not None},
        )

    def judge(self, on_progress: Progress | None, part: Part) -> bool:
        """Leave the rows of a part of all batches, and say whether any had to be computed."""
        batches = list(self._batches())[part.index :: part.count]
        computed = False
        for number, batch in enumerate(batches):
            for stage, share in self._judge_batch(batch):
                computed = True
                if on_progress is not None:
                    on_progress(stage, (number + share) / len(batches))
        return computed

    def rows(self) -> Iterator[Row]:
        """All rows, by method and budget, the full cache's first; they have been left."""
        batches = list(self._batches())
        for run in self._runs:
            for batch in batches:
                for sample in batch.samples:
                    row = self._store.find(self._key(run, sample, batch.length))
                    assert row is not None, "every batch has left its rows"
                    yield self._told(row, run, sample, batch)

    def _told(self, row: Row, run: _Run, sample: Sample, batch: _Batch) -> Row:
        """A row as this evaluation calls it, which may be another's that has the same numbers."""
        return replace(
            row,
            method=run.spec.label,
            length=batch.length,
            depth=sample.depth,
            protocol=self._settings.protocol,
        )

    def _batches(self) -> Iterator[_Batch]:
        for (name, length), samples in self._samples.items():
            size = self._settings.batch_at(length)
            for alike in self._alike(samples):
                for start in range(0, len(alike), size):
                    own = alike[start : start + size]
                    title = f"{_title(self._settings, name, length)} {_numbers(own)}"
                    yield _Batch(title, length, own)

    def _alike(self, samples: list[Sample]) -> list[list[Sample]]:
        """Samples that may be run together, in order."""
        if self._settings.protocol == "aware":
            return [samples]
        found: dict[int, list[Sample]] = {}
        for sample in samples:
            found.setdefault(sample.question, []).append(sample)
        return list(found.values())

    def _judge_batch(self, batch: _Batch) -> Iterator[tuple[str, float]]:
        """Run what has no rows yet, saying before each run which it is and what is done."""
        missing = [
            run
            for run in self._runs
            if any(self._find(run, sample, batch) is None for sample in batch.samples)
        ]
        if not missing:
            return
        full, *others = self._runs
        yield f"{batch.name}: {full.spec.label}", 0.0
        name = batch.samples[0].set
        limit = self._settings.answer_tokens(name)
        reference = self._runner.refer(batch.samples, limit=limit, until=SETS[name].stop)
        self._keep(full, batch, Found.of_full(reference), reference)
        for run in (run for run in others if run in missing):
            yield (
                f"{batch.name}: {run.spec.label} at {run.budget}",
                self._runs.index(run) / len(self._runs),
            )
            found = self._runner.compare(run.empty.fork(), reference)
            self._keep(run, batch, found, reference)

    def _find(self, run: _Run, sample: Sample, batch: _Batch) -> Row | None:
        return self._store.find(self._key(run, sample, batch.length))

    def _keep(self, run: _Run, batch: _Batch, found: Found, reference: Reference) -> None:
        """Write the rows of one run."""
        self._store.add(
            self._row(run, batch, found, reference, number) for number in range(len(batch.samples))
        )

    def _row(
        self, run: _Run, batch: _Batch, found: Found, reference: Reference, number: int
    ) -> Row:
        sample, report = batch.samples[number], found.report
        answer = found.answers[number] if found.answers else None
        expected = reference.answers[number] if reference.answers else None
        verdict = NO_VERDICT
        if answer is not None and expected is not None:
            verdict = judge_answer(
                self._tokenizer,
                sample.set,
                sample.expected,
                answer,
                full_is_cut=expected.is_cut,
                classes=sample.classes,
            )
        return Row(
            key=self._key(run, sample, batch.length),
            set=sample.set,
            kind=sample.kind,
            index=sample.index,
            length=batch.length,
            depth=sample.depth,
            protocol=self._settings.protocol,
            method=run.spec.label,
            budget=run.budget,
            prompt_tokens=len(sample.prompt),
            left_out=sample.left_out,
            divergences=found.divergences[number],
            agreements=found.agreements[number],
            nll=found.nll[number],
            **asdict(verdict),
            tokens_kept=round(fmean(report.tokens_kept)),
            bytes_held=(report.bytes_fast + report.bytes_slow) // report.rows,
            bytes_fast=report.bytes_fast // report.rows,
            bytes_full=report.bytes_full // report.rows,
            batch_rows=found.metered.rows,
            first_token_seconds=found.metered.first_token_seconds,
            tokens_per_second=found.metered.tokens_per_second,
            bytes_peak=found.metered.bytes_peak,
        )

    def _key(self, run: _Run, sample: Sample, length: int) -> str:
        """Hash of all that the numbers depend on; the label is not among it."""
        late = self._settings.protocol == "agnostic" and sample.question > 0
        return key_of(
            ({"question": sample.question} if late else {})
            | {
                "version": VERSION,
                "model": self._identity,
                "dtype": str(self._model.dtype),
                "device": self._model.device.type,
                "method": run.spec.method,
                "options": run.spec.options,
                "policy": run.policy,
                "budget": run.budget,
                "sample": sample.facts(),
                "length": length,
                "seed": self._settings.seed,
                "max_new_tokens": self._settings.answer_tokens(sample.set),
            }
        )


def draw_all(
    tokenizer: PreTrainedTokenizerBase, settings: FidelitySettings
) -> dict[tuple[str, int], list[Sample]]:
    """The samples of an evaluation, by set and length.

    Args:
        tokenizer: Of the model.
        settings: What is asked.

    Raises:
        ConfigError: When they cannot be had.
    """
    return {
        (name, length): draw_samples(
            tokenizer,
            name,
            settings.samples,
            length=settings.prompt_length(name, length),
            tokens=settings.tokens,
            seed=settings.seed,
            depths=settings.depths,
        )
        for name in settings.sets
        for length in settings.lengths
    }


def digests(
    settings: FidelitySettings, samples: Mapping[tuple[str, int], Sequence[Sample]]
) -> dict[str, str]:
    """By set, and length where there are several, the hash of its samples."""
    return {
        _title(settings, *each): key_of({"samples": [sample.facts() for sample in found]})
        for each, found in samples.items()
    }


def _title(settings: FidelitySettings, name: str, length: int) -> str:
    """What the samples of a set and a length are called."""
    return name if len(settings.lengths) == 1 else f"{name} at {length}"


def _numbers(samples: Sequence[Sample]) -> str:
    """Which samples of a set these are, from 1."""
    first, last = samples[0].index + 1, samples[-1].index + 1
    if last - first == len(samples) - 1:
        return f"{first} to {last}"
    return ", ".join(str(sample.index + 1) for sample in samples)


def _require_positions(model: PreTrainedModel, settings: FidelitySettings) -> None:
    """Refuse prompts that the model has no positions for, with what follows them."""
    for length in settings.lengths:
        for name in settings.sets:
            prompt, more = settings.prompt_length(name, length), settings.tokens_after(name)
            require_positions(model, prompt, more, "give a smaller length, or fewer new tokens")


def _prepare(model: PreTrainedModel, spec: MethodSpec, budget: str) -> _Run:
    cache = make_cache(model, spec.method, budget=budget, **spec.options)
    return _Run(spec, budget, cache, _policy_hash(cache))


def _policy_hash(cache: KVCache) -> str | None:
    """Hash of the weights of a learned policy, or gates; None where nothing was learnt."""
    layers = [part for part in cache.parts if isinstance(part, EvictingLayer)]
    artifact = getattr(layers[0].eviction.policy, "artifact", None) if layers else None
    if artifact is not None:
        return artifact.digest()
    digest = cache.spec.options.get("digest")
    return digest if isinstance(digest, str) else None
