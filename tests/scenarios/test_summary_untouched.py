"""A summary leaves the model, its flags, hooks and the random state as they were."""

import random
import warnings
from collections import OrderedDict
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookcb import Learner, count_hooks, layer_info, module_summary
from tests.hooks.support import IDS, Plain, S, cnn, encoder, mlp, randn
from tests.support import SaysSo, along, changes_in, in_turn, models, row, row_of_type, unsettle


@models
def test_a_summary_leaves_everything_as_it_was(make):
    model, *xb = make()
    unsettle(model)
    for grad, look in product((True, False), (module_summary, layer_info)):
        with torch.set_grad_enabled(grad), changes_in(model) as changed:
            look(model, *xb)
        assert changed == [], (grad, look)


@in_turn("on", [True, False])
@in_turn("fails", [False, True])
def test_flags_stay_whatever_they_are(on, fails):
    def forward(m, x):
        if fails:
            raise SaysSo(1, 2)
        return m.rnn(m.enc(x))

    model = Plain(forward, enc=encoder(), rnn=nn.LSTM(8, 4))
    flags = torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    try:
        torch._C._set_mkldnn_enabled(on)
        torch.backends.mha.set_fastpath_enabled(on)
        with changes_in(model) as changed, pytest.raises(SaysSo) if fails else torch.enable_grad():
            module_summary(model, randn(3, 5, 8))
        assert changed == []
    finally:
        torch._C._set_mkldnn_enabled(flags[0])
        torch.backends.mha.set_fastpath_enabled(flags[1])


def test_random_numbers_drawn_in_forward_are_given_back():
    def forward(m, x):
        random.random()
        return F.dropout(x, training=True) + torch.rand(())

    with changes_in(model := Plain(forward)) as changed:
        module_summary(model, randn(2, 3))
    assert changed == []


class Drawn(Dataset):
    """Draws its samples from generators of its own, one of which is made when the first sample is read."""

    def __init__(self):
        self.python, self.numpy, self.late = random.Random(1), np.random.default_rng(1), None

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.late = self.late or torch.Generator().manual_seed(1)
        return torch.rand(3, generator=self.late) + self.python.random() + self.numpy.random(), torch.ones(1)


