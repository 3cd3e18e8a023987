"""`kvfold diffuse`: masked diffusion language models, written, measured and made."""

from __future__ import annotations

import typer

from kvfold.cli.diffuse_adapt import adapt
from kvfold.cli.diffuse_arithmetic import train_arithmetic
from kvfold.cli.diffuse_bench import bench
from kvfold.cli.diffuse_calibrate import calibrate
from kvfold.cli.diffuse_generate import generate

HELP = """Write with masked diffusion language models, recomputing only what drifts.

Models: a folder or a name on the Hub (LLaDA, Dream, or any that tells its mask token), or those
that kvfold makes: `arithmetic` and `arithmetic-shifted` (`train-arithmetic`), `adapted` and
`adapted-same` (`adapt`).
"""

app = typer.Typer(help=HELP, no_args_is_help=True)
app.command()(generate)
app.command()(bench)
app.command()(calibrate)
app.command("train-arithmetic")(train_arithmetic)
app.command()(adapt)
