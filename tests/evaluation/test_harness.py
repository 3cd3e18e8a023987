"""The model `kvfold` under lm-evaluation-harness's own runner, beside its model `hf`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.cache import CACHE_KEYWORD
from kvfold.cli.lm_eval import main
from kvfold.errors import BudgetError, ConfigError
from kvfold.evaluation.harness import KVFoldLM, register
from tests.contract import teacher_forced
from tests.evaluation.harness_tasks import NAMES, write_tasks
from tests.processes import SOURCE, environment
from tests.tiny_folder import save_tiny

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `harness`")

CHOICE, ANSWER, TEXT = NAMES
ROOMY = "method=streaming,budget=1900"
"""Evicts, but nothing here is so long: what is scored a token at a time is what `hf` scores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `model`, a tiny one, and `tasks`."""
    root = tmp_path_factory.mktemp("harness")
    save_tiny(root / "model")
    write_tasks(root / "tasks")
    return root


@functools.cache
def run(folder: Path, model: str, arguments: str = "", **settings: Any) -> dict[str, Any]:
    """What lm-eval's runner finds on the local tasks."""
    from lm_eval.tasks import TaskManager

    register()
    settings = {"batch_size": 3, "tasks": NAMES} | settings
    return lm_eval.simple_evaluate(
        model=model,
        model_args=",".join(filter(None, (f"pretrained={folder / 'model'}", arguments))),
        tasks=list(settings.pop("tasks")),
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
        **settings,
    )


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """What the model answered, sample by sample."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["results"] == expected["results"]
    for task in expected["results"]:
        assert responses(found, task) == responses(expected, task)


@pytest.mark.parametrize("arguments", ["method=full", "method=snapkv,budget=1.0"])
def test_a_cache_that_keeps_everything_has_exactly_the_scores_of_hf(
    folder: Path, arguments: str
) -> None:
    expected = run(folder, "hf")
    assert set(expected["results"]) == set(NAMES)
    found = run(folder, "kvfold", arguments)
    assert_same(found, expected)
    held = found["config"]["kvfold_held"]
    assert held["bytes_fast"] >= held["bytes_full"] > 0


@pytest.mark.parametrize("limits", ["", "max_length=150"])
def test_token_by_token_is_what_hf_scores_at_once(folder: Path, limits: str) -> None:
    expected = run(folder, "hf", limits)
    found = run(folder, "kvfold", ",".join(filter(None, (ROOMY, limits))))
    for task in NAMES:
        for now, then in zip(responses(found, task), responses(expected, task), strict=True):
            assert_close(now, then)
    assert found["results"][CHOICE] == expected["results"][CHOICE]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for now, then in zip(found, expected, strict=True):
        if isinstance(then, tuple):
            assert now == (pytest.approx(then[0], rel=1e-5), then[1])
        else:
            assert now == (then if isinstance(then, str) else pytest.approx(then, rel=1e-5))


def test_the_length_is_what_cuts_in_the_test_above(folder: Path) -> None:
    cut, whole = run(folder, "hf", "max_length=150"), run(folder, "hf")
    assert responses(cut, CHOICE) != responses(whole, CHOICE)
    assert responses(cut, TEXT) != responses(whole, TEXT)


def test_a_smaller_cache_scores_from_what_it_kept(folder: Path) -> None:
    found = run(folder, "kvfold", "method=tova,budget=0.25")
    model, tokenizer = kvfold.load(str(folder / "model"))
    page = found["samples"][TEXT][0]["doc"]["page"]
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(page)["input_ids"]]])
    cache = kvfold.make_cache(model, "tova", budget=0.25)
    logits = teacher_forced(model, cache, ids[:, :1], ids[:, 1:-1])[0].log_softmax(dim=-1)
    expected = float(logits.gather(1, ids[0, 1:, None]).sum())
    [told] = responses(found, TEXT)[0]
    assert told == pytest.approx(expected, rel=1e-5)
    assert told != pytest.approx(responses(run(folder, "hf"), TEXT)[0][0], rel=1e-3)
    held = found["config"]["kvfold_held"]
    assert 0.1 < held["bytes_fast"] / held["bytes_full"] < 0.3


def test_texts_are_generated_from_what_was_kept(folder: Path) -> None:
    found = run(folder, "kvfold", "method=streaming,budget=40", tasks=(ANSWER,), batch_size=1)
    model, tokenizer = kvfold.load(str(folder / "model"))
    sample = found["samples"][ANSWER][0]
    inputs = tokenizer(sample["arguments"][0][0], return_tensors="pt")
    cache = kvfold.make_cache(model, "streaming", budget=40)
    rows = model.generate(**inputs, max_new_tokens=12, do_sample=False, **{CACHE_KEYWORD: cache})
    told = tokenizer.decode(rows[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    expected = told.split("\n")[0].split(".")[0].split(",")[0]
    assert sample["filtered_resps"] == [expected]
    assert responses(found, ANSWER) != responses(run(folder, "hf"), ANSWER)


@pytest.mark.parametrize(
    "settings",
    [
        {"apply_chat_template": True, "system_instruction": "Be brief."},
        {"gen_kwargs": "do_sample=True,temperature=0.7,max_gen_toks=20"},
        {"num_fewshot": 2},
    ],
    ids=["chat", "sampling", "shots"],
)
def test_chat_templates_sampling_and_shots_are_those_of_hf(
    folder: Path, settings: dict[str, Any]
) -> None:
    tasks = (CHOICE, ANSWER)
    expected = run(folder, "hf", tasks=tasks, **settings)
    assert_same(run(folder, "kvfold", "method=full", tasks=tasks, **settings), expected)
    assert responses(expected, ANSWER) != responses(run(folder, "hf"), ANSWER)


def test_options_of_a_method_are_arguments_of_the_model(folder: Path) -> None:
    found = run(folder, "kvfold", "method=h2o,budget=0.5,option.scope=layer,option.sinks=2")
    facts = {name: found["config"][f"kvfold_{name}"] for name in ("method", "budget", "scope")}
    assert facts == {"method": "h2o", "budget": "0.5", "scope": "layer"}
    model = KVFoldLM(
        pretrained=str(folder / "model"), device="cpu", method="h2o", options={"scope": "layer"}
    )
    assert model.get_model_info()["kvfold_scope"] == "layer"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "nothing"}, ConfigError, "nothing"),
        ({"method": "h2o", "budget": 3}, BudgetError, "below the minimum of 8"),
        ({"method": "h2o", "budget": "1MiB"}, BudgetError, "shared by the rows of a batch"),
        ({"method": "h2o", "option.depth": 2}, ConfigError, "no option 'depth'"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(
    folder: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KVFoldLM(pretrained=str(folder / "model"), device="cpu", **arguments)


def test_caches_that_only_try_a_batch_are_not_counted(folder: Path) -> None:
    sizes = {"batch_size": "auto", "max_batch_size": 2, "max_length": 64}
    settings = {"method": "h2o", "budget": 0.5, "device": "cpu", **sizes}
    model = KVFoldLM(pretrained=str(folder / "model"), **settings)
    assert model._detect_batch_size() == 2
    assert model.get_model_info()["kvfold_held"]["caches"] == 0


def test_answers_are_kept_for_lm_evals_own_cache(folder: Path) -> None:
    kept: list[tuple[str, Any]] = []

    class Hook:
        def add_partial(self, kind: str, request: Any, answer: Any) -> None:
            kept.append((kind, answer))

    from lm_eval.api.instance import Instance

    model = KVFoldLM(pretrained=str(folder / "model"), device="cpu", method="knorm", batch_size=2)
    model.set_cache_hook(Hook())
    wanted = [
        Instance("loglikelihood", {}, (text, " here"), index)
        for index, text in enumerate(("", "it is", "it was not"))
    ]
    found = model.loglikelihood(wanted, disable_tqdm=True)
    assert sorted(kept) == sorted(("loglikelihood", answer) for answer in found)


def test_the_entry_point_names_the_model() -> None:
    text = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8")
    _, _, rest = text.partition('[project.entry-points."lm_eval.models"]\n')
    name, _, value = rest.splitlines()[0].partition(" = ")
    assert name == "kvfold"
    assert EntryPoint(name, value.strip('"'), "lm_eval.models").load() is KVFoldLM


def arguments_of(folder: Path, model: str) -> list[str]:
    given = ["--model", "kvfold", "--model_args", f"pretrained={folder / 'model'},{model}"]
    given += ["--tasks", CHOICE, "--include_path", str(folder / "tasks")]
    return [*given, "--device", "cpu", "--batch_size", "3"]


def assert_written(folder: Path, out: Path) -> None:
    """The file that lm-eval wrote says what its runner finds in this process."""
    [path] = out.rglob("*.json")
    written = json.loads(path.read_text())
    assert written["config"]["kvfold_budget"] == "0.5"
    here = run(folder, "kvfold", "method=snapkv,budget=0.5", tasks=(CHOICE,))
    for metric in ("acc,none", "acc_norm,none"):
        assert written["results"][CHOICE][metric] == here["results"][CHOICE][metric]


@pytest.fixture
def local_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep lm-eval's command line from reading its own thousands of tasks."""
    import lm_eval.tasks

    quick = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)
    for name in ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.usefixtures("local_tasks_alone")
