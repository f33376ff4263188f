"""What check() says of trainings with a planted fault, and that it says nothing of healthy ones."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import (
    Callback,
    Freeze,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
    Learner,
    MixedPrecision,
    synth_learner,
)
from hookcb.gradients.flow import check_gradients
from tests.gradients.support import HEALTHY, INF, NAN, OTHER_HEALTHY, at, batches, learner, mlp, seeded, sgd
from tests.support import fit, in_terminal, make_batches, make_learner, make_model

ADAM = torch.optim.Adam


def found(health, *codes):
    return {f.param for f in health.check() if not codes or f.code in codes}


def more_seeds(*seeds):
    """The same again from other weights and data, which takes long and shows little that is new."""
    return [pytest.param(seed, marks=pytest.mark.slow) for seed in seeds]


# ---- healthy


@pytest.mark.parametrize("opt", ["Adam", "SGD"])
@pytest.mark.parametrize("seed", [0, *more_seeds(1, 2, 3)])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_gives_no_alarm(name, seed, opt):
    make, data, loss, rates = HEALTHY[name]
    health = GradientHealth()
    kind = partial(torch.optim.SGD, momentum=0.9) if opt == "SGD" else torch.optim.Adam
    learn = learner(seeded(make, seed), data(seed), health, opt=kind, lr=rates[opt], loss=loss, n_epoch=5)
    losses = learn.recorder.losses
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), "it does not learn, so it tells nothing"
    assert str(health.check()).startswith("nothing"), str(health.check())
    assert list(health.check()) == []


@pytest.mark.parametrize("name", OTHER_HEALTHY)
@pytest.mark.parametrize("seed", [0, *more_seeds(1)])
def test_what_looks_odd_and_is_not_gives_no_alarm(name, seed):
    health = GradientHealth()
    OTHER_HEALTHY[name](health, seed)
    assert len(health.stats) >= 20
    assert list(health.check()) == [], str(health.check())


def test_one_backward_of_a_healthy_model_gives_no_alarm():
    for name, (make, data, loss, _) in HEALTHY.items():
        model = seeded(make)
        x, y = data(0)[0]
        loss(model(x), y).backward()
        assert list(check_gradients(model)) == [], name


# ---- NaN and infinities


def mended(cb):
    """So that weights stay finite."""
    for p in cb.model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(("name", "step"), [("0.weight", 3), ("2.bias", 0), ("0.bias", 7)])
def test_a_gradient_that_is_not_finite_is_named_with_its_first_step(name, step, bad):
    def plant(cb):
        if cb.train_iter in (step, step + 2) and cb.train_iter < 8:
            dict(cb.model.named_parameters())[name].grad.flatten()[0] = bad

    health = GradientHealth()
    learner(mlp(), batches(8), at("after_backward", plant), health, at("before_step", mended, 30, "mend"))
    (finding,) = [f for f in health.check() if f.code == "nonfinite"]
    assert (finding.param, finding.step) == (name, step)
    assert name in finding.message
    assert str(step) in str(finding)
    assert name in str(health.check())


def test_a_nan_of_the_data_names_all_it_reaches_from_its_step_on():
    data = batches(6)
    data[4][0][1, 1] = NAN
    health = GradientHealth()
    learner(mlp(), data, health)
    steps = {f.param: f.step for f in health.check() if f.code == "nonfinite"}
    assert set(steps) >= {"0.weight", "2.weight", "2.bias"}
    assert set(steps.values()) == {4}


def test_the_first_step_that_was_not_finite_is_remembered_when_its_record_is_not_kept():
    def plant(cb):
        if cb.train_iter == 3:
            cb.model[0].weight.grad[0, 0] = NAN

    health = GradientHealth(keep=4)
    learner(mlp(), batches(40), at("after_backward", plant), health, at("before_step", mended, 30, "mend"))
    assert 3 not in health.steps()
    assert [(f.param, f.step) for f in health.check() if f.code == "nonfinite"] == [("0.weight", 3)]


def test_ordinary_overflows_under_a_scaler_are_no_alarm_and_a_scale_at_its_end_is():
    data = batches(30)
    health = GradientHealth()
    amp = MixedPrecision("fp16", init_scale=2.0**24, growth_interval=100)
    learner(mlp(), data, health, amp, lr=1e-2)
    assert health.skipped > 0
    assert list(health.check()) == [], str(health.check())
    health = GradientHealth()
    for _, y in data:
        y[0] = NAN
    learner(mlp(), data, health, MixedPrecision("fp16", init_scale=2.0**4), lr=1e-2)
    assert list(health.check()) != []


# ---- too small, too large, at rest


def sigmoids(depth=30, width=16):
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Sigmoid())]
    return nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 1))


@pytest.mark.parametrize("opt", [sgd, ADAM])
def test_gradients_that_vanish_through_thirty_sigmoids_are_named_and_those_of_the_head_not(opt):
    health = GradientHealth()
    learner(seeded(sigmoids), batches(12), health, opt=opt, lr=0.01)
    vanished = found(health, "vanishing")
    assert {"0.weight", "1.weight"} & vanished, str(health.check())
    assert not {"61.weight", "61.bias", "59.weight"} & vanished


def test_one_backward_through_thirty_sigmoids_shows_that_gradients_vanish():
    model = seeded(sigmoids)
    x, y = batches(1, bs=32)[0]
    F.mse_loss(model(x), y).backward()
    findings = check_gradients(model)
    assert any(f.code == "vanishing" for f in findings)
    assert math.isclose(
        findings.total_norm, math.hypot(*(p.grad.norm() for p in model.parameters())), rel_tol=1e-3
    )
    assert math.isclose(findings.mean_norm, sum(p.grad.norm() for p in model.parameters()) / 64, rel_tol=1e-3)


def scaled(name, factor, since=0):
    def act(cb):
        if cb.train_iter >= since:
            dict(cb.model.named_parameters())[name].grad.mul_(factor)

    return at("after_backward", act)


def deep():
    return nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 1))


@pytest.mark.parametrize("name", ["0.weight", "4.weight"])
@pytest.mark.parametrize(("factor", "code"), [(1e-8, "vanishing"), (1e6, "exploding")])
def test_a_layer_far_from_the_scale_of_the_others_is_named(name, factor, code):
    health = GradientHealth()
    learner(seeded(deep), batches(12, d=8), scaled(name, factor), health, lr=1e-9)
    assert found(health, code) == {name}, str(health.check())
    assert found(health, "vanishing", "exploding") == {name}


def test_a_loss_in_another_unit_is_no_alarm():
    """Scales are relative to the model's own: all gradients by the same factor are as healthy as before."""
    for factor in (1e-7, 1e6):
        model = seeded(deep)
        x, y = batches(1, d=8)[0]
        (F.mse_loss(model(x), y) * factor).backward()
        assert list(check_gradients(model)) == [], str(check_gradients(model))


