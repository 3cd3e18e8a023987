"""A saved tiny model with a tokenizer, and a runner that starts no process."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvfold.bench.request import Measurement, Request
from tests.tiny import SHARED, tiny_model


def save_tiny(folder: Path, kind: str) -> Path:
    """Save a tiny model, and a tokenizer of the commonest words of the text that is measured on."""
    tiny_model(kind).save_pretrained(folder)
    found = Counter(re.findall(r"\w+|[^\w\s]+", "".join(topics.values())))
    words = ["<unk>", "<s>", "</s>", *(word for word, _ in found.most_common())]
    vocabulary = {word: index for index, word in enumerate(words[: SHARED["vocab_size"]])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    return folder


class FakeRunner:
    """Answers requests with made-up numbers and remembers them."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> Measurement | None:
        self.requests.append(request)
        if request.task == "store":
            return None
        steps = max(request.steps, 1)
        tokens = request.batch * request.steps if request.steps else request.context
        kept = request.context if request.budget is None else request.context // 4
        return Measurement(
            seconds=[0.5 + 0.25 * len(self.requests)] * steps,
            tokens=tokens,
            attention="kvfold",
            model_bytes=1000,
            rss_model=2000,
            rss_peak=2000 + len(self.requests),
            device_peak=None,
            tokens_seen=request.context,
            tokens_kept=[kept, kept, kept],
            cache_bytes=10 * kept,
            full_bytes=10 * request.context,
            slow_bytes=2048 if request.subject == "sekv" else 0,
            moved_bytes=1024 if request.subject == "sekv" else 0,
            parts={"surprisal": 0.125, "spans": 0.25} if request.subject == "sekv" else {},
        )


def silent(line: str) -> None:
    """Progress that no one reads."""
