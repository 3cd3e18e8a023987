"""`kvfold diffuse`: what it writes and prints, how runs go on, and what it refuses at once."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from kvfold.cli.app import run
from kvfold.diffusion import BudgetCurve, Calibration
from kvfold.diffusion.learner import MaskingSettings
from kvfold.diffusion.train import train_arithmetic
from kvfold.training import TrainingSettings
from kvfold.training.checkpoint import CHECKPOINT
from kvfold.training.loop import _Run
from tests.tiny_folder import save_tiny

SUM = "123+456="
COMMANDS = ("generate", "bench", "calibrate", "train-arithmetic", "adapt")
SHORT = ["--steps", "4", "--every", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("private") / "adder"
    settings = TrainingSettings(steps=40, learning_rate=2e-3, warmup_steps=5)
    train_arithmetic(folder, settings, MaskingSettings(rows=16), problems=1)
    return str(folder)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvfold.diffusion.own.SHIPPED", tmp_path / "shipped")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def diffuse(*arguments: str) -> int:
    return run(["diffuse", *arguments])


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert diffuse(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert diffuse(command, "--help") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "--json" in out


def test_a_text_on_stdout_and_the_report_on_stderr(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diffuse("generate", SUM, "--model", model, "--steps", "5", "--stream") == 0
    out, err = capsys.readouterr()
    *canvas, report = err.splitlines()
    assert [line.split()[0] for line in canvas] == [str(step) for step in range(1, len(canvas) + 1)]
    assert canvas[0].count("░") == 12, "four of sixteen in the first of five steps"
    assert "░" not in canvas[-1]
    assert canvas[-1].split()[1].partition("<end>")[0] == out.strip()
    assert report.startswith("spa: ")
    assert "tokens/s" in report
    document = as_json(capsys, "generate", SUM, "--model", model, "--steps", "5")
    assert document["text"] + "\n" == out
    assert document["prompt_tokens"] == 8
    assert document["report"]["steps"] == len(canvas)
    assert document["new_tokens"] == len(out.strip())
    rate = document["new_tokens"] / document["seconds"]
    assert document["tokens_per_second"] == pytest.approx(rate)


def test_on_a_terminal_the_canvas_stays_in_place(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, color_system="standard")
    monkeypatch.setattr("kvfold.cli.diffuse_generate.stderr", lambda: console)
    options = ["--model", model, "--steps", "3", "--sampler", "llada:stop_at_eos=false"]
    assert diffuse("generate", SUM, *options, "--stream") == 0
    shown = screen.getvalue()
    assert [f"step {number}" in shown for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert "\x1b[1;32m" in shown, "what is new stands out"
    assert shown.endswith("\x1b[2K"), "nothing of it is left"
    assert capsys.readouterr().out.count("\n") == 1


def test_caches_and_samplers_take_options(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = BudgetCurve(0.1, 0.4, 0.2)
    Calibration((0.1,) * 4, {8: 0.9}, curve, 8, 0.3).save(tmp_path / "fit.json")
    options = ["--model", model, "--cache", "spa:preset=paper:rank=4"]
    options += ["--calibration", str(tmp_path / "fit.json")]
    document = as_json(capsys, "generate", SUM, *options, "--sampler", "dream:steps=3")
    assert document["report"]["steps"] == 3
    expected = {"rank=4", "ratio=0.3", "kv_refresh='selected'", "BudgetCurve(first=0.1, peak=0.4"}
    assert [part for part in expected if part not in document["options"]] == []
    options = ["--model", model, "--cache", "none", "--threshold", "0.01"]
    assert as_json(capsys, "generate", SUM, *options)["report"]["steps"] == 1


def test_prompts_from_a_file_and_from_standard_input(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sum.txt").write_text(SUM, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(SUM.encode())))
    given = ([SUM], ["--file", "sum.txt"], ["-"])
    texts = [as_json(capsys, "generate", *each, "--model", model)["text"] for each in given]
    assert texts[0] == texts[1] == texts[2]


def test_a_bench_shows_all_caches_and_writes_files(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", model, "--rows", "3", "--rounds", "2", "--steps", "6", "--threads", "1"]
    options += ["--caches", "spa:ratio=0.2,dkv"]
    assert diffuse("bench", *options, "--out", "new/b", "--follow") == 0
    shown, said = capsys.readouterr()
    assert "adder, 3 held-out additions, 16 tokens to write" in shown
    shown, parts = shown.split("milliseconds of a step")
    rows = {line.split("│")[1].strip(): line for line in shown.splitlines() if "│" in line}
    assert list(rows) == ["none", "spa:ratio=0.2", "dkv"]
    parts = {line.split("│")[1].strip() for line in parts.splitlines() if "│" in line}
    assert parts >= {"MLP", "attention", "selection", "logits", "sampling", "other", "all"}
    assert "1.00 (1.00 to 1.00)" in rows["none"]
    assert "100.0%" in rows["none"]
    assert "round 2 of 2, turn 1: dkv" in said
    assert imread("new/b/bench-diffusion.png").ndim == 3
    document = json.loads(Path("new/b/bench-diffusion.json").read_text(encoding="utf-8"))
    assert [each["cache"] for each in document["outcomes"]] == list(rows)
    assert document["settings"]["model"] == "adder"
    assert document["settings"]["steps"] == 6
    none, spa, dkv = document["outcomes"]
    assert none["followed"] is None
    assert len(spa["followed"]["divergences"]) == 6
    assert spa["followed"]["divergences"][0] < 1e-5
    assert len(dkv["followed"]["same"]) == 3 * 16
    assert f"{sum(dkv['followed']['same']) / 48:.1%}" in rows["dkv"]
    assert (none["agreement"], len(none["seconds"]["samples"])) == (1.0, 2)
    ratio = spa["tokens_per_second"]["samples"][1] / none["tokens_per_second"]["samples"][1]
    assert spa["times_none"]["samples"][1] == pytest.approx(ratio)
    turns = [none["seconds"]["samples"][i] / spa["seconds"]["samples"][i] for i in range(2)]
    assert spa["times_none_by_turn"]["samples"] == pytest.approx(turns), "one turn a round"
    assert sum(spa["step_seconds"].values()) * 12 == pytest.approx(sum(spa["seconds"]["samples"]))
    assert 0 <= spa["right"] <= 1
    assert spa["report"]["share"] < 1


def test_a_bench_of_given_and_of_reference_prompts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rounds", "1", "--caches", "none", "--length", "4"]
    document = as_json(capsys, "bench", SUM, "1+1=", "--model", model, *options)
    assert (document["task"], document["outcomes"][0]["right"]) == ("2 prompts", None)
    plain = save_tiny(tmp_path / "plain")
    options += ["--mask-token-id", "0", "--prediction", "shifted", "--prompt-tokens", "9"]
    document = as_json(capsys, "bench", "--model", plain, "--rows", "2", *options)
    assert document["task"] == "2 prompts of 9 tokens"
    assert document["outcomes"][0]["report"]["rows"] == 2


def test_a_bench_in_which_nothing_is_written(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", model, "--rounds", "1", "--caches", "none", "--length", "1"]
    document = as_json(capsys, "bench", f"{SUM}0579;321654", *options)
    assert document["outcomes"][0]["new_tokens"] == 0
    assert document["outcomes"][0]["times_none"] is None
    assert diffuse("bench", f"{SUM}0579;321654", *options) == 0
    assert re.search(r"│ +- │", capsys.readouterr().out)


def test_a_calibration_is_written_and_used(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["calibrate", SUM, "--model", model, "--ratio", "0.3", "--ranks", "4,16"]
    assert diffuse(*options) == 0
    shown, said = capsys.readouterr()
    assert "drift by layer" in shown
    assert said == "use it: --cache spa --calibration kvfold-calibration/calibration.json\n"
    assert imread("kvfold-calibration/calibration.png").ndim == 3
    fitted = Calibration.load("kvfold-calibration/calibration.json")
    assert (fitted.ratio, sorted(fitted.overlap), len(fitted.drift)) == (0.3, [4, 16], 4)
    document = as_json(capsys, *options, "--out", "other")
    assert document["drift"] == pytest.approx(list(fitted.drift), rel=1e-3)
    assert document["calibration"] == str(Path("other/calibration.json"))


def test_a_small_model_is_trained_found_by_name_and_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    options = ["train-arithmetic", "--prediction", "shifted", "--rows", "2", "--problems", "2"]
    report = _Run.report

    def interrupt(self: _Run, *arguments: object) -> None:
        report(self, *arguments)
        if self.done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(_Run, "report", interrupt)
        assert diffuse(*options, *SHORT) == 130
    assert "with --resume goes on with it" in capsys.readouterr().err
    assert diffuse(*options, *SHORT) == 2
    assert "resume it, or choose another" in capsys.readouterr().err
    assert diffuse(*options, *SHORT, "--resume") == 0
    shown, said = capsys.readouterr()
    assert "right in 16 steps" in shown
    assert said.endswith("use it: kvfold diffuse generate --model arithmetic-shifted\n")
    assert (here.parent / "home/models/diffusion-arithmetic-shifted" / CHECKPOINT).exists()
    document = as_json(capsys, *options, *SHORT, "--out", "whole")
    assert document["model"] == "whole"
    assert [point["step"] for point in document["curve"]] == [0, 2, 4]
    texts = [
        as_json(capsys, "generate", SUM, "--model", name)["text"]
        for name in ("arithmetic-shifted", "whole")
    ]
    assert texts[0] == texts[1]


def test_a_model_is_adapted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_tiny(tmp_path / "plain")
    Path("text.txt").write_text("One day, it rained on the roof. " * 300, encoding="utf-8")
    options = ["--model", plain, "--texts", "text.txt", "--mask-token-id", "0", "--rows", "2"]
    options += ["--validation", "2", "--prediction", "same", "--precision", "bfloat16", *SHORT]
    document = as_json(capsys, "adapt", *options)
    assert document["model"] == "adapted-same"
    assert document["adapted_from"] == "plain"
    assert document["settings"]["precision"] == "bfloat16"
    assert document["identity"]["prediction"] == "same"
    options = ["generate", "Hi", "--raw", "--model", "adapted-same", "--length", "4"]
    assert as_json(capsys, *options)["report"]["rows"] == 1


@pytest.mark.parametrize(
    ("options", "rate", "rank"),
    [
        ([], 3e-4, None),
        (["--lora-rank", "2"], 1e-3, 2),
        (["--lora-rank", "2", "--learning-rate", "0.002"], 2e-3, 2),
    ],
    ids=["all", "lora", "rate"],
)
def test_what_learns_has_its_own_rate(
    options: list[str],
    rate: float,
    rank: int | None,
    plain: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("text.txt").write_text("One day, it rained on the roof. " * 300, encoding="utf-8")
    options += ["--model", plain, "--texts", "text.txt", "--mask-token-id", "0", "--rows", "2"]
    document = as_json(capsys, "adapt", *options, "--validation", "2", *SHORT)
    assert document["settings"]["learning_rate"] == rate
    assert document["identity"].get("lora", {}).get("rank") == rank
    saved = json.loads(Path(document["folder"], "training.json").read_text(encoding="utf-8"))
    assert saved["identity"] == document["identity"]
    written = as_json(capsys, "generate", "Hi", "--raw", "--model", "adapted", "--length", "4")
    assert written["report"]["rows"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "give one prompt"),
        (["generate", " "], "the prompt is empty"),
        (["generate", SUM, "--file", "a"], "give one prompt"),
        (["generate", SUM], "run `kvfold diffuse train-arithmetic`"),
        (["generate", SUM, "--model", "adapted"], "run `kvfold diffuse adapt`"),
        (["generate", SUM, "--model", "./nowhere"], "there is no folder"),
        (["generate", SUM, "--model", "PLAIN"], "the model has no mask token"),
        (["generate", SUM, "--model", "MODEL", "--length", "200"], "128 positions"),
        (["generate", SUM, "--model", "MODEL", "--cache", "spa:rank=99"], "the rank is 99"),
        (["generate", SUM, "--model", "MODEL", "--block-length", "4", "--steps", "2"], "too few"),
        (["generate", SUM, "--model", "MODEL", "--chat"], "no chat template"),
        (["generate", SUM, "--cache", "best"], "unknown cache for diffusion 'best'"),
        (["generate", SUM, "--cache", "spa:ratio=0"], "spa: ratio is 0"),
        (["generate", SUM, "--cache", "spa:ratio=2"], "spa: ratio is 2"),
        (["generate", SUM, "--cache", "dual:ratio=1"], "dual has no option 'ratio'"),
        (["generate", SUM, "--cache", "spa:preset=fast"], "unknown preset of spa 'fast'"),
        (["generate", SUM, "--cache", "spa:ratio"], "cannot read 'spa:ratio'"),
        (["generate", SUM, "--calibration", "none.json"], "no calibration that can be read"),
        (["generate", SUM, "--cache", "dual", "--calibration", "fit.json"], "is for spa"),
        (["generate", SUM, "--sampler", "best"], "unknown sampler 'best'"),
        (["generate", SUM, "--sampler", "dream", "--block-length", "4"], "dream has no option"),
        (["generate", SUM, "--sampler", "llada:steps=3", "--steps", "3"], "steps is given twice"),
        (["generate", SUM, "--sampler", "llada", "--steps", "0"], "steps is 0"),
        (["generate", SUM, "--sampler", "llada", "--threshold", "2"], "threshold is 2.0"),
        (["generate", SUM, "--length", "0"], "--length 0 is below 1"),
        (["generate", SUM, "--prediction", "left"], "--prediction 'left': give same or shifted"),
        (["generate", SUM, "--dtype", "int8"], "dtype 'int8' is not one of"),
        (["bench", "--caches", "spa,spa"], "name each once"),
        (["bench", "--caches", "spa,best"], "unknown cache for diffusion 'best'"),
        (["bench", "--rounds", "0"], "--rounds 0 is below 1"),
        (["bench", "--out", "fit.json"], "cannot write to the folder"),
        (["bench", ""], "a prompt is empty"),
        (["calibrate"], "no prompt was given"),
        (["calibrate", SUM, "--ranks", "4,x"], "--ranks '4,x': give whole numbers"),
        (["calibrate", SUM, "--ratio", "0"], "--ratio is 0.0"),
        (["calibrate", SUM, "--model", "MODEL", "--steps", "1"], "a single step"),
        (["train-arithmetic", "--steps", "0"], "--steps 0 is below 1"),
        (["train-arithmetic", "--prediction", "left"], "--prediction 'left'"),
        (["train-arithmetic", "--learning-rate", "0"], "learning_rate is 0.0"),
        (["train-arithmetic", "--out", "fit.json"], "cannot write to the folder"),
        (["adapt", "--model", " "], "the model name is empty"),
        (["adapt", "--precision", "int8"], "--precision 'int8': give float32 or bfloat16"),
        (["adapt", "--lora-rank", "0"], "--lora-rank 0 is below 1"),
        (["adapt", "--model", "PLAIN", "--mask-token-id", "0", "--lora-rank", "33"], "1 to 32"),
        (["adapt", "--model", "PLAIN"], "no special token to spare"),
        (["adapt", "--model", "PLAIN", "--mask-token-id", "9999"], "give mask_token_id"),
        (["adapt", "--model", "PLAIN", "--mask-token-id", "0", "--length", "8"], "too short"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str],
    message: str,
    model: str,
    plain: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Calibration((0.1,), {1: 0.9}, BudgetCurve(0.2, 0.2, 0.2), 1, 0.2).save(here / "fit.json")
    places = {"MODEL": model, "PLAIN": plain}
    assert diffuse(*[places.get(argument, argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert message in err
    assert [path.name for path in here.iterdir()] == ["fit.json"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is autoregressive."""
    return save_tiny(tmp_path_factory.mktemp("plain"))