def test_the_command_line_is_lm_evals_own(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = arguments_of(folder, "method=snapkv,budget=0.5")
    monkeypatch.setattr(sys, "argv", ["kvfold-lm-eval", *given, "--output_path", str(tmp_path)])
    assert main() == 0
    assert CHOICE in capsys.readouterr().out
    assert_written(folder, tmp_path)


@pytest.mark.usefixtures("local_tasks_alone")
def test_the_command_line_says_in_one_line_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments_of(folder, "method=snapkv,budget=1.5")
    monkeypatch.setattr(sys, "argv", ["kvfold-lm-eval", *given])
    assert main() == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kvfold-lm-eval: budget 150% is more than the whole cache: give a share")


@pytest.mark.slow
def test_the_command_line_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    start = "from kvfold.cli.lm_eval import main; raise SystemExit(main())"
    given = arguments_of(folder, "method=snapkv,budget=0.5")
    result = subprocess.run(
        [sys.executable, "-c", start, *given, "--output_path", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(HF_HUB_OFFLINE="1"),
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert CHOICE in result.stdout
    assert_written(folder, tmp_path)


@pytest.mark.real
def test_the_default_model_at_budget_one_has_exactly_the_scores_of_hf(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase], folder: Path, tmp_path: Path
) -> None:
    os.symlink(default_model[0].name_or_path, tmp_path / "model")
    os.symlink(folder / "tasks", tmp_path / "tasks")
    expected = run(tmp_path, "hf")
    assert_same(run(tmp_path, "kvfold", "method=distill,budget=1.0"), expected)
    assert expected["results"][CHOICE]["acc,none"] == 1.0
    assert expected["results"][ANSWER]["exact_match,none"] >= 0.8
