"""A calibration measures what it says, and fits a curve that is there to be found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from kvfold.diffusion import (
    BudgetCurve,
    Calibration,
    DiffusionModel,
    LLaDASampler,
    SpaCache,
    calibrate,
    fit_curve,
    generate,
    stream,
)
from kvfold.errors import ArtifactError, ConfigError
from tests.diffusion.checkpoints import LAYERS, prompts_of, tiny_diffusion

SAMPLER = LLaDASampler(steps=6, stop_at_eos=False)


@pytest.mark.parametrize(
    "curve",
    [
        BudgetCurve(0.03, 0.25, 0.13, at=0.75),
        BudgetCurve(0.1, 0.3, 0.05, at=0.25),
        BudgetCurve(0.3, 0.3, 0.1, at=0.0),
        BudgetCurve(0.1, 0.3, 0.3, at=1.0),
        BudgetCurve(0.2, 0.2, 0.2, at=0.0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_a_drift_with_a_curve_s_shape_gives_the_curve(curve: BudgetCurve, scale: float) -> None:
    shares = curve.shares(17)
    found = fit_curve([share * scale for share in shares], sum(shares) / 17)
    for one, other in zip(found.shares(17), shares, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_valley_is_fitted_by_a_level_or_falling_side() -> None:
    found = fit_curve([0.4, 0.2, 0.1, 0.2, 0.3], 0.25)
    shares = found.shares(5)
    assert max(shares) == found.peak
    assert sum(shares) / 5 == pytest.approx(0.25, abs=1e-6)
    assert shares == sorted(shares, reverse=True)


def test_drift_is_what_values_do_between_steps() -> None:
    model, prompts = tiny_diffusion("dream"), prompts_of(5, 8)
    fitted = calibrate(model, prompts, length=10, sampler=SAMPLER, ratio=0.3)
    frames = [frame.ids for frame in stream(model, prompts, "none", length=10, sampler=SAMPLER)]
    blank = torch.full_like(frames[0], model.traits.mask_id)
    sums, count = [0.0] * LAYERS, 0
    for row, prompt in enumerate(prompts):
        before = None
        for ids in [blank, *frames[:-1]]:
            values = values_of(model, [*prompt, *ids[row].tolist()], len(prompt))
            if before is not None:
                count += 1
                for layer, (new, old) in enumerate(zip(values, before, strict=True)):
                    cosines = torch.nn.functional.cosine_similarity(new, old, dim=-1)
                    sums[layer] += float((1 - cosines).mean())
            before = values
    assert fitted.drift == pytest.approx([total / count for total in sums], rel=1e-3, abs=1e-6)
    assert fitted.overlap[model.shape.value_width] == pytest.approx(1.0, abs=0.02)
    assert sorted(fitted.overlap) == [1, 2, 4, 8, 16]
    assert all(0 < share <= 1 for share in fitted.overlap.values())
    enough = [rank for rank, share in sorted(fitted.overlap.items()) if share >= 0.9]
    assert fitted.rank == enough[0]


def values_of(model: DiffusionModel, ids: list[int], start: int) -> list[torch.Tensor]:
    """Each layer's values of the generated tokens in the dense forward, by hooks."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.value.register_forward_hook(lambda module, given, output: found.append(output))
        for layer in model.decoder.blocks
    ]
    model.logits(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return [values[0, start:] for values in found]


def test_a_calibration_makes_a_cache_and_survives_a_file(tmp_path: Path) -> None:
    model, prompts = tiny_diffusion("llada"), prompts_of(5)
    fitted = calibrate(model, prompts, length=10, sampler=SAMPLER, ratio=0.3, ranks=[4, 8])
    cache = fitted.cache(refresh=9)
    assert cache == SpaCache(0.3, fitted.curve, fitted.rank, refresh=9)
    assert sum(cache.shares(LAYERS)) / LAYERS == pytest.approx(0.3, abs=1e-6)
    assert generate(model, prompts, cache, length=10, sampler=SAMPLER).report.share < 1
    fitted.save(tmp_path / "fit.json")
    assert Calibration.load(tmp_path / "fit.json") == fitted


def test_what_cannot_be_measured_is_refused() -> None:
    model, prompts = tiny_diffusion("llada"), prompts_of(5)
    with pytest.raises(ConfigError, match="ratio is 0"):
        calibrate(model, prompts, ratio=0)
    with pytest.raises(ConfigError, match="rank is 99"):
        calibrate(model, prompts, ranks=[99])
    with pytest.raises(ConfigError, match="single step"):
        calibrate(model, prompts, length=4, sampler=LLaDASampler(steps=1))
    for drift in ([], [0.1, -1.0], [0.1, math.nan]):
        with pytest.raises(ConfigError, match="one number from 0 up"):
            fit_curve(drift, 0.25)


@pytest.mark.parametrize("change", [{"format": 9}, {"curve": {"first": 2}}, {"rank": "many"}])
def test_a_damaged_file_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path, curve = tmp_path / "fit.json", BudgetCurve(0.1, 0.2, 0.1)
    Calibration((0.1, 0.2), {4: 0.9}, curve, 4, 0.15).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match="no calibration"):
        Calibration.load(path)
    path.unlink()
    with pytest.raises(ArtifactError, match="no calibration"):
        Calibration.load(path)
