"""`kvfold train`: learn what a method needs, for a model of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.checks import check_model
from kvfold.cli.console import JsonOption, note, progress
from kvfold.cli.options import DeviceOption, DtypeOption, ModelOption, listed, load
from kvfold.cli.train_place import (
    EveryOption,
    OutOption,
    Place,
    RateOption,
    ResumeOption,
    SeedOption,
    SinksOption,
    TextsOption,
    ValidationOption,
    folder_for,
    is_main,
    progress_line,
    show_trained,
    this_command,
)
from kvfold.cli.train_sekv import sekv
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.evict.learner import DistillSettings
    from kvfold.evict.train import TrainedPolicy
    from kvfold.training import Progress, TrainingSettings

app = typer.Typer(help="Learn what a method needs, for a model of your own.", no_args_is_help=True)

StepsOption = Annotated[int, typer.Option(help="Prompts to learn from, one a step.")]
RankerOption = Annotated[
    int, typer.Option(help="Texts to which a supervised ranker is fitted first; 0 for none.")
]
LengthOption = Annotated[int, typer.Option(help="Tokens of an excerpt, continuation included.")]
HorizonOption = Annotated[int, typer.Option(help="Tokens of the continuation that are scored.")]
BlockOption = Annotated[int, typer.Option(help="Tokens between two prunings; 1 is the paper's.")]
BudgetsOption = Annotated[str, typer.Option(help="Shares that may stay, a comma between.")]
RolloutsOption = Annotated[int, typer.Option(help="Prunings of a prompt that are compared.")]
LawOption = Annotated[
    str, typer.Option(help="Of what is drawn: plackett-luce or conditional-poisson.")
]
ScopeOption = Annotated[
    str, typer.Option(help="What shares one kept set: layer, or token (all of them).")
]
WholeOption = Annotated[float, typer.Option(help="Share of kv heads that may keep everything.")]
ImportanceOption = Annotated[
    int, typer.Option(help="Texts by which the importance of heads is measured; 0 for none.")
]
FeaturesOption = Annotated[str, typer.Option(help="What the policy may look at.")]
EntropyOption = Annotated[float, typer.Option(help="Weight of the draw's entropy.")]
ClipOption = Annotated[float, typer.Option(help="A token's divergence counts up to so much.")]
RecentOption = Annotated[int, typer.Option(help="Last tokens that always stay.")]


@app.callback()
def _train() -> None:
    """Learn what a method needs, for a model of your own."""


@app.command()
def distill(
    model: ModelOption = "default",
    out: OutOption = "distill-policy",
    texts: TextsOption = "default",
    steps: StepsOption = 300,
    ranker_texts: RankerOption = 48,
    length: LengthOption = 768,
    horizon: HorizonOption = 32,
    block: BlockOption = 8,
    budgets: BudgetsOption = "0.125,0.25",
    rollouts: RolloutsOption = 8,
    law: LawOption = "plackett-luce",
    scope: ScopeOption = "layer",
    whole: WholeOption = 0.1,
    importance_texts: ImportanceOption = 16,
    features: FeaturesOption = "mass,norm,spread,entropy,position",
    entropy_bonus: EntropyOption = 0.01,
    clip: ClipOption = 2.0,
    sinks: SinksOption = 4,
    recent: RecentOption = 32,
    learning_rate: RateOption = 3e-4,
    validation: ValidationOption = 16,
    every: EveryOption = 50,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Train a policy of DistillCache: which tokens to keep so that the model says the same.

    `policy` in `kvfold.make_cache` takes the folder; --resume goes on after an interruption.
    """
    check_model(model, dtype)
    folder = folder_for(out)
    settings, method = _settings(locals())
    if length <= horizon + sinks + recent:
        raise ConfigError(
            f"excerpts of {length} tokens leave no prompt before {horizon} scored ones, with "
            f"{sinks} first and {recent} last ones protected: give a greater --length"
        )
    where = Place(model, dtype, device, folder, resume)
    where.check()
    with where.open():
        trained = _run(where, listed(texts), length, settings, method)
    if is_main():
        _show(trained, json_output=json_output)


app.command()(sekv)


def _settings(given: Mapping[str, Any]) -> tuple[TrainingSettings, DistillSettings]:
    """The options as settings, checked."""
    from kvfold.evict.learner import DistillSettings
    from kvfold.evict.network import check_features
    from kvfold.training import TrainingSettings

    own = {field.name for field in fields(DistillSettings)} & set(given)
    method = {name: given[name] for name in own}
    method |= {
        "budgets": _shares(given["budgets"]),
        "features": listed(given["features"]),
        "law": _law(given["law"]),
    }
    settings = TrainingSettings(
        steps=given["steps"],
        learning_rate=given["learning_rate"],
        warmup_steps=min(20, given["steps"] // 10),
        seed=given["seed"],
        validate_every=given["every"],
        checkpoint_every=given["every"],
    )
    settings.check()
    distill = DistillSettings(**method)
    distill.check()
    check_features(distill.features)
    return settings, distill


def _run(
    where: Place,
    texts: tuple[str, ...],
    length: int,
    settings: TrainingSettings,
    method: DistillSettings,
) -> TrainedPolicy:
    from kvfold.evict.train import train_policy
    from kvfold.training import open_corpus

    accelerator = where.accelerator()
    loaded, tokenizer = load(where.model, where.dtype, where.device_for(accelerator))
    corpus = open_corpus(texts, tokenizer, length=length, seed=settings.seed)
    with progress() as report:
        return train_policy(
            loaded,
            corpus,
            where.out,
            settings,
            method,
            name=where.model,
            command=this_command(),
            resume=where.resume,
            on_progress=lambda at: report(_line(at), at.step / at.total),
            on_preparation=report,
            accelerator=accelerator,
        )


def _shares(text: str) -> tuple[float, ...]:
    from kvfold.budget import Budget

    budgets = [Budget.parse(part) for part in listed(text)]
    if not budgets or any(budget.unit != "ratio" for budget in budgets):
        raise ConfigError(f"--budgets {text!r}: give shares such as 0.125,0.25")
    return tuple(budget.amount for budget in budgets)


def _law(text: str) -> str:
    if text not in ("plackett-luce", "conditional-poisson"):
        raise ConfigError(f"--law {text!r}: give plackett-luce or conditional-poisson")
    return text


def _line(at: Progress) -> str:
    """One line on where a run stands, with its speed."""
    line, speed = progress_line(at, ("kl", "entropy"), "kl"), at.metrics.get("tokens_per_second")
    return line if speed is None else f"{line}, {speed:.0f} tokens/s"


def _show(trained: TrainedPolicy, *, json_output: bool) -> None:
    record, files = trained.artifact.record, {"policy": trained.policy, "picture": trained.curve}
    show_trained(files, record, title="Trained policy", json_output=json_output)
    if not json_output:
        note(f"use it: kvfold.make_cache(model, {_arguments(trained)})")


def _arguments(trained: TrainedPolicy) -> str:
    """What `make_cache` is given to use a policy as it was trained."""
    from kvfold.evict.build import RECENT, SINKS
    from kvfold.evict.whole_heads import WHOLE

    identity = trained.artifact.record["identity"]
    assert isinstance(identity, dict)
    settings = identity["settings"]
    changed = [
        f"{name}={settings[name]}"
        for name, default in (("sinks", SINKS), ("recent", RECENT), ("whole", WHOLE))
        if settings[name] != default
    ]
    return ", ".join(['"distill"', f'policy="{trained.policy.parent}"', *changed])
