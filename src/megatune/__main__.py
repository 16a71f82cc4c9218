"""`python -m megatune`: the same as the console script."""

import sys

from megatune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
