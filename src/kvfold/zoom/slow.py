"""Which slow tier a cache has: tokens as they are, in memory or on a disk, or factors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.zoom.disk import DiskTier
from kvfold.zoom.factors import Factoring, FactorTier
from kvfold.zoom.gates import RANK, Gates
from kvfold.zoom.lane import Lanes
from kvfold.zoom.pinned import PinnedTier
from kvfold.zoom.tiers import RawTier, SlowTier
from kvfold.zoom.turning import turnings

MakeSlow = Callable[[int, torch.device], SlowTier]
"""Makes the slow tier of a layer, counted from 0 among those that zoom, for tokens of a device."""
DEFAULTS: dict[str, object] = {"factors": "none", "rank": None, "precision": "half", "disk": None}
"""The options of the slow tier; without a rank, it is half of the longest span."""
CHOICES = {"factors": ("none", "head", "joint"), "precision": ("half", "int8")}
"""What some of them may be."""


def check_slow(method: str, options: Mapping[str, object]) -> None:
    """Refuse options of the slow tier that cannot be used.

    Args:
        method: Its registered name.
        options: All of the method's, those that were not given as they are by default; what has
            choices is one of them.

    Raises:
        ConfigError: Saying what to give.
    """
    rank, factors, disk = options["rank"], options["factors"], options["disk"]
    is_number = isinstance(rank, int) and not isinstance(rank, bool) and 1 <= rank <= RANK
    if rank is not None and not is_number:
        raise ConfigError(f"{method}: rank is {rank!r}, give a whole number from 1 to {RANK}")
    for name in ("rank", "precision"):
        if factors == "none" and options[name] != DEFAULTS[name]:
            raise ConfigError(f"{method}: {name} is of factors: give factors=head or factors=joint")
    if disk is None:
        return
    if factors != "none":
        raise ConfigError(f"{method}: a disk holds spans as they are: leave out factors or disk")
    if not isinstance(disk, str | os.PathLike) or not os.path.isdir(disk):
        raise ConfigError(f"{method}: disk is {_named(disk)}, give a folder that exists")
    if not os.access(disk, os.W_OK | os.X_OK):
        raise ConfigError(f"{method}: disk is {_named(disk)}, give a folder you may write to")


def _named(disk: object) -> str:
    return repr(os.fspath(disk) if isinstance(disk, os.PathLike) else disk)


def slow_tiers(
    model: PreTrainedModel, longest: int, options: Mapping[str, object], gates: Gates | None
) -> MakeSlow:
    """What makes the slow tier of each layer.

    Args:
        model: Whose keys and values they hold.
        longest: Tokens of the longest span.
        options: That were checked.
        gates: Those that say which components are used, if any do.

    Raises:
        UnsupportedModelError: When keys are to be factorised that cannot be turned back.
    """
    factors, rank, disk = options["factors"], options["rank"], options["disk"]
    if isinstance(disk, str | os.PathLike):
        folder = Path(disk).absolute()
        return lambda index, device: DiskTier(folder, longest)
    if factors == "none":
        return _as_they_are(longest)
    if not isinstance(rank, int):
        rank = min(longest // 2, RANK)
    is_joint, is_int8 = factors == "joint", options["precision"] == "int8"
    how = Factoring(rank, is_joint, is_int8, longest, None if is_joint else gates)
    turned = turnings(model, longest)
    return lambda index, device: FactorTier(how, turned[index], index)


def _as_they_are(longest: int) -> MakeSlow:
    """What makes tiers of tokens as they are: on the host, where a device has its own memory."""
    lanes = Lanes()

    def make(index: int, device: torch.device) -> SlowTier:
        is_apart = device.type == "cuda"
        return PinnedTier(longest, lanes, index) if is_apart else RawTier(longest)

    return make
