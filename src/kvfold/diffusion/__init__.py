"""Masked diffusion language models, and caches that recompute only what they must."""

from kvfold.diffusion.budget import CURVES, BudgetCurve
from kvfold.diffusion.caches import (
    CACHES,
    PRESETS,
    DelayedCache,
    DiffusionCache,
    DualCache,
    NoCache,
    PrefixCache,
    SpaCache,
    ValueCache,
    make_cache,
)
from kvfold.diffusion.calibrate import Calibration, calibrate, fit_curve
from kvfold.diffusion.follow import Following, follow
from kvfold.diffusion.generate import Frame, Generation, Writing, generate, stream
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.own import OWN
from kvfold.diffusion.race import Runner, race
from kvfold.diffusion.samplers import (
    SAMPLERS,
    DreamSampler,
    LLaDASampler,
    Sampler,
    make_sampler,
)
from kvfold.diffusion.shape import DecoderShape, Traits
from kvfold.diffusion.tokenizer import load_tokenizer
from kvfold.diffusion.work import DiffusionReport

__all__ = [
    "CACHES",
    "CURVES",
    "OWN",
    "PRESETS",
    "SAMPLERS",
    "BudgetCurve",
    "Calibration",
    "DecoderShape",
    "DelayedCache",
    "DiffusionCache",
    "DiffusionModel",
    "DiffusionReport",
    "DreamSampler",
    "DualCache",
    "Following",
    "Frame",
    "Generation",
    "LLaDASampler",
    "NoCache",
    "PrefixCache",
    "Runner",
    "Sampler",
    "SpaCache",
    "Traits",
    "ValueCache",
    "Writing",
    "calibrate",
    "fit_curve",
    "follow",
    "generate",
    "load_tokenizer",
    "make_cache",
    "make_sampler",
    "race",
    "stream",
]
