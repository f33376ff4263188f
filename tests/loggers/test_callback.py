"""Log: what arrives at loggers, when, and that nothing else is changed by it."""

import copy
import functools
import math
import pickle
import random
import signal
import sys

import pytest
import torch
from torch import nn

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelTrainException,
    Checkpoint,
    GradientAccumulation,
    GradientHealth,
    Learner,
    Loop,
    OneCycle,
    check_callback,
    watch,
)
from hookcb.activations.stats import LAYER_STATS
from hookcb.gradients.stats import GRAD_STATS, STEP_STATS
from hookcb.loggers import (
    CSVLogger,
    Histogram,
    JSONLLogger,
    Log,
    MLflowLogger,
    TensorBoardLogger,
    as_logger,
    read_csv,
    read_jsonl,
)
from hookcb.profiling.steps.timer import StepTimer
from tests.support import fit, make_learner, make_model, same, weights


class Kept:
    """A logger that keeps everything."""

    def __init__(self):
        self.calls = []

    def log(self, values, step):
        assert all(type(x) is float for x in values.values())
        self.calls.append((step, values))

    @property
    def steps(self):
        return [step for step, _ in self.calls]

    def series(self, name):
        return {step: values[name] for step, values in self.calls if name in values}


class KeptToo(Kept):
    """With histograms."""

    def __init__(self):
        super().__init__()
        self.hists = []

    def log_histograms(self, hists, step):
        self.hists.append((step, hists))


class Fails:
    """A logger that cannot be logged to."""

    def __init__(self, first=0):
        self.first, self.n = first, 0

    def __repr__(self):
        return "Fails()"

    def log(self, values, step):
        self.n += 1
        if step >= self.first:
            raise OSError("no space left")


class Opened:
    """A logger that opens something when it first logs."""

    def __init__(self):
        self.is_open, self.happened = False, []

    def log(self, values, step):
        self.is_open = True
        self.happened.append(step)

    def close(self):
        self.is_open = False
        self.happened.append("closed")


def logged(cbs=(), n_epoch=1, n_train=7, every=3, kept=None, fit_with=(), **kwargs):
    """What is logged of a fit, and its learner."""
    kept = kept or Kept()
    learn = make_learner(n_train, **kwargs)
    fit(learn, n_epoch, cbs=[*cbs, Log(kept, every=every), *fit_with])
    return kept, learn


# ---- loss and rate


def test_loss_and_rate_are_those_of_the_recorder_at_every_nth_batch():
    kept, learn = logged([OneCycle(lr_max=0.1), GradientAccumulation(2)], n_epoch=3)
    due = range(0, 21, 3)
    assert kept.series("loss") == {i: learn.recorder.losses[i] for i in due}
    assert kept.series("lr") == {i: learn.recorder.lrs[i] for i in due}
    assert len(set(kept.series("lr").values())) > 3


def test_the_row_of_an_epoch_comes_with_its_last_batch():
    kept, learn = logged(n_epoch=3, metrics={"acc": lambda p, y: (p > y).float().mean()})
    for column in ("epoch", "train_loss", "valid_loss", "acc", "time"):
        expected = [row[column] for row in learn.recorder.rows]
        assert kept.series(f"epoch/{column}") == dict(zip((6, 13, 20), expected, strict=True))
    assert kept.steps == sorted(kept.steps)


def test_without_on_epoch_there_are_batches_only():
    kept = Kept()
    fit(make_learner(7), 2, cbs=Log(kept, every=5, on_epoch=False))
    assert kept.steps == [0, 5, 10]
    assert all(set(values) == {"loss", "lr"} for _, values in kept.calls)


def test_a_row_may_have_what_is_no_number():
    class Adds(Callback):
        def after_train(self):
            self.learn.row |= {"note": "fine", "tensor": torch.tensor(2.0), "count": 3, "nothing": None}

    kept, _ = logged([Adds], n_valid=0)
    (values,) = [values for _, values in kept.calls if "epoch/count" in values]
    assert (values["epoch/tensor"], values["epoch/count"]) == (2.0, 3.0)
    assert not {"epoch/note", "epoch/nothing"} & set(values)


def test_nan_arrives_as_nan():
    batches = [(torch.full((4, 2), math.nan), torch.zeros(4, 1))] * 2
    kept = Kept()
    fit(Learner(batches, make_model(), nn.functional.mse_loss), cbs=Log(kept, every=1))
    assert all(math.isnan(x) for x in kept.series("loss").values())
    assert len(kept.series("loss")) == 2


