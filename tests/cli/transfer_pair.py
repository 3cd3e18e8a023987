"""A tiny pair in two folders, texts, and a codec of the pair, for the command line."""

from __future__ import annotations

from pathlib import Path

import torch

from kvfold.cli.app import run
from tests.tiny import tiny_model
from tests.tiny_folder import POSITIONS, byte_tokenizer

QUICK = (
    "--texts", "text.txt", "--count", "6", "--refine", "4", "--tokens", "96", "--patches", "1",
)  # fmt: skip


def save_pair(folder: Path) -> tuple[str, str]:
    """A base and a copy with other weights, with one tokenizer."""
    model = tiny_model(vocab_size=259, max_position_embeddings=POSITIONS)
    names = []
    for name in ("base", "special"):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
        names.append(str(folder / name))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(0.1 * weight.std(correction=0) * noise)
    return names[0], names[1]


def write_text(path: Path) -> None:
    """Text enough to read."""
    lines = (f"The {n}th letter was read on day {n * n % 97}.\n\n" for n in range(400))
    path.write_text("".join(lines), encoding="utf-8")


def calibrated(pair: tuple[str, str], out: str, *arguments: str) -> int:
    """Calibrate quickly in this folder, where `text.txt` is."""
    return run(["transfer", "calibrate", *pair, *QUICK, "--out", out, *arguments])
