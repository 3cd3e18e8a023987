"""The model `kvfold-diffusion` under lm-evaluation-harness's own runner."""

from __future__ import annotations

import functools
import os
import random
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.cli.lm_eval import main
from kvfold.diffusion import DiffusionModel, LLaDASampler, generate, load_tokenizer, make_cache
from kvfold.diffusion.likelihood import estimate, is_greedy
from kvfold.errors import ConfigError
from kvfold.evaluation.harness import register
from kvfold.evaluation.harness_diffusion import KVFoldDiffusionLM
from tests.evaluation.harness_tasks import NAMES, write_tasks
from tests.processes import SOURCE
from tests.tiny_folder import save_tiny

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `harness`")

CHOICE, ANSWER, TEXT = NAMES
MASK = 259
TRAITS = {"mask_token_id": MASK, "prediction": "same"}
QUICK = "mc_num=2,length=8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `model`, a tiny decoder that is taken for a masked diffusion model, and `tasks`."""
    root = tmp_path_factory.mktemp("harness")
    save_tiny(root / "model", vocab_size=260)
    write_tasks(root / "tasks", answer_tokens=6)
    return root


@functools.cache
def run(folder: Path, arguments: str = QUICK, **settings: Any) -> dict[str, Any]:
    """What lm-eval's runner finds on the local tasks."""
    from lm_eval.tasks import TaskManager

    register()
    settings = {"batch_size": 2, "tasks": NAMES, "limit": 2} | settings
    given = {"pretrained": folder / "model", **TRAITS}
    return lm_eval.simple_evaluate(
        model="kvfold-diffusion",
        model_args=",".join([*(f"{name}={value}" for name, value in given.items()), arguments]),
        tasks=list(settings.pop("tasks")),
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
        **settings,
    )


def opened(folder: Path, **settings: Any) -> KVFoldDiffusionLM:
    return KVFoldDiffusionLM(str(folder / "model"), device="cpu", **TRAITS | settings)


def plain(folder: Path) -> tuple[DiffusionModel, Any]:
    model = DiffusionModel.from_pretrained(folder / "model", device="cpu", **TRAITS)
    return model, load_tokenizer(folder / "model")


def sample_of(found: dict[str, Any], task: str, number: int = 0) -> dict[str, Any]:
    return sorted(found["samples"][task], key=lambda sample: sample["doc_id"])[number]


def estimated(model: DiffusionModel, context: list[int], tokens: list[int], draws: int) -> float:
    seed = random.Random(f"0 {context}").getrandbits(63)
    generator = torch.Generator().manual_seed(seed)
    return estimate(model, context, tokens, draws=draws, generator=generator)


def test_continuations_are_estimated_and_greedy_if_they_are_written(folder: Path) -> None:
    sample = sample_of(run(folder), CHOICE)
    model, tokenizer = plain(folder)
    context = tokenizer(sample["doc"]["question"])["input_ids"]
    for choice, (found, greedy) in zip(
        sample["doc"]["choices"], sample["filtered_resps"], strict=True
    ):
        tokens = tokenizer(f" {choice}")["input_ids"]
        assert found == pytest.approx(estimated(model, context, tokens, 2), rel=1e-5)
        assert greedy == is_greedy(model, context, tokens, make_cache("spa"))


