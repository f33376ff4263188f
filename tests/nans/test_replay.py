"""A batch runs again without traces in the model, and before the eyes of those hooks only that change it."""

from collections import deque
from functools import partial

import torch
from torch import nn

from hookcb.core.restore import preserve_modes
from hookcb.nans.replay import BatchStarts, as_at_start, has_observers
from tests.support import in_turn, make_learner


class Keeps(nn.Module):
    """Keeps what it has seen, in attributes of several kinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.n, self.means, self.latest = 0, [0.0], deque([1], maxlen=2)
        self.by_size, self.sizes = {0: 1}, {0}
        self.mean = torch.zeros(())

    def forward(self, x):
        self.n += 1
        self.means.append(x.mean().item())
        self.latest.append(self.n)
        self.by_size[len(x)], self.mean = self.n, x.mean()
        self.sizes.add(len(x))
        self.fresh = x
        return self.layer(x)


class Batch:
    """The part of a learner that a replay uses."""

    loss = None

    def __init__(self, model):
        self.model, self.xb, self.yb, self.pred = model, (torch.ones(2, 3),), (), None

    def restored(self):
        return preserve_modes(self.model)


def plain(model):
    return {name: x for name, x in vars(model).items() if name not in vars(nn.Module())}


def test_what_modules_keep_in_attributes_is_as_before():
    model = Keeps()
    before = {k: x.copy() if hasattr(x, "copy") else x for k, x in plain(model).items()}
    mean = model.mean
    batch = Batch(model)
    with as_at_start(batch, BatchStarts().note(batch)):
        model(torch.randn(5, 3))
        assert model.n == 1
    assert plain(model) == before
    assert model.mean is mean


def returns_nothing(seen, m, *args):
    if len(args) == 3:
        return
    try:
        seen.append(m)
    finally:
        seen.append(None)


def returns_something(m, args, output):
    return output * 2


HOOKS = {
    "of one path": (lambda seen: partial(returns_nothing, seen), True),
    "with a value": (lambda seen: returns_something, False),
    "unknown": (lambda seen: lambda m, args, output: seen.append(m), False),  # gives what append gives
    "an object": (lambda seen: nn.Identity(), False),
}


@in_turn("name", HOOKS)
def test_hooks_that_return_nothing_are_left_out_and_others_are_not(name):
    make, is_observer = HOOKS[name]
    seen, model = [], nn.Linear(3, 3)
    model.register_forward_hook(make(seen))
    assert has_observers(Batch(model)) is is_observer
    if not is_observer:
        return
    batch = Batch(model)
    register = dict(model._forward_hooks)
    with as_at_start(batch, BatchStarts().note(batch), with_observers=False):
        model(torch.ones(2, 3))
    assert seen == []
    with as_at_start(batch, BatchStarts().note(batch)):
        model(torch.ones(2, 3))
    assert seen == [model, None]
    assert dict(model._forward_hooks) == register


def test_a_learner_without_hooks_has_no_observers():
    assert not has_observers(make_learner())
