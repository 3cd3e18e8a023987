"""Fits SPA-Cache to a model: where in depth its tokens drift, and which rank sees it.

Texts are written without a cache. From step to step, each layer's values of the generated tokens
are compared: their mean drift `1 - cosine` says how the budget goes over depth, and how many of the
tokens that drift most by their values are also those by their proxies says which rank is enough.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kvfold.artifacts import json_text, write_whole
from kvfold.diffusion.budget import BudgetCurve, require_share
from kvfold.diffusion.caches import CacheState, DiffusionCache, SpaCache
from kvfold.diffusion.caches.drift import count_of, most_drifted
from kvfold.diffusion.canvas import Canvas, Prompts
from kvfold.diffusion.decoder import Layer
from kvfold.diffusion.flow import Outputs
from kvfold.diffusion.generate import stream
from kvfold.diffusion.model import DiffusionModel, visibility
from kvfold.diffusion.options import as_number
from kvfold.diffusion.samplers import Sampler
from kvfold.errors import ArtifactError, ConfigError

FORMAT = 1
"""Version of the file that `Calibration.save` writes."""
ENOUGH = 0.9
"""Share of the most drifted tokens that a proxy must find for its rank to be enough."""
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured of a model, and what follows from it."""

    drift: tuple[float, ...]
    """Mean `1 - cosine` of values from step to step, by layer."""
    overlap: Mapping[int, float]
    """By rank, the share of the most drifted tokens that the proxies find, mean over layers."""
    curve: BudgetCurve
    """The drift's shape over depth, stretched to a mean share of `ratio`."""
    rank: int
    """The smallest rank measured whose overlap is enough; the largest if none is."""
    ratio: float
    """Mean share of tokens to recompute."""

    def cache(self, **options: object) -> SpaCache:
        """A cache with these settings; options go before them."""
        own = {"curve": self.curve, "rank": self.rank, "ratio": self.ratio}
        return SpaCache(**own | options)  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            ArtifactError: When the file cannot be written.
        """
        text = json_text({"format": FORMAT, **asdict(self)})
        write_whole(Path(path), lambda file: file.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ArtifactError: When the file is missing, damaged or of another version.
        """
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))
            if held["format"] != FORMAT:
                raise ValueError(f"its format is {held['format']}, not {FORMAT}")
            return cls(
                drift=tuple(float(number) for number in held["drift"]),
                overlap={int(rank): float(share) for rank, share in held["overlap"].items()},
                curve=BudgetCurve(**held["curve"]),
                rank=int(held["rank"]),
                ratio=float(held["ratio"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"{path} is no calibration that can be read ({error}): make it again"
            ) from error


def calibrate(
    model: DiffusionModel,
    prompts: Prompts,
    *,
    length: int = 64,
    sampler: str | Sampler | None = None,
    ratio: float = 0.25,
    ranks: Sequence[int] | None = None,
) -> Calibration:
    """Measure drift while texts are written without a cache, and fit a curve and a rank.

    Args:
        model: To be measured.
        prompts: A few, of the kind that will be used.
        length: Tokens to write after each.
        sampler: As `generate` takes it.
        ratio: Mean share of tokens that a layer will recompute.
        ranks: To try; powers of two up to the width of values without it.

    Returns:
        The measurement; `calibration.cache()` is the cache fitted to the model.

    Raises:
        ConfigError: The ratio or a rank cannot be used, or the texts took a single step.

    Example:
        >>> fitted = calibrate(model, prompts, ratio=0.2)
        >>> generate(model, prompts, fitted.cache())
    """
    require_share(ratio, "the ratio")
    tried = sorted(set(ranks or _powers(min(model.shape.value_width, model.shape.hidden))))
    probe = _Probe(ratio, tuple(tried))
    stream(model, prompts, probe, length=length, sampler=sampler).result()
    drift, overlap = probe.measured()
    enough = [rank for rank in tried if overlap[rank] >= ENOUGH]
    return Calibration(
        drift=tuple(drift),
        overlap=overlap,
        curve=fit_curve(drift, ratio),
        rank=enough[0] if enough else tried[-1],
        ratio=ratio,
    )


def fit_curve(drift: Sequence[float], ratio: float) -> BudgetCurve:
    """The curve nearest to a drift over depth, on a logarithmic scale.

    For a peak at a given layer the curve's logarithm is linear in `log peak`, `log first/peak` and
    `log last/peak`: least squares, the last two held at 0 at most. The peak is tried at each layer.

    Args:
        drift: One number a layer.
        ratio: Mean of the shares.

    Raises:
        ConfigError: There is no layer, or a number is negative, NaN or infinite.
    """
    if not drift or not all(0 <= as_number(number) < math.inf for number in drift):
        raise ConfigError(f"the drift is {list(drift)!r}: give one number from 0 up for each layer")
    logs = torch.tensor([max(number, _LEAST) for number in drift], dtype=torch.float64).log()
    depth = torch.linspace(0, 1, len(drift), dtype=torch.float64)
    _, fall, drop, at = min(_fit(logs, depth, float(at)) for at in depth)
    # How high the curve is, the mean says.
    raw = BudgetCurve(math.exp(fall), 1.0, math.exp(drop), at=at)
    shares = raw.shares(len(drift), mean=ratio)
    return BudgetCurve(shares[0], max(shares), shares[-1], at=at)


def _fit(logs: torch.Tensor, depth: torch.Tensor, at: float) -> tuple[float, float, float, float]:
    """Squared error, logs of first and last over peak, and the peak's place, which is given."""
    before = ((depth - at) / max(at, _LEAST)).square() * (depth < at)
    after = ((depth - at) / max(1 - at, _LEAST)).square() * (depth > at)
    fits = []
    # Of the sides that would rise from the peak, one or both are held level.
    for left, right in itertools.product((1.0, 0.0), repeat=2):
        columns = torch.stack([torch.ones_like(depth), before * left, after * right], dim=1)
        found = torch.linalg.pinv(columns) @ logs
        fall, drop = found[1:].clamp(min=math.log(_LEAST)).tolist()
        if max(fall, drop) <= _LEAST:
            error = float((columns @ found - logs).square().sum())
            fits.append((error, min(fall, 0.0), min(drop, 0.0), at))
    return min(fits)


def _powers(width: int) -> list[int]:
    return [2**power for power in range(int(math.log2(width)) + 1)] + [width]


@dataclass(frozen=True)
class _Probe(DiffusionCache):
    """No cache, but a measurement of one generation."""

    summary = "measures drift"

    ratio: float
    ranks: tuple[int, ...]
    states: list[_ProbeState] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "probe"

    def start(self, model: DiffusionModel, canvas: Canvas) -> CacheState:
        self.states.append(_ProbeState(self, model, canvas))
        return self.states[-1]

    def measured(self) -> tuple[list[float], dict[int, float]]:
        """Mean drift by layer and mean overlap by rank."""
        state = self.states[-1]
        if not state.count:
            raise ConfigError("the texts took a single step: give more tokens or steps to measure")
        layers = len(state.drift)
        overlap = {rank: total / state.count / layers for rank, total in state.overlap.items()}
        return [total / state.count for total in state.drift], overlap


class _ProbeState(CacheState):
    """Sums over rows and steps."""

    def __init__(self, probe: _Probe, model: DiffusionModel, canvas: Canvas) -> None:
        super().__init__(model)
        self._start = canvas.prompt
        self._kept = count_of(probe.ratio, canvas.width - canvas.prompt)
        self._proxies = {rank: model.proxies(rank) for rank in probe.ranks}
        self._before: list[torch.Tensor] = []
        self.drift = [0.0] * model.shape.layers
        self.overlap = dict.fromkeys(probe.ranks, 0.0)
        self.count = 0

    @property
    def nbytes(self) -> int:
        return sum(normed.nbytes for normed in self._before)

    def keep(self, rows: torch.Tensor) -> None:
        self._before = [normed[rows] for normed in self._before]

    def step(self, canvas: Canvas) -> Outputs:
        decoder = self.model.decoder
        hidden, angles = decoder.embedding(canvas.ids), decoder.angles(canvas.positions)
        visible = visibility(self.model.traits, canvas.valid, canvas.positions, canvas.positions)
        inputs = []
        for index, layer in enumerate(decoder.blocks):
            inputs.append(layer.attention_norm(hidden)[:, self._start :])
            if self._before:
                self._compare(index, layer, inputs[-1], self._before[index])
            hidden = layer(hidden, angles, visible)
        self.count += len(hidden) if self._before else 0
        self._before = inputs
        return Outputs(hidden)

    def _compare(self, index: int, layer: Layer, now: torch.Tensor, before: torch.Tensor) -> None:
        new, old = layer.value(now).float(), layer.value(before).float()
        cosines = torch.nn.functional.cosine_similarity(new, old, dim=-1)
        self.drift[index] += float((1 - cosines).clamp_min(0).mean(dim=1).sum())
        wanted = _marked(most_drifted(new, old, self._kept), now.shape[1])
        for rank, proxies in self._proxies.items():
            chosen = most_drifted(proxies[index](now), proxies[index](before), self._kept)
            shared = (wanted & _marked(chosen, now.shape[1])).sum()
            self.overlap[rank] += float(shared) / self._kept


def _marked(chosen: torch.Tensor, tokens: int) -> torch.Tensor:
    """Indices `[B, K]` as a mask `[B, F]`."""
    mask = torch.zeros(len(chosen), tokens, dtype=torch.bool, device=chosen.device)
    return mask.scatter(1, chosen, value=True)
