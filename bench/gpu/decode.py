"""Decoding, first tokens and memory on a GPU, on random weights of published models' shapes.

    python bench/gpu/decode.py --out decode
    python bench/gpu/decode.py --model tiny --device cpu --contexts 512   # whether it runs

Needs one CUDA GPU of 80 GB, and host memory for sekv's slow tier (10 GB), and is meant to take less
than ten minutes there, which was not tried yet: what has not begun after `--minutes` is left out,
and the result says so. The methods take turns, round by round, each in a cache that is made anew
and is alone on the device beside the weights. A context to decode from is read as far as `--read`,
and repeats the states of that beyond; prompts whose first token is timed are read whole, in chunks.
Random weights write nonsense, so that the result speaks of time and bytes alone. A method that runs
out of memory has a row that says so. Writes `gpu-decode.json`, anew after each comparison.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from kvfold.artifacts import json_text, write_files
from kvfold.bench.comparison import Comparison, Outcome
from kvfold.bench.decode import payoffs
from kvfold.bench.measure import fill, time_decode, time_prefill
from kvfold.bench.request import Measurement
from kvfold.bench.rounds import alternate
from kvfold.bench.subjects import budget_of, empty_cache, prepare, require_subject
from kvfold.cache import KVCache
from kvfold.environment import environment
from kvfold.errors import KVFoldError

FORMAT = 1
"""Version of the result's layout."""
MODELS = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1048576,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    ),
    "qwen2-7b": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=1048576,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    ),
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1048576,
    ),
}
"""The shapes of Llama-3-8B and Qwen2-7B, with as many positions as are wanted, and one for trying
this script."""
METHODS = ("full", "streaming", "snapkv", "distill", "sekv")
"""What is measured, in this order."""


@dataclass
class Failures:
    """Why methods have no numbers at one context."""

    deadline: float
    """By `time.monotonic`."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By method."""

    def attempt(self, subject: str, measure: Callable[[], Measurement]) -> Measurement | None:
        """Measure; None where the method ran out of memory, now or before, or time is up."""
        if subject in self.reasons or time.monotonic() > self.deadline:
            return None
        try:
            return measure()
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            self.reasons[subject] = f"out of memory: {str(error).partition(chr(10))[0]}"
        # Only here, without the error, are the tensors of the failed attempt nobody's.
        _release()
        return None

    def sift(
        self, found: Mapping[str, tuple[Measurement | None, ...]]
    ) -> dict[str, tuple[Measurement, ...]]:
        """The measurements of methods that did not fail, of as many rounds as each of them had."""
        whole = {
            subject: [each for each in measurements if each is not None]
            for subject, measurements in found.items()
            if subject not in self.reasons
        }
        unmeasured = [subject for subject, measurements in whole.items() if not measurements]
        self.reasons |= dict.fromkeys(unmeasured, "not measured: time was up")
        rounds = min(map(len, filter(None, whole.values())), default=0)
        return {subject: tuple(each[:rounds]) for subject, each in whole.items() if each}