@pytest.mark.parametrize("lr", [3.0, 50.0])
def test_a_training_that_diverges_is_seen(lr):
    health = GradientHealth()
    learner(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))), batches(25, d=8), health, lr=lr)
    assert list(health.check()) != []


def test_an_unrolled_network_that_explodes_is_seen():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(3, 8, batch_first=True, nonlinearity="relu"), nn.Linear(8, 1)
            nn.init.eye_(self.rnn.weight_hh_l0)
            self.rnn.weight_hh_l0.data.mul_(1.5)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 64, 3, generator=g), torch.randn(4, 1, generator=g)) for _ in range(20)]
    health = GradientHealth()
    learner(seeded(Rnn), data, health, lr=0.01)
    assert list(health.check()) != []


def two_rates(params, lr):
    params = list(params)
    return torch.optim.SGD([{"params": params[:2], "lr": 0.0}, {"params": params[2:], "lr": lr}])


def test_weights_of_a_group_with_a_rate_of_zero_do_not_move_and_are_named():
    health = GradientHealth()
    learner(mlp(), batches(15), health, opt=two_rates, lr=0.05)
    findings = [f for f in health.check() if "0." in str(f)]
    named = {name for name in ("0.weight", "0.bias") if any(name in str(f) for f in findings)}
    assert named == {"0.weight", "0.bias"}, str(health.check())
    assert not any("2.weight" in str(f) or "2.bias" in str(f) for f in health.check())