def test_a_cancelled_batch_leaves_nothing():
    class Cancels(Callback):
        def after_loss(self):
            if self.training and self.train_iter in (0, 2):
                raise CancelBatchException

    class CancelsEarly(Callback):
        def before_batch(self):
            if self.training and self.train_iter == 3:
                raise CancelBatchException

    kept, _ = logged([Cancels, CancelsEarly], every=1)
    assert list(kept.series("loss")) == [1, 4, 5, 6]


def test_what_is_validated_or_trained_aside_is_not_logged():
    kept = Kept()

    class Validates(Callback):
        def after_backward(self):
            self.learn.validate()

    log = Log(kept, every=1)
    learn = make_learner(3, n_valid=2, cbs=log)
    fit(learn, cbs=Validates)
    assert kept.steps == [0, 1, 2, 2]
    kept.calls.clear()
    learn.one_batch()
    learn.validate()
    learn.lr_find(num_it=5)
    assert kept.calls == []


class HandMade(Loop):
    """A loop with nothing of a Learner's: no optimizer, no recorder; it may tell of a loss."""

    def go(self, losses):
        self.run_fit(lambda: self._train(losses))

    def _train(self, losses):
        self.set_phase(training=True, dl=losses, n_iter=len(losses))
        for loss in losses:
            self.emit("before_batch")
            self.loss = loss
            self.emit("after_batch")
            self.train_iter += 1
        self.emit("after_epoch")


def test_a_loop_that_is_no_learner_is_logged_as_far_as_it_tells():
    kept = Kept()
    HandMade(make_model(), cbs=Log(kept, every=2)).go([torch.tensor(x) for x in (4.0, 3.0, 2.0)])
    assert kept.calls == [(0, {"loss": 4.0}), (2, {"loss": 2.0}), (2, {"epoch/epoch": 0.0})]
    kept.calls.clear()
    HandMade(make_model(), cbs=Log(kept, every=2, on_epoch=False)).go([None, None])
    assert kept.calls == []


# ---- recorders


def test_layers_are_logged_with_the_numbers_of_their_record():
    kept, learn = logged([ActivationStats(include_paramless=True)], n_epoch=2)
    stats = learn.activation_stats
    for step in (0, 3, 6, 9, 12, 13):
        for name in ("0", "1", "2"):
            for stat in LAYER_STATS:
                expected = stats.stats[step][name][stat]
                assert kept.series(f"activations/{name}/{stat}")[step] == expected
    assert list(kept.series("activations/0/mean")) == [0, 3, 6, 9, 12, 13]  # 6 is due, and ends an epoch


def test_gradients_are_logged_under_the_step_they_are_of():
    kept, learn = logged([GradientHealth(), GradientAccumulation(2)], n_train=9, every=4)
    health = learn.gradient_health
    assert health.steps() == [1, 3, 5, 7, 8]
    of_record = {step: record for record, step in enumerate(health.steps())}
    norms = kept.series("gradients/2.weight/norm")
    assert list(norms) == [3, 8]  # batches 0, 4 and 8 are due, and each time the newest record is read
    for stat in GRAD_STATS:
        got = kept.series(f"gradients/2.weight/{stat}")
        assert got == {step: health.stats[of_record[step]]["2.weight"][stat] for step in norms}
    for stat in STEP_STATS:
        got = kept.series(f"gradients/step/{stat}")
        assert got == {step: health.step_series(stat)[of_record[step]] for step in norms}
    assert kept.steps == sorted(kept.steps)
    names = {name for _, values in kept.calls for name in values}
    assert "gradients/0.weight/zero_rows" in names
    assert "gradients/0.bias/zero_rows" not in names  # a vector has none


