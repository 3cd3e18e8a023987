"""`kvfold transfer`: caches handed from one model to another of the same architecture."""

from __future__ import annotations

import typer

from kvfold.cli.transfer_answers import answers
from kvfold.cli.transfer_ask import ask
from kvfold.cli.transfer_bench import bench
from kvfold.cli.transfer_calibrate import calibrate
from kvfold.cli.transfer_serve import serve
from kvfold.cli.transfer_specialise import specialise

HELP = """Hand a prefix's cache from a base model to a fine-tuned one, as compact codes (SCD).

`specialise` teaches a base model a task; `calibrate` makes a codec of two models; `serve` reads
prefixes with the first and sends their codes; `ask` answers prompts with the second, which reads a
prefix itself when no codes come. `bench` measures times, `answers` what they cost in answers.
"""

app = typer.Typer(help=HELP, no_args_is_help=True)
app.command()(specialise)
app.command()(calibrate)
app.command()(serve)
app.command()(ask)
app.command()(bench)
app.command()(answers)
