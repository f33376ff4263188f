"""`python -m hookcb`: the command line."""

import sys

from hookcb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
