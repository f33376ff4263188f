"""loss.spike: losses that jump, what came first, and whether they heal."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Finding, Learner, watch
from hookcb.diagnosis.faults.loss.spike import LossSpikes
from hookcb.diagnosis.judge import explained
from hookcb.diagnosis.measurements.changes import Change
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.group_settings import GroupSettings
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.ranges import Left, Shift
from hookcb.diagnosis.measurements.settings import Settings
from hookcb.diagnosis.measurements.shifts import Growth, Shifts
from hookcb.diagnosis.measurements.spikes import (
    N_KEPT,
    SpikeFinder,
    Spikes,
    excess_of_moments,
    values_in,
)
from hookcb.diagnosis.run import Layer, Passed, Run, Skipped
from hookcb.records.store import N_SENT
from tests.diagnosis.faults.loss.support import losses, noisy
from tests.diagnosis.support import only, series
from tests.support import in_turn


def spiky(values, at, rates=(), **kwargs):
    """A run with these losses, after others have replaced some of them."""
    for i, x in at.items():
        values[i] = x
    run, finder = losses(values, **kwargs), SpikeFinder()
    for step, x in enumerate(values):
        if (spike := finder.add(x, step, step // 50, step % 50)) is not None:
            spike.rates = tuple(rates)
    run.measured(Spikes).found, run.measured(Spikes).n = finder.found, finder.n
    return run


def level(n=300, size=0.05):
    return noisy([1.0] * n, size)


def test_two_jumps_of_single_batches_are_a_note_on_these():
    found = only(LossSpikes, spiky(level(), {80: 5.0, 250: 9.0}))
    assert (found.code, found.severity) == ("loss.spike", "info")
    assert (found.step, found.last_step, found.value) == (80, 250, 9.0)
    assert "step 250, batch 0 of epoch 5" in found.message
    assert "it is this batch alone" in found.message
    assert "It healed within 1 batch. So it does 1 more time, at step 80." in found.message


def test_a_single_jump_counts_if_it_stands_out():
    assert only(LossSpikes, spiky(level(), {80: 5.0})).step == 80
    assert isinstance(only(LossSpikes, spiky(level(), {80: 1.4})), Passed)


@in_turn("at", [{}, {5: 5.0, 10: 5.0}])
def test_noise_and_the_beginning_are_no_spikes(at):
    assert isinstance(only(LossSpikes, spiky(level(), at)), Passed)


def test_thirty_two_batches_are_too_few_for_spikes():
    assert isinstance(only(LossSpikes, spiky([1.0] * 32, {31: 9.0})), Skipped)


def test_the_same_batch_of_each_epoch_is_named_as_such():
    found = only(LossSpikes, spiky(level(), {60: 5.0, 110: 9.0, 210: 5.0}))
    assert "at step 60, 210, 2 of them at the same batch of other epochs." in found.message


def test_spikes_at_equal_distances_are_told_as_such():
    found = only(LossSpikes, spiky(level(), {60: 5.0, 110: 9.0, 160: 5.0, 210: 5.0}))
    assert "So it does every 50 batches, 4 times from step 60 on." in found.message


def test_a_rate_that_rose_before_comes_first():
    values = level()
    for i in range(100, 140):
        values[i] += 4 - 0.1 * (i - 100)
    found = only(LossSpikes, spiky(values, {}, rates=[(97, 0.1), (98, 1.0), (99, 1.0)]))
    assert "the learning rate had risen from 0.1 to 1 at step 98. It healed within 3" in found.message


def test_a_batch_that_heals_at_once_is_told_even_if_the_rate_rose():
    found = only(LossSpikes, spiky(level(), {100: 9.0}, rates=[(98, 0.1), (99, 1.0)]))
    assert "it is this batch alone" in found.message


def lasting(n=40, start=3.0):
    values = level()
    values[100 : 100 + n] = [start + 0.2 * i for i in range(n)]
    return values


def test_losses_that_climb_on_are_of_the_weights():
    found = only(LossSpikes, spiky(lasting(), {}))
    assert "it is 6.2 16 batches later, so the weights have moved" in found.message
    assert "It healed within 40 batches." in found.message
    assert found.severity == "info"


def test_other_data_come_before_a_layer_and_before_an_unusual_batch_but_after_settings():
    others = Shift(98, "inputs", (Left("mean", (-0.1, 0.1), (0.9, 1.1)),))
    run = spiky(lasting(), {})
    run.measured(Shifts).found = [others]
    run.measured(Spikes).found[0].inputs = 30.0
    found = only(LossSpikes, run)
    assert "the inputs of the batches from step 98 on are unlike those before: mean 0.9 to" in found.message
    assert (found.step, found.severity) == (98, "info")
    assert "Compare the batches from step 98 on" in found.next_steps[0]
    run.measured(Shifts).found = [others._replace(step=91)]
    assert "this batch came first" in only(LossSpikes, run).message
    run.measured(Shifts).found = [others._replace(step=104, slack=4)]
    assert "the inputs of the batches from about step 104 on" in only(LossSpikes, run).message
    run.measured(Shifts).found, run.measured(Shifts).growth = (
        [others._replace(of="targets")],
        Growth(90, 1, 9),
    )
    assert "the targets have grown from 1 to 9 since step 90" in only(LossSpikes, run).message
    run.measured(Shifts).found = [others]
    run.measured(Spikes).found[0].rates = ((98, 0.1), (99, 1.0))
    run.measured(Spikes).found[0].inputs = math.nan
    assert "the learning rate had risen" in only(LossSpikes, run).message


@pytest.mark.parametrize("is_watched", [False, True])
def test_inputs_on_another_scale_for_good_are_the_cause_of_a_spike(is_watched):
    torch.manual_seed(0)
    y = torch.randint(3, (200, 16))
    x = F.one_hot(y, 6).float() * 2 + torch.randn(200, 16, 6) / 2
    x[120:] *= 6
    y[120:] = (y[120:] + 1) % 3
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    opt, batches = torch.optim.Adam(model.parameters(), 3e-3), list(zip(x, y, strict=True))
    if is_watched:
        with watch(model, opt, Diagnose(show=False)) as loop:
            for inputs, labels in batches:
                loop.report_loss(F.cross_entropy(model(inputs), labels)).backward()
                opt.step()
                opt.zero_grad()
    else:
        loop = Learner(batches, model, F.cross_entropy, opt)
        with loop.no_logging():
            loop.fit(1, cbs=Diagnose(show=False))
    (found,) = (f for f in loop.diagnose().findings if f.code == "loss.spike")
    assert "step 120" in found.message
    assert "the inputs of the batches from step 120 on are unlike those before" in found.message


def test_a_layer_that_left_its_band_before_comes_first():
    steps = list(range(0, 200, 5))
    usual = series(noisy([1.0] * 18, 0.01) + [30.0, 60.0] + [1.0] * 20, every=5)
    body = Layer("body", "Linear", "Linear 4→4", 0, {"abs_max": usual})
    other = Layer("other", "Linear", "Linear 4→4", 1, {"abs_max": series(noisy([1.0] * 40, 0.01), every=5)})
    assert usual.steps == steps
    found = only(LossSpikes, spiky(lasting(), {}, layers={"other": other, "body": body}))
    assert found.layer == "body"
    assert "the largest output of body was" in found.message
    young = series(noisy([1.0] * 8, 0.01) + [30.0, 60.0] + [1.0] * 10, every=10)  # six looks from step 16 on
    body = Layer("body", "Linear", "Linear 4→4", 0, {"abs_max": young})
    assert only(LossSpikes, spiky(lasting(), {}, layers={"body": body})).layer == ""


def test_a_layer_that_leaves_its_band_with_the_loss_is_not_to_blame():
    with_it = series(noisy([1.0] * 10, 0.01) + [30.0] * 10, every=10)  # from step 100 on
    body = Layer("body", "Linear", "Linear 4→4", 0, {"abs_max": with_it})
    assert only(LossSpikes, spiky(lasting(), {}, layers={"body": body})).layer == ""


def test_a_loss_that_does_not_come_back_is_a_warning_only_if_the_rate_had_risen():
    values = level(120) + noisy([4.0] * 180, 0.05)
    found = only(LossSpikes, spiky(list(values), {}, rates=[(118, 0.1), (119, 1.0)]))
    assert found.severity == "warning"
    assert "It has not healed: the last losses are 4" in found.message
    assert only(LossSpikes, spiky(values, {})).severity == "info"  # a new task may be harder


def test_spikes_after_a_larger_one_have_its_cause():
    values = lasting()
    values[160] = 2.0
    found = only(LossSpikes, spiky(values, {}))
    assert "so the weights have moved" in found.message
    assert "at step 160" in found.message


def with_steps(values, norm=2.0, **facts):
    """A run with a spike at step 100, and what was seen of the steps before it."""
    run = spiky(values, {})
    (spike,) = run.measured(Spikes).found
    spike.norms = tuple((step, norm) for step in range(60, 92))
    for name, fact in facts.items():
        setattr(spike, name, fact)
    return run


def test_samples_that_are_wrong_in_several_batches_are_named():
    facts = {"worst": ((7, 30.0), (3, 20.0)), "n_samples": 16}
    values = level()
    values[100:140] = [3.0] * 40
    message = only(LossSpikes, with_steps(values, typical=1.0, **facts)).message
    assert "while most samples of its first batch are usual, so that a part of the samples" in message
    assert "of its 16 samples, counted from 0, the worst are 7 (30), 3 (20), where the median is 1" in message
    assert "a part of the samples" not in only(LossSpikes, with_steps(values, typical=9.0, **facts)).message
    assert "the weights have moved" in only(LossSpikes, with_steps(lasting(), typical=1.0, **facts)).message


def test_a_spike_that_leaves_a_model_no_better_than_a_constant_is_a_warning():
    for n, severity in ((200, "warning"), (40, "info")):  # which has healed
        values = level()[:100] + [3.0] * n + level()[:160]
        run = with_steps(values[:300])
        run._kept |= {"loss.trivial": [Finding("loss.trivial", "warning")], "loss.diverging": []}
        assert only(LossSpikes, run).severity == severity
        run._kept["loss.diverging"] = [Finding("loss.diverging", "error")]  # which then says what happened
        assert only(LossSpikes, run).severity == "info"


def test_clipping_that_ended_comes_first_if_it_did_cut():
    run = with_steps(lasting(), limit_change=(92, 92, 1.0, math.inf))
    message = only(LossSpikes, run).message
    assert (
        "noise: from step 92 on clip_grad_norm_ was not called, after 92 steps with a limit of 1" in message
    )
    assert "it had cut 32 of the last 32 gradients" in message
    message = only(LossSpikes, with_steps(lasting(), norm=0.5, limit_change=(92, 92, 1.0, math.inf))).message
    assert "so the weights have moved, by this step or one before it. From step 92 on clip_grad" in message
    message = only(LossSpikes, with_steps(lasting(), limit_change=(92, 92, 1.0, 8.0))).message
    assert "noise: from step 92 on the limit of clip_grad_norm_ was 8, after 92 steps" in message


def test_a_loss_that_jumps_while_the_steps_before_were_usual_is_not_blamed_on_these():
    run = with_steps(lasting(start=5.0))
    (spike,) = run.measured(Spikes).found
    spike.norms = tuple((step, 2.0) for step in range(60, 100))
    found = only(LossSpikes, run)
    assert "usual (norms up to 2, before that up to 2), so several batches in a row" in found.message
    assert "or something besides the optimizer has changed the model" in found.message
    assert found.next_steps == ("Look at the batches and the model at step 100",)
    spike.norms = (*spike.norms[:-1], (99, 9.0))
    assert "so the weights have moved" in only(LossSpikes, run).message


def test_a_jump_is_left_open_if_no_norms_are_known():
    found = only(LossSpikes, spiky(lasting(start=5.0), {}))
    assert "so the weights have moved, or these batches are unusual, too" in found.message
    assert found.next_steps[0] == "Look at the batches and the model at step 100"


def test_what_the_program_had_changed_just_before_comes_first():
    for change, is_told in (
        (Change(99, 98, "eps", 1e-8, 1.0), True),
        (Change(104, 92, "p", 0.0, 0.9, "drop", "drop"), True),
        (Change(60, 59, "eps", 1e-8, 1.0), False),  # long before
        (Change(104, 101, "eps", 1e-8, 1.0), False),  # afterwards
        (Change(104, 40, "p", 0.0, 0.9, "drop", "drop"), False),  # at any of 64 steps
    ):
        run = spiky(lasting(), {})
        run.measured(Settings).changes.append(change)
        found = only(LossSpikes, run)
        assert (f"the program had changed {change.text}" in found.message) is is_told
        assert ("without this change" in found.next_steps[0]) is is_told
        assert found.layer == ("drop" if is_told and change.layer else "")  # with or without an output


def test_a_batch_with_few_different_tokens_comes_first():
    found = only(LossSpikes, with_steps(lasting(), n_values=(1, 37)))
    assert "as its inputs have 1 different value, and all inspected ones 37 or more" in found.message
    assert "so the weights" in only(LossSpikes, with_steps(lasting(), n_values=(10, 37))).message


def test_inputs_of_another_kind_from_a_batch_on_are_no_matter_of_that_batch_alone():
    values = level(120) + noisy([4.0] * 180, 0.05)
    found = only(LossSpikes, with_steps(values[20:], inputs=220.0))
    assert "this batch came first, as its inputs are 220 times as large" in found.message
    assert "It has not healed" in found.message
    assert found.next_steps == ("Look at the batches and the model at step 100",)


def test_different_integers_are_counted_in_inputs_on_the_cpu():
    assert values_in((torch.zeros(2, 3, dtype=torch.int64), torch.arange(3))) == (6, 1)
    assert values_in({"ids": torch.arange(2048)}) == (1024, 1024)
    assert values_in(torch.zeros(3)) is values_in(torch.empty(0, dtype=torch.int64)) is None


def test_clipping_is_not_named_for_a_batch_that_heals_at_once():
    values = level()
    values[100] = 9.0
    assert (
        "clip_grad" not in only(LossSpikes, with_steps(values, limit_change=(92, 92, 1.0, math.inf))).message
    )


def test_a_scale_that_changed_between_backward_and_step_is_a_warning():
    found = only(LossSpikes, with_steps(lasting(), rescaled=(99, 65_536.0, 256.0)))
    assert found.severity == "warning"
    assert "from 65,536 to 256 between the backward and the step of batch 99" in found.message
    assert "its gradients were 256 times too large" in found.message
    found = only(LossSpikes, with_steps(lasting(), rescaled=(99, 256.0, 512.0)))  # too small by that
    assert found.severity == "info"


def test_what_the_steps_before_had_is_told_beside_the_weights():
    norms = (*((step, 0.5) for step in range(60, 99)), (99, 7.0))
    scales = tuple((step, 512.0 if step < 97 else 256.0) for step in range(60, 100))
    message = only(LossSpikes, with_steps(lasting(), norms=norms, scales=scales)).message
    assert "At step 97 the scale of the GradScaler was 256, before 512." in message
    assert "The norm of the gradients was 7 at step 99; the median before is 0.5." in message


def test_a_loss_that_ends_as_nan_has_not_healed():
    found = only(LossSpikes, spiky([*lasting()[:110], *[math.nan] * 150], {}))
    assert "It is nan 10 batches later." in found.message


def test_the_largest_spikes_of_many_are_kept():
    finder = SpikeFinder()
    for step, x in enumerate(level(8_000)):
        finder.add(50.0 if step == 1_000 else 5.0 if step > 40 and step % 100 == 0 else x, step)
    assert finder.n == 79
    assert len(finder.found) == N_KEPT
    assert any(spike.step == 1_000 for spike in finder.found)
    assert [x.step for x in finder.found] == sorted(x.step for x in finder.found)


def test_losses_on_their_way_from_a_device_are_all_seen_in_order():
    measured, run = Spikes(), Run()
    run.loop = type("Loop", (), {"train_iter": 0, "epoch": 0, "iter": 0, "opt": None})()
    values = level(200)
    values[150] = 9.0
    for step, x in enumerate(values):
        run.loop.train_iter = run.loop.iter = step
        run.measured(Curves).last_loss = torch.tensor(x)  # as on a GPU
        measured.on_loss(run)
        if step % 50 == N_SENT:
            measured._arriving.send()
    measured.tell(run)
    assert [(x.step, x.batch, x.lasted, x.worst) for x in measured.found] == [(150, 150, 1, ())]


def test_ranks_tell_who_has_seen_a_spike():
    measured = Spikes()
    of_ranks = []
    for at in ({80: 5.0}, {80: 9.0, 200: 5.0}):
        run = spiky(level(), at)
        of_ranks.append(run.measured(Spikes).state(run))
    measured.merge(Run(), of_ranks, 0)
    assert [(x.step, x.value, x.ranks) for x in measured.found] == [(80, 9.0, (0, 1)), (200, 5.0, (1,))]


# ---- in a training


class Data:
    """Batches of three clouds; in one, two samples are far away, with wrong labels."""

    def __init__(self, n=90, at=60, bad=(3, 7)):
        self.n, self.at, self.bad = n, at, list(bad)

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for i in range(self.n):
            y = torch.randint(3, (16,), generator=generator)
            x = F.one_hot(y, 4).float() * 2 + torch.randn(16, 4, generator=generator) / 2
            if i == self.at:
                x[self.bad] *= 60
                y[self.bad] = (y[self.bad] + 1) % 3
            yield x, y

    def __len__(self):
        return self.n


def train(loop, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "learner":
        learn = Learner(loop, model, F.cross_entropy, opt)
        with learn.no_logging():
            learn.fit(1, cbs=Diagnose(show=False))
        return learn
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, y in loop:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    return w


@pytest.mark.parametrize("kind", ["learner", "watch"])
def test_the_worst_samples_of_the_batch_are_named(kind):
    trained = train(Data(), kind)
    (found,) = [x for x in trained.diagnose().findings if x.code == "loss.spike"]
    assert (found.step, found.severity) == (60, "info")
    assert "of its 16 samples, counted from 0, the worst are" in found.message
    assert "7 (" in found.message
    assert "3 (" in found.message
    assert found.next_steps[0] == "Look at the samples that are named, in the batch of step 60"


def test_a_loss_that_is_not_finite_is_no_spike():
    assert isinstance(only(LossSpikes, spiky(level(), {80: math.nan, 90: math.inf})), Passed)


@pytest.mark.cuda
def test_a_spike_on_a_gpu_is_known_without_waiting():
    torch.manual_seed(0)
    model = nn.Linear(4, 1, device="cuda")
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(200, 16, 4, device="cuda")
    y = torch.randn(200, 16, 1, device="cuda")
    y[150] += 100
    torch.cuda.synchronize()
    with watch(model, opt, Diagnose(show=False)) as w:
        for i in range(200):
            opt.zero_grad()
            if i > 8:
                torch.cuda.set_sync_debug_mode("error")
            F.mse_loss(model(x[i]), y[i]).backward()
            opt.step()
            torch.cuda.set_sync_debug_mode("default")
    (found,) = [x for x in w.diagnose().findings if x.code == "loss.spike"]
    assert (found.step, found.value > 1_000) == (150, True)


# ---- the state of Adam


def stepped(kind=torch.optim.Adam, n=30, **options):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64))
    opt = kind([p], lr=0.01, **options)
    for i in range(n):
        p.grad = torch.randn(64) * (1e-3 if i % 7 else 1.0)
        opt.step()
    return opt, opt.state[p]


@in_turn(
    "kind, betas",
    product(
        [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam],
        [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5)],
    ),
)
def test_moments_that_gradients_have_made_agree(kind, betas):
    opt, _ = stepped(kind, betas=betas)
    assert excess_of_moments(opt) <= 1


def test_the_bound_of_the_moments_is_reached_by_the_worst_gradients():
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = torch.optim.Adam([p], lr=0.01)
    for i in range(300):  # gradients that grow as (β₂ / β₁)ⁱ make |m| as large as it can be
        p.grad = torch.full((1,), (0.999 / 0.9) ** i, dtype=torch.float64)
        opt.step()
    assert 0.95 < excess_of_moments(opt) <= 1


@in_turn("key, factor", [("exp_avg", 100.0), ("exp_avg_sq", 1e-6)])
def test_moments_that_were_changed_contradict_each_other(key, factor):
    opt, state = stepped()
    state[key].mul_(factor)
    assert excess_of_moments(opt) > 5


def test_what_has_no_such_moments_is_unknown():
    sgd, _ = stepped(torch.optim.SGD, momentum=0.9)
    assert math.isnan(excess_of_moments(sgd))
    opt, state = stepped()
    state["exp_avg_sq"].zero_()  # rounded, or not
    assert math.isnan(excess_of_moments(opt))


def test_a_state_that_is_wrong_is_a_warning_even_if_the_loss_heals():
    run = spiky(lasting(), {})
    run.measured(Spikes).found[0].ratio = 30.0
    found = only(LossSpikes, run)
    assert found.severity == "warning"
    assert "some elements of exp_avg are 30 times as large as any gradients" in found.message


def climbing(at=100, n=40, size=4.0):
    values = level()
    for i in range(at, at + n):
        values[i] += size - 0.1 * (i - at)
    return values


def test_a_rate_that_has_crept_up_comes_first():
    rates = [(36 + i, 0.01 * 1.02**i) for i in range(64)]
    found = only(LossSpikes, spiky(climbing(), {}, rates=rates))
    assert "the learning rate has risen from 0.01 at step 36 to 0.0348" in found.message
    flat = only(LossSpikes, spiky(climbing(), {}, rates=[(36 + i, 0.01 * 1.002**i) for i in range(64)]))
    assert "learning rate has risen" not in flat.message


def test_a_spike_on_one_rank_is_in_its_data_if_others_with_the_same_weights_have_usual_losses():
    def told(of_others, n_sharing=2):
        run = spiky(climbing(), {}, rates=[(36 + i, 0.01 * 1.02**i) for i in range(64)])
        means = [(x + other) / 2 for x, other in zip(climbing(), of_others, strict=True)]
        run.loss, run.measured(Loss).n_ranks = series(means), 2
        run.measured(GroupSettings).n_sharing = n_sharing
        for spike in run.measured(Spikes).found:
            spike.ranks = (1,)
        return only(LossSpikes, run)

    found = told(level())
    assert (found.step, found.ranks) == (100, (1,))
    assert "it is in the data of rank 1, or in what else is its own" in found.message
    assert "learning rate has risen" not in found.message
    assert "learning rate has risen" in told(level(), n_sharing=1).message  # weights of their own
    assert "learning rate has risen" in told(climbing(size=1.0)).message  # they rise, too


def test_a_rate_that_rose_in_one_group_is_told_with_its_group():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    opt = torch.optim.SGD([{"params": [*layer.parameters()]} for layer in model], lr=1e-3)
    x = torch.randn(200, 16, 4, generator=torch.Generator().manual_seed(0))
    with watch(model, opt, Diagnose(show=False)) as w:
        for step in range(200):
            if step == 120:
                opt.param_groups[1]["lr"] = 3.0
            if step == 122:
                opt.param_groups[1]["lr"] = 1e-3
            opt.zero_grad()
            F.mse_loss(model(x[step]), x[step].sum(1, keepdim=True)).backward()
            opt.step()
    (found,) = [x for x in w.diagnose().findings if x.code == "loss.spike"]
    group = "parameter group 1 (1.weight, 1.bias)"
    assert f"the learning rate of {group} had risen from 0.001 to 3 at step 120" in found.message
    assert found.step == 120


def test_the_largest_jump_is_told_and_smaller_ones_without_a_cause_beside_it():
    run = spiky(level(), {80: 2.2, 81: 2.0, 82: 1.9, 240: 3.0})
    first, last = run.measured(Spikes).found
    first.sigma, last.inputs = first.sigma / 9, 40.0  # further above its noise, but a smaller jump
    first.after = [1.9, 1.0, 1.0, 1.0]
    first.lasted = 2
    found = only(LossSpikes, run)
    assert found.value == 3.0
    assert "its inputs are 40 times as large" in found.message
    assert found.message.endswith("Smaller ones are at step 80.")


def test_a_divergence_follows_from_a_cause_that_is_known():
    assert "loss.diverging" in LossSpikes.leads_to
    values = [*level(120), *noisy([9.0] * 200, 0.05)]
    run = with_steps(
        values, limit_change=(118, 118, 1.0, math.inf), norms=tuple((i, 3.0) for i in range(80, 118))
    )
    found = only(LossSpikes, run)
    assert (found.severity, found.step) == ("warning", 118)
    diverging = Finding("loss.diverging", "error", step=119, message="m")
    cause, effect = explained([diverging, found], Run())
    assert (cause.code, effect.consequence_of) == ("loss.spike", "loss.spike")


@in_turn(
    "loss_of",
    [
        lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten()),
        lambda scores, y: F.cross_entropy(scores.transpose(1, 2), y),
    ],
)
def test_samples_are_named_in_a_plain_loop_that_reshapes_its_scores(loss_of):
    model = nn.Sequential(nn.Embedding(5, 16), nn.Linear(16, 5))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    with watch(model, opt, Diagnose(show=False)) as loop:
        for step in range(160):
            x = torch.randint(5, (8, 12))
            y = (x + (torch.rand(8, 12) < 0.1)) % 5
            if step == 120:
                y[[2, 6]] = (x[[2, 6]] + 3) % 5
            opt.zero_grad()
            loss_of(model(x), y).backward()
            opt.step()
    found = next(f for f in loop.diagnose().findings if f.code == "loss.spike" and "step 120" in f.message)
    assert " 2 (" in found.message
    assert " 6 (" in found.message
