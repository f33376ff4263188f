"""Weights that begin too small for the depth, told only if little is learned, and the advice tried out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.faults.model.shrinking import MIN_SIGNAL
from hookcb.diagnosis.run import Run, Skipped
from tests.support import along, first, fit

CODE = "init.shrinking"


def net(depth=8, act=nn.ReLU, norm=False, d=16):
    torch.manual_seed(0)
    parts = []
    for i in range(depth):
        parts += [nn.Linear(d if i else 8, d), *([nn.LayerNorm(d)] if norm else []), act()]
    return nn.Sequential(*parts, nn.Linear(d, 4))


def data(n=60, size=64):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n * size, 8, generator=g)
    return list(zip(x.split(size), x[:, :4].argmax(1).split(size), strict=True))


def trained(model, batches, opt=torch.optim.SGD, lr=0.05):
    learn = Learner(batches, model, F.cross_entropy, opt, lr=lr)
    return fit(learn, 1, cbs=[Diagnose("ignore", show=False)])


def watched(model, batches, opt=torch.optim.SGD, lr=0.05):
    optimizer = opt(model.parameters(), lr=lr)
    with watch(model, optimizer, Diagnose("ignore", show=False)) as w:
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return w


def loss_of(model):
    x, y = (torch.cat(part) for part in zip(*data(20), strict=True))
    return float(F.cross_entropy(model(x), y).detach())


@pytest.mark.parametrize(("train", "act"), first(along([trained, watched], [nn.ReLU, nn.GELU])))
def test_it_is_the_cause_of_small_updates_and_of_a_flat_loss(train, act):
    verdict = train(net(act=act), data()).diagnose()
    assert verdict.primary.code == CODE
    assert verdict.primary.value < MIN_SIGNAL
    assert "torch's default" in verdict.primary.causes[0]
    assert all(x.consequence_of == CODE for x in verdict.findings if x.code.startswith(("update.", "loss.")))
    assert not any("multiply" in step.lower() for step in verdict.primary.next_steps)


@pytest.mark.slow
def test_its_advice_works():
    model = net()
    for m in model:
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
    learn = trained(model, data(120))
    assert learn.diagnose().status == "healthy"
    assert loss_of(model) < 1.1 < 1.35 < loss_of(trained(net(), data(120)).model)


@pytest.mark.parametrize("model", first([net(norm=True), net(3), net(4)]))
def test_a_signal_that_is_kept_or_shrinks_little_is_ruled_out(model):
    verdict = trained(model, data()).diagnose()
    assert CODE not in {x.code for x in verdict.findings}


@pytest.mark.slow
def test_nothing_is_said_if_the_model_learns():
    learn = trained(net(6), data(200), torch.optim.Adam, 3e-3)
    assert loss_of(learn.model) < 0.7
    assert learn.diagnose().status == "healthy"


@pytest.mark.slow
def test_sigmoids_are_left_to_the_gradients():
    verdict = trained(net(8, nn.Sigmoid), data()).diagnose()
    assert CODE not in {x.code for x in verdict.findings}
    assert verdict.primary.code == "grad.attenuated"


def test_batches_of_one_sample_cannot_tell():
    verdict = trained(net(), data(60, 1)).diagnose()
    assert CODE in {code for gap in verdict.gaps for code in gap.codes}
    assert [type(x) for x in FAULTS[CODE]().findings(Run())] == [Skipped]
