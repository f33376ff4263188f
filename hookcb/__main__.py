"""`python -m hookcb` is the command `hookcb`."""

import sys

from hookcb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
