"""One of several ranks that runs `hanging_worker.py`: `hangs_worker.py FOLDER CASE SECONDS HOW`."""

import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("hanging_worker.py")


def fit(case, seconds, hanging):
    """Fits a Learner in which a rank does at the end of a batch what it does in the script."""
    from hookcb import Callback, Diagnose
    from tests.ranks.support import join_group, make_learner

    rank, _ = join_group(seconds)
    hangs = Callback(
        name="hangs",
        after_batch=lambda cb: hanging.in_batch(cb.learn.iter, case, rank, seconds, cb.learn.model),
    )
    make_learner().fit(1, cbs=[Diagnose(), hangs])


def main():
    _, _, case, seconds, how = sys.argv
    if how == "command":
        from hookcb.cli.main import main as main_of_hookcb

        sys.exit(main_of_hookcb(["diagnose", str(SCRIPT), case, seconds]))
    from hookcb import Diagnose, watch
    from tests.ranks import hanging_worker

    if how == "learner":
        return fit(case, float(seconds), hanging_worker)
    return hanging_worker.main(case, float(seconds), lambda model, opt: watch(model, opt, cbs=Diagnose()))


if __name__ == "__main__":
    main()