@pytest.mark.parametrize(("clips", "first"), [(True, "clipped_"), (False, "")])
def test_norms_that_are_read_after_clipping_are_logged_under_names_that_say_so(clips, first):
    kept, model, x = Kept(), nn.Linear(4, 1), torch.randn(8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, GradientHealth(), Log(kept, every=1)):
        for _ in range(2):
            opt.zero_grad()
            (100 * model(x)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
    names = {name for _, values in kept.calls for name in values}
    for norm in ("step/total_norm", "step/mean_norm", "weight/norm"):
        place, _, stat = norm.partition("/")
        assert f"gradients/{place}/{first}{stat}" in names
        assert (f"gradients/{norm}" in names) != clips


def test_each_record_is_logged_once():
    kept, _ = logged([ActivationStats(every=7)], n_epoch=2, n_train=11, every=2)
    assert list(kept.series("activations/0/mean")) == [0, 7, 14, 21]
    assert [step for step, values in kept.calls if "activations/0/mean" in values] == [0, 7, 14, 21]


def test_an_epoch_without_training_logs_its_row_alone():
    class Skips(Callback):
        def before_train(self):
            if self.epoch == 1:
                raise CancelTrainException

    kept, _ = logged([Skips, ActivationStats(), GradientHealth(), StepTimer()], n_epoch=2, n_train=2)
    step, values = kept.calls[-1]
    assert step == 1
    assert set(values) == {"epoch/epoch", "epoch/train_loss", "epoch/valid_loss", "epoch/time"}


def test_of_kept_records_the_newest_is_logged_however_few_stay():
    kept, learn = logged([ActivationStats(keep=2)], n_train=20, every=3)
    whole, _ = logged([ActivationStats()], n_train=20, every=3)
    assert kept.series("activations/0/std") == whole.series("activations/0/std")
    assert len(learn.activation_stats.stats) == 2


def test_a_layer_that_was_not_called_is_not_logged():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.n = nn.Linear(2, 1), nn.Linear(2, 1), 0

        def forward(self, x):
            self.n += 1
            return self.a(x) + (self.b(x) if self.n % 2 else 0)

    kept, _ = logged([ActivationStats()], n_train=4, n_valid=0, every=1, model=Skips())
    assert list(kept.series("activations/a/mean")) == [0, 1, 2, 3]
    assert list(kept.series("activations/b/mean")) == [0, 2]


def test_recorders_of_a_name_of_their_own_have_it_in_front():
    first = ActivationStats(modules="0", name="stem_stats")
    kept, _ = logged([first, ActivationStats(modules="2"), GradientHealth(activations=True)])
    names = {name.rpartition("/")[0] for _, values in kept.calls for name in values}
    assert {"stem_stats/0", "activations/2", "gradients_of_outputs/2"} <= names
    assert "activations/0" not in names


def test_histograms_go_to_loggers_that_take_them():
    kept, plain = KeptToo(), Kept()
    learn = make_learner(7, n_valid=0)
    fit(learn, cbs=[ActivationStats(with_hist=True, bins=5), Log([kept, plain], every=3)])
    stats = learn.activation_stats
    assert [step for step, _ in kept.hists] == [0, 3, 6]
    for step, hists in kept.hists:
        for name in ("0", "2"):
            hist = hists[f"activations/{name}"]
            assert isinstance(hist, Histogram)
            counts = torch.tensor([hist.below, *hist.counts, hist.above])
            low, high = stats.stats[step][name]["min"], stats.stats[step][name]["max"]
            assert counts.sum() == pytest.approx(stats.hist(name)[:, step].expm1().sum().item())
            assert hist.edges[0] <= low <= high <= hist.edges[-1]
            assert (hist.min, hist.max) == (low, high)
    assert kept.calls == plain.calls


def test_step_times_are_logged_in_seconds():
    kept, learn = logged([StepTimer()], every=2)
    times = {t.step: t for t in learn.step_timer.times}
    got = kept.series("time/total")
    assert list(got) == [1, 3, 5, 6]  # the step in progress has not ended, but where the epoch has
    assert got == {step: times[step].total for step in got}
    assert kept.series("time/forward") == {step: times[step].forward for step in got}
    assert kept.steps == sorted(kept.steps)


# ---- loggers that fail, close, use random numbers


def trained(*cbs, **kwargs):
    learn = make_learner(6, model=nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)), **kwargs)
    for i, p in enumerate(learn.model.parameters()):
        nn.init.constant_(p, 0.1 + 0.01 * i)
    torch.manual_seed(0)
    random.seed(0)
    return [*weights(fit(learn, 2, cbs=cbs).model), torch.get_rng_state(), torch.tensor(random.random())]


def test_a_logger_that_fails_is_told_of_once_and_the_training_is_the_same():
    fails, kept = Fails(first=2), Kept()
    with pytest.warns(UserWarning, match=r"Fails\(\) failed with OSError\('no space left'\)") as told:
        results = trained(Log([fails, kept], every=1))
    assert len(told) == 1
    assert fails.n == 3
    assert list(kept.series("loss")) == list(range(12))
    assert same(results, trained())


