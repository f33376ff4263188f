"""A training with one callback, in whose batches nothing may wait for a device."""

import torch
from torch import nn
from torch.nn import functional as F

from hookcb import Callback, Learner
from tests.contract.test_every_callback import ARGUMENTS, PUBLIC
from tests.support import fit

MORE = {  # options that record more
    "ActivationStats": [{"with_hist": True, "include_paramless": True}, {"sample": 3}, {"every": 2}],
    "GradientHealth": [{"activations": True}, {"every": 2}],
}


def each():
    """Names and makers of callbacks, with each set of arguments."""
    for cls in PUBLIC:
        for options in [*ARGUMENTS.get(cls.__name__, [{}]), *MORE.get(cls.__name__, [])]:
            name = "-".join([cls.__name__, *map(str, options)])
            yield name, lambda cls=cls, options=options: cls(**options)


def planted():
    """Callbacks that wait, each in its own way."""
    ways = {
        "reads": lambda cb: cb.loss.item(),
        "compares": lambda cb: bool(cb.loss > 0),
        "copies to the host": lambda cb: cb.pred.detach().to("cpu"),
        "copies from the host": lambda cb: cb.pred.new_zeros(2).copy_(torch.ones(2)),
        "indexes by a mask": lambda cb: cb.pred[cb.pred > 0],
        "indexes by numbers of the host": lambda cb: cb.pred[torch.tensor([0, 2])],
        "searches": lambda cb: cb.pred.nonzero(),
    }

    def acting(act):
        def after_loss(cb):
            act(cb)

        return lambda: Callback(name="planted", after_loss=after_loss)

    for name, act in ways.items():
        yield f"planted: {name}", acting(act)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.LayerNorm(300), nn.ReLU(), nn.Linear(300, 3))


def trained(callback, move_model, move_batch, strict):
    """Trains; `strict(True)` is called as a batch begins, `strict(False)` as it ends."""
    batches = [move_batch((torch.randn(64, 6), torch.randint(3, (64,)))) for _ in range(8)]
    on = Callback(name="on", before_batch=lambda cb: strict(True))
    off = Callback(name="off", after_batch=lambda cb: strict(False))
    on.order, off.order = -10_000, 10_000
    learn = Learner((batches, batches[:2]), move_model(net()), F.cross_entropy, torch.optim.SGD, lr=0.01)
    learn.remove_cbs(learn.cbs)
    learn.add_cbs([on, callback, off])
    try:
        fit(learn)
    finally:
        strict(False)
    return learn
