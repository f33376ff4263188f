"""Graphs of past batches that are kept alive, or not; memory and batches that grow, made up."""

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.time.growth import KEY, N_TRACKED, GraphsKept, GrowingBatches, GrowingMemory
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.schedule import EACH, Schedule
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.coverage import BY_CLOSURE
from tests.diagnosis.faults.time.support import only, places
from tests.support import in_turn

MB = 1e6
X, Y = torch.ones(4, 3), torch.zeros(4, 2)


def mark(fault, node, step):
    fault.on_loss(Run(loop=SimpleNamespace(train_iter=step, loss_node=node)))


def count(fault):
    fault.on_batch_end(Run(looking=True))


def findings(fault):
    return [found for found in fault.findings(Run()) if isinstance(found, Finding)]


def noted(n):
    """Batches of n in which losses are followed."""
    schedule = Schedule()
    return [i for i in range(n) if (schedule.is_due() or True) and schedule.is_noted()]


def loop(keep, n=N_TRACKED + 10, every=5):
    """Findings in a training that calls `keep` with each loss."""
    torch.manual_seed(0)
    model, fault = nn.Linear(3, 2), GraphsKept()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    loss = pred = None
    followed = noted(n)
    for step in range(n):
        pred = model(X)
        loss = F.mse_loss(pred, Y)
        if step in followed:
            mark(fault, loss.grad_fn, step)
        opt.zero_grad()
        loss.backward()
        opt.step()
        keep(loss, pred)
        if step % every == 0:
            count(fault)
    count(fault)
    return findings(fault)


class Running:
    """A sum that goes on with its graph."""

    def __init__(self):
        self.total = 0.0

    def __call__(self, loss, pred):
        self.total = self.total + loss


def appended():
    losses = []
    return lambda loss, pred: losses.append(loss)


def into_dict():
    rows = []
    return lambda loss, pred: rows.append({"loss": (loss / 2, pred.shape)})


@pytest.mark.parametrize("keep", [appended, Running, into_dict])
def test_losses_that_are_kept_with_their_graph_are_told(keep):
    (found,) = loop(keep())
    assert (found.code, found.value) == ("memory.graphs_kept", N_TRACKED - 2)
    assert f"The graphs of {N_TRACKED - 2} batches since step" in found.message


def detached():
    losses = []
    return lambda loss, pred: losses.append(loss.detach())


def numbers():
    losses = []
    return lambda loss, pred: losses.append(loss.item())


def the_last_two():
    losses = []

    def keep(loss, pred):
        losses.append(loss)
        del losses[:-2]

    return keep


def every_second():
    losses = []
    return lambda loss, pred: losses.append(loss if len(losses) % 2 else None)


def an_epoch():
    """Losses of ten batches, which are averaged and dropped."""
    losses = []

    def keep(loss, pred):
        losses.append(loss)
        if len(losses) == 10:
            losses.clear()

    return keep


@in_turn("keep", [detached, numbers, the_last_two, every_second, an_epoch])
def test_losses_that_are_dropped_in_time_or_kept_as_numbers_are_no_finding(keep):
    assert loop(keep()) == []


def test_a_loop_that_only_holds_its_last_batch_is_no_finding():
    assert loop(lambda loss, pred: None) == []


def test_fewer_batches_than_it_follows_are_too_few():
    assert loop(appended(), n=N_TRACKED - 3) == []
    assert len(loop(appended(), n=N_TRACKED)) == 1


def test_it_is_told_even_where_the_losses_are_dropped_afterwards():
    losses, fault = [], GraphsKept()
    for step in range(N_TRACKED):
        losses.append(torch.ones(3, requires_grad=True).sum())
        mark(fault, losses[-1].grad_fn, step)
    count(fault)
    losses.clear()
    count(fault)
    (found,) = findings(fault)
    assert (found.step, found.value) == (0, N_TRACKED - 2)


def test_the_first_step_it_names_is_one_that_it_follows():
    (found,) = loop(appended(), n=3 * N_TRACKED, every=3 * N_TRACKED - 1)
    assert found.step == noted(3 * N_TRACKED)[-N_TRACKED]


def test_losses_without_a_graph_are_not_followed():
    fault = GraphsKept()
    for step in range(2 * N_TRACKED):
        mark(fault, None, step)
        count(fault)
    assert findings(fault) == []


