"""Settings and fixtures of the whole suite."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

torch.set_num_threads(1)  # the suite runs in as many processes as there are cores


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    """`tiny(kind, seed=0, **overrides)`: a tiny random model."""
    return tiny_model


@pytest.fixture(scope="session")
def default_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The default model, attached, and its tokenizer; for tests marked `real`."""
    import kvfold

    return kvfold.load("default")
