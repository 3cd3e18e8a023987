"""The measuring process: a request on standard input, the measurement on standard output.

Run as `python -m kvfold.bench.worker`. What stops it stands in the last line of standard error.
"""

from __future__ import annotations

import sys

from kvfold.errors import KVFoldError


def main() -> int:
    """Read one request, do it, and return the exit code: 0, or 1 with a line on standard error."""
    from kvfold.bench.measure import perform
    from kvfold.bench.request import Request

    try:
        measurement = perform(Request.from_json(sys.stdin.read()))
    except KVFoldError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write("null\n" if measurement is None else measurement.to_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
