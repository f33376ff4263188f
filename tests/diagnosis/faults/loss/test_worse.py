"""train.changed: a setting that has changed in mid-run; loss.worse: a loss that is higher since then."""

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.loss.worse import ChangedSettings, WorseLoss
from hookcb.diagnosis.measurements.changes import LIMIT, Change
from hookcb.diagnosis.measurements.group_rates import GroupRates, Jump
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.ranges import Left, Shift
from hookcb.diagnosis.measurements.schedules import Scheduler, Schedules, Use
from hookcb.diagnosis.measurements.settings import Settings
from hookcb.diagnosis.measurements.shifts import Growth, Shifts
from hookcb.diagnosis.run import Passed, Skipped
from hookcb.diagnosis.verdict import Finding
from tests.diagnosis.faults.loss.support import losses, noisy
from tests.diagnosis.support import only, series

CHANGED = Change(100, 99, "betas", (0.9, 0.98), (0.9, 0.1))


def run_with(levels, *changes, rates=(), kind="cross-entropy"):
    """A run whose loss has these levels, for 50 batches each."""
    run = losses(noisy([x for x in levels for _ in range(50)], 0.05), lr=series(list(rates)))
    run.measured(Settings).changes.extend(changes)
    run.measured(Loss).kind = kind
    run.n_batches = len(run.loss)
    return run


def test_a_setting_after_which_the_loss_stays_higher_is_a_warning_at_its_step():
    found = only(WorseLoss, run_with([2, 1, 1.5, 1.5], CHANGED))
    assert (found.code, found.severity) == ("loss.worse", "warning")
    assert (found.step, found.last_step) == (100, 199)
    assert "The loss has risen from 0.981 to 1.51; in the end it is 1.49." in found.message
    assert (
        "What changed before: betas of the optimizer, from (0.9, 0.98) to (0.9, 0.1) at step 100"
        in found.message
    )
    assert "before step 100" in found.next_steps[0]


def test_settings_that_changed_soon_after_are_told_beside_it():
    later = CHANGED._replace(step=110, name="eps", of="parameter group 1")
    assert "; eps of parameter group 1" in only(WorseLoss, run_with([2, 1, 1.5, 1.5], CHANGED, later)).message
    much_later = CHANGED._replace(step=180, name="eps")
    assert "eps" not in only(WorseLoss, run_with([2, 1, 1.5, 1.5], CHANGED, much_later)).message


def test_a_rise_that_is_half_gone_is_a_note_and_one_that_is_gone_is_none():
    assert only(WorseLoss, run_with([2, 1, 1.5, 1.2], CHANGED)).severity == "info"
    assert isinstance(only(WorseLoss, run_with([2, 1, 1.5, 0.9], CHANGED)), Passed)


def test_a_rise_that_began_before_any_change_is_not_told():
    assert isinstance(only(WorseLoss, run_with([2, 1, 1.5, 1.5])), Passed)
    assert isinstance(
        only(WorseLoss, run_with([2, 1, 1.5, 1.5], CHANGED._replace(step=160, last=159))), Passed
    )


def test_what_may_be_meant_is_a_note():
    dropout = Change(100, 97, "p", 0.0, 0.5, "blocks.0.drop", "blocks.0.drop")
    found = only(WorseLoss, run_with([2, 1, 1.5, 1.5], dropout))
    assert (found.severity, found.layer) == ("info", "blocks.0.drop")
    assert "p of blocks.0.drop, from 0 to 0.5 between steps 97 and 100" in found.message
    assert only(WorseLoss, run_with([2, 1, 1.5, 1.5], CHANGED, kind="")).severity == "info"
    loss = CHANGED._replace(name="operations", before=("Add", "Mean"), after=("Add", "Sum"), of="the loss")
    found = only(WorseLoss, run_with([2, 1, 1.5, 1.5], loss))
    assert (found.severity, "operations of the loss, now with Sum, without Mean" in found.message) == (
        "info",
        True,
    )
    decay = CHANGED._replace(name="weight_decay", before=0.01, after=0.1)
    assert only(WorseLoss, run_with([2, 1, 1.5, 1.5], decay)).severity == "info"


