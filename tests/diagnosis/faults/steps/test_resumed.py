"""Trainings that go on from a file without the state of their optimizer or scheduler."""

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from tests.diagnosis.faults.support import found_in_loop, from_start, small_net

CODE = "load.not_resumed"


@pytest.fixture(autouse=True)
def _from_start():
    with from_start():
        yield


@pytest.fixture
def file(tmp_path):
    """A file of a training with all that it needs to go on."""
    model = small_net()
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    rate = StepLR(opt, 20)
    for step in range(25):
        torch.manual_seed(step)
        model(torch.randn(8, 4)).square().mean().backward()
        opt.step()
        rate.step()
    path = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "rate": rate.state_dict()}, path)
    return path


def found(file, *parts, lr=0.05, kind=SGD, rate=StepLR, again=True, before=0):
    """Findings of a training that loads these parts of a file, and may write it again."""
    read, model = torch.load(file), small_net()
    given = {"momentum": 0.9} if kind is SGD else {}
    opt = kind(model.parameters(), lr=lr, **given)
    schedule = rate(opt, 20)
    for _ in range(before):
        opt.step()
        schedule.step()
    loaded = {"model": model, "opt": opt, "rate": schedule}
    for part in ("model", *parts):
        loaded[part].load_state_dict(read[part])
    end = (lambda: torch.save(read, file)) if again else (lambda: None)
    return found_in_loop(model, opt, CODE, end=end)


@pytest.mark.slow
def test_weights_without_the_state_of_the_optimizer_are_found(file):
    ((severity, message),) = found(file)
    assert severity == "warning"
    assert "last.pt, which also has the state of an optimizer for 6 parameters" in message
    assert len(found(file, "rate")) == 1


@pytest.mark.slow
def test_an_optimizer_without_its_scheduler_is_found(file):
    ((_, message),) = found(file, "opt")
    assert "the scheduler has made 25 steps, but StepLR begins at 0" in message


@pytest.mark.slow
def test_a_whole_resume_is_silent(file):
    assert found(file, "opt", "rate") == []
    assert found(file, "rate", "opt") == []


@pytest.mark.slow
def test_another_training_from_the_weights_is_silent(file):
    assert found(file, lr=0.01) == []
    assert found(file, kind=Adam) == []
    assert found(file, "opt", rate=CosineAnnealingLR) == []
    assert found(file, "opt", before=3) == []  # a scheduler that is stepped to where it was


def test_a_file_that_another_program_has_written_is_silent(file):
    with from_start():
        pass
    from hookcb.diagnosis.heard import heard
    from hookcb.diagnosis.measurements.loads import Saves

    heard(Saves).saves.clear()
    assert found(file, again=False) == []


@pytest.mark.slow
def test_weights_that_are_put_back_at_the_end_are_silent(file):
    model = small_net()
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    end = lambda: model.load_state_dict(torch.load(file)["model"])  # noqa: E731
    assert found_in_loop(model, opt, CODE, end=end) == []
