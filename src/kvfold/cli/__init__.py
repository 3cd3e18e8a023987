"""The command line: `kvfold COMMAND`, one file a command.

Modules in this folder import only typer, rich and the standard library at their top; a command
imports the rooms it needs when it runs. So `kvfold --help` answers at once, and the environment
is set before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

__all__ = ["main"]

FASTER = {"THP_MEM_ALLOC_ENABLE": "1", "MKL_CBWR": "AUTO"}
"""Has torch ask Linux for large pages, with which a CPU reads weights and caches faster, and MKL
take the code path made for the CPU, whoever made it; the results are then the same in every run."""
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    **FASTER,
}
"""Set unless the user has set them; libraries read them when they are imported."""

SHARED = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Set too where other work may keep cores busy, since threads that wait actively then wait for
whole time slices. A measurement needs the machine to itself."""


def set_unless_given(variables: Mapping[str, str]) -> None:
    """Put variables into the environment that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: What stands after `kvfold`; the process's own arguments if None.

    Returns:
        0 when it worked, 2 for a user's error, 1 for a failure, 130 after Ctrl-C, 141 when the
        reader of standard output went away.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # `bench` is a command, and one of `diffuse` and `transfer`.
    words = [argument for argument in given if not argument.startswith("-")][:2]
    measures = words[:1] == ["bench"] or words in (["diffuse", "bench"], ["transfer", "bench"])
    wanted = ENVIRONMENT if measures else ENVIRONMENT | SHARED
    set_unless_given(wanted)
    try:
        from kvfold.cli.app import run
    except KeyboardInterrupt:
        sys.stderr.write("kvfold: interrupted\n")
        return 130
    return run(given)
