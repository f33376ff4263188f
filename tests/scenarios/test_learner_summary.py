"""The summary of a learner, before, after and in the middle of a fit."""

import functools
import html
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from hookcb import ActivationStats, Callback, HookCallback, Learner, layer_info, module_summary
from tests.hooks.support import PACKED, Plain, S, mlp, norm_net, randn, tied
from tests.support import (
    BATCH,
    DIAGNOSTICS,
    Pair,
    SaysSo,
    changes_in,
    each,
    fit,
    in_terminal,
    in_turn,
    make_batches,
    make_learner,
    row,
    same,
    shown,
    spy,
    weights,
)


class Stateless:
    """Gives its batches by a generator function; has no length."""

    def __init__(self, batches):
        self.batches, self.n_given = batches, 0

    def __iter__(self):
        for batch in self.batches:
            self.n_given += 1
            yield batch


class Noise(Dataset):
    """Draws from torch's and Python's generators for every sample."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.rand(2) + random.random(), torch.rand(1)


def test_a_learner_sums_up_its_model_and_what_trains_it():
    class MyLoss(nn.MSELoss):
        pass

    learn = make_learner(
        cbs=[ActivationStats(), Callback(name="extra")], loss_func=MyLoss(), model=norm_net()
    )
    with changes_in(learn) as changed:
        summary = learn.summary()
    assert changed == []
    assert learn.opt is None
    for text in (str(summary), in_terminal(summary), summary._repr_html_()):
        plain = text.lower().replace("_", "")
        for word in ("sgd", "myloss", "activationstats", "recorder", "extra", "batchnorm1d"):
            assert word in plain
    assert summary.n_params == sum(p.numel() for p in learn.model.parameters())
    assert row(summary, "5").shape == S([4, 1])
    assert summary.multiply_adds == 4 * (2 * 4 + 4)


def test_a_learner_shows_what_it_has_after_a_fit_and_with_a_ready_optimizer():
    learn = fit(make_learner())
    with changes_in(learn) as changed:
        assert "SGD" in str(learn.summary())
    assert changed == []
    model = mlp()
    ready = make_learner(model=norm_net(), opt_func=torch.optim.RMSprop(model.parameters()))
    assert "RMSprop" in str(ready.summary())
    partly = make_learner(
        opt_func=functools.partial(torch.optim.SGD, momentum=0.9), loss_func=functools.partial(F.mse_loss)
    )
    text = str(partly.summary())
    assert "SGD" in text
    assert "mse_loss" in text


@pytest.mark.parametrize("name", ["[/red]", "[red]", ":warning:"])
def test_names_around_a_learner_are_shown_as_they_are(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    loss = type(f"{name}Loss", (nn.MSELoss,), {})()
    cb = type(f"{name}Callback", (Callback,), {})(name="evil")
    opt = type(f"{name}SGD", (torch.optim.SGD,), {})
    learn = make_learner(loss_func=loss, cbs=cb, opt_func=opt)
    for summary in (learn.summary(), fit(learn) and learn.summary()):
        for text in (str(summary), in_terminal(summary), html.unescape(summary._repr_html_())):
            assert f"{name}Loss" in text
            assert f"{name}SGD" in text
            assert f"{name}Callback" in text or "evil" in text


def test_a_summary_of_a_learner_emits_no_event_and_prints_nothing(capsys):
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    learn.summary()
    module_summary(learn, randn(4, 2))
    layer_info(learn, randn(4, 2))
    assert log == []
    assert capsys.readouterr() == ("", "")


def test_results_of_an_earlier_fit_stay():
    learn = fit(make_learner(), cbs=[make() for make in DIAGNOSTICS[::2]])
    stats, losses, rows = (
        repr(r) for r in (learn.activation_stats.table(), learn.recorder.losses, learn.recorder.rows)
    )
    means = repr(learn.means.hooks.stored)
    with changes_in(learn) as changed:
        learn.summary()
        module_summary(learn, randn(4, 2))
        layer_info(learn, randn(4, 2))
    assert changed == []
    assert repr(learn.activation_stats.table()) == stats
    assert repr(learn.recorder.losses) == losses
    assert repr(learn.recorder.rows) == rows
    assert repr(learn.means.hooks.stored) == means


EVENTS_OF_A_FIT = [
    *("before_fit", "before_epoch", "before_train"),
    *BATCH,
    *("after_train", "before_validate", "after_validate", "after_epoch", "after_fit"),
]


@pytest.mark.parametrize("event", each(3, EVENTS_OF_A_FIT))
def test_a_summary_in_the_middle_of_a_fit_changes_nothing(event):
    def run(look):
        torch.manual_seed(0)
        n_hooked = []
        watchers = [
            ActivationStats(include_paramless=True),
            ActivationStats(every=2, name="every_other"),
            HookCallback(hook=lambda m, i, o: o.mean(), name="means"),
            HookCallback(hook=lambda m, i, o: n_hooked.append(type(m)), name="counter"),
        ]
        learn = make_learner(model=norm_net(), cbs=[*watchers, Callback(name="look", **{event: look})])
        fit(learn, 2)
        results = [(w.stats, w.names, w.left_out) for w in watchers[:2]], watchers[2].hooks.stored
        return weights(learn.model), learn.recorder.losses, repr(results), n_hooked, torch.get_rng_state()

    def look(cb):
        with changes_in(cb.learn) as changed:
            assert cb.learn.summary().n_params == sum(p.numel() for p in cb.model.parameters())
            module_summary(cb.learn, randn(4, 2))
            layer_info(cb.learn, randn(4, 2))
        assert changed == []

    plain, watched = run(lambda cb: None), run(look)
    assert same(plain[0], watched[0])
    assert plain[1] == watched[1]
    assert plain[2] == watched[2]
    assert plain[3] == watched[3]
    assert torch.equal(plain[4], watched[4])


@pytest.mark.parametrize("event", ["before_batch", "after_loss", "after_batch"])
def test_a_summary_in_a_fit_of_a_model_that_renormalises_its_weights_changes_nothing(event):
    def run(look):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = tied()
        model.embed.max_norm = 1.0
        ids = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(0))
        learn = Learner(([(x, x.flip(0)) for x in ids], None), model, F.cross_entropy, lr=0.1)
        return fit(learn, 2, cbs=Callback(name="look", **{event: look})).recorder.losses

    assert run(lambda cb: None) == run(lambda cb: cb.learn.summary())


@pytest.mark.slow
def test_a_summary_in_the_middle_of_a_fit_does_not_take_its_batches():
    data = TensorDataset(randn(12, 2), randn(12, 1))
    loaders = [
        Stateless(make_batches(3)),
        DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True),
    ]
    for loader in loaders:
        learn = Learner((loader, None), norm_net(), F.mse_loss, torch.optim.SGD)
        seen = []

        class Looks(Callback):
            def after_batch(self, seen=seen):
                seen.append(self.iter)
                assert len(seen) <= 6  # else the loader began anew at each look
                self.learn.summary()

        fit(learn, 2, cbs=Looks)
        assert seen == [0, 1, 2, 0, 1, 2], type(loader)
    loader._iterator = None  # ends its worker; a collection of garbage would wait 5 s for it, in another test


@pytest.mark.parametrize(
    "how",
    [
        lambda data, g: {"batch_size": 4, "shuffle": True, "generator": g},
        lambda data, g: {"batch_size": 4, "sampler": RandomSampler(data, generator=g)},
        lambda data, g: {
            "batch_sampler": BatchSampler(SubsetRandomSampler(range(12), generator=g), 4, False)
        },
    ],
    ids=["loader", "sampler", "batch sampler"],
)
def test_a_loader_with_a_generator_of_its_own_goes_on_as_without_a_summary(how):
    def run(look):
        data = TensorDataset(randn(12, 2), randn(12, 1))
        loader = DataLoader(data, **how(data, torch.Generator().manual_seed(3)))
        learn = Learner((loader, None), norm_net(), F.mse_loss, torch.optim.SGD)
        look(learn)
        torch.manual_seed(0)
        return fit(learn)

    plain, watched = run(lambda learn: None), run(lambda learn: learn.summary())
    assert plain.recorder.losses == watched.recorder.losses
    assert same(weights(plain.model), weights(watched.model))


def test_random_numbers_the_data_draws_are_given_back():
    learn = Learner((DataLoader(Noise(), batch_size=3, shuffle=True), None), norm_net(), F.mse_loss)
    with changes_in(learn) as changed:
        learn.summary()
    assert changed == []


def test_a_generator_class_is_asked_for_one_batch_at_most():
    loader = Stateless(make_batches(3))
    assert Learner((loader, None), norm_net(), F.mse_loss).summary().n_params > 0
    assert loader.n_given <= 1


def test_a_one_shot_iterator_loses_no_batch_in_silence():
    learn = Learner(((b for b in make_batches(3)), None), norm_net(), F.mse_loss)
    said = None
    try:
        learn.summary()
    except (ValueError, TypeError, RuntimeError) as error:
        said = str(error)
    assert said is None or "iterator" in said or "batch" in said
    fit(learn)
    assert len(learn.recorder.losses) == 3


def test_a_loader_without_a_batch_is_said():
    with pytest.raises(ValueError, match="batch"):
        Learner((Stateless([]), None), norm_net(), F.mse_loss).summary()


class Loss(nn.Module):
    """A model with keyword arguments whose output has the loss."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x, y):
        out = self.fc(x)
        return Pair(out, F.mse_loss(out, y))


