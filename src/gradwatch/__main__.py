"""`python -m gradwatch`: the `gradwatch` command, where its script is not on the path."""

import sys

from gradwatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
