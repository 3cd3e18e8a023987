"""What the models of lm-evaluation-harness stand on, whether lm-eval is installed or not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvfold.errors import ConfigError


def harness_base(module: str, name: str) -> Any:
    """A class of lm-eval, a bare object where lm-eval is not installed.

    Args:
        module: In lm-eval.
        name: Of the class.
    """
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        return object


def require_harness(base: Any) -> None:
    """Refuse to go on without lm-eval.

    Args:
        base: What `harness_base` gave.

    Raises:
        ConfigError: It is no class of lm-eval's.
    """
    if base is object:
        raise ConfigError(
            "lm-eval is not installed: run `make harness` in kvfold's checkout, or "
            "pip install 'lm-eval>=0.4.13,<0.5'"
        )
