"""`kvfold transfer`: caches handed from one model to another of the same architecture."""

from __future__ import annotations

import typer

from kvfold.cli.transfer_ask import ask
from kvfold.cli.transfer_bench import bench
from kvfold.cli.transfer_calibrate import calibrate
from kvfold.cli.transfer_serve import serve

HELP = """Hand a prefix's cache from a base model to a fine-tuned one, as compact codes (SCD).

`calibrate` makes a codec of two models; `serve` reads prefixes with the first and sends their
codes; `ask` answers prompts with the second, which reads a prefix itself when no codes come.
"""

app = typer.Typer(help=HELP, no_args_is_help=True)
app.command()(calibrate)
app.command()(serve)
app.command()(ask)
app.command()(bench)
