"""Trainings that go on from a file, or from memory, without the state of their optimizer or scheduler."""

from copy import deepcopy
from functools import partial
from io import BytesIO

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loads import Saves
from hookcb.diagnosis.measurements.restores import settings_of
from tests.diagnosis.faults.support import found_in_loop, from_start, small_net
from tests.support import in_turn

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


@pytest.mark.parametrize("is_own", [True, False])
def test_weights_from_memory_without_the_state_of_the_optimizer_are_found_if_the_program_saved_them(is_own):
    model, kept = small_net(), BytesIO()
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    model(torch.randn(8, 4)).square().mean().backward()
    opt.step()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, kept)
    kept.seek(0)
    if not is_own:
        heard(Saves).saves.clear()
    again = small_net()
    again.load_state_dict(torch.load(kept)["model"])
    assert len(found_in_loop(again, SGD(again.parameters(), lr=0.05, momentum=0.9), CODE)) == is_own


@pytest.mark.slow
def test_an_optimizer_without_its_scheduler_is_found(file):
    ((_, message),) = found(file, "opt")
    assert "the scheduler has made 25 steps, but StepLR begins at 0" in message
    assert "Step 0 is made at the loaded 0.005, but the schedule begins at 0.05." in message


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


def falling(step, n=200):
    return min((step + 1) / 10, max(0.05, 1 - step / n))


def decayed(make, n=150, lr=0.02):
    """States of a model and its optimizer after some steps of a schedule, and that of the schedule."""
    model = small_net()
    opt = Adam(model.parameters(), lr=lr)
    schedule = make(opt)
    for step in range(n):
        torch.manual_seed(step)
        opt.zero_grad()
        x = torch.randn(32, 4)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
        schedule.step()
    return [deepcopy(part.state_dict()) for part in (model, opt, schedule)]


def resumed(make, again=None, *, n=150, loads=False, is_made_first=False, edit=lambda opt: None, n_after=30):
    """Findings of a training that goes on in memory, with a scheduler made before or after the load."""
    of_model, of_opt, of_schedule = decayed(make, n)
    model = small_net()
    opt = Adam(model.parameters(), lr=0.02)
    model.load_state_dict(of_model)
    schedule = (again or make)(opt) if is_made_first else None
    opt.load_state_dict(of_opt)
    edit(opt)
    schedule = schedule or (again or make)(opt)
    if loads:
        schedule.load_state_dict(of_schedule)
    return found_in_loop(model, opt, CODE, n_after, each=lambda step: schedule.step())


def of_lambda(opt, rate=falling):
    return LambdaLR(opt, rate)


def sequence(opt):
    parts = [LinearLR(opt, 0.1, total_iters=10), CosineAnnealingLR(opt, 190)]
    return SequentialLR(opt, parts, [10])


def test_a_schedule_that_begins_anew_in_its_middle_is_a_warning():
    ((severity, message),) = resumed(of_lambda)
    assert severity == "warning"
    assert message.startswith(
        "Adam has loaded a state of a schedule that had moved the learning rate from 0.02 to 0.005 in 150 "
        "steps, but the same LambdaLR begins at 0: its state was not loaded. Step 0 is made at 0.002, and "
        "the rate then reaches 0.0191, 3.8 times the loaded 0.005 (limit 2)."
    )
    ((severity, message),) = resumed(of_lambda, is_made_first=True)
    assert severity == "warning"
    assert "Step 0 is made at the loaded 0.005, but the schedule begins at 0.002" in message
    ((severity, message),) = resumed(of_lambda, n=180)  # at the rate of its first step
    assert severity == "warning"
    assert "Step 0 is made at 0.002, and the rate then reaches 0.0191, 9.6 times the loaded 0.002" in message


def test_the_schedulers_within_others_are_one_schedule():
    ((severity, message),) = resumed(sequence)
    assert (severity, "the same SequentialLR begins at 0" in message) == ("warning", True)
    assert resumed(sequence, loads=True) == []


def test_another_schedule_is_a_note_unless_the_loss_rises_and_stays_high():
    ((severity, message),) = resumed(of_lambda, partial(of_lambda, rate=lambda step: 0.1))
    assert (severity, message[-24:]) == ("info", " A new one may be meant.")
    later = partial(of_lambda, rate=lambda step: 0.1 if step < 40 else step - 39.0)
    ((severity, message),) = resumed(of_lambda, later, n_after=200)
    assert (severity == "info", "The loss rises with it from " in message) == (False, True)


def _by_hand(opt):
    for group in opt.param_groups:
        group["lr"] = group["initial_lr"] = 0.001


RISING = {
    "in warmup": (of_lambda, {"n": 4}),
    "at its end": (partial(OneCycleLR, max_lr=0.02, total_steps=151), {}),
    "rises again by itself": (partial(CosineAnnealingWarmRestarts, T_0=40), {}),
}


@in_turn("make, given", RISING.values(), ids=RISING)
def test_a_rate_that_rises_again_anyway_is_only_a_note(make, given):
    assert [severity for severity, _ in resumed(make, **given)] == ["info"]


SILENT = {
    "the scheduler is loaded": {"loads": True},
    "it is loaded, and was made first": {"loads": True, "is_made_first": True},
    "it is made with last_epoch": {"again": lambda opt: LambdaLR(opt, falling, last_epoch=149)},
    "it goes on from the loaded rate": {"again": lambda opt: CosineAnnealingLR(opt, 50)},
    "likewise, and was made first": {"again": lambda opt: CosineAnnealingLR(opt, 50), "is_made_first": True},
    "its rate was set by hand": {"edit": _by_hand},
    "likewise after it was made": {"edit": _by_hand, "is_made_first": True},
    "the state is that of the beginning": {"n": 0},
}


@in_turn("given", SILENT.values(), ids=SILENT)
def test_a_schedule_that_goes_on_or_is_set_is_silent(given):
    assert resumed(of_lambda, **given) == []


def test_an_optimizer_of_another_model_is_silent():
    _, of_opt, _ = decayed(of_lambda)
    other, model = small_net(), small_net()
    of_other = Adam(other.parameters(), lr=0.02)
    of_other.load_state_dict(of_opt)
    of_lambda(of_other)
    opt = Adam(model.parameters(), lr=0.02)

    def each(step):
        other(torch.ones(1, 4)).sum().backward()
        of_other.step()

    assert found_in_loop(model, opt, CODE, each=each) == []


def test_the_settings_of_a_schedule_are_its_numbers_and_functions():
    opt = Adam(small_net().parameters(), lr=0.02)
    for make in (of_lambda, sequence, lambda opt: of_lambda(opt, partial(falling, n=300))):
        one, other = make(opt), make(opt)
        opt.step()
        other.step()
        assert settings_of(one) == settings_of(other)
    made = [of_lambda(opt, partial(falling, n=n)) for n in (200, 300)]
    made += [of_lambda(opt, lambda step, top=top: top) for top in (1.0, 2.0)]
    made += [StepLR(opt, 20), StepLR(opt, 30), ChainedScheduler([ConstantLR(opt), StepLR(opt, 20)])]
    assert len({settings_of(x) for x in made}) == len(made)