def test_it_is_tried_again_in_the_next_fit():
    fails = Fails()
    learn = make_learner(cbs=Log(fails))
    for n in (1, 2):
        with pytest.warns(UserWarning, match="nothing more is logged there in this fit"):
            fit(learn)
        assert fails.n == n


def test_histograms_or_a_close_that_fail_are_told_of_too():
    class FailsAtHistograms(Kept):
        def log_histograms(self, hists, step):
            raise RuntimeError("no histograms")

    class FailsAtClose(Opened):
        def close(self):
            raise RuntimeError("will not close")

    class FailsAtBoth(FailsAtClose):
        def log(self, values, step):
            super().log(values, step)
            raise RuntimeError("will not log")

    given = {
        "no histograms": FailsAtHistograms(),
        "will not close": FailsAtClose(),
        "will not log": FailsAtBoth(),
    }
    for message, logger in given.items():
        with pytest.warns(UserWarning, match=message) as told:
            logged([ActivationStats(with_hist=True)], kept=logger)
        assert len(told) == 1


def test_what_has_failed_is_closed_all_the_same():
    class FailsAtLog(Opened):
        def log(self, values, step):
            super().log(values, step)
            raise RuntimeError("will not log")

    opened = FailsAtLog()
    with pytest.warns(UserWarning, match="will not log"):
        logged(kept=opened)
    assert opened.happened == [0, "closed"]


def test_a_logger_may_do_with_its_values_as_it_likes():
    class Empties:
        def log(self, values, step):
            values.clear()

        def log_histograms(self, hists, step):
            hists.clear()

    kept, alone = KeptToo(), KeptToo()
    for loggers in ([Empties(), kept], [alone]):
        fit(make_learner(), cbs=[ActivationStats(with_hist=True), Log(loggers, every=1, on_epoch=False)])
    assert (kept.calls, kept.hists) == (alone.calls, alone.hists)


