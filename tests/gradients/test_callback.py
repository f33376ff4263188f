"""GradientHealth reads gradients and weights right, whatever they are of, and says what is wrong."""

import io
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.optim import optimizer as optimizers

from hookcb import (
    Callback,
    CancelStepException,
    Checkpoint,
    Freeze,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    check_callback,
    count_hooks,
    synth_learner,
    unfreeze,
)
from hookcb.gradients.callback import GradientHealth
from hookcb.gradients.flow import check_gradients, gradient_flow
from hookcb.gradients.stats import GRAD_STATS, STEP_STATS
from tests.support import fit, make_batches, make_learner, make_model, same, weights


def plain(x):
    """A gradient or weight as dense float64 magnitudes, or with its sign where it is real."""
    x = x.detach()
    x = x.to_dense() if x.layout is not torch.strided else x
    return (x.abs() if x.is_complex() else x).double()


class Oracle(Callback):
    """Notes what GradientHealth should read, element by element in float64, at the plainest places."""

    order = -1

    def before_fit(self):
        self.records, self.start = [], {}

    def before_step(self):
        self.now = {}
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            g = plain(p.grad).flatten()
            finite = g[g.isfinite()].abs()
            rows = plain(p.grad).reshape(len(p.grad), -1) if p.ndim > 1 else None
            self.start.setdefault(name, p.detach().clone())
            self.now[name] = {
                "norm": math.sqrt(sum((g * g).tolist())),
                "rms": math.sqrt(sum((g * g).tolist()) / len(g)),
                "abs_max": finite.max().item() if len(finite) else math.nan,
                "nonfinite": (~g.isfinite()).sum().item(),
                "zero_rows": math.nan if rows is None else (rows == 0).all(1).double().mean().item(),
                "before": p.detach().clone(),
            }

    def after_step(self):
        for name, p in self.model.named_parameters():
            if name not in self.now:
                continue
            w, own = plain(p).flatten(), self.now[name]
            before = own.pop("before")
            own["clipped_norm"] = plain(p.grad).norm().item()
            own["weight_norm"], own["weight_mean"] = w.norm().item(), w.mean().item()
            own["weight_std"] = w.std().item() if len(w) > 1 else math.nan
            wide = torch.complex128 if p.is_complex() else torch.float64
            for stat, then in (("update_ratio", before), ("drift", self.start[name])):
                change = (p.detach().to(wide) - then.to(wide)).norm().item()
                base = then.to(wide).norm().item()
                own[stat] = 0.0 if change == 0 else change / base if base else math.inf
        self.records.append(self.now)


def compare(health, oracle, rel=1e-5):
    assert len(health.stats) == len(oracle.records) > 0
    for i, record in enumerate(oracle.records):
        for name, expected in record.items():
            for stat, value in expected.items():
                found = health.series(name, stat)[i]
                # of bf16 and float32 weights small differences lose digits before anybody looks at them
                assert found == pytest.approx(value, rel=rel, abs=1e-9, nan_ok=True), (i, name, stat)


def checked(learn, n_epoch=2, rel=1e-5, **options):
    health, oracle = GradientHealth(**options), Oracle()
    with learn.no_logging():
        learn.fit(n_epoch, cbs=[health, oracle])
    compare(health, oracle, rel)
    return health


def test_all_readings_of_a_plain_training():
    health = checked(make_learner())
    assert health.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(health.stats[0][0]) == list(GRAD_STATS)
    for i, step in enumerate(health.step_stats):
        norms = [health.series(name, "norm")[i] for name in health.names]
        assert step["total_norm"] == pytest.approx(math.sqrt(sum(n * n for n in norms)), rel=1e-6)
        assert step["mean_norm"] == pytest.approx(sum(norms) / 4, rel=1e-6)
        assert (step["lr"], step["scale"], step["skipped"]) == (pytest.approx(0.1), 1.0, 0.0)
        assert step["clip_coef"] == pytest.approx(1.0)
        assert list(step) == list(STEP_STATS)
    assert health.skipped == 0
    rows = health.table()
    assert len(rows) == 6 * 4 * len(GRAD_STATS)
    assert rows[0].layer == "0.weight"
    assert [r.step for r in health.stats] == list(range(6))


