"""update.spike: gradients against Adam's second moment, and the losses after they have grown."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookcb import Callback, Diagnose, watch
from hookcb.diagnosis.faults.steps.stale_moments import FROM_STEP, StaleMoments, _on, _step_of
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from tests.diagnosis.faults.support import numbers
from tests.diagnosis.support import evidence

# ---- what is measured


def begun(model):
    fault, run = StaleMoments(), Run()
    run.loop = SimpleNamespace(model=model, train_iter=FROM_STEP, opt=None)
    fault.on_model(run)
    return fault, run


def measured(model, opt, grads):
    """RMS of each matrix after steps with these gradients, in float64 by hand, and as the fault has them."""
    fault, run = begun(model)
    run.loop.opt = opt
    for step, grad in enumerate(grads, FROM_STEP):
        for p in model.parameters():
            p.grad = torch.full_like(p, grad) * numbers(*p.shape, seed=step - FROM_STEP)
        opt.step()
        run.loop.train_iter = step
        fault.on_between(run)
    fault.tell(run)
    return {name: [x for _, x in rms] for name, rms in fault.rms.items()}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_the_rms_is_that_of_gradients_over_the_root_of_the_corrected_second_moment(kind):
    net, grads = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)), [1.0, 2.0, 1.0, 30.0]
    found = measured(net, kind(net.parameters(), betas=(0.9, 0.99)), grads)
    assert found.keys() == {"0.weight", "1.weight"}
    for name, shape in (("0.weight", (5, 6)), ("1.weight", (1, 5))):
        v = torch.zeros(shape, dtype=torch.float64)
        for t, grad in enumerate(grads):
            g = (grad * numbers(*shape, seed=t)).double()
            v = 0.99 * v + 0.01 * g**2
            rms = (g**2 / (v / (1 - 0.99 ** (t + 1)))).mean().sqrt()
            assert found[name][t] == pytest.approx(float(rms), rel=1e-4)
    assert found["0.weight"][0] == pytest.approx(1, rel=1e-4)


def test_a_step_that_is_counted_on_a_device_stays_there():
    net = nn.Linear(6, 5)
    opt = torch.optim.Adam(net.parameters(), betas=(0.9, 0.99))
    on_cpu = measured(net, opt, [1.0, 2.0])["weight"][-1]
    step = torch.tensor(2.0, device="meta")  # reading it would raise an error
    opt.state[net.weight]["step"] = step
    assert _step_of(opt.state[net.weight]) is step
    assert _on(torch.ones(2), [torch.tensor(0.5, dtype=torch.float64), 0.25]).tolist() == [0.5, 0.25]
    assert math.isfinite(on_cpu)


def test_embeddings_and_vectors_are_left_out_and_other_optimizers_have_no_moments():
    net = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
    fault, _ = begun(net)
    assert fault.done
    net = nn.Linear(4, 4)
    fault, run = begun(net)
    run.loop.opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net.weight.grad = torch.ones_like(net.weight)
    fault.on_between(run)
    fault.tell(run)
    assert list(fault.findings(run)) == [Absent("no optimizer has the second moments of Adam")]


# ---- what follows

STEPS = range(0, 400, 8)


def judged(rms, losses, kind="cross-entropy"):
    """Severity, parameter and step of what is found; `rms` is that of the steps that are not as usual."""
    run = evidence(loss=losses, loss_kind=kind)
    run.measured(Loss).graph_of_one = LossGraph(kind, is_pure=bool(kind))
    fault = run.measured(StaleMoments)
    fault.rms = {"a.weight": [(step, rms.get(step, 1.0)) for step in STEPS]}
    (found,) = fault.findings(run)
    if isinstance(found, Passed | Skipped):
        return type(found)
    return (found.code, found.severity, found.param, found.step)


def losses(*parts):
    noise = numbers(400).tolist()
    levels = [level for n, level in parts for _ in range(n)]
    return [level + 0.05 * e for level, e in zip(levels, noise, strict=True)]


CALM, RISEN, HEALED = (
    losses((400, 2.0)),
    losses((203, 2.0), (197, 2.6)),
    losses((203, 2.0), (40, 2.6), (157, 2.0)),
)
HIGH = {200: 7.0, 208: 3.0}


def test_a_loss_that_rises_after_a_large_rms_is_told_and_a_note_once_it_has_healed():
    assert judged(HIGH, RISEN) == ("update.spike", "warning", "a.weight", 200)
    assert judged(HIGH, HEALED) == ("update.spike", "info", "a.weight", 200)
    assert judged(HIGH, RISEN, "mse")[1] == "info"  # its targets may move, as those of Q-learning
    assert judged(HIGH, RISEN, "") is Skipped  # an objective, as of a policy, need not fall


@pytest.mark.parametrize(
    ("rms", "losses"),
    [
        (HIGH, CALM),  # no harm
        ({200: 7.0}, RISEN),  # a single one, as of one unusual batch
        ({200: 2.2, 208: 2.2}, RISEN),
        ({}, RISEN),
        ({120: 7.0, 128: 3.0}, RISEN),  # long before
    ],
)
def test_neither_a_large_rms_nor_a_rise_of_the_loss_is_enough_alone(rms, losses):
    assert judged(rms, losses) is Passed


def test_few_steps_are_not_judged():
    fault = StaleMoments()
    fault.rms = {"a.weight": [(0, 9.0), (1, 9.0)]}
    (found,) = fault.findings(Run())
    assert isinstance(found, Skipped)


def test_weights_are_as_without_it_and_no_tensor_is_kept():
    def trained(*cbs):
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        opt = torch.optim.Adam(net.parameters(), lr=0.1)
        with watch(net, opt, *(cbs or [Callback()])) as w:
            for step in range(FROM_STEP + 20):
                loss = w.report_loss(net(numbers(8, 4, seed=step)).square().mean())
                loss.backward()
                opt.step()
                opt.zero_grad()
        return net.weight.detach().clone()

    plain = trained()
    watched = trained(diagnose := Diagnose(show=False))
    assert torch.equal(plain, watched)
    fault = diagnose.evidence().measured(StaleMoments)
    steps = [step for step, _ in fault.rms["weight"]]
    assert steps[0] >= FROM_STEP
    assert 2 <= len(steps) <= 4  # one of each 8
    assert not fault._kept
    assert not fault._params
    assert all(math.isfinite(x) for _, x in fault.rms["weight"])
