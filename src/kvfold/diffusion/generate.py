"""Writes texts: evaluates the model, decides places, lets finished rows go, until none is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvfold.diffusion.caches import CacheState, DiffusionCache, make_cache
from kvfold.diffusion.canvas import Canvas, Prompts, blank_canvas
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.parts import part
from kvfold.diffusion.samplers import SAMPLERS, RowNoise, Sampler
from kvfold.diffusion.work import DiffusionReport


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The generated places after a step."""

    step: int
    """Steps taken."""
    ids: torch.Tensor
    """`[B, G]` of all prompts, the mask token where nothing is decided."""
    changed: torch.Tensor
    """Whether a place was decided in this step, `[B, G]`."""


Watch = Callable[[Canvas, torch.Tensor, torch.Tensor], None]
"""Shown the canvas before a step's decisions, the logits `[W, V]` of its wanted places, and which
places are decided, `[B, N]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What was written, and what it took."""

    tokens: list[list[int]]
    """Of each prompt, up to the first token that ends a text and with it."""
    ids: torch.Tensor
    """`[B, G]`; what follows the end of a text is that ending token again."""
    report: DiffusionReport
    """Steps, tokens computed, bytes held."""


def generate(
    model: DiffusionModel,
    prompts: Prompts,
    cache: str | DiffusionCache = "spa",
    *,
    length: int = 128,
    sampler: str | Sampler | None = None,
    generator: torch.Generator | None = None,
) -> Generation:
    """Write a text after each prompt.

    A row's text does not depend on its neighbours: it is what the row gives alone, drawn at random
    or not, up to the rounding of sums over other shapes.

    Args:
        model: From `DiffusionModel.from_pretrained`.
        prompts: Token ids, of any lengths; or `[B, P]`.
        cache: A name in `CACHES` or a cache with options, such as `SpaCache(ratio=0.2)`.
        length: Tokens to generate, G.
        sampler: A name in `SAMPLERS` or a sampler with options, such as
            `LLaDASampler(block_length=32, threshold=0.9)`; the model's own without it.
        generator: On the CPU, of what is drawn at random; seed 0 without it.

    Returns:
        The texts and a report.

    Raises:
        ConfigError: An option, prompt or length that cannot be used.

    Example:
        >>> model = DiffusionModel.from_pretrained("GSAI-ML/LLaDA-8B-Instruct", dtype="bfloat16")
        >>> found = generate(model, [[3, 4, 5]], SpaCache(ratio=0.25), length=64)
        >>> print(found.report)
    """
    writing = stream(model, prompts, cache, length=length, sampler=sampler, generator=generator)
    for _ in writing:
        pass
    return writing.result()


def stream(
    model: DiffusionModel,
    prompts: Prompts,
    cache: str | DiffusionCache = "spa",
    *,
    length: int = 128,
    sampler: str | Sampler | None = None,
    generator: torch.Generator | None = None,
) -> Writing:
    """The same step by step: iterate over the frames, then ask for the `result()`.

    Example:
        >>> writing = stream(model, [[3, 4, 5]], "dual", length=64)
        >>> for frame in writing:
        ...     show(frame.ids, frame.changed)
        >>> writing.result().tokens
    """
    chosen = sampler if sampler is not None else model.traits.sampler
    made = SAMPLERS[chosen]() if isinstance(chosen, str) else chosen
    canvas = blank_canvas(model, prompts, length)
    made.check(length)
    noise = RowNoise(len(canvas.ids), model.device, generator)
    return Writing(model, canvas, make_cache(cache), made, noise)