class Resumable(DataLoader):
    """Knows its state, as torchdata's StatefulDataLoader does."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError("a summary loads no state")


WITH_WORKER = partial(DataLoader, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("kind", [DataLoader, Resumable, pytest.param(WITH_WORKER, marks=pytest.mark.slow)])
def test_random_numbers_drawn_for_the_batch_of_a_summary_are_given_back(kind):
    def losses(*looks):
        torch.manual_seed(0)
        loader = kind(Drawn(), 2, shuffle=True, generator=torch.Generator().manual_seed(3))
        learn = Learner((loader, None), nn.Linear(3, 1), F.mse_loss, lr=0.1)
        with learn.no_logging():
            for look in looks:
                look(learn)
            learn.fit(1)
        return learn.recorder.losses

    assert losses() == losses(Learner.summary, layer_info)


def _count_in_place(m, x):
    m.steps += 1
    return m.fc(x)


def _count_anew(m, x):
    m.steps = m.steps + 1
    return m.fc(x)


def _count_by_data(m, x):
    m.steps.data = m.steps.data + 1
    return m.fc(x)


def _grow(m, x):
    m.steps.resize_(3).fill_(7)
    return m.fc(x)


def _fill_cache(m, x):
    m.cache = x.detach().clone()
    return m.fc(x)


def _register(m, x):
    m.register_buffer("late", torch.zeros(2))
    return m.fc(x)


def _write_by_index(m, x):
    m.table[0] = x.mean()
    return m.fc(x)


@in_turn(
    ("forward", "inner"),
    along(
        [_count_in_place, _count_anew, _count_by_data, _grow, _fill_cache, _register, _write_by_index],
        [False, True],
    ),
)
def test_buffers_written_in_forward_are_as_before(forward, inner):
    model = Plain(forward, fc=nn.Linear(3, 2), steps=torch.zeros(()), table=torch.zeros(4))
    model.register_buffer("cache", None, persistent=False)
    model = nn.Sequential(model) if inner else model
    with changes_in(model) as changed:
        module_summary(model, randn(2, 3))
    assert changed == []
    assert [b for m in model.modules() for b in m._buffers.values()].count(None) == 1


def test_buffers_written_through_another_reference_are_as_before():
    model = Plain(lambda m, x: m.fc(x) + m.caches[0].add_(1), fc=nn.Linear(3, 2), keys=torch.zeros(2))
    model.caches = [model.keys]
    with changes_in(model) as changed:
        module_summary(model, randn(2, 3))
    assert changed == []
    assert model.caches[0] is model.keys


def test_a_buffer_that_two_modules_share_stays_one():
    ones = torch.ones(3)
    model = nn.Sequential(*(Plain(lambda m, x: x + m.shared.add_(1), shared=ones) for _ in range(2)))
    with changes_in(model) as changed:
        assert module_summary(model, randn(2, 3)).n_buffers == 3
    assert changed == []
    assert model[0].shared is model[1].shared is ones


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(11, 4, max_norm=0.1),
        lambda: nn.EmbeddingBag(11, 4, max_norm=0.1),
    ],
    ids=["Embedding, max_norm", "EmbeddingBag, max_norm"],
)
def test_weights_written_in_forward_are_as_before(make):
    with changes_in(model := make()) as changed:
        module_summary(model, IDS)
    assert changed == []


def test_gradients_taken_in_forward_are_not_added_to_those_that_wait():
    def adapt(m, x):
        with torch.enable_grad():
            m.fc(x).sum().backward()
        return m.fc(x)

    for waits in (False, True):
        model = Plain(adapt, fc=nn.Linear(3, 2))
        if waits:
            unsettle(model)
        with changes_in(model) as changed:
            module_summary(model, randn(2, 3))
        assert changed == []


@pytest.mark.parametrize(("first", "look"), along([True, False], [module_summary, layer_info]))
def test_a_scripted_part_is_summed_up_as_one_layer(first, look):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    parts = [scripted, nn.BatchNorm1d(4)]
    model = nn.Sequential(*(parts if first else parts[::-1]), nn.Linear(4, 2))
    with changes_in(model) as changed:
        result = look(model, randn(3, 4))
    assert changed == []
    if look is module_summary:
        assert sum(r.params for r in result) == result.n_params == 20 + 8 + 8 + 10
        assert row(result, "2").shape == S([3, 2])
    else:
        assert result[-1] == ("Linear", 10, True, S([3, 2]), False)


def test_a_buffer_a_waiting_backward_needs_is_not_written_to():
    model = Plain(lambda m, x: m.fc(x) * m.scale, fc=nn.Linear(3, 2), scale=torch.full((2,), 2.0))
    loss = model(randn(4, 3)).sum()
    module_summary(model, randn(4, 3))
    loss.backward()
    assert model.fc.bias.grad.tolist() == [8, 8]


def test_a_model_that_keeps_a_tensor_from_its_forward_can_still_be_trained():
    def forward(m, x):
        if not hasattr(m, "positions"):
            m.positions = torch.arange(x.shape[1]) * torch.ones(())
        return m.fc(x * m.positions)

    model = Plain(forward, fc=nn.Linear(3, 2))
    module_summary(model, randn(2, 3))
    model(randn(2, 3).requires_grad_()).sum().backward()
    assert model.fc.weight.grad.isfinite().all()


def test_a_model_that_takes_gradients_in_its_forward_is_summarised():
    def forward(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(m.fc(x).sum(), x)[0]

    model = Plain(forward, fc=nn.Linear(3, 2))
    with changes_in(model) as changed:
        summary = module_summary(model, randn(4, 3))
    assert changed == []
    assert row_of_type(summary, "Plain").shape == torch.Size([4, 3])
    assert row(summary, "fc").shape == torch.Size([4, 2])


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_summary_works_in_every_grad_mode(ambient):
    model = cnn()
    with ambient():
        assert module_summary(model, randn(2, 3, 8, 8)).n_params == sum(p.numel() for p in model.parameters())
    model(randn(2, 3, 8, 8)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_train_methods_that_keep_parts_frozen_are_not_led_astray():
    class FrozenNorm(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].training = not self[1].training
            return self

    model = FrozenNorm(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    for modes in ([True, False, True, True], [False, True, True, False]):
        for m, mode in zip(model.modules(), modes, strict=True):
            m.training = mode
        with changes_in(model) as changed:
            module_summary(model, randn(4, 3))
        assert changed == []


def test_hooks_of_the_user_stay_and_forward_hooks_that_matter_run():
    model = mlp()
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda m, args, out: None)
    model[2].register_full_backward_hook(lambda m, gi, go: None)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    n = count_hooks(model)
    with changes_in(model) as changed:
        module_summary(model, randn(2, 10))
    assert changed == []
    assert n == count_hooks(model) == 4


@in_turn(
    ("error", "look"),
    along(
        [SaysSo(1, 2), KeyboardInterrupt(), RuntimeError("boom"), StopIteration(3)],
        [module_summary, layer_info],
    ),
)
def test_an_error_in_forward_arrives_as_it_was_and_leaves_nothing_behind(error, look):
    def fail(m, x):
        m.running += 1
        torch.rand(())
        raise error

    broken = Plain(fail, running=torch.zeros(()))
    model = nn.Sequential(OrderedDict(stem=nn.Linear(3, 3), rnn=nn.BatchNorm1d(3), broken=broken))
    unsettle(model)
    with changes_in(model) as changed, pytest.raises(type(error)) as caught:
        look(model, randn(4, 3))
    assert changed == []
    assert caught.value is error


def test_an_error_in_forward_says_which_layers_had_run():
    def fail(m, x):
        raise RuntimeError("boom")

    model = nn.Sequential(
        OrderedDict(stem=nn.Linear(3, 3), middle=nn.Linear(3, 3), broken=Plain(fail), head=nn.Linear(3, 3))
    )
    with pytest.raises(RuntimeError) as caught:
        module_summary(model, randn(4, 3))
    assert caught.value.args == ("boom",)
    notes = " ".join(caught.value.__notes__)
    assert "middle" in notes
    assert "head" not in notes


def test_an_error_before_any_layer_ran_arrives_too():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        module_summary(nn.Linear(3, 3), randn(4, 5))
    assert caught.value.__notes__


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("look", [module_summary, layer_info])
def test_lazy_modules_stay_lazy(look):
    model = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with changes_in(model) as changed:
        look(model, randn(5, 4))
    assert changed == []
    assert model[1].has_uninitialized_params()
    assert type(model[1]) is nn.LazyLinear
    assert model(randn(5, 4)).shape == (5, 2)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters_count_as_they_will_be():
    model = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2))
    summary = module_summary(model, randn(5, 4))
    assert sum(r.params for r in summary) == summary.n_params == 23
    assert "LazyLinear" in str(summary)
