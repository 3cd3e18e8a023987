"""`kvfold-lm-eval`: the command line of lm-evaluation-harness, with the model `kvfold` in it.

Its releases up to 0.4.13 know no models of other packages, so the model is registered before its
own command line runs. Later ones find it by the entry point.
"""

from __future__ import annotations

import sys

from kvfold.cli import FASTER, SHARED, set_unless_given


def main() -> int:
    """Run lm-eval's command line on the process's arguments.

    Returns:
        0 when it worked, 2 for a user's error, 1 for a failure. What lm-eval itself refuses ends as
        it does there.
    """
    set_unless_given(SHARED | FASTER)
    from kvfold.cli.failures import explain
    from kvfold.errors import KVFoldError
    from kvfold.evaluation.harness import register

    try:
        register()
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

        cli_evaluate()
    except KVFoldError as error:
        code, text = explain(error, sys.argv[1:])
        sys.stderr.write(f"kvfold-lm-eval: {text}\n")
        return code
    return 0
