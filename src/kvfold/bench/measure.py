"""One measurement: in the process that was started for it, or on a model that is there already."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvfold.bench.memory import peak_resident, resident
from kvfold.bench.request import Measurement, Request
from kvfold.bench.rounds import seconds_now
from kvfold.bench.subjects import empty_cache, held_by, prepare, stored_cache
from kvfold.cache import CACHE_KEYWORD, KVCache, prefill
from kvfold.cache.replay import RecordingCache, replay
from kvfold.errors import ConfigError
from kvfold.models import load_model
from kvfold.text import text_tokens

_WARMUP_TOKENS = 32


def perform(request: Request) -> Measurement | None:
    """Do what a request asks for.

    Returns:
        The measurement; None where a cache was stored.

    Raises:
        KVFoldError: When the request cannot be met.
    """
    torch.set_num_threads(request.threads)
    model, tokenizer = load_model(request.model, dtype=request.dtype, device=request.device)
    prepare(model, request.subject)
    if request.task == "store":
        return _store(request, model, tokenizer)
    if request.task == "decode":
        return _decode(request, model, tokenizer)
    prompt = _tokens(request, model, tokenizer, request.context)
    return time_prefill(
        model, request.subject, request.budget, prompt, chunk_size=request.chunk_size
    )


def fill(model: PreTrainedModel, cache: KVCache, prompt: torch.Tensor, count: int) -> None:
    """Let an empty cache hold a context of which no more than a prompt is really read.

    Args:
        model: Prepared for the cache's method.
        cache: Empty.
        prompt: Tokens, `[1, N]`.
        count: Tokens that the cache is to hold, N or more; beyond N the prompt's queries, keys and
            values are repeated.

    Raises:
        ConfigError: When they are to be repeated, and the model has layers that are not kvfold's.
    """
    if prompt.shape[1] == count:
        prefill(model, prompt, cache)
        return
    if len(cache.own_layers) < len(cache.layers):
        raise ConfigError(
            "this model has layers that are not kvfold's, whose states cannot be repeated: "
            "leave --read out"
        )
    source = RecordingCache(model)
    prefill(model, prompt, source)
    replay(source, cache, count=count)


@torch.no_grad()
def time_decode(
    model: PreTrainedModel, cache: Cache, steps: torch.Tensor, *, warmup: int
) -> Measurement:
    """Time decode steps from a context that a cache holds.

    Args:
        model: Prepared for the cache.
        cache: With one row, which is repeated to B rows.
        steps: The tokens to feed, `[B, warmup and timed ones]`.
        warmup: Steps before the timed ones.
    """
    rss_model, batch = resident(), len(steps)
    cache.batch_repeat_interleave(batch)
    seconds = []
    for token in steps.split(1, dim=1):
        begin = seconds_now(model.device)
        model(input_ids=token, use_cache=True, **{CACHE_KEYWORD: cache})
        seconds.append(seconds_now(model.device) - begin)
    timed = seconds[warmup:]
    return _measurement(model, cache, timed, batch * len(timed), rss_model)


def time_prefill(
    model: PreTrainedModel,
    subject: str,
    budget: str | None,
    prompt: torch.Tensor,
    *,
    chunk_size: int | None,
) -> Measurement:
    """Time a prompt `[1, N]` into a new cache, up to the first token; a short one comes before it.

    Args:
        model: Prepared for the subject.
        subject: `dynamic` or a method.
        budget: None for what keeps everything.
        prompt: Tokens.
        chunk_size: Most tokens a forward; all at once without it.
    """
    scratch = empty_cache(model, subject, budget)
    prefill(model, prompt[:, :_WARMUP_TOKENS], scratch)
    del scratch
    rss_model = resident()
    cache = empty_cache(model, subject, budget)
    begin = seconds_now(model.device)
    logits = prefill(model, prompt, cache, chunk_size=chunk_size)
    logits.argmax(dim=-1).tolist()
    seconds = seconds_now(model.device) - begin
    return _measurement(model, cache, [seconds], prompt.shape[1], rss_model)


def _store(request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    cache = empty_cache(model, request.subject, request.budget)
    if not isinstance(cache, KVCache):
        raise ConfigError(f"{request.subject} has no file format: store method full")
    fill(model, cache, _tokens(request, model, tokenizer, _read(request)), request.context)
    cache.save(_file(request))


def _decode(
    request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Measurement:
    cache = stored_cache(model, request.subject, _file(request))
    read = _read(request)
    total = read + request.warmup + request.steps
    steps = _tokens(request, model, tokenizer, total)[:, read:].expand(request.batch, -1)
    return time_decode(model, cache, steps, warmup=request.warmup)


def _read(request: Request) -> int:
    return request.context if request.read is None else request.read


def _tokens(
    request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int
) -> torch.Tensor:
    return torch.tensor([text_tokens(tokenizer, count)], device=model.device)


def _file(request: Request) -> str:
    if request.file is None:
        raise ConfigError(f"task {request.task} needs the file of a stored cache")
    return request.file


def _measurement(
    model: PreTrainedModel, cache: Cache, seconds: list[float], tokens: int, rss_model: int | None
) -> Measurement:
    held, cuda = held_by(cache), model.device.type == "cuda"
    return Measurement(
        seconds=seconds,
        tokens=tokens,
        attention=str(model.config._attn_implementation),
        model_bytes=sum(weight.nbytes for weight in model.parameters()),
        rss_model=rss_model,
        rss_peak=peak_resident(),
        device_peak=torch.cuda.max_memory_allocated(model.device) if cuda else None,
        tokens_seen=held.tokens_seen,
        tokens_kept=held.tokens_kept,
        cache_bytes=held.cache_bytes,
        full_bytes=held.full_bytes,
        slow_bytes=held.slow_bytes,
        moved_bytes=held.moved_bytes,
        parts=held.parts,
    )
