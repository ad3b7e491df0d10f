"""`python -m autosp_rules` is the `autosp` command."""

import sys

from autosp_rules.cli import main

if __name__ == "__main__":
    sys.exit(main())
