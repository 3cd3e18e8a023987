"""`kvfold diffuse calibrate`: fit SPA-Cache's budget and rank to a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.console import JsonOption, facts, note, print_json, stdout
from kvfold.cli.diffuse_bench import PromptsFileOption
from kvfold.cli.diffuse_options import (
    BlockOption,
    DiffusionOption,
    FactorOption,
    LengthOption,
    MaskOption,
    PredictionOption,
    SamplerOption,
    StepsOption,
    ThresholdOption,
    check_writing,
    choice_of,
    open_model,
    prompts_of,
)
from kvfold.cli.files import output_folder
from kvfold.cli.options import DeviceOption, DtypeOption, listed
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.diffusion import Calibration

NAME = "calibration"
"""Of the files, before their endings."""

PromptsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="A few prompts, of the kind that will be used, as they are.", show_default=False
    ),
]


def calibrate(
    prompts: PromptsArgument = None,
    file: PromptsFileOption = None,
    model: DiffusionOption = "arithmetic",
    ratio: Annotated[
        float, typer.Option(help="Mean share of tokens that a layer will recompute.")
    ] = 0.25,
    ranks: Annotated[
        str | None,
        typer.Option(help="To try, a comma between.", show_default="powers of two up to full"),
    ] = None,
    length: LengthOption = 16,
    sampler: SamplerOption = None,
    steps: StepsOption = None,
    block_length: BlockOption = None,
    threshold: ThresholdOption = None,
    factor: FactorOption = None,
    mask_token_id: MaskOption = None,
    prediction: PredictionOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    out: Annotated[
        str, typer.Option(help="Folder of the calibration and its picture.", metavar="DIR")
    ] = "kvfold-calibration",
    json_output: JsonOption = False,
) -> None:
    """Measure how tokens drift in each layer, and fit a budget curve and a rank for spa.

    `--calibration` of generate and bench takes the file.
    """
    folder = output_folder(out)
    check_writing(locals())
    tried = _ranks(ranks)
    texts = prompts_of(prompts, file)
    choice = choice_of(locals())
    from kvfold.diffusion import calibrate as measure
    from kvfold.diffusion.budget import require_share
    from kvfold.text import encode

    require_share(ratio, "--ratio")
    loaded, tokenizer = open_model(locals())
    found = measure(
        loaded,
        [encode(tokenizer, text) for text in texts],
        length=length,
        sampler=choice.make(loaded),
        ratio=ratio,
        ranks=tried,
    )
    _show(found, folder, json_output=json_output)


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = listed(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--ranks {text!r}: give whole numbers from 1, such as 16,32,64")
    return tuple(int(part) for part in parts)


def _show(found: Calibration, folder: Path, *, json_output: bool) -> None:
    from kvfold.artifacts import write_files
    from kvfold.diffusion.picture import draw_calibration

    written, picture = write_files(
        folder,
        {
            f"{NAME}.json": found.save,
            f"{NAME}.png": lambda path: draw_calibration(found).savefig(
                path, format="png", dpi=130
            ),
        },
    )
    curve = found.curve
    if json_output:
        from dataclasses import asdict

        print_json({"calibration": str(written), "picture": str(picture), **asdict(found)})
        return
    least, most = min(found.drift), max(found.drift)
    stdout().print(
        facts(
            {
                "calibration": written,
                "picture": picture,
                "drift by layer": f"{least:.4f} to {most:.4f}",
                "curve": f"{curve.first:.3f} first, {curve.peak:.3f} at depth {curve.at:.2f}, "
                f"{curve.last:.3f} last",
                "mean share": f"{found.ratio:.2f}",
                "rank": f"{found.rank}, which finds {found.overlap[found.rank]:.0%} of the tokens "
                "that drift most",
            },
            title="Calibration",
        )
    )
    note(f"use it: --cache spa --calibration {written}")
