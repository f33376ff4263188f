"""Learning rates over a fit are those of torch's schedulers and of the formulas, and are given back."""

import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, MultiStepLR, SequentialLR, StepLR

from hookcb import (
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    check_callback,
)
from hookcb.training.monitor import improves, monitored, resolve_mode
from hookcb.training.schedules.one_cycle import OneCycle
from hookcb.training.schedules.plateau import ReduceLROnPlateau
from hookcb.training.schedules.schedule import Schedule
from hookcb.training.schedules.warmup_cosine import WarmupCosine
from tests.support import fit, make_batches, make_learner, make_model, same, spy, weights

MAKERS = {
    "per batch": lambda: Schedule(partial(StepLR, step_size=2)),
    "per epoch": lambda: Schedule(partial(ExponentialLR, gamma=0.5), per="epoch"),
    "one cycle": OneCycle,
    "warm-up": WarmupCosine,
    "plateau": lambda: ReduceLROnPlateau(patience=0, min_delta=10.0),
}
WARM_THEN_STEP = lambda opt: SequentialLR(opt, [LinearLR(opt, 0.1), StepLR(opt, 2)], [3])  # noqa: E731


class Moms(Callback):
    """Keeps the momentum, or the first beta, of each batch."""

    order = 1000

    def before_fit(self):
        self.moms = []

    def before_step(self):
        group = self.opt.param_groups[-1]
        self.moms.append(group["betas"][0] if "betas" in group else group["momentum"])


class Rows(Callback):
    """Puts given values into the rows."""

    order = 45

    def __init__(self, *values, column="my_loss"):
        super().__init__()
        self.values, self.column = values, column

    def after_epoch(self):
        self.learn.row[self.column] = self.values[self.epoch]


def sgd(**kwargs):
    return partial(SGD, **kwargs)


def settings(opt):
    return [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]


def by_hand(make, n_epoch, batches, opt_func=SGD, lr=0.1, per="batch"):
    """Torch's own loop: the weights it comes to, and the rate of each batch."""
    model = make_model()
    opt = opt_func(model.parameters(), lr=lr)
    scheduler, lrs = make(opt), []
    for _ in range(n_epoch):
        for x, y in batches:
            lrs.append(opt.param_groups[0]["lr"])
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if per == "batch":
                scheduler.step()
        if per == "epoch":
            scheduler.step()
    return weights(model), lrs


@pytest.mark.parametrize("per", ["batch", "epoch"])
@pytest.mark.parametrize(
    "make",
    [
        partial(StepLR, step_size=2),
        partial(ExponentialLR, gamma=0.7),
        partial(MultiStepLR, milestones=[1, 4]),
        partial(LambdaLR, lr_lambda=lambda i: 1 / (1 + i)),
        WARM_THEN_STEP,
    ],
    ids=["step", "exponential", "multistep", "lambda", "sequential"],
)
def test_a_schedule_does_what_the_loop_by_hand_does(make, per):
    expected, lrs = by_hand(make, 3, make_batches(3), per=per)
    learn = fit(make_learner(), 3, cbs=Schedule(make, per=per))
    assert learn.recorder.lrs == lrs
    assert same(weights(learn.model), expected)


@pytest.mark.parametrize("opt_func", [Adam, sgd(momentum=0.9), SGD], ids=["adam", "momentum", "plain"])
def test_one_cycle_is_that_of_torch(opt_func):
    cycles = opt_func is not SGD
    make = partial(
        lr_scheduler.OneCycleLR,
        max_lr=0.3,
        total_steps=12,
        pct_start=0.25,
        div_factor=25.0,
        final_div_factor=1e5 / 25,
        cycle_momentum=cycles,
    )
    expected, lrs = by_hand(make, 4, make_batches(3), opt_func)
    learn = fit(make_learner(opt_func=opt_func), 4, cbs=OneCycle(0.3))
    assert learn.recorder.lrs == lrs
    assert same(weights(learn.model), expected)
    assert (lrs[0], lrs[-1]) == (pytest.approx(0.3 / 25), pytest.approx(0.3 / 1e5))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 12, 100])
