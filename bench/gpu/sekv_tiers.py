"""Decodes with sekv's spans on the device, on the host, and on the host with some coming ahead.

    python bench/gpu/sekv_tiers.py --out tiers
    python bench/gpu/sekv_tiers.py --device cpu --context 512 --out tiers   # whether it runs

Needs one CUDA GPU and a few minutes. The model is a given one, or has the default model's shape and
random weights with pointed attention. All caches read the same prompt and take the same tokens in
turns, round by round. Writes `sekv-tiers.json`: throughput, moved bytes, ratios of neighbours in
time, and by how much the logits differ where spans are on the host.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# On a CPU the kernel would read spans where they stand, and no tier would be asked for them.
os.environ.setdefault("KVFOLD_NATIVE", "0")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import kvfold
from kvfold.artifacts import json_text, write_files
from kvfold.bench.rounds import alternate, seconds_now
from kvfold.bench.spread import Spread, pairwise
from kvfold.cache import CACHE_KEYWORD, KVCache, prefill
from kvfold.environment import environment
from kvfold.text import text_tokens
from kvfold.zoom.lane import Lanes
from kvfold.zoom.layer import ZoomLayer
from kvfold.zoom.pinned import PinnedTier
from kvfold.zoom.report import ZoomReport
from kvfold.zoom.slow import MakeSlow
from kvfold.zoom.tiers import RawTier

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Of the default model."""
SHARPNESS = 3.0
"""By which random query and key weights are scaled: products of the usual ones differ too little
for any span to matter."""
WARMUP = 4
"""Steps of each cache before the timed ones."""


def main() -> None:
    """Measure and write the result."""
    options = _options()
    torch.manual_seed(0)
    model, text = _model(options)
    caches = _caches(model, options)
    prompt, steps = text[:, : options.context], text[:, options.context :]
    for name, cache in caches.items():
        _say(f"{name}: prefilling {options.context} tokens")
        prefill(model, prompt, cache)
        _decode(model, cache, steps[:, :WARMUP])
    moved, logits = {name: _moved(cache) for name, cache in caches.items()}, {}

    def measure(name: str, number: int) -> float:
        _say(f"{name}: round {number} of {options.rounds}")
        start = WARMUP + (number - 1) * options.steps
        begin = seconds_now(model.device)
        logits[name] = _decode(model, caches[name], steps[:, start : start + options.steps])
        return options.steps / (seconds_now(model.device) - begin)

    rates = alternate(caches, options.rounds, measure)
    count = options.rounds * options.steps
    apart = (logits["device"] - logits["host"]).abs().max() / logits["device"].abs().max()
    result = {
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "environment": {**environment(), "cuda": torch.version.cuda},
        "caches": {
            name: {
                "tokens_per_second": Spread(rates[name]).to_dict(),
                "bytes_moved_a_token": (_moved(cache) - moved[name]) / count,
                **_held(cache),
            }
            for name, cache in caches.items()
        },
        "ratios": [each.to_dict() for each in pairwise(rates)],
        "relative_difference_of_host": float(apart),
    }
    (file,) = write_files(
        options.out,
        {"sekv-tiers.json": lambda path: path.write_text(json_text(result), encoding="utf-8")},
    )
    _say(f"wrote {file}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="where the model runs")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and caches")
    parser.add_argument("--model", help="a name or folder; random weights without it")
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--budget", type=float, default=0.1, help="of sekv")
    parser.add_argument("--ahead", type=float, default=0.25, help="share of expanded spans")
    parser.add_argument("--steps", type=int, default=32, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="of every cache, alternating")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the result")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> tuple[PreTrainedModel, torch.Tensor]:
    """An attached model, and the tokens of the prompt and of all steps, `[1, T]`."""
    count = options.context + WARMUP + options.rounds * options.steps
    dtype = getattr(torch, options.dtype)
    if options.model:
        model, tokenizer = kvfold.load(options.model, dtype=dtype, device=options.device)
        return model, torch.tensor([text_tokens(tokenizer, count)], device=model.device)
    config = LlamaConfig(**SHAPE, max_position_embeddings=count)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data.mul_(SHARPNESS)
    model = model.to(device=options.device, dtype=dtype)
    kvfold.attach(model)
    return model, torch.randint(3, config.vocab_size, (1, count)).to(options.device)


def _caches(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, KVCache]:
    lanes, ahead = Lanes(), Lanes()
    return {
        "full": kvfold.make_cache(model, "full"),
        "device": _sekv(model, options, lambda longest, index: RawTier(longest)),
        "host": _sekv(model, options, lambda longest, index: PinnedTier(longest, lanes, index, 0)),
        "ahead": _sekv(
            model,
            options,
            lambda longest, index: PinnedTier(longest, ahead, index, options.ahead),
        ),
    }


def _sekv(
    model: PreTrainedModel,
    options: argparse.Namespace,
    make: Callable[[int, int], RawTier],
) -> KVCache:
    """A cache with a slow tier of our choice."""
    cache = kvfold.make_cache(model, "sekv", budget=options.budget)
    for layer in _zooming(cache):
        longest = layer.spans.slow.longest
        make_slow: MakeSlow = lambda index, device, longest=longest: make(longest, index)  # noqa: E731
        layer.resolution = replace(layer.resolution, make_slow=make_slow)
    cache.reset()
    return cache


def _zooming(cache: KVCache) -> list[ZoomLayer]:
    return [part for part in cache.parts if isinstance(part, ZoomLayer)]


@torch.inference_mode()
def _decode(model: PreTrainedModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    """Feed tokens one by one; the last logits, `[1, V]` in float32."""
    output = None
    for token in tokens.split(1, dim=1):
        output = model(input_ids=token, use_cache=True, **{CACHE_KEYWORD: cache})
    assert output is not None, "there are steps"
    return output.logits[:, -1].float()


def _moved(cache: KVCache) -> int:
    details = cache.report().details
    return details.bytes_moved if isinstance(details, ZoomReport) else 0


def _held(cache: KVCache) -> dict[str, object]:
    report, layers = cache.report(), _zooming(cache)
    return {
        "bytes_fast": report.bytes_fast,
        "bytes_slow": report.bytes_slow,
        "bytes_full": report.bytes_full,
        "expanded": _mean([layer.expanded for layer in layers]),
        "ahead": _mean([layer.spans.ahead for layer in layers]),
        "spans": _mean([len(layer.spans) for layer in layers]),
    }


def _mean(counts: list[int]) -> float:
    """Of all layers; 0 where there are none."""
    return sum(counts) / max(len(counts), 1)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main()