def test_weights_that_no_optimizer_has_are_named():
    health, model = GradientHealth(), mlp()
    learner(model, batches(15), health, opt=torch.optim.SGD(model[2].parameters(), lr=0.05))
    assert found(health) == {"0.weight", "0.bias"}, str(health.check())


def test_steps_too_small_for_the_precision_of_the_weights_are_seen():
    """Updates of a bfloat16 weight below half a unit in the last place are lost."""
    model = mlp().bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(4.0)
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(15)]
    health = GradientHealth()
    learner(model, data, health, lr=1e-6)
    assert found(health, "unmoved") == {"0.weight", "0.bias", "2.weight", "2.bias"}, str(health.check())


def test_parameters_without_gradient_are_named_and_frozen_ones_are_not():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.idle, self.fixed = mlp(), nn.Linear(3, 3), nn.Linear(2, 2).requires_grad_(False)

        def forward(self, x):
            return self.net(x)

    health = GradientHealth()
    learner(Part(), batches(15), health, Freeze("net.0"))
    named = {name for name, _ in Part().named_parameters() if any(name in str(f) for f in health.check())}
    assert named == {"idle.weight", "idle.bias"}, str(health.check())
    model = Part()
    model(batches()[0][0]).sum().backward()
    named = {
        name for name, _ in Part().named_parameters() if any(name in str(f) for f in check_gradients(model))
    }
    assert named == {"idle.weight", "idle.bias"}


def test_a_model_without_any_gradient_is_refused_in_words():
    with pytest.raises(ValueError, match="gradient"):
        check_gradients(mlp())


# ---- how it reads


def test_findings_are_frozen_sentences_and_the_whole_prints():
    health = GradientHealth()
    learner(seeded(sigmoids), batches(12), health)
    findings = health.check()
    for finding in findings:
        assert str(finding) == finding.message or finding.message in str(finding)
        assert finding.param in finding.message
        with pytest.raises(AttributeError):
            finding.message = "all is well"
        assert not hasattr(finding, "__dict__")
    text = in_terminal(findings)
    assert findings[0].message in text
    assert f"{findings.total_norm:.3g}" in text
    assert in_terminal(health.report())
    assert math.isclose(findings.total_norm, health.step_series("total_norm")[-1], rel_tol=1e-6)


def test_before_any_fit_there_is_nothing_to_say():
    health = GradientHealth()
    assert list(health.check()) == []
    assert len(health.stats) == len(health.table()) == len(health.step_stats) == health.skipped == 0
    assert in_terminal(health.report())
    assert str(health.check())


def test_names_with_markup_are_printed_as_they_are():
    model = nn.Sequential()
    model.add_module("[red]x", nn.Linear(3, 1))
    health = GradientHealth()
    learner(model, None, health)
    assert "[red]x.weight" in in_terminal(health.report())
    model.zero_grad()
    (model(batches()[0][0]).sum() * NAN).backward()
    assert "[red]x.weight" in in_terminal(check_gradients(model))


def test_clipping_and_accumulation_are_no_alarm():
    health = GradientHealth()
    learner(mlp(), batches(60), GradientAccumulation(2), GradientClip(1e-2), health, opt=ADAM, lr=1e-2)
    assert list(health.check()) == [], str(health.check())


def test_a_net_of_which_no_unit_is_active_is_called_dead():
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(net[0].bias, -100.0)
    learn = synth_learner(model=net)
    with learn.no_logging():
        learn.fit(2, cbs=GradientHealth())
    (finding,) = learn.gradient_health.check()
    assert finding.code == "dead"
    assert "all 2 weights" in str(finding)


# ---- stacks of many layers


def stacked(act, n=8, d=16, seed=0):
    torch.manual_seed(seed)
    layers = [layer for _ in range(n) for layer in (nn.Linear(d, d), act())]
    return nn.Sequential(nn.Linear(2, d), act(), *layers, nn.Linear(d, 1))


def xor(n=12, bs=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(bs, 2, generator=g) for _ in range(n)]
    return [(x, (x[:, :1] * x[:, 1:]).sign()) for x in xs]


