"""One measurement, in the process that was started for it."""

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
        return _time_decode(request, model, tokenizer)
    return _time_prefill(request, model, tokenizer)


def _store(request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    cache = empty_cache(model, request.subject, request.budget)
    if not isinstance(cache, KVCache):
        raise ConfigError(f"{request.subject} has no file format: store method full")
    read = request.context if request.read is None else request.read
    prompt = _tokens(request, model, tokenizer, read)
    if read == request.context:
        prefill(model, prompt, cache)
    else:
        if len(cache.own_layers) < len(cache.layers):
            raise ConfigError(
                "this model has layers that are not kvfold's, whose states cannot be repeated: "
                "leave --read out"
            )
        source = RecordingCache(model)
        prefill(model, prompt, source)
        replay(source, cache, count=request.context)
    cache.save(_file(request))


@torch.no_grad()
def _time_decode(
    request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Measurement:
    cache = stored_cache(model, request.subject, _file(request))
    read = request.context if request.read is None else request.read
    total = read + request.warmup + request.steps
    steps = _tokens(request, model, tokenizer, total)[:, read:]
    steps = steps.expand(request.batch, -1)
    rss_model = resident()
    cache.batch_repeat_interleave(request.batch)
    seconds = []
    for token in steps.split(1, dim=1):
        begin = seconds_now(model.device)
        model(input_ids=token, use_cache=True, **{CACHE_KEYWORD: cache})
        seconds.append(seconds_now(model.device) - begin)
    timed, tokens = seconds[request.warmup :], request.batch * request.steps
    return _measurement(model, cache, timed, tokens, rss_model)


def _time_prefill(
    request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Measurement:
    prompt = _tokens(request, model, tokenizer, request.context)
    scratch = empty_cache(model, request.subject, request.budget)
    prefill(model, prompt[:, :_WARMUP_TOKENS], scratch)
    del scratch
    rss_model = resident()
    cache = empty_cache(model, request.subject, request.budget)
    begin = seconds_now(model.device)
    logits = prefill(model, prompt, cache, chunk_size=request.chunk_size)
    logits.argmax(dim=-1).tolist()
    seconds = seconds_now(model.device) - begin
    return _measurement(model, cache, [seconds], request.context, rss_model)


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