def main() -> None:
    """Measure and write the result."""
    options = _options()
    deadline = time.monotonic() + 60 * options.minutes
    result: dict[str, object] = {
        "format": FORMAT,
        "kind": "gpu-decode",
        "command": shlex.join(["python", *sys.argv]),
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "seed": options.seed,
        "environment": {**environment(), **_cuda(options.device)},
    }
    models: dict[str, object] = {}
    for name in options.model:
        _say(f"{name}: making {options.dtype} weights on {options.device}")
        model = _model(name, options)
        for found in _measure(model, name, options, deadline):
            models[name] = found
            _write(options.out, {**result, "models": models})
        del model
        _release()
    _say(f"wrote {options.out / 'gpu-decode.json'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    shapes = [name for name in MODELS if name != "tiny"]
    add = parser.add_argument
    add("--model", nargs="+", default=shapes, choices=MODELS, help="whose shapes")
    add("--methods", nargs="+", default=METHODS, help="of kvfold, in this order")
    add("--budget", default="0.1", help="of the methods that have one")
    add("--contexts", nargs="+", type=int, default=[8192, 32768, 131072], help="to decode from")
    add("--prefill-contexts", nargs="*", type=int, default=[8192, 32768], help="to read")
    add("--read", type=int, default=4096, help="tokens really read of a context to decode from")
    add("--chunk-size", type=int, default=2048, help="tokens a forward of a prompt that is read")
    add("--batch", type=int, default=1, help="rows to decode")
    add("--warmup", type=int, default=4, help="decode steps before the timed ones")
    add("--steps", type=int, default=32, help="timed decode steps")
    add("--rounds", type=int, default=3, help="of every method, alternating")
    add("--minutes", type=float, default=9, help="after which nothing is begun")
    add("--dtype", default="bfloat16", help="of weights and caches")
    add("--device", default="cuda", help="where the model runs")
    add("--seed", type=int, default=0, help="of weights and tokens")
    add("--out", type=Path, default=Path("."), help="folder of the result")
    options = parser.parse_args()
    try:
        for method in options.methods:
            require_subject(method)
    except KVFoldError as error:
        parser.error(str(error))
    if min(options.contexts) <= options.warmup + options.steps:
        parser.error("a context is used up by its steps: give a longer one, or fewer --steps")
    return options


def _model(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """Random weights, made where they stay, on kvfold's attention."""
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_config(MODELS[name], dtype=dtype)
    model = model.eval().requires_grad_(False)
    prepare(model, "full")
    return model


def _measure(
    model: PreTrainedModel, name: str, options: argparse.Namespace, deadline: float
) -> Iterator[dict[str, object]]:
    """What is known of a model after each comparison."""
    found: list[Comparison] = []
    rows: dict[str, list[dict[str, object]]] = {"decode": [], "prefill": []}
    jobs = [("decode", context) for context in options.contexts]
    jobs += [("prefill", context) for context in options.prefill_contexts]
    for kind, context in jobs:
        failures = Failures(deadline)
        comparison = _compare(model, f"{name}, {kind}", context, options, failures)
        rows[kind].append({**comparison.to_dict(), "failed": failures.reasons})
        found += [comparison] if kind == "decode" else []
        yield {
            "config": model.config.to_dict(),
            "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
            **rows,
            "findings": [str(each) for each in payoffs(found)],
        }


def _compare(
    model: PreTrainedModel,
    title: str,
    context: int,
    options: argparse.Namespace,
    failures: Failures,
) -> Comparison:
    """All methods in turns, over the rounds that all had which did not fail."""
    measure_one = _prefill if title.endswith("prefill") else _decode

    def measure(subject: str, number: int) -> Measurement | None:
        _say(f"{title}, context {context}: {subject}, round {number} of {options.rounds}")
        return failures.attempt(subject, partial(measure_one, model, subject, context, options))

    found = alternate(options.methods, options.rounds, measure)
    whole = failures.sift(found)
    batch = options.batch if measure_one is _decode else 1
    return Comparison(context, batch, tuple(starmap(Outcome, whole.items())))


def _decode(
    model: PreTrainedModel, subject: str, context: int, options: argparse.Namespace
) -> Measurement:
    """Decode steps, the last of which attends to the whole context in a full cache."""
    stored = context - options.warmup - options.steps
    read = min(options.read, stored)
    tokens = _tokens(model, read + options.warmup + options.steps, options)
    cache = empty_cache(model, subject, budget_of(subject, options.budget))
    assert isinstance(cache, KVCache), "the methods are kvfold's"
    fill(model, cache, tokens[:, :read], stored)
    _reset_peak(model.device)
    steps = tokens[:, read:].expand(options.batch, -1)
    return time_decode(model, cache, steps, warmup=options.warmup)


def _prefill(
    model: PreTrainedModel, subject: str, context: int, options: argparse.Namespace
) -> Measurement:
    """The time to the first token after a prompt that is read in chunks."""
    budget, prompt = budget_of(subject, options.budget), _tokens(model, context, options)
    _reset_peak(model.device)
    return time_prefill(model, subject, budget, prompt, chunk_size=options.chunk_size)


def _tokens(model: PreTrainedModel, count: int, options: argparse.Namespace) -> torch.Tensor:
    """Random ones, `[1, count]`, a longer row beginning with a shorter one."""
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(3, model.config.vocab_size, (count,), generator=generator)
    return tokens[None].to(model.device)


def _reset_peak(device: torch.device) -> None:
    """From here on the device's peak is counted, without what is no longer needed."""
    if device.type == "cuda":
        _release()
        torch.cuda.reset_peak_memory_stats(device)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_out_of_memory(error: BaseException) -> bool:
    """Device memory, the host's, and what is page-locked say it in different words."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in ("out of memory", "allocate memory"))


def _cuda(device: str) -> dict[str, object]:
    if torch.device(device).type != "cuda":
        return {"cuda": None, "device_bytes": None}
    facts = torch.cuda.get_device_properties(device)
    return {"cuda": torch.version.cuda, "device_bytes": facts.total_memory}


def _write(folder: Path, result: dict[str, object]) -> None:
    text = json_text(result)
    write_files(folder, {"gpu-decode.json": lambda path: path.write_text(text, encoding="utf-8")})


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main()
