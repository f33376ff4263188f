"""The verdict on trainings of which only GradientHealth was recorded: planted faults, and healthy ones."""

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
from hookcb.diagnosis.gather import recorded
from hookcb.diagnosis.judge import judge
from tests.gradients.support import HEALTHY, INF, NAN, OTHER_HEALTHY, at, batches, learner, mlp, seeded, sgd
from tests.support import along, first, fit, in_turn, make_learner, make_model

ADAM = torch.optim.Adam


def findings(learn, *codes):
    """Codes and parameters of the findings, or of those with these codes; notes are left out."""
    found = [f for f in learn.diagnose().findings if f.severity != "info"]
    return [(f.code, f.param) for f in found if not codes or f.code in codes]


# ---- healthy


@pytest.mark.parametrize(("name", "opt"), first(along(HEALTHY, ["Adam", "SGD"])))
def test_a_healthy_training_gives_no_alarm(name, opt):
    make, data, loss, rates = HEALTHY[name]
    kind = partial(torch.optim.SGD, momentum=0.9) if opt == "SGD" else torch.optim.Adam
    cb = GradientHealth()
    learn = learner(seeded(make, 0), data(0), cb, opt=kind, lr=rates[opt], loss=loss, n_epoch=5)
    losses = learn.recorder.losses
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), "it does not learn, so it tells nothing"
    assert learn.diagnose().status == "healthy", str(learn.diagnose())


@pytest.mark.parametrize("name", first(OTHER_HEALTHY))
def test_what_looks_odd_and_is_not_gives_no_alarm(name):
    health = GradientHealth()
    learn = OTHER_HEALTHY[name](health, 0)
    assert len(health.stats) >= 20
    assert learn.diagnose().status == "healthy", str(learn.diagnose())


# ---- NaN and infinities


def mended(cb):
    """So that weights stay finite."""
    for p in cb.model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)


@in_turn("bad", [NAN, INF, -INF])
@in_turn(("name", "step"), [("0.weight", 3), ("2.bias", 0), ("0.bias", 7)])
def test_a_gradient_that_is_not_finite_is_named_with_its_first_step(name, step, bad):
    def plant(cb):
        if cb.train_iter in (step, step + 2) and cb.train_iter < 8:
            dict(cb.model.named_parameters())[name].grad.flatten()[0] = bad

    cbs = at("after_backward", plant), GradientHealth(), at("before_step", mended, 30, "mend")
    verdict = learner(mlp(), batches(8), *cbs).diagnose()
    assert (verdict.status, verdict.primary.code) == ("sick", "nonfinite.first")
    assert (verdict.primary.param, verdict.primary.step, verdict.primary.value) == (name, step, 1)
    assert f"{name} has 1 NaN or infinite element at step {step}" in verdict.primary.message


def test_a_nan_of_the_data_is_found_at_its_step_with_all_it_reaches():
    data = batches(6)
    data[4][0][1, 1] = NAN
    learn = learner(mlp(), data, GradientHealth())
    assert findings(learn)[0][0] == "nonfinite.first"
    alone = judge(recorded(learn.cbs, learn))
    assert (alone.primary.code, alone.primary.step) == ("nonfinite.first", 4)
    assert all(name in alone.primary.message for name in ("0.weight", "2.weight", "2.bias"))


@pytest.mark.parametrize("skips", [False, True])
def test_a_batch_after_the_training_says_nothing_about_how_an_earlier_nan_began(skips):
    data = batches(6)
    data[4][0][1, 1] = NAN
    health = GradientHealth(on_nonfinite="skip" if skips else "record")
    verdict = learner(mlp(), data, health).diagnose()
    assert (verdict.primary.code, verdict.primary.step) == ("nonfinite.first", 4)
    assert "NaN in the inputs" not in verdict.ruled_out
    assert "the batch of the first NaN was not inspected" in str(verdict.coverage)


def test_the_first_step_that_was_not_finite_is_remembered_when_its_record_is_not_kept():
    def plant(cb):
        if cb.train_iter == 3:
            cb.model[0].weight.grad[0, 0] = NAN

    health = GradientHealth(keep=4)
    cbs = at("after_backward", plant), health, at("before_step", mended, 30, "mend")
    primary = learner(mlp(), batches(40), *cbs).diagnose().primary
    assert 3 not in health.steps()
    assert (primary.code, primary.param, primary.step) == ("nonfinite.first", "0.weight", 3)


@pytest.mark.slow
def test_ordinary_overflows_under_a_scaler_are_no_alarm_and_a_scale_at_its_end_is():
    health = GradientHealth()
    amp = MixedPrecision("fp16", init_scale=2.0**24, growth_interval=1000)
    learn = learner(mlp(), batches(150), health, amp, lr=1e-2)
    assert health.skipped > 0
    assert learn.diagnose().status == "healthy", str(learn.diagnose())
    data = batches(30)
    for _, y in data:
        y[0] = NAN
    learn = learner(mlp(), data, GradientHealth(), MixedPrecision("fp16", init_scale=2.0**4), lr=1e-2)
    assert {"nonfinite.first", "amp.scale_collapse"} <= {code for code, _ in findings(learn)}


