"""The evidence has what probes measured, and a probe that fails does not harm the training."""

import pytest

from hookcb import Diagnose
from hookcb.diagnosis.probes.suite import Probes
from tests.support import fit, make_learner


def evidence_of(n_epoch=2):
    watcher = Diagnose(show=False)
    fit(make_learner(4), n_epoch, cbs=watcher)
    return watcher.evidence()


def test_what_there_was_to_look_at_is_told():
    evidence = evidence_of()
    assert evidence.observed >= {"loss", "backward", "steps", "batches"}
    assert evidence.observed >= {"inputs", "labels", "loss", "backward", "steps"}
    assert evidence.sources >= {"batches", "batch", "steps", "time", "loss", "model"}
    assert "attention" not in evidence.observed
    assert "replicas at the end of an epoch" not in evidence.observed
    assert evidence.observations == []
    assert len(evidence.loss) == evidence.n_batches == evidence.n_steps == 8


@pytest.mark.parametrize("part", ["begin_batch", "record_loss", "end_backward", "begin_step", "end_batch"])
def test_a_part_that_fails_is_a_note_and_the_training_goes_on(part, monkeypatch):
    def fail(*args):
        raise RuntimeError("a probe is broken")

    plain = fit(make_learner(4), 2)
    monkeypatch.setattr(Probes, part, fail)
    learn = fit(make_learner(4), 2, cbs=Diagnose(show=False))
    assert learn.recorder.losses == plain.recorder.losses
    notes = [line for line in learn.diagnose().looked if "a probe is broken" in line]
    assert len(notes) == 1  # however often it failed
