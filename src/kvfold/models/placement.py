"""Where a model's weights go: dtypes and devices, from what a user writes."""

import torch

from kvfold.errors import ConfigError

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Reads a dtype; None stands for the checkpoint's own (`auto`).

    Raises:
        ConfigError: It is not a dtype that a model can be run in.
    """
    if dtype is None or dtype == "auto":
        return None
    found = _DTYPES.get(dtype.lower()) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ConfigError(
            f"dtype {dtype!r} is not one of float32 (fp32), bfloat16 (bf16), float16 (fp16), auto"
        )
    return found


def parse_device(device: str | torch.device | None) -> torch.device:
    """Reads a device that is there; None stands for CUDA where there is one, else the CPU.

    Raises:
        ConfigError: There is no such device on this machine.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(_no_device(device)) from error
    available = {
        "cpu": True,
        "cuda": (found.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available.get(found.type, False):
        raise ConfigError(_no_device(device))
    return found


def _no_device(device: str | torch.device) -> str:
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    names += ["mps"] if torch.backends.mps.is_available() else []
    return f"device '{device}' is not on this machine, which has: {', '.join(names)}"