def test_larger_parameters_are_read_whole_up_to_their_size():
    model = nn.Sequential(nn.Linear(2, 300), nn.ReLU(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 1))
    health = GradientHealth()
    oracle = Oracle()
    fit(make_learner(model=model, cbs=[health, oracle]))
    exact = set(GRAD_STATS) - {"update_ratio", "drift"}
    for i, record in enumerate(oracle.records):
        for stat in GRAD_STATS:
            found = health.series("2.weight", stat)[i]
            rel = 1e-4 if stat in exact else 0.2  # of 1,024 of 60,000 elements
            assert found == pytest.approx(record["2.weight"][stat], rel=rel, abs=1e-9), stat


def test_of_weights_above_65536_elements_the_norm_is_about_right():
    model = nn.Sequential(nn.Linear(2, 400), nn.Linear(400, 400), nn.Linear(400, 1))
    health, oracle = GradientHealth(), Oracle()
    fit(make_learner(model=model, cbs=[health, oracle]))
    found, true = health.stats[-1]["1.weight"], oracle.records[-1]["1.weight"]
    for stat in ("norm", "rms", "abs_max", "zero_rows"):
        assert found[stat] == pytest.approx(true[stat], rel=1e-4, abs=1e-12)
    assert found["weight_norm"] == pytest.approx(true["weight_norm"], rel=0.07)
    assert found["weight_std"] == pytest.approx(true["weight_std"], rel=0.07)


@pytest.mark.parametrize("clip", [{"max_norm": 0.05}, {"value": 0.01}, {"max_norm": 1e9}])
def test_norms_are_told_before_and_after_clipping(clip):
    health, oracle = GradientHealth(), Oracle()
    learn = fit(make_learner(cbs=[health, oracle, GradientClip(**clip)]))
    compare(health, oracle)
    for step, coef in zip(health.step_stats, learn.gradient_clip.coefs, strict=True):
        assert step["clip_coef"] == pytest.approx(coef, rel=1e-4)
    assert health.step_stats[0]["total_norm"] == pytest.approx(learn.gradient_clip.norms[0], rel=1e-6)


def test_an_accumulated_gradient_is_read_once_and_whole():
    health, oracle = GradientHealth(), Oracle()
    fit(make_learner(n_train=5, cbs=[GradientAccumulation(2), health, oracle]))
    compare(health, oracle)
    assert [r.step for r in health.stats] == [1, 3, 4]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_counts_steps_of_the_optimizer(every):
    learn = fit(make_learner(n_train=6, cbs=[GradientAccumulation(2), GradientHealth(every)]))
    assert [r.step for r in learn.gradient_health.stats] == [1, 3, 5][::every]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_under_a_grad_scaler_gradients_are_unscaled_and_skipped_steps_are_counted(options):
    def adam(params, lr):
        return torch.optim.Adam(params, lr=lr, **options)

    model, health = make_model(), GradientHealth()
    amp = MixedPrecision("fp16", init_scale=2.0**24, growth_interval=1000)
    learn = fit(make_learner(n_train=12, model=model, opt_func=adam, lr=1e-3, cbs=[amp, health]))
    skipped = health.step_series("skipped")
    assert health.skipped == sum(skipped) == learn.mixed_precision.skipped > 0
    scale = 2.0**24
    plain_model = make_model()
    batches = make_batches(12)
    for i in range(len(batches)):
        assert health.step_series("scale")[i] == scale
        ratio, clipped = (
            health.series("0.weight", "update_ratio")[i],
            health.series("0.weight", "clipped_norm")[i],
        )
        if skipped[i]:
            scale /= 2
            assert ratio == 0
            assert math.isnan(clipped)
        else:
            assert ratio > 0
            assert clipped == health.series("0.weight", "norm")[i]
    first = skipped.index(0.0)
    x, y = batches[first]
    F.mse_loss(plain_model(x), y).backward()
    true = plain_model[0].weight.grad.norm().item()
    assert health.series("0.weight", "norm")[first] == pytest.approx(true, rel=0.02)
    assert not any(finding.code == "nonfinite" for finding in health.check())


class Rows(nn.Module):
    def __init__(self, n=400, sparse=True):
        super().__init__()
        self.emb, self.head = nn.Embedding(n, 3, sparse=sparse), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.emb(x).mean(1))