class Writing:
    """One generation, which goes on as it is iterated over."""

    def __init__(
        self,
        model: DiffusionModel,
        canvas: Canvas,
        cache: DiffusionCache,
        sampler: Sampler,
        noise: RowNoise,
        watch: Watch | None = None,
    ) -> None:
        """Set up; nothing is computed yet.

        Args:
            model: Whose layers run.
            canvas: Blank.
            cache: The description.
            sampler: Likewise.
            noise: Of the canvas's rows.
            watch: Shown every step.
        """
        self._watch = watch
        self._model, self._canvas, self._sampler, self._noise = model, canvas, sampler, noise
        self._cache = cache
        self._state = cache.start(model, seen_by(model, sampler, canvas))
        self._rows = len(canvas.ids)
        self._ids = canvas.generated(canvas.ids).clone()
        self._bytes = self._state.nbytes

    @property
    def done(self) -> bool:
        """Whether every row is finished."""
        return not len(self._canvas.ids)

    def __iter__(self) -> Iterator[Frame]:
        """A frame after each step."""
        while not self.done:
            with torch.no_grad():
                changed = self._step()
            yield Frame(self._canvas.step, self._ids.clone(), changed)

    def result(self) -> Generation:
        """What was written; what is still undecided is written first."""
        for _ in self:
            pass
        tokens = [self._until_end(row) for row in self._ids.tolist()]
        work = self._state.work
        report = DiffusionReport(
            cache=self._cache.name,
            rows=self._rows,
            steps=work.steps,
            tokens=sum(map(len, tokens)),
            logits=work.logits,
            dense=work.dense,
            queries=tuple(work.queries),
            keys=tuple(work.keys),
            bytes_held=self._bytes,
        )
        return Generation(tokens, self._ids.clone(), report)

    def _step(self) -> torch.Tensor:
        """Evaluate, decide, let go; where something was decided, `[B, G]` of all prompts."""
        canvas = self._canvas
        self._sampler.aim(canvas)
        seen = seen_by(self._model, self._sampler, canvas)
        counts = canvas.wanted.sum(dim=1).tolist()
        logits = evaluate(self._model, self._sampler, canvas, seen, self._state)
        with part("sampling"):
            proposed, sure = self._sampler.propose(logits, counts, self._noise)
        tokens = canvas.ids.masked_scatter(canvas.wanted, proposed)
        confidence = torch.full(canvas.ids.shape, -torch.inf, device=sure.device, dtype=sure.dtype)
        confidence = canvas.generated(confidence.masked_scatter(canvas.wanted, sure))
        chosen = torch.zeros_like(canvas.wanted)
        chosen[:, canvas.prompt :] = self._sampler.choose(confidence, canvas, self._noise)
        if self._watch is not None:
            self._watch(canvas, logits, chosen)
        canvas.decide(tokens, chosen)
        self._bytes = max(self._bytes, self._state.nbytes)
        return self._publish()

    def _publish(self) -> torch.Tensor:
        """Copy what was decided, end the rows that are finished, and go on with the others."""
        canvas = self._canvas
        done, first, ends = self._finished()
        columns = torch.arange(canvas.width - canvas.prompt, device=canvas.ids.device)
        written = canvas.generated(canvas.ids)
        beyond = (done[:, None] & (columns > first[:, None])) & ends[:, None].ge(0)
        self._ids[canvas.numbers] = torch.where(beyond, ends[:, None], written)
        changed = torch.zeros_like(self._ids, dtype=torch.bool)
        changed[canvas.numbers] = canvas.generated(canvas.changed)
        if bool(done.any()):
            self._keep((~done).nonzero()[:, 0])
        return changed

    def _keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone."""
        twice = torch.cat([rows, rows + len(self._canvas.ids)])
        self._state.keep(twice if self._sampler.guidance else rows)
        self._canvas.keep(rows)
        self._noise.keep(rows)

    def _finished(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which rows are finished, where each one's text ends and by which token; -1 for none."""
        canvas = self._canvas
        masked, ids = canvas.generated(canvas.masked), canvas.generated(canvas.ids)
        length = ids.shape[1]
        ending = torch.zeros_like(masked)
        if self._sampler.stop_at_eos and self._model.traits.eos_ids:
            known = torch.tensor(sorted(self._model.traits.eos_ids), device=ids.device)
            ending = torch.isin(ids, known) & ~masked
        columns = torch.arange(length, device=ids.device)
        first = columns.where(ending, length).amin(dim=1)
        undecided = columns.where(masked, length).amin(dim=1)
        done = undecided >= first
        by = ids.gather(1, first.clamp_max(length - 1)[:, None])[:, 0]
        return done, first, by.where(first < length, -1)

    def _until_end(self, row: list[int]) -> list[int]:
        ends = self._model.traits.eos_ids if self._sampler.stop_at_eos else frozenset[int]()
        first = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        return row[: first + 1]


def seen_by(model: DiffusionModel, sampler: Sampler, canvas: Canvas) -> Canvas:
    """What the model is shown: under guidance every row twice."""
    return canvas.with_blank(model.traits.mask_id) if sampler.guidance else canvas


def evaluate(
    model: DiffusionModel, sampler: Sampler, canvas: Canvas, seen: Canvas, state: CacheState
) -> torch.Tensor:
    """One step of a cache: logits `[W, V]` of the wanted places, without what may not be emitted.

    Args:
        model: Whose layers run.
        sampler: Whose guidance counts.
        canvas: With the wanted places set.
        seen: What the model is shown of it.
        state: Of the cache; it goes on by a step.
    """
    outputs = state.step(seen)
    rows, columns = canvas.wanted.nonzero(as_tuple=True)
    sources = columns - model.traits.shift
    logits = model.decoder.logits(outputs.at(rows, sources)).float()
    if scale := sampler.guidance:
        others = outputs.at(rows + len(canvas.ids), sources)
        without = model.decoder.logits(others).float()
        logits = without + (scale + 1) * (logits - without)
    state.work.steps += 1
    state.work.dense += seen.ids.numel()
    state.work.logits += len(logits) * (2 if scale else 1)
    logits[:, model.traits.never] = -torch.inf
    return logits
