"""What a run of a training consists of."""

import pickle

from hookcb import Diagnose
from hookcb.diagnosis.run import Run
from tests.support import fit, make_learner

# what measurements and faults keep is theirs; a new attribute of all needs a reason
ATTRIBUTES = [
    *("loop", "looking", "noting"),  # while it is followed
    *("parts", "sources", "reasons", "notes", "reader"),
    *("n_batches", "n_looked", "n_steps"),
    *("loss", "lr", "layers", "params", "steps"),
]


def test_a_run_has_these_attributes_and_no_others():
    assert len(ATTRIBUTES) <= 16
    assert sorted(name for name in Run.__dataclass_fields__ if name[0] != "_") == sorted(ATTRIBUTES)


def test_what_stays_of_a_fit_holds_no_loop_and_can_be_pickled():
    learn = fit(make_learner(10), cbs=Diagnose(show=False))
    run = learn.diagnosis.evidence()
    assert run.loop is None
    again = pickle.loads(pickle.dumps(run))
    assert again.loss == run.loss
    assert {kind.__name__ for kind in again.parts} == {kind.__name__ for kind in run.parts}
