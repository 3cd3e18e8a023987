"""Samplers, one file each. Importing the folder registers them."""

from kvfold.diffusion.samplers.dream import DreamSampler
from kvfold.diffusion.samplers.llada import LLaDASampler
from kvfold.diffusion.samplers.noise import RowNoise
from kvfold.diffusion.samplers.sampler import SAMPLERS, Sampler, make_sampler, register_sampler

__all__ = [
    "SAMPLERS",
    "DreamSampler",
    "LLaDASampler",
    "RowNoise",
    "Sampler",
    "make_sampler",
    "register_sampler",
]
