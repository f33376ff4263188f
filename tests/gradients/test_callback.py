"""GradientHealth reads gradients and weights right, whatever they are of, and says what is wrong."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.optim import optimizer as optimizers

from hookcb import (
    Callback,
    CancelStepException,
    Freeze,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    unfreeze,
    watch,
)
from hookcb.diagnosis.gather import recorded
from hookcb.diagnosis.judge import judge
from hookcb.gradients.callback import GradientHealth
from hookcb.gradients.stats import GRAD_STATS, STEP_STATS
from tests.support import fit, in_terminal, make_batches, make_learner, make_model, same, weights


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 300), nn.ReLU(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 1))
    health = GradientHealth(detail_every=1)
    oracle = Oracle()
    fit(make_learner(model=model, cbs=[health, oracle]))
    exact = set(GRAD_STATS) - {"update_ratio", "drift"}
    for i, record in enumerate(oracle.records):
        for stat in GRAD_STATS:
            found = health.series("2.weight", stat)[i]
            rel = 1e-4 if stat in exact else 0.2  # of 1,024 of 60,000 elements
            assert found == pytest.approx(record["2.weight"][stat], rel=rel, abs=1e-9), stat


def test_of_weights_above_65536_elements_the_norm_is_about_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 400), nn.Linear(400, 400), nn.Linear(400, 1))
    health, oracle = GradientHealth(detail_every=1), Oracle()
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
    assert "nonfinite.first" not in {finding.code for finding in learn.diagnose().findings}


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
    learn = Learner(batches, Rows(n), F.mse_loss, torch.optim.SGD, lr=0.1)
    health = checked(learn, rel=1e-4 if n < 99 else 1, detail_every=1)
    x = batches[0][0].unique()
    assert health.stats[0]["emb.weight"]["zero_rows"] == pytest.approx(1 - len(x) / n)


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


def test_a_step_that_calls_its_closure_again_and_again_clips_nothing():
    """The gradient of the last call is not what clipping leaves of that of the first one."""

    class Twice(torch.optim.SGD):  # as an LBFGS that is not torch's
        def step(self, closure):
            for _ in range(2):
                closure()
                with torch.no_grad():
                    for p in self.param_groups[0]["params"]:
                        p -= 0.1 * p.grad

    model = make_model()
    opt, ((x, y), *_) = Twice(model.parameters(), lr=0.5), make_batches()

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with watch(model, opt, GradientHealth()) as w:
        for _ in range(4):
            opt.step(closure)
    assert set(w.gradient_health.step_series("clip_coef")) == {1.0}


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
    assert health.not_optimized == []


def test_frozen_parameters_and_those_without_a_gradient_are_told_apart():
    model = make_model()
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    model[0].bias.requires_grad_(False)
    health = GradientHealth()
    fit(make_learner(model=model, cbs=health))
    assert health.frozen == ["0.bias"]
    assert health.without_grad == ["unused.weight", "unused.bias"]


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
    assert health.records.first_bad.keys() == set(health.names)
    assert {step for step, _ in health.records.first_bad.values()} == {2}


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


def test_before_any_fit_there_is_nothing_to_read():
    health = GradientHealth()
    assert len(health.stats) == len(health.table()) == len(health.step_stats) == health.skipped == 0
    assert in_terminal(health.report())


def test_the_report_fits_80_columns_and_marks_what_the_verdict_names():
    learn = fit(poisoned(), cbs=[GradientHealth(), Freeze("2")])
    health = learn.gradient_health
    verdict = judge(recorded([health], learn))
    assert verdict.primary.param == "0.weight"
    rows = {row.name: row for row in health.report(verdict=verdict).rows}
    assert (rows["0.weight"].mark, rows["0.bias"].mark) == ("nonfinite.first", "")
    assert [row.mark for row in health.report().rows] == ["", ""]
    assert health.report(verdict=verdict, worst=1).rows[0].name == "0.weight"
    console = Console(file=io.StringIO(), width=80)
    console.print(health.report(verdict=verdict), health.report())
    text = console.file.getvalue()
    assert "nonfinite" in text
    assert "0.weight" in text
    assert "2 frozen" in text
    assert f"total norm {health.step_series('total_norm')[-1]:.3g}" in text