@pytest.mark.parametrize("n", [40, 400])
def test_sparse_gradients_are_read_by_the_rows_they_have(n):
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randint(n, (8, 5), generator=g), torch.randn(8, 1, generator=g)) for _ in range(3)]
    health = checked(
        Learner(batches, Rows(n), F.mse_loss, torch.optim.SGD, lr=0.1), rel=1e-4 if n < 99 else 1
    )
    x = batches[0][0].unique()
    assert health.stats[0]["emb.weight"]["zero_rows"] == pytest.approx(1 - len(x) / n)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.w).abs().sum(1, keepdim=True)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2000)
        self.head = nn.Linear(2000, 1)
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.head(self.fc(x)) * self.scale + self.none.sum()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def test_complex_parameters_count_by_their_magnitude():
    checked(make_learner(model=Complex()))


def test_tied_weights_are_there_once():
    assert checked(make_learner(model=Tied())).names == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]


def test_parameters_without_dimensions_or_elements_do_no_harm():
    health = GradientHealth()
    fit(make_learner(model=Odd(), lr=1e-5, cbs=health))
    assert set(health.names) == {"fc.weight", "fc.bias", "head.weight", "head.bias", "scale", "none"}
    assert health.stats[0]["none"]["norm"] == 0
    assert health.stats[0]["scale"]["norm"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_widened(dtype):
    batches = [(x.to(dtype), y.to(dtype)) for x, y in make_batches()]
    checked(Learner(batches, make_model().to(dtype), F.mse_loss, torch.optim.SGD, lr=0.1), rel=1e-4)


def test_channels_last_weights_are_read_by_their_rows():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 1))
    model = model.to(memory_format=torch.channels_last)
    batches = [(torch.randn(4, 3, 4, 4), torch.randn(4, 1)) for _ in range(3)]
    health = checked(Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.1), rel=1e-4)
    for stat, of in (("min", torch.min), ("max", torch.max)):
        assert health.buffer_stats[-1]["1.running_mean"][stat] == of(model[1].running_mean).item()
        assert health.buffer_series("1.running_var", stat)[-1] == of(model[1].running_var).item()


@pytest.mark.parametrize("func", [torch.optim.AdamW, torch.optim.Adagrad])
def test_parameter_groups_and_capturable_rates(func):
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
    opt = func(groups, lr=torch.tensor(0.02)) if func is torch.optim.AdamW else func(groups)
    health = checked(Learner(make_batches(), model, F.mse_loss, opt))
    assert health.step_series("lr")[0] == pytest.approx(0.01)


def test_lbfgs_is_read_around_its_step():
    class WithClosure(Learner):
        def step(self):
            def closure():
                self.opt.zero_grad()
                loss = F.mse_loss(self.model(self.x), self.y)
                loss.backward()
                return loss

            self.opt.step(closure)

    model = make_model()
    health, oracle = GradientHealth(), Oracle()
    learn = WithClosure(make_batches(), model, F.mse_loss, torch.optim.LBFGS(model.parameters(), lr=0.1))
    fit(learn, cbs=[health, oracle])
    for i, record in enumerate(oracle.records):
        for name in health.names:
            assert health.series(name, "clipped_norm")[i] == health.series(name, "norm")[i]
            for stat in ("norm", "update_ratio", "weight_norm", "drift"):
                assert health.series(name, stat)[i] == pytest.approx(record[name][stat], rel=1e-5)
    assert health.skipped == 0


def test_several_optimizers_are_all_listened_to():
    class Two(Learner):
        def step(self):
            other.step()
            self.opt.step()
            other.zero_grad()

    model = make_model()
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)
    learn = Two(make_batches(), model, F.mse_loss, torch.optim.Adam(model[0].parameters()))
    health = GradientHealth()
    fit(learn, cbs=health)
    assert health.skipped == 0
    assert min(health.series("2.weight", "update_ratio")) > 0
    assert min(health.series("0.weight", "update_ratio")) > 0
    assert list(health.check()) == []


def test_frozen_parameters_and_those_without_a_gradient_are_told_apart():
    model = make_model()
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    model[0].bias.requires_grad_(False)
    health = GradientHealth()
    fit(make_learner(model=model, cbs=health))
    assert health.frozen == ["0.bias"]
    assert health.without_grad == ["unused.weight", "unused.bias"]
    assert [(f.code, f.param) for f in health.check()] == [
        ("no_gradient", "unused.weight"),
        ("no_gradient", "unused.bias"),
    ]


