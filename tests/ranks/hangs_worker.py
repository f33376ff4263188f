"""One of several ranks that runs `hanging_worker.py`: `hangs_worker.py FOLDER CASE SECONDS HOW`."""

import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("hanging_worker.py")


def main():
    _, _, case, seconds, how = sys.argv
    if how == "command":
        from hookcb.cli.main import main as main_of_hookcb

        sys.exit(main_of_hookcb(["diagnose", str(SCRIPT), case, seconds]))
    from hookcb import Diagnose, watch
    from tests.ranks import hanging_worker

    hanging_worker.main(case, float(seconds), lambda model, opt: watch(model, opt, cbs=Diagnose()))


if __name__ == "__main__":
    main()