@in_turn(
    ("batch", "model", "n_inp"),
    [
        ({"x": randn(4, 2), "y": randn(4, 1)}, Loss, None),
        ((randn(4, 3), randn(4, 4), randn(4, 5)), lambda: nn.Bilinear(3, 4, 5), None),
        ((randn(4, 3), randn(4, 4), randn(4, 5), randn(4)), lambda: nn.Bilinear(3, 4, 5), 2),
        (randn(4, 2), lambda: nn.Linear(2, 1), None),
        ((PACKED, randn(2)), lambda: nn.GRU(5, 7), None),
    ],
    ids=["mapping", "several", "n_inp", "tensor", "packed"],
)
def test_a_learner_gives_its_model_the_inputs_of_a_training_batch(batch, model, n_inp):
    learn = Learner([batch], model(), F.mse_loss, n_inp=n_inp)
    with changes_in(learn) as changed:
        summary = learn.summary()
    assert changed == []
    assert summary.multiply_adds > 0 or isinstance(learn.model, nn.Bilinear)
    assert all(r.called for r in summary)


def test_an_overridden_predict_is_what_calls_the_model():
    class Own(Learner):
        def predict(self):
            return self.model(self.xb[0], scale=2.0)

    model = Plain(lambda m, x, *, scale: m.fc(x) * scale, fc=nn.Linear(2, 1))
    learn = Own(make_batches(), model, F.mse_loss)
    with changes_in(learn) as changed:
        assert row(learn.summary(), "fc").shape == S([4, 1])
        assert row(module_summary(learn, randn(7, 2)), "fc").shape == S([7, 1])
        assert layer_info(learn, randn(1, 2)) == [("Linear", 3, True, S([1, 1]), False)]
    assert changed == []


def test_an_error_in_the_summary_of_a_learner_leaves_it_as_it_was():
    error = SaysSo(1, 2)

    class Own(Learner):
        def predict(self):
            self.model(*self.xb)
            raise error

    learn = Own(make_batches(), norm_net(), F.mse_loss, cbs=ActivationStats())
    with changes_in(learn) as changed, pytest.raises(SaysSo) as caught:
        learn.summary()
    assert changed == []
    assert caught.value is error
    broken = make_learner(model=nn.Linear(5, 1))
    with changes_in(broken) as changed, pytest.raises(RuntimeError, match="shapes"):
        broken.summary()
    assert changed == []


def test_a_learner_in_a_narrow_terminal_shows_all_it_has(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    summary = make_learner(model=norm_net(), cbs=ActivationStats()).summary()
    assert str(summary.n_params) in shown(str(summary))
    assert "SGD" in str(summary)
    assert "mse_loss" in str(summary)