def test_eight_sigmoids_vanish():
    learn = fit(
        Learner(xor(), stacked(nn.Sigmoid), F.mse_loss, torch.optim.SGD, lr=0.1), cbs=GradientHealth()
    )
    found = learn.gradient_health.check()
    assert {f.code for f in found} == {"vanishing"}
    assert found[0].param == "0.weight"
    assert "vanishing" in str(found)


def test_steep_waves_explode():
    class Wave(nn.Module):
        def forward(self, x):
            return (20 * x).sin()

    learn = Learner(xor(), stacked(Wave, 8), F.mse_loss, torch.optim.SGD, lr=1e-12)
    found = fit(learn, cbs=GradientHealth()).gradient_health.check()
    assert found[0].code == "exploding"
    assert found[0].param == "0.weight"


def test_weights_out_of_the_optimizer_or_at_a_rate_of_0_are_found():
    model = make_model()
    opt = torch.optim.SGD(model[2].parameters(), lr=0.1)
    learn = fit(make_learner(n_train=8, model=model, opt_func=opt, cbs=GradientHealth()))
    assert [(f.code, f.param) for f in learn.gradient_health.check()] == [
        ("not_optimized", "0.weight"),
        ("not_optimized", "0.bias"),
    ]
    learn = fit(make_learner(n_train=8, lr=0.0, cbs=GradientHealth()))
    assert [f.code for f in learn.gradient_health.check()] == ["zero_lr"]
    learn = fit(make_learner(n_train=25, lr=1e-9, cbs=GradientHealth()))
    assert {f.code for f in learn.gradient_health.check()} == {"unmoved"}


def test_weights_that_are_put_back_do_not_move():
    def restore(cb):
        with torch.no_grad():
            cb.model[0].weight.copy_(kept)

    model = make_model()
    kept = model[0].weight.detach().clone()
    putter = Callback(after_step=restore)
    putter.order = -5
    found = fit(make_learner(n_train=8, model=model, cbs=[GradientHealth(), putter])).gradient_health.check()
    assert [(f.code, f.param) for f in found] == [("unmoved", "0.weight")]


def test_one_sudden_gradient_is_a_spike():
    batches = make_batches(30)
    batches[20][1].fill_(1e4)
    learn = fit(Learner(batches, make_model(), F.mse_loss, torch.optim.SGD, lr=1e-6), cbs=GradientHealth())
    assert ("spike", 20) in [(f.code, f.step) for f in learn.gradient_health.check()]


class ResidualStack(nn.Module):
    """With a last gamma of zero in each branch."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(2, 16), nn.Linear(16, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16)
            )
            for _ in range(4)
        )
        for branch in self.branches:
            nn.init.zeros_(branch[4].weight)

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


STACKED = {
    "relu": lambda s: stacked(nn.ReLU, 2, seed=s),
    "tanh": lambda s: stacked(nn.Tanh, 4, seed=s),
    "two sigmoids": lambda s: stacked(nn.Sigmoid, 1, seed=s),
    "gelu": lambda s: stacked(nn.GELU, 6, seed=s),
    "residual": lambda s: (torch.manual_seed(s), ResidualStack())[1],
}


@pytest.mark.parametrize("opt", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__)
@pytest.mark.parametrize("kind", STACKED)
def test_a_healthy_stack_gives_no_alarm(kind, opt):
    lr = 0.05 if opt is torch.optim.SGD else 3e-3
    learn = Learner(xor(40, seed=0), STACKED[kind](0), F.mse_loss, opt, lr=lr)
    fit(learn, 2, cbs=GradientHealth())
    assert list(learn.gradient_health.check()) == []


def test_a_transformer_with_warm_up_gives_no_alarm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
            with warnings.catch_warnings(action="ignore"):
                self.body = nn.TransformerEncoder(layer, 3)

        def forward(self, x):
            return self.head(self.body(self.emb(x))).transpose(1, 2)

    torch.manual_seed(0)
    xs = [torch.randint(50, (8, 12)) for _ in range(30)]
    learn = Learner([(x, x) for x in xs], Net(), F.cross_entropy, torch.optim.AdamW, lr=1e-3)
    health = GradientHealth()
    with learn.no_logging():
        learn.fit_one_cycle(2, cbs=[health, GradientClip(1.0)])
    assert list(health.check()) == []