@pytest.mark.parametrize("opt_func", [Adam, sgd(momentum=0.5)], ids=["adam", "momentum"])
def test_one_cycle_follows_its_formula(n, opt_func):
    def cosine(start, end, share):
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2

    rise = max(0.25 * n - 1, 0.0)
    learn = make_learner(n_train=n, opt_func=opt_func)
    fit(learn, cbs=[OneCycle(1.0, div=10, div_final=100, moms=(0.9, 0.8)), Moms()])
    for i, (lr, mom) in enumerate(zip(learn.recorder.lrs, learn.moms.moms, strict=True)):
        ends = [(0.1, 1.0), (0.9, 0.8)] if i <= rise else [(1.0, 0.01), (0.8, 0.9)]
        share = (i / rise if rise else 0.0) if i <= rise else (i - rise) / (n - 1 - rise)
        assert lr == pytest.approx(cosine(*ends[0], share))
        assert mom == pytest.approx(cosine(*ends[1], share))


def fastai_rates(n, lr_max, div, div_final, pct_start):
    """Batch i at the point i / n of half a cosine up and half a cosine down, as in `combined_cos`."""

    def between(start, end, pos):
        return start + (1 + math.cos(math.pi * (1 - pos))) * (end - start) / 2

    def rate(pct):
        if pct < pct_start:
            return between(lr_max / div, lr_max, pct / pct_start)
        return between(lr_max, lr_max / div_final, (pct - pct_start) / (1 - pct_start))

    return [rate(i / n) for i in range(n)]


def test_one_cycle_differs_from_that_of_fastai_as_it_says():
    n, options = 40, {"div": 25.0, "div_final": 1e5, "pct_start": 0.25}
    lrs = fit(make_learner(n_train=n), cbs=OneCycle(1.0, **options)).recorder.lrs
    theirs = fastai_rates(n, 1.0, **options)
    assert list(lrs).index(max(lrs)) == 0.25 * n - 1
    assert theirs.index(max(theirs)) == 0.25 * n
    assert lrs[0] == pytest.approx(theirs[0])
    assert lrs[-1] == pytest.approx(1e-5)
    assert theirs[-1] > 1e-3
    assert max(abs(a - b) for a, b in zip(lrs, theirs, strict=True)) < 0.2


def test_one_cycle_peaks_at_the_rate_of_each_group():
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.4}]
    seen = []
    see = Callback(before_step=lambda cb: seen.append([g["lr"] for g in cb.opt.param_groups]), name="see")
    fit(make_learner(n_train=8, model=model, opt_func=SGD(groups, lr=1.0)), cbs=[OneCycle(), see])
    assert seen[1] == [pytest.approx(0.1), pytest.approx(0.4)]
    assert all(b == pytest.approx(4 * a) for a, b in seen)


def test_one_cycle_leaves_momentum_alone_where_told_or_where_there_is_none():
    learn = fit(make_learner(opt_func=Adam), 2, cbs=[OneCycle(moms=None), Moms()])
    assert set(learn.moms.moms) == {0.9}
    learn = fit(make_learner(opt_func=SGD), 2, cbs=[OneCycle(), Moms()])
    assert set(learn.moms.moms) == {0}


@pytest.mark.parametrize(("warmup", "w"), [(0.25, 3), (4, 4), (0, 0), (12, 12), (1.0, 12), (1, 1)])
def test_warmup_cosine_follows_its_formula(warmup, w):
    learn = fit(make_learner(opt_func=Adam, lr=0.2), 4, cbs=WarmupCosine(warmup, lr_min=0.01))
    rates = [0.2 * (i + 1) / w for i in range(w)]
    rates += [0.01 + 0.19 * (1 + math.cos(math.pi * (i - w) / (12 - w))) / 2 for i in range(w, 12)]
    assert learn.recorder.lrs == pytest.approx(rates)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("opt_func", [Adam, sgd(momentum=0.9)], ids=["adam", "momentum"])