def test_it_keeps_no_graph_alive_itself():
    x = torch.ones(3, requires_grad=True)
    fault, loss = GraphsKept(), (x * 2).sum()
    node = loss.grad_fn
    mark(fault, node, 0)
    token = weakref.ref(node.metadata[KEY])
    assert token() is not None
    del loss, node
    gc.collect()
    assert token() is None


def test_gradients_of_a_noted_loss_are_to_the_bit_as_without():
    x = torch.arange(3.0, requires_grad=True)
    loss = (x.exp() * x).sum()
    mark(GraphsKept(), loss.grad_fn, 0)
    loss.backward()
    assert torch.equal(x.grad, (x.exp() * x + x.exp()).detach())


def test_graphs_that_are_kept_later_on_are_told_too():
    kept = []
    (found,) = loop(lambda loss, pred: kept.append(loss), n=10 * N_TRACKED)
    assert found.step == 1  # at the first look at 60 of them, after batch 60
    late = []
    n = (EACH + 2) * N_TRACKED
    calls = iter(range(n))
    (found,) = loop(lambda loss, pred: next(calls) > N_TRACKED and late.append(loss), n=n)
    assert found.step > N_TRACKED


# ---- memory.growth


def memory(values, steps=None, **about):
    run = Run(**about)
    run.measured(Curves).memory = Series.of(range(len(values)) if steps is None else steps, values)
    return run


def test_memory_that_grows_is_told():
    random_ = random.Random(0)
    found = only(GrowingMemory, memory([100 * MB + 3 * MB * i + random_.random() * MB for i in range(100)]))
    assert (found.code, found.severity, found.step) == ("memory.growth", "warning", 10)
    assert found.value == pytest.approx(3 * MB, rel=0.01)


def test_of_a_long_run_the_growth_so_far_is_that_of_all_its_steps():
    steps = range(0, 4_000, 4)  # of which every fourth is kept
    found = only(GrowingMemory, memory([2 * MB * step for step in steps], steps))
    assert "Memory grows by 2.0 MB per step, 7.9 GB so far" in found.message


def test_the_history_of_lbfgs_may_grow():
    given = memory([2 * MB * i for i in range(100)], reasons={"before_step": Skipped(BY_CLOSURE)})
    assert "history" in only(GrowingMemory, given).reason


@in_turn(
    "values",
    [
        [100 * MB] * 100,
        [100 * MB + 0.5 * MB * i for i in range(100)],
        [30 * MB * i for i in range(10)] + [300 * MB] * 90,
        [100 * MB] * 60 + [900 * MB] * 40,
        [100 * MB + 500 * MB * (i % 2) for i in range(100)],
    ],
)
def test_memory_that_stays_jumps_once_or_swings_is_no_finding(values):
    assert isinstance(only(GrowingMemory, memory(values)), Passed)


def test_fifty_nine_steps_are_too_few_for_growth():
    assert isinstance(only(GrowingMemory, memory([9 * MB * i for i in range(59)])), Skipped)


def growing(sizes, seconds):
    n = len(seconds)
    run = Run()
    run.measured(Inputs).sizes = Series(list(range(len(sizes))), [float(x) for x in sizes])
    curves = run.measured(Curves)
    curves.batches = Series(list(range(n)), list(seconds))
    curves.waits = Series(list(range(n)), [0.0] * n)
    return run


def test_batches_that_grow_are_told_only_if_they_take_longer():
    longer = [0.004 + 0.001 * i for i in range(40)]
    assert places(GrowingBatches, growing(range(10, 100, 9), longer)) == ["time.growing"]
    assert places(GrowingBatches, growing(range(10, 100, 9), [0.004] * 40)) == []
    assert places(GrowingBatches, growing([10] * 12, longer)) == []
    assert isinstance(only(GrowingBatches, growing([10] * 5, longer)), Skipped)


def steps(times, sizes=(10,) * 12, calls=1, trained=(4,) * 12):
    """A run with these seconds of each batch."""
    run = growing(sizes, times)
    fault = run.measured(GrowingBatches)
    for i in range(len(times)):
        fault._calls.add((i, float(calls if isinstance(calls, int) else calls[i])))
    for i, n in enumerate(trained):
        fault._trained.add((i, float(n)))
    return run


N = 200
NOISE = [random.Random(1).choice([0.0, 0.0, 0.0, 1e-3, 5e-3]) for _ in range(N)]
LINEAR = [2e-3 * (1 + 2 * i / N) + x for i, x in enumerate(NOISE)]


