"""`python -m fxrewrite` is the `fxrewrite` command."""

import sys

from fxrewrite.cli import main

if __name__ == "__main__":
    sys.exit(main())