def test_after_the_fit_each_group_has_what_it_had(make, opt_func):
    def fail(cb):
        raise SystemError

    learn = fit(make_learner(opt_func=opt_func))
    before, attributes = settings(learn.opt), set(vars(learn.opt))
    for ending in ({}, {"after_step": fail}, {"before_fit": fail}):
        saboteur = Callback(name="saboteur", **ending)
        saboteur.order = 1000
        try:
            fit(learn, 3, cbs=[make(), saboteur])
        except SystemError:
            assert ending
        assert settings(learn.opt) == before
        assert set(vars(learn.opt)) == attributes


def test_a_rate_in_a_tensor_stays_in_it():
    learn = make_learner(opt_func=partial(Adam, foreach=True, capturable=False))
    learn.opt = Adam(learn.model.parameters(), lr=torch.tensor(0.1))
    lr = learn.opt.param_groups[0]["lr"]
    for make in MAKERS.values():
        fit(learn, 3, cbs=make())
        assert learn.opt.param_groups[0]["lr"] is lr
        assert lr == torch.tensor(0.1)


@pytest.mark.parametrize("level", [CancelBatchException, CancelStepException])
def test_cancelled_batches_count_and_nothing_is_warned_of(level):
    learn = make_learner()

    def cancel(cb):
        if cb.training:
            raise level

    event = "before_batch" if level is CancelBatchException else "before_step"
    steps = []
    count = Callback(after_fit=lambda cb: steps.append(cb.learn.schedule.scheduler.last_epoch), name="count")
    count.order = 90
    fit(learn, 2, cbs=[Schedule(partial(StepLR, step_size=1)), Callback(name="c", **{event: cancel}), count])
    assert steps == [6]


def test_validation_within_the_training_steps_nothing():
    def look(cb):
        cb.learn.validate()

    learn = fit(make_learner(), cbs=[Schedule(partial(ExponentialLR, gamma=0.5)), Callback(after_step=look)])
    assert learn.recorder.lrs == [0.1, 0.05, 0.025]


def test_an_earlier_scheduler_does_not_set_the_rate_of_this_fit():
    model = make_model()
    opt = SGD(model.parameters(), lr=7.0)
    ExponentialLR(opt, 0.5)
    learn = fit(make_learner(model=model, opt_func=opt), lr=0.1, cbs=WarmupCosine(0))
    assert learn.recorder.lrs[0] == 0.1
    assert opt.param_groups[0]["initial_lr"] == 7.0


def test_two_schedules_chain_as_in_torch():
    cbs = [Schedule(partial(ExponentialLR, gamma=g), name=n) for g, n in [(0.5, "a"), (0.1, "b")]]
    learn = fit(make_learner(), cbs=cbs)
    assert learn.recorder.lrs == pytest.approx([0.1, 0.005, 0.00025])
    assert settings(learn.opt)[0]["lr"] == 0.1


def test_a_loader_that_gives_more_than_it_says_stays_at_the_last_rate():
    class Liar(list):
        def __len__(self):
            return 4

    learn = make_learner()
    learn.dls = learn.dls._replace(train=Liar(make_batches(6)))
    fit(learn, cbs=OneCycle(1.0))
    assert learn.recorder.lrs[3:] == [pytest.approx(1e-5)] * 3


@pytest.mark.parametrize("cls", [OneCycle, WarmupCosine])
def test_a_schedule_over_the_fit_needs_its_length_before_training_starts(cls):
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    learn.dls = learn.dls._replace(train=type("Stream", (), {"__iter__": lambda s: iter(make_batches(2))})())
    with pytest.raises(ValueError, match="no length"):
        fit(learn, cbs=cls())
    assert ("a", "before_epoch") not in log


@pytest.mark.parametrize("cls", [OneCycle, WarmupCosine])
def test_a_fit_of_no_epochs_is_none(cls):
    learn = fit(make_learner(), 0, cbs=cls())
    assert learn.recorder.lrs == []