@in_turn(
    "times",
    [
        LINEAR,
        [2e-3 * (1 + 2 * (i / N) ** 2) for i in range(N)],
        [2e-3 * 3 ** (i / N) + x for i, x in enumerate(NOISE)],
        [2.5e-3] * 40 + LINEAR[40:],  # the first ones are inspected
        LINEAR[::3],
    ],
)
def test_steps_that_take_longer_and_longer_are_told(times):
    found = only(GrowingBatches, steps(times))
    assert (found.code, found.severity) == ("time.growing", "warning")
    assert found.value >= 2


@in_turn(
    "times",
    [
        [2e-3] * N,
        [2e-3 + x for x in NOISE],
        [2e-3] * 100 + [8e-3] * 100,  # another process takes the machine
        [2e-3] * 60 + [4e-3] * 70 + [8e-3] * 70,
        [20e-3] * 20 + [2e-3] * 180,  # warm-up
        [2e-3 * (1 + 0.8 * i / N) for i in range(N)],  # the limit is 2
        [1e-4 * (1 + 5 * i / N) for i in range(N)],  # and 1 ms
        [2e-3 * (3 if i % 50 == 49 else 1) for i in range(N)],  # an evaluation between
        [random.Random(2 + i // 20).uniform(2e-3, 9e-3) for i in range(N)],
    ],
)
def test_steps_of_a_busy_machine_are_no_finding(times):
    assert isinstance(only(GrowingBatches, steps(times)), Passed)


def test_growth_that_is_explained_is_no_finding():
    assert places(GrowingBatches, steps(LINEAR, sizes=[10 + 0.6 * i for i in range(12)])) == []
    assert places(GrowingBatches, steps(LINEAR, calls=[1 + i // 20 for i in range(N)])) == []
    assert places(GrowingBatches, steps(LINEAR, trained=[2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6])) == []


@pytest.mark.slow
def test_a_loop_that_walks_through_a_longer_and_longer_list_is_slow(monkeypatch):
    now = [0.0]  # of a clock, as the test may run on a busy machine
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("hookcb.diagnosis.measurements.curves.time", clock)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(160):
            loss = F.mse_loss(model(X + i % 7), Y)
            opt.zero_grad()
            loss.backward()
            now[0] += 1e-3 + 1e-4 * i  # for a mean over all losses so far
            opt.step()
    (found,) = [x for x in w.diagnose().findings if x.code == "time.growing"]
    assert "At inputs of the same size" in found.message


def nothing(*seen):
    """A hook."""


def in_each(act, n_step=20):
    """What is found of steps that take longer in a training that calls `act` with the model in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(n_step):
            act(i, model)
            loss = F.mse_loss(model(X), Y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return [x for x in w.diagnose().findings if x.code == "time.growing"]


@pytest.mark.parametrize(
    ("add", "layer"),
    [
        (lambda i, model: model[1].register_forward_hook(nothing), "1"),
        (lambda i, model: model[1].weight.register_hook(nothing), "1"),
        (lambda i, model: model.register_forward_pre_hook(nothing), ""),
        (lambda i, model: [model[1].register_full_backward_hook(nothing) for _ in range(i)], "1"),
    ],
)
def test_hooks_that_are_added_in_each_step_are_told_without_times(add, layer):
    (found,) = in_each(add)
    assert (found.severity, found.layer) == ("warning", layer)
    assert found.value >= found.last_step - found.step >= 8
    assert ("the model itself" in found.message) == (layer == "")


def test_the_hooks_of_both_steps_are_counted():
    (found,) = in_each(lambda i, model: model[1].register_forward_hook(nothing))
    there = {f"{step + 1} at step {step}" for step in (found.step, found.last_step)}
    assert all(text in found.message for text in there)


def added_and_removed():
    handles = []

    def act(i, model):
        for handle in handles:
            handle.remove()
        handles[:] = [model[0].register_forward_hook(nothing)]

    return act


@in_turn(
    "act",
    [
        added_and_removed(),
        lambda i, model: i % 2 or model[0].register_forward_hook(nothing),  # once in an epoch of two batches
        lambda i, model: i or [model[0].register_forward_hook(nothing) for _ in range(100)],
        lambda i, model: i > 5 or model[0].register_forward_hook(nothing),
    ],
)
def test_other_hooks_are_no_finding(act):
    assert in_each(act) == []


def test_too_few_steps_tell_nothing_of_hooks():
    assert in_each(lambda i, model: model[1].register_forward_hook(nothing), n_step=8) == []