def test_a_parameter_that_thaws_appears_from_then_on():
    def thaw(cb):
        if cb.epoch == 1:
            unfreeze(cb.model)

    model = make_model()
    model[0].requires_grad_(False)
    health = GradientHealth()
    fit(make_learner(model=model, cbs=[health, Callback(before_epoch=thaw)]), 2)
    norms = health.series("0.weight", "norm")
    assert all(map(math.isnan, norms[:3]))
    assert min(norms[3:]) > 0
    drift, update = (health.series("0.weight", stat)[3] for stat in ("drift", "update_ratio"))
    assert drift == update
    assert health.series("2.weight", "drift")[-1] > health.series("2.weight", "drift")[0]


def test_weights_that_get_other_memory_in_mid_fit_are_followed():
    def move(cb):
        if cb.train_iter == 2:
            for p in cb.model.parameters():
                p.data = p.data.clone()

    health, oracle = GradientHealth(), Oracle()
    learn = make_learner(n_train=5, cbs=[health, oracle, Callback(before_batch=move)])
    fit(learn)
    compare(health, oracle)


def test_params_selects_by_glob_list_and_predicate():
    for params, names in (
        ("*.weight", ["0.weight", "2.weight"]),
        (["0.*", "2.bias"], ["0.weight", "0.bias", "2.bias"]),
        (lambda name, p: p.ndim == 1, ["0.bias", "2.bias"]),
    ):
        assert fit(make_learner(cbs=GradientHealth(params=params))).gradient_health.names == names
    with pytest.raises(LookupError, match=r"matches 'conv\*'; it has: 0.weight, 0.bias"):
        fit(make_learner(cbs=GradientHealth(params="conv*")))
    assert not optimizers._global_optimizer_pre_hooks


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"every": 1.5}, {"params": 3}, {"params": []}, {"on_nonfinite": "stop"}, {"keep": 1}],
)
def test_arguments_that_cannot_be_are_refused(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        GradientHealth(**options)


# ---- NaN and infinities


def poisoned(at=2, **kwargs):
    batches = make_batches(5)
    batches[at][0][0, 0] = math.nan
    return Learner(batches, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1, **kwargs)


def test_recording_counts_them_and_names_the_first_step():
    learn = fit(poisoned(), cbs=GradientHealth())
    health = learn.gradient_health
    assert health.series("0.weight", "nonfinite")[:3] == [0, 0, 6]
    found = [f for f in health.check() if f.code == "nonfinite"]
    assert {f.step for f in found} == {2}
    assert {f.param for f in found} == set(health.names)
    assert "step 2" in str(found[0])


def test_skip_leaves_the_step_out_and_goes_on():
    learn = fit(poisoned(), cbs=[GradientHealth(on_nonfinite="skip"), GradientClip(1.0)])
    health = learn.gradient_health
    assert health.skipped == 1
    assert health.step_series("skipped") == [0, 0, 1, 0, 0]
    assert health.series("2.weight", "update_ratio")[2] == 0
    assert all(w.isfinite().all() for w in weights(learn.model))
    clean = make_batches(5)
    del clean[2]
    plain = Learner(clean, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1, cbs=GradientClip(1.0))
    assert same(weights(fit(plain).model), weights(learn.model))


@pytest.mark.parametrize("every", [1, 10])
def test_raise_names_the_parameter_and_leaves_weights_and_optimizer(every):
    before = {}

    def note(cb):
        before["weights"] = weights(cb.model)
        before["state"] = [v.clone() for s in cb.opt.state.values() for v in s.values()]

    learn = poisoned(cbs=Callback(before_batch=note))
    learn.opt_func = torch.optim.Adam
    health = GradientHealth(every, on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"'0.weight' has 6 NaN .* epoch 0, batch 2"):
        fit(learn, cbs=health)
    assert same(before["weights"], weights(learn.model))
    assert same(before["state"], [v for s in learn.opt.state.values() for v in s.values()])
    assert len(health.stats) == (3 if every == 1 else 1)
    assert not optimizers._global_optimizer_pre_hooks


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_an_ordinary_overflow_is_left_to_the_scaler(on_nonfinite):
    amp = MixedPrecision("fp16", init_scale=2.0**24)
    learn = fit(make_learner(n_train=12, cbs=[amp, GradientHealth(on_nonfinite=on_nonfinite)]))
    assert learn.gradient_health.skipped == learn.mixed_precision.skipped > 0


def test_at_a_scale_of_1_it_is_no_overflow():
    batches = [(x * math.nan, y) for x, y in make_batches(8)]
    learn = Learner(batches, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1)
    with pytest.raises(FloatingPointError, match="batch 4"):
        fit(learn, cbs=[MixedPrecision("fp16", init_scale=16.0), GradientHealth(on_nonfinite="raise")])


def test_a_step_cancelled_by_another_is_a_skipped_one():
    def cancel(cb):
        if cb.iter == 1:
            raise CancelStepException

    learn = fit(make_learner(cbs=[GradientHealth(), Callback(before_step=cancel)]))
    assert learn.gradient_health.skipped == 1
    assert learn.gradient_health.series("0.weight", "update_ratio")[1] == 0


# ---- contract


@pytest.mark.parametrize("options", [{"every": 2, "activations": True}, {"on_nonfinite": "skip"}])
def test_it_keeps_the_contract_with_options_too(options):
    check_callback(lambda: GradientHealth(**options))
    assert not optimizers._global_optimizer_pre_hooks


def test_records_do_not_hold_the_model():
    health = GradientHealth()
    learn = fit(make_learner(cbs=health))
    assert count_hooks(learn.model) == 0
    learn.remove_cb(health)
    again = pickle.loads(pickle.dumps(health))
    assert again.table() == health.table() or any(map(math.isnan, [r.value for r in health.table()]))
    assert len(pickle.dumps(health)) < 200_000


def test_a_resumed_fit_has_the_records_of_one_that_was_not_interrupted(tmp_path):
    def health_of(folder, *n_epochs):
        for n_epoch in n_epochs:
            learn = make_learner(n_train=4, cbs=[GradientHealth(activations=True), Checkpoint(folder)])
            with learn.no_logging():
                learn.fit(n_epoch, resume="latest")
        return learn.gradient_health

    whole, resumed = health_of(tmp_path / "a", 3), health_of(tmp_path / "b", 1, 3)
    assert str(whole.table()) == str(resumed.table())
    assert str(whole.step_stats) == str(resumed.step_stats)
    assert str(whole.output_stats.table()) == str(resumed.output_stats.table())


def test_what_is_saved_is_read_again(tmp_path):
    health = fit(make_learner(cbs=GradientHealth(activations=True))).gradient_health
    again = GradientHealth.load(health.save(tmp_path / "health.pt"))
    assert str(again.table()) == str(health.table())
    assert str(again.check()) == str(health.check())
    assert again.flow() == health.flow()
    assert str(again.output_stats.table()) == str(health.output_stats.table())
    with pytest.raises(ValueError, match="not written by save"):
        GradientHealth.load(make_learner().save(tmp_path / "weights.pt"))


def test_gradients_of_outputs_are_unscaled_and_of_every_call():
    seen = {}

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            a = self.fc(x)
            b = self.fc(a.relu())
            for name, t in (("fc#0", a), ("fc#1", b)):
                if t.requires_grad:
                    t.register_hook(lambda g, name=name: seen.setdefault(name, g.clone()))
            return self.head(b)

    for cbs in ([], [MixedPrecision("fp16", init_scale=4.0)]):
        seen.clear()
        health = fit(
            make_learner(model=Twice(), cbs=[GradientHealth(activations=True), *cbs])
        ).gradient_health
        assert health.output_stats.names == ["fc#0", "fc#1", "head"]
        for name, g in seen.items():
            true = g.double() / (4.0 if cbs else 1.0)
            assert health.output_stats.stats[0][name]["std"] == pytest.approx(true.std().item(), rel=1e-4)
            assert health.output_stats.stats[0][name]["abs_max"] == pytest.approx(
                true.abs().max().item(), rel=1e-4
            )


# ---- words


def deep(act, n=8, d=16, seed=0):
    torch.manual_seed(seed)
    layers = [layer for _ in range(n) for layer in (nn.Linear(d, d), act())]
    return nn.Sequential(nn.Linear(2, d), act(), *layers, nn.Linear(d, 1))


def xor(n=12, bs=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(bs, 2, generator=g) for _ in range(n)]
    return [(x, (x[:, :1] * x[:, 1:]).sign()) for x in xs]


def test_eight_sigmoids_vanish():
    learn = fit(Learner(xor(), deep(nn.Sigmoid), F.mse_loss, torch.optim.SGD, lr=0.1), cbs=GradientHealth())
    found = learn.gradient_health.check()
    assert {f.code for f in found} == {"vanishing"}
    assert found[0].param == "0.weight"
    assert "vanishing" in str(found)


def test_steep_waves_explode():
    class Wave(nn.Module):
        def forward(self, x):
            return (20 * x).sin()

    learn = Learner(xor(), deep(Wave, 8), F.mse_loss, torch.optim.SGD, lr=1e-12)
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


class Residual(nn.Module):
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


HEALTHY = {
    "relu": lambda s: deep(nn.ReLU, 2, seed=s),
    "tanh": lambda s: deep(nn.Tanh, 4, seed=s),
    "two sigmoids": lambda s: deep(nn.Sigmoid, 1, seed=s),
    "gelu": lambda s: deep(nn.GELU, 6, seed=s),
    "residual": lambda s: (torch.manual_seed(s), Residual())[1],
}


@pytest.mark.parametrize(
    "opt", [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__
)
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_training_gives_no_alarm(kind, opt):
    lr = 0.05 if opt is torch.optim.SGD else 3e-3
    learn = Learner(xor(40, seed=0), HEALTHY[kind](0), F.mse_loss, opt, lr=lr)
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


# ---- pictures and tables


def flow_by_hand(model):
    layers = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            layers.setdefault(name.rpartition(".")[0], []).append(plain(p.grad).abs().flatten())
    return {name: torch.cat(of) for name, of in layers.items()}


def test_flow_after_a_plain_backward():
    model = make_model()
    with pytest.raises(ValueError, match="backward"):
        gradient_flow(model)
    x, y = make_batches()[0]
    F.mse_loss(model(x), y).backward()
    true = flow_by_hand(model)
    assert [layer.layer for layer in gradient_flow(model)] == list(true)
    for layer in gradient_flow(model):
        assert layer.mean == pytest.approx(true[layer.layer].mean().item())
        assert layer.max == pytest.approx(true[layer.layer].max().item())
    assert list(check_gradients(model)) == []
    model[0].weight.grad[0, 0] = math.nan
    assert [(f.code, f.param) for f in check_gradients(model)] == [("nonfinite", "0.weight")]


def test_flow_of_a_record_is_that_of_its_gradients():
    flows = []
    log = Callback(before_step=lambda cb: flows.append(flow_by_hand(cb.model)))
    health = fit(make_learner(cbs=[GradientHealth(), log])).gradient_health
    for record in (0, 1, -1):
        for layer in health.flow(record):
            assert layer.mean == pytest.approx(flows[record][layer.layer].mean().item(), rel=1e-5)
            assert layer.max == pytest.approx(flows[record][layer.layer].max().item(), rel=1e-6)
    with pytest.raises(IndexError):
        health.flow(99)


def test_pictures_show_what_was_recorded():
    pytest.importorskip("matplotlib")
    health = fit(synth_learner(), 2, cbs=GradientHealth()).gradient_health
    (ax,) = health.plot_flow().axes
    assert ax.get_yscale() == "log"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["mean", "largest"]
    assert [bar.get_height() for bar in ax.patches] == [layer.max for layer in health.flow()]
    (ax,) = health.plot_updates().axes
    line = ax.lines[0].get_ydata()
    assert list(line) == pytest.approx([math.log10(x) for x in health.series("0.weight", "update_ratio")])
    assert any(list(line.get_ydata()) == [-3, -3] for line in ax.lines)
    assert len(health.plot_updates(params=slice(None)).axes[0].lines) == 5
    with pytest.raises(ValueError, match="recorded"):
        GradientHealth().plot_flow()


def test_the_report_fits_80_columns_and_names_what_is_wrong():
    learn = fit(poisoned(), cbs=[GradientHealth(), Freeze("2")])
    console = Console(file=io.StringIO(), width=80)
    console.print(learn.gradient_health.report(), learn.gradient_health.check())
    text = console.file.getvalue()
    assert "nonfinite" in text
    assert "0.weight" in text
    assert "2 frozen" in text
    console.print(GradientHealth().report(), GradientHealth().check())