def test_a_rate_that_jumped_is_told_of_all_groups_or_of_one():
    rates = [0.01] * 100 + [0.03] * 100
    found = only(WorseLoss, run_with([2, 1, 1.5, 1.5], rates=rates))
    assert "the learning rate, from 0.01 to 0.03 at step 100" in found.message
    run = run_with([2, 1, 1.5, 1.5])
    run.measured(GroupRates).jumps.append(Jump(100, 0.01, 0.1, 1, "head.weight"))
    assert "of parameter group 1 (head.weight)" in only(WorseLoss, run).message


def test_warm_restarts_are_meant():
    run = run_with([2, 1, 1.5, 1.5], rates=[0.01] * 100 + [0.03] * 100)
    restarts = Scheduler("CosineAnnealingWarmRestarts", None)
    run.measured(Schedules).used = [(restarts, Use())]
    assert isinstance(only(WorseLoss, run), Passed)


def test_a_rate_that_creeps_up_is_told_from_its_first_step_on():
    rates = [0.01 * 1.02 ** max(0, i - 150) for i in range(300)]
    found = only(WorseLoss, run_with([2, 1.5, 1, 1, 1.2, 1.5], rates=rates))
    assert found.step == 151
    assert "the learning rate, from 0.01 to 0.191 in the steps from 151 on" in found.message
    rates = [0.01 * min(1, i / 20) * 1.02 ** max(0, i - 150) for i in range(300)]  # after a warmup
    found = only(WorseLoss, run_with([2, 1.5, 1, 1, 1.2, 1.5], rates=rates))
    assert "the learning rate, from 0.01 to 0.191 in the steps from 151 on" in found.message


def test_a_warmup_under_which_the_loss_falls_is_no_finding():
    rates = [1e-4 * (i + 1) for i in range(300)]
    assert isinstance(only(WorseLoss, run_with([3, 2, 1.5, 1.2, 1, 0.9], rates=rates)), Passed)


OTHERS = Shift(100, "inputs", (Left("mean", (-0.1, 0.1), (0.9, 1.1)),))


def test_other_data_are_a_note_as_they_may_be_meant_and_a_warning_if_all_is_lost():
    run = run_with([2, 1, 1.5, 1.5])
    run.measured(Shifts).found = [OTHERS, OTHERS._replace(step=110)]
    found = only(WorseLoss, run)
    assert (found.severity, found.step) == ("info", 100)
    assert found.message.endswith(
        "What changed before: the inputs of the batches from step 100 on are unlike those before: "
        "mean 0.9 to 1.1, before -0.1 to 0.1."
    )
    assert "Compare the batches from step 100 on" in found.next_steps[0]
    lost = run_with([2, 1, 2.1, 2.1, 2.1])
    lost.measured(Shifts).found = [OTHERS]
    assert only(WorseLoss, lost).severity == "warning"
    lost.measured(Shifts).found = [OTHERS, OTHERS._replace(step=150)]  # as of tasks in a row
    assert only(WorseLoss, lost).severity == "info"
    lost.measured(Shifts).found = [OTHERS]
    lost.measured(Shifts).growth = Growth(100, 1.0, 9.0)  # which loss.diverging tells
    assert only(WorseLoss, lost).severity == "info"


def test_a_setting_comes_before_other_data():
    run = run_with([2, 1, 1.5, 1.5], CHANGED)
    run.measured(Shifts).found = [OTHERS._replace(step=95)]
    assert "betas" in only(WorseLoss, run).message


def test_data_that_a_program_changes_in_place_are_told_before_what_follows():
    """Labels stay, and inputs become noise at the second epoch, so that all is lost."""
    torch.manual_seed(0)
    y = torch.randint(4, (1_600,))
    x = F.one_hot(y, 8).float() * 3 + torch.randn(1_600, 8) / 2
    model, diagnose = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), Diagnose(show=False)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    with watch(model, opt, diagnose) as w:
        for step in range(240):
            at = slice(step % 100 * 16, step % 100 * 16 + 16)
            if 100 <= step < 200:
                x[at] = 5 - x[at].mean(1, keepdim=True) + torch.randn(16, 8) / 4
            w.report_loss(F.cross_entropy(model(x[at]), y[at])).backward()
            opt.step()
            opt.zero_grad()
    assert diagnose.verdict is not None
    found = diagnose.verdict.primary
    assert (found.code, found.severity, found.step) == ("loss.spike", "warning", 100)
    assert "the inputs of the batches from step 100 on are unlike those before: mean" in found.message


def test_few_batches_are_too_few():
    assert isinstance(only(WorseLoss, run_with([1])), Skipped)


