"""ChannelsLast lays out model, inputs and the optimizer's state, and trains the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, ChannelsLast, Learner
from tests.support import fit, same, weights
from tests.training.support import quiet

RAGGED = [4, 4, 2]


LAST = torch.channels_last


class Mixed(nn.Module):
    """Weights of two, four and five dimensions, and a buffer of four."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv, self.volume = nn.Conv2d(3, 4, 3), nn.Conv3d(1, 2, 2)
            self.head = nn.Linear(4, 1)
        self.register_buffer("offset", torch.arange(192.0).reshape(1, 3, 8, 8) / 192)

    def forward(self, x):
        x = self.conv(x + self.offset).relu()
        return self.head(x.mean((2, 3))) + self.volume(x[:, None, :2, :2, :2]).mean()


def batches(n=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, 8, 8, generator=g), torch.randn(4, 1, generator=g)) for _ in range(n)]


def learner(opt_func=torch.optim.SGD, **kwargs):
    return Learner((batches(), batches(2, 1)), Mixed(), F.mse_loss, opt_func, lr=0.05, **kwargs)


def is_last(t):
    return t.is_contiguous(memory_format=LAST)


def test_model_and_images_are_laid_out_in_training_and_validation_and_the_batches_stay():
    learn, seen = learner(cbs=ChannelsLast()), []
    given = [x for x, _ in [*learn.dls.train, *learn.dls.valid]]
    params = list(learn.model.parameters())
    look = Callback(
        after_pred=lambda cb: seen.append(
            (is_last(cb.x), is_last(cb.model.conv.weight), is_last(cb.model.offset))
        )
    )
    fit(learn, cbs=look)
    assert seen == [(True, True, True)] * 5
    assert is_last(learn.model.conv.weight)
    assert learn.model.volume.weight.is_contiguous()
    assert all(p is q for p, q in zip(params, learn.model.parameters(), strict=True))
    assert not any(map(is_last, given))


def test_nested_inputs_are_laid_out_and_others_left():
    x, ids, masks = torch.randn(2, 3, 4, 4), torch.ones(2, 3, 4, 4, dtype=torch.int64), torch.randn(2, 3)
    seen = []

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, pair, more):
            seen.extend([pair[0], pair[1], more["masks"]])
            return pair[0].mean((1, 2, 3)) * self.scale

    batch = {"pair": [x, ids], "more": {"masks": masks}}
    learn = Learner([batch], Nested(), lambda pred: pred.mean(), cbs=ChannelsLast())
    fit(learn)
    assert is_last(seen[0])
    assert torch.equal(seen[0], x)
    assert seen[1] is ids
    assert seen[2] is masks


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_with_a_state_goes_on_rightly(fused):
    def trained(*cbs):
        learn = learner(lambda params, lr: torch.optim.Adam(params, lr=lr, fused=fused))
        fit(fit(learn, 2), 2, cbs=cbs)
        return learn

    learn, plain = trained(ChannelsLast()), trained()
    assert is_last(learn.opt.state[learn.model.conv.weight]["exp_avg"])
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(*map(weights, (learn.model, plain.model)), strict=True)
    )


class Sees(nn.Module):
    """Notes the memory formats of what it gets."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3)
        self.seen = []

    def forward(self, x, ids, flat):
        self.seen.append([t.is_contiguous(memory_format=torch.channels_last) for t in (x["image"], ids)])
        return self.conv(x["image"]).mean((1, 2, 3))[:, None] + flat.mean() + ids.float().mean()


def images(sizes, last=False):
    g = torch.Generator().manual_seed(0)
    made = []
    for n in sizes:
        x, ids = torch.randn(n, 3, 5, 5, generator=g), torch.ones(n, 3, 2, 2, dtype=torch.int64)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        made.append(({"image": x}, ids, torch.randn(n, 3, 5, generator=g), torch.randn(n, 1, generator=g)))
    return made


def test_channels_last_reaches_model_and_images_of_training_and_validation_and_nothing_else():
    learn = quiet(images(RAGGED), images([2]), Sees())
    learn.fit(2, cbs=ChannelsLast())
    assert learn.model.seen == [[True, False]] * 8
    assert learn.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    plain = quiet(
        images(RAGGED, last=True), images([2], last=True), Sees().to(memory_format=torch.channels_last)
    )
    plain.fit(2)
    assert same(weights(learn.model), weights(plain.model))


def test_images_and_weights_of_one_channel_are_laid_out_too():
    """There `contiguous` changes nothing, and `to` does; see torch's tutorial on channels last."""
    (x, y), conv = (torch.randn(2, 1, 5, 5), torch.randn(2, 1)), nn.Conv2d(1, 2, 3)
    seen = []
    look = Callback(name="look", after_pred=lambda cb: seen.append(cb.x.stride()))
    learn = quiet([(x, y)], None, nn.Sequential(conv, nn.Flatten(), nn.Linear(18, 1)))
    learn.fit(1, cbs=[ChannelsLast(), look])
    assert seen == [x.to(memory_format=torch.channels_last).stride()]
    assert conv.weight.stride() == nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last).weight.stride()