# ---- too small, too large, at rest


def sigmoids(depth=30, width=16):
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Sigmoid())]
    return nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 1))


@pytest.mark.parametrize("opt", first([sgd, ADAM]))
def test_gradients_that_vanish_through_thirty_sigmoids_are_named_and_those_of_the_head_not(opt):
    learn = learner(seeded(sigmoids), batches(12), GradientHealth(), opt=opt, lr=0.01)
    assert findings(learn, "grad.attenuated") == [("grad.attenuated", "0.weight")]


def scaled(name, factor, since=0):
    def act(cb):
        if cb.train_iter >= since:
            dict(cb.model.named_parameters())[name].grad.mul_(factor)

    return at("after_backward", act)


def deep():
    return nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 1))


@pytest.mark.parametrize(("factor", "code"), [(1e-8, "grad.attenuated"), (1e6, "grad.exploding")])
def test_a_first_layer_far_from_the_scale_of_the_others_is_named(factor, code):
    learn = learner(seeded(deep), batches(12, d=8), scaled("0.weight", factor), GradientHealth(), lr=1e-9)
    assert findings(learn, "grad.attenuated", "grad.exploding") == [(code, "0.weight")]


@pytest.mark.parametrize("lr", [3.0, 50.0])
def test_a_training_that_diverges_is_seen(lr):
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    learn = learner(model, batches(25, d=8), GradientHealth(), lr=lr)
    assert {"nonfinite.first", "update.too_large"} <= {code for code, _ in findings(learn)}


@pytest.mark.slow
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
    assert learner(seeded(Rnn), data, GradientHealth(), lr=0.01).diagnose().status == "sick"


def two_rates(params, lr):
    params = list(params)
    return torch.optim.SGD([{"params": params[:2], "lr": 0.0}, {"params": params[2:], "lr": lr}])


def test_weights_of_a_group_with_a_rate_of_zero_may_stay_as_they_are():
    learn = learner(mlp(), batches(15), GradientHealth(), opt=two_rates, lr=0.05)
    assert findings(learn) == []


def test_weights_that_no_optimizer_has_are_named():
    model = mlp()
    opt = torch.optim.SGD(model[2].parameters(), lr=0.05)
    learn = learner(model, batches(15), GradientHealth(), opt=opt)
    assert findings(learn) == [("param.not_in_optimizer", "0.weight")]
    assert "0.weight, 0.bias" in learn.diagnose().primary.message


def test_steps_too_small_for_the_precision_of_the_weights_are_seen():
    """Updates of a bfloat16 weight below half a unit in the last place are lost."""
    model = mlp().bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(4.0)
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(15)]
    learn = learner(model, data, GradientHealth(), lr=1e-6)
    assert findings(learn)[0][0] == "update.too_small", str(learn.diagnose())


def test_parameters_without_gradient_are_named_and_frozen_ones_are_not():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.idle, self.fixed = mlp(), nn.Linear(3, 3), nn.Linear(2, 2).requires_grad_(False)

        def forward(self, x):
            return self.net(x)

    learn = learner(Part(), batches(15), GradientHealth(), Freeze("net.0"))
    assert findings(learn) == [("param.unreachable", "idle.weight")]
    message = learn.diagnose().primary.message
    assert "idle.bias" in message
    assert "fixed" not in message
    assert "net" not in message


def test_clipping_and_accumulation_are_no_alarm():
    cbs = GradientAccumulation(2), GradientClip(1e-2), GradientHealth()
    learn = learner(mlp(), batches(60), *cbs, opt=ADAM, lr=1e-2)
    assert learn.diagnose().status == "healthy", str(learn.diagnose())


def test_a_net_of_which_no_unit_is_active_is_seen():
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(net[0].bias, -100.0)
    learn = synth_learner(model=net)
    with learn.no_logging():
        learn.fit(2, cbs=GradientHealth())
    verdict = learn.diagnose()
    assert verdict.status != "healthy"
    assert "exactly zero" in str(verdict)


# ---- stacks of many layers


def stacked(act, n=8, d=16, seed=0):
    torch.manual_seed(seed)
    layers = [layer for _ in range(n) for layer in (nn.Linear(d, d), act())]
    return nn.Sequential(nn.Linear(2, d), act(), *layers, nn.Linear(d, 1))


def test_a_rate_of_0_or_nearly_0_is_found():
    learn = fit(make_learner(n_train=12, lr=0.0, cbs=GradientHealth()))
    assert findings(learn) == [("param.not_stepped", "")]
    learn = learner(mlp(), batches(1) * 30, GradientHealth(), lr=1e-9)
    assert findings(learn) == [("update.too_small", "")]


def test_weights_that_are_put_back_do_not_move():
    def restore(cb):
        with torch.no_grad():
            cb.model[0].weight.copy_(kept)

    model = make_model()
    kept = model[0].weight.detach().clone()
    putter = Callback(after_step=restore)
    putter.order = -5
    learn = fit(make_learner(n_train=8, model=model, cbs=[GradientHealth(), putter]))
    assert findings(learn) == [("param.not_stepped", "0.weight")]


@pytest.mark.slow
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
    assert learn.diagnose().status == "healthy", str(learn.diagnose())