def test_a_limit_of_clipping_that_falls_by_a_third_or_more_is_told():
    falls = CHANGED._replace(name=LIMIT, before=1.0, after=0.1)
    assert "limit of clip_grad_norm_ of the optimizer, from 1 to 0.1 at step 100" in (
        only(WorseLoss, run_with([2, 1, 1.5, 1.5], falls)).message
    )
    assert isinstance(only(WorseLoss, run_with([2, 1, 1.5, 1.5], falls._replace(after=0.7))), Passed)


def test_a_note_is_a_warning_where_steps_are_too_large_soon_after_the_change():
    dropout = Change(100, 97, "p", 0.0, 0.95, "drop", "drop")
    for step, severity in ((104, "warning"), (180, "info"), (60, "info")):
        run = run_with([2, 1, 1.5, 1.5], dropout)
        run._kept["update.spike"] = [Finding("update.spike", "warning", step=step)]
        assert only(WorseLoss, run).severity == severity


def test_weights_that_something_else_writes_to_are_a_change_that_may_be_meant():
    for code, severity in (("loss.trivial", "warning"), ("loss.flat", "info")):
        run = run_with([2, 1, 1.5, 1.5])
        run._kept["param.overwritten"] = [Finding("param.overwritten", "info", "q", "q.weight", 99)]
        run._kept[code] = [Finding(code, "warning")]
        found = only(WorseLoss, run)
        assert (found.severity, found.step, found.layer) == (severity, 100, "q")
        assert "something other than the optimizer writes to q.weight, first after step 99" in found.message
        assert isinstance(only(ChangedSettings, run), Passed)


def test_changes_after_which_the_loss_is_no_higher_are_a_note():
    later = CHANGED._replace(step=180, name="eps", before=1e-8, after=1e-3)
    found = only(ChangedSettings, run_with([2, 1, 0.9, 0.8], later, CHANGED))
    assert (found.code, found.severity, found.step, found.last_step) == ("train.changed", "info", 100, 180)
    assert "What changed: betas of the optimizer, from (0.9, 0.98) to (0.9, 0.1) at step 100; eps" in (
        found.message
    )


def test_what_is_told_with_a_loss_that_rose_and_what_follows_a_schedule_are_left_out():
    assert isinstance(only(ChangedSettings, run_with([2, 1, 1.5, 1.5], CHANGED)), Passed)
    steps = [CHANGED._replace(step=step, before=step, after=step + 40) for step in (60, 100, 140)]
    assert isinstance(only(ChangedSettings, run_with([2, 1, 0.9, 0.8], *steps)), Passed)
    assert only(ChangedSettings, run_with([2, 1, 0.9, 0.8], *steps[:2])).step == 60


def test_a_rate_that_rises_in_a_warmup_or_leads_to_a_spike_is_no_change_to_note():
    warmup = [1e-3 * min(1, (i + 1) / 10) for i in range(100)]
    run = run_with([2, 1, 0.9, 0.8], rates=warmup + [3e-3] * 100)
    found = only(ChangedSettings, run)
    assert "What changed: the learning rate, from 0.001 to 0.003 at step 100. This" in found.message
    run._kept["loss.spike"] = [Finding("loss.spike", "info", step=100)]
    assert isinstance(only(ChangedSettings, run), Passed)


def test_of_many_changes_four_are_listed():
    many = [CHANGED._replace(name=f"p{i}") for i in range(6)]
    assert "; and 2 more. This may be" in only(ChangedSettings, run_with([2, 1, 0.9, 0.8], *many)).message


def test_a_first_step_with_other_numbers_than_the_state_that_was_loaded_is_a_note():
    def resumed(change):
        model = nn.Linear(4, 1)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with watch(model, opt, Diagnose(show=False)) as w:
            opt.load_state_dict(opt.state_dict())
            for group in opt.param_groups:
                change(group)
            for _ in range(60):
                opt.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                opt.step()
        return [x for x in w.diagnose().findings if x.code == "train.changed"]

    (found,) = resumed(lambda group: group.update(lr=group["lr"] * 16, eps=1e-6))
    assert (found.severity, found.step) == ("info", 0)
    assert (
        "lr of the optimizer, 0.001 in the state that was loaded and 0.016 in its first step, 0"
        in found.message
    )
    assert "eps of the optimizer, 1e-08 in the state" in found.message
    assert "state that was loaded" in found.next_steps[0]
    assert not resumed(lambda group: group.update(lr=group["lr"] / 10))  # as for a fine tuning
