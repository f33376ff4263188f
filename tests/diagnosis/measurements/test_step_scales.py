"""StepScales: calls of clipping and of GradScalers, heard in trainings."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from hookcb import Callback, CancelStepException, Diagnose, GradientClip, Learner, watch
from hookcb.diagnosis.measurements.step_scales import StepScales

N, END = 60, 40
X, Y = torch.randn(N, 8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Look(Callback):
    """Keeps what was measured so far."""

    order = -100

    def __init__(self, diagnose):
        super().__init__()
        self.diagnose = diagnose

    def after_batch(self):
        self.found = deepcopy(self.diagnose._dispatcher.run.measured(StepScales))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def watched(each_step, scaler=None):
    net, diagnose = model(), Diagnose(show=False)
    opt, look = torch.optim.SGD(net.parameters(), lr=0.01), Look(diagnose)
    with watch(net, opt, [diagnose, look]):
        for step in range(N):
            loss = F.cross_entropy(net(X[step]), Y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            each_step(step, net, opt)
            opt.zero_grad()
    return look.found


def test_clipping_by_a_bound_function_is_heard_until_it_ends():
    norms = []

    def each(step, net, opt):
        if step < END:
            norms.append(float(clip_grad_norm_(net.parameters(), 0.5)))
        opt.step()

    found = watched(each)
    assert found.limit_change(N, within=64) == (END, END, 0.5, math.inf)
    assert found.limit_change(N, within=10) is None
    assert found.limit_change(END, within=64) is None
    assert found.norms(END) == tuple(zip(range(END - 32, END), norms[-32:], strict=True))


@pytest.mark.parametrize("limits", [(0.5, 0.6), (0.6, 0.5), (math.inf, 0.5)])
def test_a_limit_that_hardly_rises_or_that_falls_is_no_end(limits):
    def each(step, net, opt):
        clip_grad_norm_(net.parameters(), limits[step >= END])
        opt.step()

    assert watched(each).limit_change(N, within=64) is None


def test_clipping_of_another_model_is_none_of_this_one():
    other = nn.Linear(2, 2)

    def each(step, net, opt):
        other(torch.ones(2)).sum().backward()
        if step < END:
            clip_grad_norm_(other.parameters(), 0.5)
        opt.step()

    assert watched(each).limit_change(N, within=64) is None


def test_clipping_of_a_learner_is_heard_and_cancelled_steps_are_left_out():
    class Skip(Callback):
        order = 10  # before it is clipped

        def before_step(self):
            if self.train_iter % 7 == 0:
                raise CancelStepException

    diagnose, clip = Diagnose(show=False), GradientClip(0.5)
    look = Look(diagnose)
    learn = Learner([(x, Y) for x in X], model(), F.cross_entropy, torch.optim.SGD, lr=0.01)
    with learn.no_logging():
        learn.fit(1, cbs=[diagnose, clip, Skip(), look])
    ((span,),) = look.found._spans.values()
    assert span.limit == 0.5
    assert look.found.norms(N)[-1][1] == pytest.approx(clip.norms[-1])


def test_a_scale_that_is_set_between_backward_and_step_is_noted():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)

    def each(step, net, opt):
        if step == END:
            scaler.update(64.0)
        scaler.step(opt)
        scaler.update()

    found = watched(each, scaler)
    assert found.rescaled(N, within=64) == (END, 1024.0 * 2**4, 64.0)
    assert found.rescaled(END, within=64) is None
    assert found.scales(12) == tuple((step, 1024.0 if step < 10 else 2048.0) for step in range(12))