WRONG = [
    (lambda: Schedule(0.1), TypeError, "no function"),
    (lambda: Schedule(StepLR), TypeError, "partial"),
    (lambda: Schedule(StepLR(SGD(make_model().parameters(), lr=1), 3)), TypeError, "partial"),
    (lambda: Schedule(partial(StepLR, step_size=2), per="step"), ValueError, "'batch' or 'epoch'"),
    (lambda: OneCycle(-1.0), ValueError, "lr_max"),
    (lambda: OneCycle(slice(1e-5, 1e-3)), TypeError, "each parameter group"),
    (lambda: OneCycle([0.1, 0]), ValueError, r"lr_max\[1\]"),
    (lambda: OneCycle(div=0), ValueError, "div"),
    (lambda: OneCycle(pct_start=1.5), ValueError, "between 0 and 1"),
    (lambda: OneCycle(moms=(0.95, 0.85, 0.95)), ValueError, "give two"),
    (lambda: OneCycle(moms=(0.95, "a")), TypeError, "moms"),
    (lambda: WarmupCosine(1.5), ValueError, "from 0 to 1"),
    (lambda: WarmupCosine(-1), ValueError, "0 or more"),
    (lambda: WarmupCosine(lr_min=math.inf), ValueError, "lr_min"),
    (lambda: ReduceLROnPlateau(factor=10.0), ValueError, "give factor=0.1"),
    (lambda: ReduceLROnPlateau(factor=1), ValueError, "factor"),
    (lambda: ReduceLROnPlateau(mode="lower"), ValueError, "'min'"),
    (lambda: ReduceLROnPlateau(patience=-1), ValueError, "patience"),
    (lambda: ReduceLROnPlateau(min_delta=math.nan), ValueError, "min_delta"),
]


@pytest.mark.parametrize(("make", "error", "text"), WRONG)
def test_arguments_that_cannot_be_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("cb", "error", "text"),
    [
        (lambda: Schedule(lambda opt: 0.1), TypeError, "no LRScheduler"),
        (lambda: Schedule(lr_scheduler.ReduceLROnPlateau), TypeError, "hookcb.ReduceLROnPlateau"),
        (lambda: Schedule(lambda opt: StepLR(SGD(make_model().parameters()), 1)), ValueError, "another opt"),
        (lambda: WarmupCosine(100), ValueError, "the fit has 3"),
        (lambda: WarmupCosine(lr_min=1.0), ValueError, "lr_min"),
        (lambda: ReduceLROnPlateau("val_loss"), LookupError, "did you mean 'valid_loss'"),
    ],
)
def test_what_does_not_go_with_the_fit_is_refused_before_training(cb, error, text):
    learn = make_learner()
    with pytest.raises(error, match=text):
        fit(learn, cbs=cb())
    assert learn.recorder.lrs == []


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_plateau_is_that_of_torch(mode):
    values = [1.0, 0.95, 0.95, 2.0, math.nan, 0.5, 0.5, 0.5, 0.9, 3.0, 3.0, 3.0]
    opt = SGD(make_model().parameters(), lr=0.1)
    torchs = lr_scheduler.ReduceLROnPlateau(
        opt, mode, factor=0.5, patience=1, threshold=0.1, threshold_mode="abs", min_lr=0.02
    )
    lrs = []
    for value in values:
        lrs.append(opt.param_groups[0]["lr"])
        torchs.step(value)
    learn = make_learner(n_train=1)
    fit(learn, len(values), cbs=[ReduceLROnPlateau("my_loss", mode, 0.1, 1, 0.5, 0.02), Rows(*values)])
    assert learn.recorder.lrs == lrs
    assert len(set(lrs)) > 2


def test_the_plateau_waits_for_its_validation():
    learn = make_learner(n_valid=0)
    with pytest.raises(ValueError, match=r"no dls.valid"):
        fit(learn, cbs=ReduceLROnPlateau())
    fit(learn, 2, cbs=ReduceLROnPlateau("train_loss"))


def test_a_column_that_never_comes_is_refused_before_training():
    learn = make_learner()
    with pytest.raises(LookupError, match=r"'sharpness'.*known are: train_loss, valid_loss, time"):
        fit(learn, cbs=ReduceLROnPlateau("sharpness"))
    assert learn.train_iter == 0