def test_what_the_model_writes_is_greedy(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    model = opened(folder, mc_num=1, cache="none")
    context = model.tok_encode("The capital of Norway")
    sampler = LLaDASampler(stop_at_eos=False)
    [tokens] = generate(model.model, [context], "none", length=3, sampler=sampler).ids.tolist()
    kept: list[Any] = []

    class Hook:
        def add_partial(self, kind: str, request: Any, answer: Any) -> None:
            kept.append((kind, request, answer))

    model.set_cache_hook(Hook())
    texts = ("", "")
    wrong = [tokens[0], (tokens[1] + 1) % 200, tokens[2]]
    found = model._loglikelihood_tokens([(texts, context, each) for each in (tokens, wrong)])
    assert [greedy for _, greedy in found] == [True, False]
    assert kept == [("loglikelihood", texts, answer) for answer in found]
    instance = Instance("loglikelihood", {}, ("", " x"), 0)
    [(alone, _)] = model.loglikelihood([instance], disable_tqdm=True)
    first = model.tokenizer.bos_token_id
    assert alone == pytest.approx(
        estimated(model.model, [first], model.tok_encode(" x"), 1), rel=1e-5
    )


def test_whole_texts_are_estimated_in_windows(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    model = opened(folder, mc_num=2, max_length=12)
    tokens = model.tok_encode("Nobody knows, nobody.")
    assert len(tokens) == 21
    request = Instance("loglikelihood_rolling", {}, ("Nobody knows, nobody.",), 0)
    [found] = model.loglikelihood_rolling([request], disable_tqdm=True)
    parts = [([model.prefix_token_id], tokens[:11]), (tokens[9:11], tokens[11:])]
    expected = sum(estimated(model.model, *part, 2) for part in parts)
    assert found == pytest.approx(expected, rel=1e-5)


def test_texts_are_written_through_the_cache(folder: Path) -> None:
    found = run(folder, f"{QUICK},cache=spa:ratio=0.5:rank=4,threshold=0.9", tasks=(ANSWER,))
    sample = sample_of(found, ANSWER)
    model, tokenizer = plain(folder)
    context = tokenizer(sample["arguments"][0][0])["input_ids"]
    cache, sampler = make_cache("spa", ratio=0.5, rank=4), LLaDASampler(threshold=0.9)
    [tokens] = generate(model, [context], cache, length=6, sampler=sampler).tokens
    told = tokenizer.decode(tokens, skip_special_tokens=True)
    for stop in ("\n", ".", ","):
        told = told.partition(stop)[0]
    assert sample["filtered_resps"] == [told]
    facts = found["config"]
    assert "ratio=0.5" in facts["kvfold_cache"]
    assert "threshold=0.9" in facts["kvfold_sampler"]
    written = facts["kvfold_written"]
    assert written["rows"] == 2
    assert written["bytes_held"] > 0
    assert 0 < written["share"] < 0.5


def test_a_long_context_loses_its_beginning(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    model = opened(folder, max_length=20, cache="none")
    text = "It was known to nobody at all, "
    request = Instance("generate_until", {}, (text, {"max_gen_toks": 4, "until": []}), 0)
    [found] = model.generate_until([request], disable_tqdm=True)
    [tokens] = generate(model.model, [model.tok_encode(text)[-16:]], "none", length=4).tokens
    assert found == model.tokenizer.decode(tokens, skip_special_tokens=True)
    request = Instance("generate_until", {}, (text, {"max_gen_toks": 20}), 0)
    with pytest.raises(ConfigError, match="give a smaller max_gen_toks"):
        model.generate_until([request], disable_tqdm=True)
    with pytest.raises(ConfigError, match="a continuation of 20 tokens cannot be scored"):
        model._loglikelihood_tokens([(("", ""), [3], [4] * 20)])


def test_one_seed_gives_the_same_answers_and_batches_do_not_matter(folder: Path) -> None:
    alone = run(folder, batch_size=1)
    for task in (CHOICE, TEXT):
        one, two = (sample_of(found, task)["filtered_resps"] for found in (run(folder), alone))
        for now, then in zip(one, two, strict=True):
            assert now == pytest.approx(then, rel=1e-5)
    other = sample_of(run(folder, f"{QUICK},seed=1", tasks=(TEXT,)), TEXT)["filtered_resps"]
    assert other != pytest.approx(sample_of(alone, TEXT)["filtered_resps"], rel=1e-3)


def test_chat_templates_are_the_tokenizers(folder: Path) -> None:
    settings = {"apply_chat_template": True, "system_instruction": "Be brief."}
    found = run(folder, tasks=(ANSWER,), **settings)
    prompt = sample_of(found, ANSWER)["arguments"][0][0]
    assert prompt.startswith("<s><system>Be brief.<user>")
    assert prompt.endswith("<assistant>")
    model = opened(folder)
    tokens = model.tok_encode(prompt)
    assert tokens == model.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokens.count(model.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "best"}, "unknown cache for diffusion 'best'"),
        ({"cache": "spa:ratio=2"}, "ratio"),
        ({"sampler": "llada:steps=3", "steps": 3}, "steps is given twice"),
        ({"depth": 2}, "llada has no option 'depth'"),
        ({"mc_num": 0}, "mc_num is 0: give a whole number of at least 1"),
        ({"batch_size": "auto"}, "batch_size is 'auto'"),
        ({"prediction": "left"}, "left"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder, **settings)


def test_the_entry_point_names_the_model() -> None:
    text = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8")
    _, _, rest = text.partition('[project.entry-points."lm_eval.models"]\n')
    name, _, value = rest.splitlines()[1].partition(" = ")
    assert name == "kvfold-diffusion"
    assert EntryPoint(name, value.strip('"'), "lm_eval.models").load() is KVFoldDiffusionLM


def test_the_command_line_is_lm_evals_own(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import lm_eval.tasks

    quick = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)
    for name in ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    args = f"pretrained={folder / 'model'},mask_token_id={MASK},prediction=same,{QUICK}"
    given = ["--model", "kvfold-diffusion", "--model_args", f"{args},cache=spa:ratio=0.5"]
    given += ["--tasks", ANSWER, "--include_path", str(folder / "tasks")]
    given += ["--device", "cpu", "--batch_size", "3", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kvfold-lm-eval", *given])
    assert main() == 0
    assert ANSWER in capsys.readouterr().out
    [path] = tmp_path.rglob("*.json")
    assert "SpaCache(ratio=0.5" in path.read_text(encoding="utf-8")
