"""`python -m kvfold`: the command line."""

import sys

from kvfold.cli import main

if __name__ == "__main__":
    sys.exit(main())