def test_an_interrupt_while_logging_ends_the_fit_as_it_should():
    class Interrupted(Kept):
        def log(self, values, step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        logged(kept=Interrupted())


class Rolls:
    """A logger that uses up random numbers, and is slow to say what it did."""

    def log(self, values, step):
        torch.rand(3)
        random.random()


def test_random_numbers_of_a_logger_are_not_those_of_the_training():
    assert same(trained(Log(Rolls(), every=1)), trained())


def test_watching_with_recorders_changes_nothing(tmp_path):
    recorders = [ActivationStats(with_hist=True), GradientHealth(), StepTimer()]
    log = Log([tmp_path / "log.jsonl", tmp_path / "log.csv"], every=2)
    assert same(trained(*recorders, log), trained())


def test_only_what_the_fit_has_opened_is_closed():
    by_fit, before = Opened(), Opened()
    before.log({}, step=0)
    fit(make_learner(2, n_valid=0), cbs=Log([by_fit, before]))
    assert (by_fit.is_open, before.is_open) == (False, True)
    assert by_fit.happened == [0, 1, "closed"]
    assert before.happened == [0, 0, 1]


def test_it_is_closed_however_the_fit_ends():
    opened = Opened()

    class Fault(Callback):
        def before_step(self):
            if self.train_iter == 1:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        logged([Fault], kept=opened, every=1)
    assert opened.happened == [0, "closed"]


# ---- the contract of a callback


def test_it_keeps_the_contract(tmp_path):
    check_callback(lambda: Log([tmp_path / "log.jsonl", tmp_path / "log.csv", Rolls()], every=1))
    assert read_jsonl(tmp_path / "log.jsonl")
    assert read_csv(tmp_path / "log.csv")


def test_copies_log_to_the_same():
    kept = Kept()
    log = Log(kept, every=1)
    fit(make_learner(3, n_valid=0, cbs=log))
    kept.calls.clear()
    fit(make_learner(3, n_valid=0, cbs=copy.deepcopy(log)))
    assert kept.steps == [0, 1, 2, 2]
    pickled = pickle.loads(pickle.dumps(Log(["a.jsonl", "b.csv"], every=7)))
    assert (pickled.every, repr(pickled.loggers)) == (7, repr(Log(["a.jsonl", "b.csv"]).loggers))


def test_a_second_fit_counts_from_0_again():
    kept = Kept()
    learn = make_learner(3, n_valid=0, cbs=[Log(kept, every=2, on_epoch=False), ActivationStats(append=True)])
    fit(fit(learn))
    assert kept.steps == [0, 2, 0, 2]
    assert list(kept.series("activations/0/mean")) == [0, 2]


def test_the_first_record_of_a_second_fit_is_new():
    kept = Kept()
    learn = make_learner(1, n_valid=0, cbs=[Log(kept), ActivationStats(), GradientHealth()])
    fit(fit(learn))
    first, _, second, _ = kept.calls
    assert first[1].keys() == second[1].keys() > {"activations/0/mean", "gradients/0.bias/norm"}


# ---- a fit that is interrupted, and goes on


RECORDERS = [ActivationStats, GradientHealth]


class Stop(Callback):
    """Asks the process to end, as a cluster does: in a batch, or after the last of an epoch."""

    def __init__(self, batch=None, epoch=None):
        super().__init__()
        self.batch, self.at_end_of = batch, epoch

    def before_step(self):
        if self.train_iter == self.batch:
            signal.raise_signal(signal.SIGTERM)

    def after_epoch(self):
        if self.epoch == self.at_end_of:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("stop", [{"batch": 6}, {"batch": 7}, {"epoch": 1}], ids=str)
def test_a_fit_that_is_stopped_and_goes_on_leaves_no_gap(tmp_path, stop):
    whole, _ = logged([c() for c in RECORDERS], n_epoch=3, n_train=5)
    path = tmp_path / "log.jsonl"

    def run(*more):
        cbs = [c() for c in RECORDERS] + [Checkpoint(tmp_path / "run"), Log(path, every=3), *more]
        fit(make_learner(5), 3, cbs=cbs, resume="latest")

    with pytest.raises(SystemExit):
        run(Stop(**stop))
    n_before = len(read_jsonl(path))
    run()
    rows = read_jsonl(path)
    assert 0 < n_before < len(rows)
    got = {(row["step"], name): x for row in rows for name, x in row.items()}
    expected = {(step, name): x for step, values in whole.calls for name, x in values.items()}
    expected |= {(step, "step"): step for step, _ in whole.calls}
    assert got.keys() == expected.keys()
    for key in got.keys() - {key for key in got if key[1] == "epoch/time"}:
        assert repr(got[key]) == repr(expected[key]), key  # NaN too
    later = [row["step"] for row in rows[n_before:]]
    assert later == sorted(later)


# ---- what can be logged to


def test_a_path_is_a_file_of_its_kind(tmp_path):
    assert isinstance(as_logger(tmp_path / "a.csv"), CSVLogger)
    assert isinstance(as_logger(str(tmp_path / "a.jsonl")), JSONLLogger)
    with pytest.raises(ValueError, match=r"'a\.txt' does not end in \.jsonl or \.csv; give a JSONLLogger"):
        Log("a.txt")


class Wraps:
    """As wandb does before a run begins."""

    @staticmethod
    @functools.wraps(Kept.log)
    def log(*args, **kwargs):
        pass


def test_any_object_that_logs_is_taken_as_it_is():
    class Other:
        def log(self, data, step=None, commit=None):
            pass

    for thing in (Kept(), Other(), Opened(), Wraps()):
        assert as_logger(thing) is thing


class Writer:
    def add_scalar(self, *args):
        pass


class Client:
    def log_metric(self, *args):
        pass


class LogsOne:
    def log(self, name, value):
        pass


@pytest.mark.parametrize(
    ("thing", "hint"),
    [
        (None, "give a JSONLLogger, CSVLogger, TensorBoardLogger or MLflowLogger"),
        (math, "an object with a method log"),
        (LogsOne(), "an object with a method log"),
        (Kept, "an instance, not the class"),
        (Wraps, "an instance, not the class"),
        (Writer(), r"TensorBoardLogger\(folder\)"),
        (Client(), r"MLflowLogger\(run\)"),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_what_cannot_be_logged_to_is_refused(thing, hint):
    with pytest.raises(TypeError, match=f"nothing can be logged to .*; .*{hint}"):
        Log([Kept(), thing])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"logger": []}, "logger must be a logger, or a list of at least one, got "),
        (
            {"logger": Kept(), "every": 0},
            "every must be a whole number of training batches, 1 or more",
        ),
        ({"logger": Kept(), "every": 2.5}, "every must be a whole number of training batches"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, error):
    with pytest.raises((TypeError, ValueError), match=error):
        Log(**arguments)


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: TensorBoardLogger("runs"), "torch.utils.tensorboard", "tensorboard"),
        (lambda: MLflowLogger(experiment="digits"), "mlflow", "mlflow"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(make, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'hookcb\[{extra}\]'"):
        make()