@pytest.mark.parametrize("others", [Callback(after_train=lambda cb: None), Rows(1.0)])
def test_a_column_that_a_callback_of_ones_own_might_add_is_missed_after_the_first_epoch(others):
    learn = make_learner()
    with pytest.raises(LookupError, match="it has: train_loss, valid_loss"):
        fit(learn, cbs=[ReduceLROnPlateau("sharpness"), others])
    assert learn.train_iter > 0


def test_an_epoch_cut_short_is_none_without_improvement():
    def cut(cb):
        if cb.epoch in (1, 2):
            raise CancelEpochException

    plateau = ReduceLROnPlateau(patience=0, min_delta=0.0)
    learn = fit(make_learner(lr=1e-3), 4, cbs=[plateau, Callback(after_step=cut)])
    assert set(learn.recorder.lrs) == {1e-3}


def test_modes_follow_from_names():
    assert [resolve_mode(m) for m in ("valid_loss", "error_rate", "accuracy")] == ["min", "min", "max"]
    assert resolve_mode("perplexity", "min") == "min"


def test_nan_never_improves_and_the_first_number_does():
    assert not improves(math.nan, None, "min")
    assert not improves(math.nan, 1.0, "max")
    assert improves(1.0, None, "min")
    assert improves(1.0, math.nan, "max")
    assert not improves(0.9, 1.0, "min", 0.1)
    assert improves(0.89, 1.0, "min", 0.1)


def test_a_value_in_a_tensor_is_read_as_a_number():
    learn = make_learner()
    learn.row = {"valid_loss": torch.tensor(2.0)}
    assert monitored(learn, "valid_loss") == 2.0


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_schedule_goes_on_from_its_state(make, tmp_path):
    def save(cb):
        if cb.epoch == 1:
            torch.save(whole.state_dict(), tmp_path / "state.pt")

    def load(cb):
        if cb.epoch == 0:
            rest.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))

    saver = Callback(name="saver", after_epoch=save)
    saver.order = 100
    whole, rest = make(), make()
    expected = fit(make_learner(opt_func=Adam), 4, cbs=[whole, saver]).recorder.lrs
    learn = make_learner(opt_func=Adam, lr=0.7)
    fit(learn, 4, cbs=[rest, Callback(name="loader", before_epoch=load)])
    assert learn.recorder.lrs[:6] == expected[6:]
    group = learn.opt.param_groups[0]
    assert (group["lr"], group["betas"], "max_lr" in group) == (0.1, (0.9, 0.999), False)


@pytest.mark.parametrize(
    ("n_epoch", "n_train", "text"),
    [(8, 3, "of 5 epochs, this one is of 8.*give n_epoch=5"), (5, 4, "of 15 batches, this one has 20")],
)
def test_a_schedule_over_the_fit_is_not_made_longer(n_epoch, n_train, text):
    states = []
    keep = Callback(after_epoch=lambda cb: states.append(cb.learn.one_cycle.state_dict()))
    fit(make_learner(), 5, cbs=[OneCycle(), keep])
    load = Callback(before_epoch=lambda cb: cb.learn.one_cycle.load_state_dict(states[0]))
    with pytest.raises(ValueError, match=text):
        fit(make_learner(n_train=n_train), n_epoch, cbs=[OneCycle(), load])


def test_a_schedule_by_epochs_keeps_the_contract_of_callbacks():
    with warnings.catch_warnings(action="error"):
        check_callback(MAKERS["per epoch"], alters_training=True)


def test_nothing_of_a_fit_is_kept():
    def stop(cb):
        raise CancelFitException

    cb = OneCycle()
    fit(make_learner(), cbs=cb)
    assert cb.scheduler is None
    fit(make_learner(), cbs=[pickle.loads(pickle.dumps(cb)), Callback(after_batch=stop)])
    assert cb.state_dict() == {}
    with pytest.raises(RuntimeError, match="no fit is running"):
        cb.load_state_dict({"kind": "OneCycleLR"})
