"""adam.state: what a program writes to the state of Adam between steps, and what it may do there."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.steps.state_changed import StateChanged
from hookcb.diagnosis.measurements.moments import _Change, _count, _read
from hookcb.diagnosis.run import Absent, Run
from tests.diagnosis.support import only
from tests.support import in_turn

N_STEP, AT = 60, 40


def train(change, kind=torch.optim.Adam, n=N_STEP, scale=1.0, **options):
    """Train, with changes of the model or the optimizer before steps, or one before step 40.

    Returns the findings, the verdict and the optimizer.
    """
    changes = change if isinstance(change, dict) else {AT: change}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = kind(model.parameters(), lr=0.01, **options)
    with watch(model, opt, Diagnose(show=False)) as w:
        for step in range(n):
            if step in changes:
                changes[step](model, opt)
            opt.zero_grad()
            factor = scale(step) if callable(scale) else scale
            (factor * F.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))).backward()
            opt.step()
    verdict = w.diagnose()
    return [x for x in verdict.findings if x.code == "adam.state"], verdict, opt


def state_of_another(model, opt, n=20, scale=1e3):
    _, _, other = train(lambda *_: None, n=n, scale=scale)
    opt.load_state_dict(other.state_dict())


def to_zero(model, opt):
    for state in opt.state.values():
        state["exp_avg_sq"].zero_()


def test_a_state_of_another_run_is_a_warning_at_its_step():
    (found,), *_ = train(state_of_another)
    assert (found.severity, found.step, found.param) == ("warning", AT, "0.weight")
    assert (
        "Before step 40, the step count of Adam falls from 40 to 20 and exp_avg_sq of 0.weight is"
        in found.message
    )
    assert "times as large" in found.message


@in_turn("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_second_moment_that_was_set_to_zero_while_steps_are_counted_is_a_warning(kind):
    (found,), *_ = train(to_zero, kind)
    assert found.severity == "warning"
    assert "became all zero, while it counts 40 steps" in found.message


def in_part_to_zero(model, opt):
    of_params = [*opt.state.values()]
    of_params[2]["exp_avg_sq"][:, ::4] = 0  # of neither the first nor the last


@in_turn(
    "change",
    [(to_zero, "0.weight is all zero"), (in_part_to_zero, "2.weight is zero in 25% of its elements")],
)
def test_a_checkpoint_without_its_second_moment_is_a_warning_before_the_first_step(change):
    write, said = change
    _, _, other = train({}, n=30)
    write(None, other)
    (found,), *_ = train({0: lambda _, opt: opt.load_state_dict(other.state_dict())}, n=30)
    assert (found.severity, found.step) == ("warning", 0)
    assert f"{said}, though exp_avg is not, while it counts 30 steps" in found.message


def test_a_whole_checkpoint_is_none():
    _, _, other = train({}, n=30)
    assert not train({0: lambda _, opt: opt.load_state_dict(other.state_dict())}, n=30)[0]


def test_a_state_that_was_reset_with_its_count_is_a_note():
    (found,), *_ = train(lambda model, opt: opt.state.clear())
    assert found.severity == "info"
    assert "the state of Adam was reset after 40 steps" in found.message


def test_a_count_that_alone_was_set_is_a_note():
    def set_count(model, opt):
        for state in opt.state.values():
            state["step"].fill_(1_000)

    (found,), *_ = train(set_count)
    assert "the step count of Adam jumps from 40 to 1,000" in found.message
    assert found.severity == "info"


def test_a_checkpoint_that_is_loaded_with_its_weights_is_not_told():
    kept = []

    def keep(model, opt):
        kept.extend(copy.deepcopy([model.state_dict(), opt.state_dict()]))

    def back(model, opt):
        _, _, other = train(lambda *_: None, n=20)
        model.load_state_dict({key: x + 0 for key, x in model.state_dict().items()})
        opt.load_state_dict(other.state_dict())

    found, verdict, _ = train(back)
    assert not found
    assert "a state of Adam that changes between its steps" in verdict.ruled_out
    assert not train(keep)[0]


def test_a_copy_of_the_state_is_the_same_state():
    found, *_ = train(lambda model, opt: opt.load_state_dict(copy.deepcopy(opt.state_dict())))
    assert not found


def test_a_training_without_second_moments_cannot_have_it():
    found, verdict, _ = train(lambda *_: None, torch.optim.SGD)
    assert not found
    assert "a state of Adam that changes between its steps" not in verdict.ruled_out
    assert isinstance(only(StateChanged, Run()), Absent)


def test_a_count_on_a_device_is_not_read_in_a_hook():
    step = torch.tensor(3.0, device="meta")  # reading it would raise an error
    assert _count({"step": step, "exp_avg_sq": torch.ones(2)}) is step
    change = _Change(9, "Adam", "w", (torch.tensor(30.0), 7, torch.tensor(35.0)), (None, None), False)
    assert _read(change).before == _read(change).after == 35  # two of seven steps were skipped
    change = change._replace(counts=(torch.tensor(30.0), 7, torch.tensor(12.0)))
    assert (_read(change).before, _read(change).after) == (30, 12)


def test_a_state_that_is_made_anew_after_its_parameter_was_frozen_is_not_told():
    def thaw(model, opt):
        model[2].requires_grad_(True)

    def freeze(model, opt):
        model[2].requires_grad_(False)
        for p in model[2].parameters():
            p.grad = None
            opt.state.pop(p)

    found, _, opt = train({20: freeze, AT: thaw})
    assert not found
    assert opt.state_dict()["state"][3]["step"] == N_STEP - AT


def test_a_checkpoint_that_is_loaded_after_a_step_that_has_only_made_the_state_is_not_told():
    _, _, other = train({}, n=20)

    def load(model, opt):
        opt.load_state_dict(other.state_dict())

    assert not train({1: load}, scale=lambda step: 0.0 if step == 0 else 1.0)[0]
    assert train({2: load})[0]


def test_a_state_that_is_elsewhere_between_the_steps_is_none_of_another_size_after_a_large_gradient():
    def move(model, opt):
        for state in opt.state.values():
            state |= {key: x.clone() for key, x in state.items()}

    spikes = dict.fromkeys(range(1, N_STEP), move)
    assert not train(spikes, scale=lambda step: 1e5 if step in (30, 45) else 1.0)[0]


def test_of_many_resets_the_last_are_told():
    (found,), *_ = train(dict.fromkeys(range(4, N_STEP, 4), lambda model, opt: opt.state.clear()))
    assert (found.severity, found.step) == ("info", 28)
    assert "was reset after 4 steps" in found.message
    assert "So it does at least 7 more times." in found.message


def test_a_state_that_was_scaled_and_makes_the_loss_spike_is_a_warning_and_comes_first():
    def scale(model, opt):
        for state in opt.state.values():
            state["exp_avg_sq"].mul_(1e-8)

    (found,), verdict, _ = train(scale)
    assert (found.severity, found.step) == ("warning", AT)
    assert "exp_avg_sq of 0.weight is 1e-08 of its size" in found.message
    assert f"In step {AT + 1}, some elements of exp_avg are" in found.message
    (spike,) = [x for x in verdict.findings if x.code == "loss.spike"]
    assert spike.consequence_of == "adam.state"
    assert f"the state of the optimizer is wrong, as before step {AT}, exp_avg_sq" in spike.message
