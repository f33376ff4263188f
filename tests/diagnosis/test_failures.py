"""A report is requested only for a bug of hookcb; for any other error the message says what happened."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.failures import describe_failure
from hookcb.diagnosis.measurements.steps import Steps
from tests.support import fit, make_learner


def notes(verdict):
    return [line for line in verdict.looked if "a part of Diagnose" in line or "is gone" in line]


def failing(monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(Steps, "on_between", fail)
    return notes(fit(make_learner(4), cbs=Diagnose(show=False)).diagnose())


class Counts(nn.Linear):
    """Is asked for its parameters, and refuses at some time."""

    refuses = False

    def named_parameters(self, *args, **kwargs):
        if self.refuses:
            raise LookupError("not now")
        return super().named_parameters(*args, **kwargs)


def test_an_error_of_the_users_module_is_told_as_that():
    model = nn.Sequential(Counts(4, 3))
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), Diagnose(show=False)) as w:
        model[0].refuses = True
        w.diagnosis._dispatcher.guarded("events", model[0].named_parameters)
        model[0].refuses = False
    (note,) = notes(w.diagnose())
    assert (
        "was ended by LookupError('not now'), which was raised in named_parameters, test_failures.py" in note
    )
    assert "report" not in note


def test_our_own_bug_is_to_be_reported_with_its_place():
    try:
        Steps().on_between(None)
    except AttributeError as error:
        frames = error.__traceback__.tb_next  # without that of this test
        text = describe_failure("a part of Diagnose", error.with_traceback(frames))
    assert text.startswith("a part of Diagnose failed, please report it: AttributeError")


@pytest.mark.parametrize("name", ["OutOfMemoryError", "AcceleratorError"])
def test_an_error_of_the_device_is_told_as_that(monkeypatch, name):
    kind = getattr(torch, name, None)
    if kind is None:
        pytest.skip("this torch has no such error")
    (note,) = failing(monkeypatch, kind("out of memory"))
    assert note.startswith("a part of Diagnose was ended by the device: ")
    assert "report" not in note


def test_a_model_that_is_gone_is_told_as_that():
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = watch(model, opt, Diagnose(show=False))
    for _ in range(3):
        loss = w.report_loss(F.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 3)))
        loss.backward()
        opt.step()
        opt.zero_grad()
    del model, opt, loss
    gc.collect()
    w.close()
    assert not any("please report" in line for line in w.diagnose().coverage)


def test_layers_that_run_as_copies_are_left_out_and_told():
    """Copies share the hooks of the layers, as in nn.DataParallel."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            replica = self.body[0]._replicate_for_data_parallel()
            replica.weight, replica.bias = self.body[0].weight, self.body[0].bias
            return self.body[1](replica(x))

    copies = Copies()
    with watch(copies, opt, Diagnose(show=False)) as w:
        for _ in range(6):
            loss = w.report_loss(F.mse_loss(copies(torch.randn(8, 4)), torch.zeros(8, 3)))
            opt.zero_grad()
            loss.backward()
            opt.step()
    assert not any("please report" in line for line in w.diagnose().coverage), w.diagnose().coverage
    assert any("ran as copies" in line for line in w.diagnose().coverage)
