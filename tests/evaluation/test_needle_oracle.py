"""A reader that never errs answers from what a cache holds: what it dropped cannot be told.

The values of the first layer depend on nothing but the token, so the reader knows each kept token
by its value. Whatever the harness says then is the cache's doing alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.evaluation import fidelity_batch
from kvfold.evaluation.batch_decoding import Answer, BatchDecoder
from kvfold.evaluation.fidelity import evaluate
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.ruler_tracking import EXAMPLE_FROM
from tests.evaluation.prompts import TOKENIZER
from tests.tiny import tiny_model

LENGTH, SAMPLES = 1400, 4
assert LENGTH < EXAMPLE_FROM, "an example would be read as the text itself"


class Reader:
    """Says every value that can be read in what a cache holds."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Learn what each token's value looks like in the first layer."""
        layer = model.model.layers[0]
        tokens = torch.arange(model.config.vocab_size)
        with torch.no_grad():
            hidden = layer.input_layernorm(model.get_input_embeddings()(tokens))
            values = layer.self_attn.v_proj(hidden)
        self._known = values[:, : layer.self_attn.head_dim]

    def __call__(
        self, decoder: BatchDecoder, *, limit: int, stop: frozenset[int], is_done: object
    ) -> tuple[list[Answer], list[torch.Tensor]]:
        """Answer as `answer_greedily` does."""
        said = [self._say(text)[:limit] for text in self._texts(decoder)]
        longest = max(map(len, said))
        fed = [each + [0] * (longest - len(each)) for each in said]
        logits = [decoder.feed(tokens) for tokens in torch.tensor(fed).T]
        return [Answer(each, len(each) == limit) for each in said], logits

    def _texts(self, decoder: BatchDecoder) -> list[str]:
        slots = decoder.cache.own_layers[0].parts[0].slots
        found = []
        for values, positions in zip(slots.values[:, 0], slots.positions[:, 0], strict=True):
            tokens = torch.cdist(values, self._known).argmin(dim=-1)[positions.argsort()]
            found.append(str(TOKENIZER.decode(tokens[(positions < 0).sum() :])))
        return found

    def _say(self, text: str) -> list[int]:
        """All numbers of needles, or the variables of statements."""
        told = re.findall(r" is: (\d{7})\.", text) or re.findall(r" VAR ([A-Z]{5}) =", text)
        return list(TOKENIZER(", ".join(told) or "none", add_special_tokens=False)["input_ids"])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.delenv("KVFOLD_DATA", raising=False)
    model = tiny_model(vocab_size=259)
    kvfold.attach(model)
    monkeypatch.setattr(fidelity_batch, "answer_greedily", Reader(model))
    return model


def judge(model: PreTrainedModel, folder: Path, name: str) -> dict[str, list[Row]]:
    """Rows by method: `same` keeps everything, `last` the last 60 % of a prompt."""
    settings = FidelitySettings(
        methods=tuple(map(MethodSpec.parse, ("same=full", "last=streaming:sinks=0"))),
        budgets=("0.6",),
        sets=(name,),
        samples=SAMPLES,
        lengths=(LENGTH,),
        max_new_tokens=48,
        depths=2,
    )
    rows = evaluate(model, TOKENIZER, settings, folder=folder).rows
    return {method: [row for row in rows if row.method == method] for method in ("same", "last")}


def test_a_cache_that_dropped_the_needle_is_caught(model: PreTrainedModel, tmp_path: Path) -> None:
    found = judge(model, tmp_path, "ruler-single-1")
    assert [row.depth for row in found["last"]] == [0, 1, 0, 1]
    assert [row.is_right for row in found["same"]] == [True] * SAMPLES
    assert [row.is_right for row in found["last"]] == [False, True, False, True]
    assert [row.found for row in found["last"]] == [0, 1, 0, 1]


def test_needles_count_one_by_one(model: PreTrainedModel, tmp_path: Path) -> None:
    for name in ("ruler-multivalue", "ruler-multiquery", "ruler-vt"):
        found = judge(model, tmp_path / name, name)
        assert [(row.is_right, row.found) for row in found["same"]] == [(True, 1)] * SAMPLES
        assert [row.is_right for row in found["last"]] == [False] * SAMPLES
        for row in found["last"]:
            assert row.found is not None
            assert 0.2 <= row.found <= 0.8
