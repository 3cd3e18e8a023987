"""Diffusion caches side by side on a GPU, on random weights of a published model's shape.

    python bench/gpu/diffusion.py --out diffusion
    python bench/gpu/diffusion.py --model tiny --device cpu --length 16   # whether it runs

Needs one CUDA GPU that holds the weights (16 GB in bfloat16), and is meant to take less than five
minutes there, which was not tried yet. All caches write after the same prompt in
turns, one token a step. Random weights write nonsense, so that the result speaks of time and bytes,
and of no agreement. Writes `diffusion.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from kvfold.artifacts import json_text, write_files
from kvfold.bench.spread import Spread, pairwise
from kvfold.diffusion import DecoderShape, DiffusionModel, Runner, Traits, make_cache, race
from kvfold.diffusion.decoder import Decoder
from kvfold.environment import environment

MODELS: dict[str, tuple[DecoderShape, Traits]] = {
    "llada-8b": (
        DecoderShape(
            vocabulary=126464,
            hidden=4096,
            layers=32,
            query_heads=32,
            kv_heads=32,
            head_dim=128,
            mlp=12288,
            positions=4096,
            rope_theta=500000.0,
        ),
        Traits(mask_id=126336, prediction="same"),
    ),
    "dream-7b": (
        DecoderShape(
            vocabulary=152064,
            hidden=3584,
            layers=28,
            query_heads=28,
            kv_heads=4,
            head_dim=128,
            mlp=18944,
            positions=131072,
            rope_theta=1000000.0,
            qkv_bias=True,
        ),
        Traits(mask_id=151666, prediction="shifted", sampler="dream"),
    ),
    "tiny": (
        DecoderShape(
            vocabulary=512,
            hidden=64,
            layers=4,
            query_heads=4,
            kv_heads=2,
            head_dim=16,
            mlp=128,
            positions=4096,
        ),
        Traits(mask_id=511, prediction="same"),
    ),
}
"""The shapes of LLaDA-8B and Dream-7B, and one for trying this script."""
CACHES = {
    "none": {},
    "spa": {},
    "spa, mean .16": {"ratio": 0.16, "kv_refresh": "selected", "reference": "last_update"},
    "dllm": {},
    "prefix": {},
    "dual": {},
    "dkv": {},
}
"""What is measured, by the name in the result: the first word is the cache."""


def main() -> None:
    """Measure and write the result."""
    options = _options()
    model = _model(options)
    prompt = torch.randint(0, model.traits.mask_id, (options.prompt,)).tolist()
    caches = {name: make_cache(name.partition(",")[0], **given) for name, given in CACHES.items()}
    with torch.inference_mode():
        runners = race(
            model,
            [prompt] * options.rows,
            caches,
            length=options.length,
            rounds=options.rounds,
            on_turn=lambda name, number, turn: _say(
                f"{name}: round {number} of {options.rounds}, turn {turn}"
            ),
        )
    result = {
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "shape": asdict(model.shape),
        "environment": {**environment(), "cuda": torch.version.cuda},
        "caches": {runner.name: _found(runner) for runner in runners},
        "ratios": [
            each.to_dict()
            for each in pairwise({each.name: each.tokens_per_second for each in runners})
        ],
    }
    (file,) = write_files(
        options.out,
        {"diffusion.json": lambda path: path.write_text(json_text(result), encoding="utf-8")},
    )
    _say(f"wrote {file}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llada-8b", choices=MODELS, help="whose shape")
    parser.add_argument("--device", default="cuda", help="where the model runs")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and caches")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--length", type=int, default=256, help="tokens to write, one a step")
    parser.add_argument("--rows", type=int, default=1, help="prompts side by side")
    parser.add_argument("--rounds", type=int, default=3, help="of every cache, alternating")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the result")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> DiffusionModel:
    """Random weights, made where they stay."""
    shape, traits = MODELS[options.model]
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, options.dtype))
    with torch.device(options.device):
        decoder = Decoder(shape)
    torch.set_default_dtype(torch.float32)
    return DiffusionModel(decoder.eval().requires_grad_(False), traits, source=options.model)


def _found(runner: Runner) -> dict[str, object]:
    return {
        "tokens_per_second": Spread(runner.tokens_per_second).to_dict(),
        "seconds_to_first": Spread(runner.first_seconds).to_dict(),
        "bytes_held": runner.report.bytes_held,
        "steps": runner.report.steps,
    }


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main()
