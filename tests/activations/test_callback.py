"""Which batches and layers ActivationStats records, and what it makes of any output."""

import contextlib
import copy
import dataclasses
import itertools
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookcb
from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelFitException,
    Hook,
    HookCallback,
    Learner,
    assert_no_hooks,
    count_hooks,
)
from hookcb.activations.stats import layer_stats
from tests.activations.support import (
    INF,
    NAN,
    STATS,
    Around,
    Tagged,
    assert_same_readings,
    assert_stats,
    ids,
    numbered,
    printed,
    randn,
    steps,
    tags,
    watch,
)
from tests.hooks import support as zoo
from tests.support import (
    BATCH,
    CANCELS,
    EVENTS,
    Net,
    Pair,
    X,
    Y,
    covering,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    primary_plan,
    spy,
)

ORDERS = [-1000, 1000]


def at(event, act, order=1000, when=lambda cb: True):
    """A callback that does something at an event of a training batch."""
    cb = Callback(name="actor", **{event: lambda cb: act(cb) if cb.training and when(cb) else None})
    cb.order = order
    return cb


def raises(event, error, batch, order=1000):
    """A callback that raises at an event of that batch of the first epoch."""

    def act(cb):
        raise error

    return at(event, act, order, lambda cb: cb.epoch == 0 and cb.iter == batch)


@in_turn("raised", [CancelFitException, KeyboardInterrupt])
@in_turn("event", EVENTS)
def test_hooks_are_gone_however_the_fit_ends(event, raised):
    model = make_model()
    plan = {**primary_plan(event), (event, 0): raised("why")}
    cbs = [ActivationStats(), HookCallback(hook=lambda m, i, o: 0, name="h"), spy([], "a", plan, order=5)]
    learn = make_learner(1, 1, model=model, cbs=cbs)
    with contextlib.suppress(ValueError, KeyboardInterrupt, RuntimeError):
        fit(learn)
    assert_no_hooks(model)
    assert count_hooks(model) == 0


@in_turn("every", [0, -1, 1.5, "2", True])
def test_an_every_that_cannot_be_is_refused(every):
    for kind in (ActivationStats, partial(HookCallback, hook=print)):
        with pytest.raises((ValueError, TypeError), match="every"):
            kind(every=every)


def test_modules_that_select_nothing_are_told_when_the_fit_begins():
    model = make_model()
    learn = make_learner(model=model)
    with pytest.raises(LookupError, match="convs"):
        fit(learn, cbs=[ActivationStats(modules="convs.*")])
    assert count_hooks(model) == 0


def test_modules_are_looked_up_at_each_fit():
    stats = ActivationStats(include_paramless=True)
    learn = fit(make_learner(cbs=stats))
    assert list(stats.names) == ["0", "1", "2"]
    learn.model.add_module("3", nn.Tanh())
    fit(learn)
    assert list(stats.names) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("eps", [0.05, 0.5, 0.0])
def test_activation_statistics_agree_with_float64(eps):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 2),
    )
    batches = [(torch.randn(k, 1, 8, 8) * 3 + 1, torch.randint(0, 2, (k,))) for k in (4, 4, 3)]
    stats = ActivationStats(include_paramless=True, eps=eps)
    fit(Learner(batches, model, F.cross_entropy, torch.optim.SGD, lr=0.0, cbs=stats))
    assert list(stats.names) == list("0123456")
    assert len(stats.stats) == 3
    for record, (x, _) in enumerate(batches):
        for layer, module in enumerate(model):
            x = module(x)
            assert_stats(stats.stats[record][layer], x, eps, std=1e-4)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


@in_turn(
    ("make", "names"),
    [
        (lambda x: (x, x * 2), ["odd[0]", "odd[1]"]),
        (lambda x: [x, None, x], ["odd[0]", "odd[2]"]),
        (lambda x: {"a": x, "b": {"c": x}}, ["odd.a", "odd.b.c"]),
        (lambda x: Pair(x, x), ["odd.x", "odd.y"]),
        (lambda x: Output(x), ["odd.logits"]),
        (lambda x: (x, (x, [x])), ["odd[0]", "odd[1][0]", "odd[1][1][0]"]),
        (lambda x: x.half(), ["odd"]),
        (lambda x: x.bfloat16(), ["odd"]),
        (lambda x: x.double(), ["odd"]),
        (lambda x: (x * 100).int(), ["odd"]),
        (lambda x: x.mean(), ["odd"]),
        (lambda x: x[:1, :1], ["odd"]),
        (lambda x: x[:, 0].t().contiguous().t(), ["odd"]),
        (lambda x: x.expand(3, 4, 2), ["odd"]),
        (lambda x: (x * 1e4).half().clamp(-6e4, 6e4), ["odd"]),
    ],
)
def test_outputs_of_any_structure_and_type_are_named_by_path_and_measured(make, names):
    outs = [make(x) for x in (X, Y)]
    stats = watch(*outs)

    def tensors(o):
        if torch.is_tensor(o):
            return [o]
        if isinstance(o, dict):
            o = list(o.values())
        if isinstance(o, Output):
            o = [o.logits]
        return [t for part in o or () for t in tensors(part)] if o is not None else []

    got = [n.replace("['", ".").replace("']", "") for n in stats.names]
    assert got == names or list(stats.names) == [n.replace(".x", "[0]").replace(".y", "[1]") for n in names]
    assert len(stats.stats) == 2
    for layer, t in enumerate(tensors(outs[1])):
        assert_stats(stats.stats[1][layer], t)


@in_turn(
    "make",
    [
        lambda x: None,
        lambda x: (None, "text"),
        lambda x: 3,
        lambda x: x[:0],
        lambda x: x > 0,
        lambda x: torch.complex(x, x),
        lambda x: x.to_sparse(),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
        lambda x: torch.nested.as_nested_tensor([x[0], x[1][:1]], layout=torch.jagged),
        lambda x: x.to("meta"),
        lambda x: object(),
        lambda x: (x for _ in range(2)),
        lambda x: {1: x, None: x},
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_no_output_raises_out_of_the_forward(make):
    stats = watch(make(X), make(Y))
    assert len(stats.stats) in (0, 1, 2)
    assert count_hooks(stats.learn.model) == 0
    assert stats.names or stats.left_out


def test_nan_and_inf_are_data():
    stats = watch(torch.where(X > 0, X, NAN))
    assert stats.stats[0][0]["mean"] != stats.stats[0][0]["mean"]
    stats = watch(torch.full_like(X, INF))
    assert stats.stats[0][0]["mean"] == float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_shares_of_an_output_without_a_finite_element_are_unknown(value):
    stats = watch(torch.full_like(X, value))
    record = stats.stats[0][0]
    assert math.isnan(record["near_zero"])
    assert math.isnan(record["zeros"])
    assert record["nonfinite"] == X.numel()
    assert "nan%" not in str(stats.report())
    large = layer_stats(torch.full((70_000,), value))  # of more than are read at a time
    assert large[5:7].isnan().all()


def test_what_has_no_statistics_is_listed_as_left_out():
    stats = watch((None, "text", X))
    assert list(stats.names) == ["odd[2]"]
    assert "odd" in str(stats.left_out)


def test_a_layer_called_several_times_gets_one_entry_a_call():
    model = Net()
    stats = ActivationStats(modules=["stem", "head"])
    outs = []
    with Hook(model.stem, lambda m, i, o: outs.append(o.clone())):
        fit(Learner([(X, Y[:, :1])], model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["head", "stem#0", "stem#1"]
    for call, out in enumerate(outs):
        assert_stats(stats.stats[0][stats.names.index(f"stem#{call}")], out)


def test_a_layer_that_is_called_in_some_batches_only_gets_nan_in_the_others():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)
            self.n = -1

        def forward(self, x):
            self.n += 1
            return self.a(x) if self.n % 2 else self.b(x) + self.a(x)

    model = Sometimes()
    stats = ActivationStats()
    batches = make_batches(4)
    fit(Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["a", "b"]
    a, b = stats.names.index("a"), stats.names.index("b")
    for i, (x, _) in enumerate(batches):
        assert len(stats.stats[i]) == 2
        assert_stats(stats.stats[i][a], model.a(x))
        if i % 2:
            assert all(v != v for v in stats.stats[i][b].values())
        else:
            assert_stats(stats.stats[i][b], model.b(x))


def test_statistics_are_of_training_batches_alone_and_calls_between_batches_do_not_count():
    def records(cbs):
        stats = ActivationStats(modules="0")
        fit(make_learner(cbs=[stats, *cbs]), 2)
        return stats

    plain = records([])
    assert len(plain.stats) == 6
    between = records([Callback(name="p", after_batch=lambda cb: cb.model(torch.full((4, 2), 1e6)))])
    assert between.table() == plain.table()
    assert list(between.names) == list(plain.names)


def test_the_report_prints_every_layer():
    stats = ActivationStats(include_paramless=True)
    fit(make_learner(cbs=stats))
    for name in ("0", "1", "2", "mean", "std"):
        assert name in printed(stats.report())
    assert printed(ActivationStats().report())  # never fitted


@in_turn("order", ORDERS)
@in_turn("every", [None, 1, 2, 3, 7, 100])
def test_each_batch_looked_at_leaves_one_record(every, order):
    stats = tags(every=every)
    stats.order = order
    fit(numbered(5, 2, stats), 2)
    expected = list(range(0, 10, every or 1))
    assert steps(stats.stats) == expected
    assert ids(stats.stats) == [k % 5 for k in expected]
    assert [record.epoch for record in stats.stats] == [k // 5 for k in expected]
    assert len({record.phase for record in stats.stats}) == 1
    assert len(stats.valid_stats) == 0


@in_turn("order", ORDERS)
@in_turn("event", ["before_batch", "after_pred", "after_loss", "before_backward", "after_step"])
def test_a_cancelled_batch_leaves_no_record(event, order):
    stats = tags(with_hist=True)
    fit(numbered(4, 1, [stats, raises(event, CancelBatchException(), 1, order)]), 2)
    assert steps(stats.stats) == [0, 2, 3, 4, 5, 6, 7]
    assert ids(stats.stats) == [0, 2, 3, 0, 1, 2, 3]
    assert stats.hist("tag").shape == (62, 7)


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_of_which_every_one_is_cancelled_leaves_nothing_that_breaks_reading(order):
    def cancel(cb):
        raise CancelBatchException

    stats = tags()
    fit(numbered(4, 0, [stats, at("after_loss", cancel, order)]))
    assert len(stats.stats) == len(stats.table()) == 0
    assert list(stats.names) in ([], ["tag"])


@in_turn("order", ORDERS)
@in_turn(
    ("event", "level"), [("before_backward", "backward"), ("before_step", "step"), ("after_step", "step")]
)
def test_a_batch_without_backward_or_step_is_recorded(event, level, order):
    stats = tags()
    fit(numbered(4, 0, [stats, raises(event, CANCELS[level](), 1, order)]))
    assert ids(stats.stats) == [0, 1, 2, 3]


@in_turn("order", ORDERS)
@in_turn("level", ["train", "epoch", "fit"])
@in_turn(("event", "first"), [("after_loss", [0, 1]), ("after_batch", [0, 1, 2])])
def test_a_cancel_of_more_leaves_no_record_of_a_batch_it_cuts_short_and_one_of_a_whole(
    event, first, level, order
):
    stats = tags()
    fit(numbered(4, 0, [stats, raises(event, CANCELS[level](), 2, order)]), 2)
    second = [] if level == "fit" else [0, 1, 2, 3]
    assert ids(stats.stats) == [*first, *second]


@in_turn("order", ORDERS)
@in_turn("error", [RuntimeError, KeyboardInterrupt])
@in_turn("event", BATCH[:-1])
def test_a_fit_that_fails_keeps_what_was_recorded_before(event, error, order):
    stats = tags()
    learn = numbered(5, 1, [stats, raises(event, error("why"), 3, order)])
    with pytest.raises(error, match="why"):
        fit(learn)
    assert ids(stats.stats) == [0, 1, 2]
    assert steps(stats.stats) == [0, 1, 2]
    assert_no_hooks(learn.model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_fails_after_the_layer_leaves_no_record_of_its_batch(error):
    class Fails(Tagged):
        def forward(self, x):
            out = super().forward(x)
            if x[0, 0] == 2:
                raise error
            return out

    stats = ActivationStats(include_paramless=True)
    learn = numbered(5, 0, stats, Fails())
    with pytest.raises(error):
        fit(learn)
    assert ids(stats.stats) == [0, 1]
    learn.model.forward = lambda x: Tagged.forward(learn.model, x)
    fit(learn)
    assert ids(stats.stats) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("event", "on_valid", "order"), covering(BATCH, [False, True], ORDERS))
def test_a_validation_in_the_middle_of_a_batch_leaves_records_as_they_are(event, on_valid, order):
    def run(*cbs):
        stats = tags(on_valid=on_valid, every=2)
        fit(numbered(4, 2, [stats, *cbs]), 2)
        return stats

    assert_same_readings(run(at(event, lambda cb: cb.learn.validate(), order)), run())


def test_validation_batches_are_recorded_where_asked_for():
    stats, plain = tags(on_valid=True), tags(name="plain")
    learn = fit(numbered(3, 3, [stats, plain]), 2)
    assert ids(stats.stats) == ids(plain.stats) == [0, 1, 2] * 2
    assert ids(stats.valid_stats) == [100, 101, 102] * 2
    assert [record.epoch for record in stats.valid_stats] == [0, 0, 0, 1, 1, 1]
    phases = [{record.phase for record in records} for records in (stats.stats, stats.valid_stats)]
    assert len(phases[0]) == len(phases[1]) == 1
    assert phases[0] != phases[1]
    learn.validate()
    learn.get_preds()
    assert len(stats.valid_stats) == len(stats.stats) == 6
    fit(learn)
    assert ids(stats.valid_stats) == [100, 101, 102]


def test_every_holds_for_validation_batches_and_a_cancelled_one_leaves_no_record():
    def cancel(cb):
        if not cb.training and cb.iter == 2:
            raise CancelBatchException

    stats = tags(on_valid=True, every=2)
    fit(numbered(3, 5, [stats, Callback(after_pred=cancel)]))
    assert ids(stats.stats) == [0, 2]
    assert ids(stats.valid_stats) == [100, 104]


def test_a_batch_outside_a_fit_leaves_no_record():
    stats = tags(on_valid=True)
    learn = numbered(3, 2, stats)
    learn.one_batch()
    learn.validate()
    assert len(stats.stats) == len(stats.valid_stats) == 0
    fit(learn)
    learn.one_batch()
    learn.validate()
    learn.model(torch.zeros(1, 2))
    assert ids(stats.stats) == [0, 1, 2]
    assert ids(stats.valid_stats) == [100, 101]


def test_a_new_fit_begins_anew_and_an_appending_one_goes_on():
    new, on = tags(), tags(append=True, with_hist=True, name="on")
    learn = fit(numbered(3, 1, [new, on]), 2)
    edges = on.hist_edges("tag")
    fit(learn, 1)
    assert steps(new.stats) == [0, 1, 2]
    assert [record.epoch for record in new.stats] == [0, 0, 0]
    assert steps(on.stats) == list(range(9))
    assert [record.epoch for record in on.stats] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ids(on.stats) == [0, 1, 2] * 3
    assert torch.equal(on.hist_edges("tag"), edges)
    assert on.hist("tag").shape == (62, 9)


@pytest.mark.parametrize("keep", [2, 3, 4, 7, 10])
def test_an_appending_fit_keeps_no_more_than_asked_for_and_goes_on_after_an_interrupt(keep):
    stats = tags(append=True, keep=keep)
    learn = numbered(9, 0, stats)
    for k in range(4):
        stop = spy([], "stop", {("after_pred", 5): KeyboardInterrupt() if k == 1 else CancelFitException()})
        try:
            fit(learn, cbs=[stop] if k in (1, 2) else [])
        except KeyboardInterrupt:
            assert k == 1
        assert len(stats.stats) <= keep
        assert steps(stats.stats) == sorted(set(steps(stats.stats)))
    assert stats.stats[-1]["tag"]["mean"] == 8


@pytest.mark.parametrize(("keep", "every"), covering([2, 3, 4, 5, 8, 13], [1, 3], of=1))
def test_kept_records_are_spread_evenly_over_the_run_and_the_newest_is_the_last(keep, every):
    seen = []
    stats, unread = tags(keep=keep, every=every), tags(keep=keep, every=every, name="unread")

    def look(cb):
        seen.append((cb.train_iter, steps(stats.stats), ids(stats.stats)))

    fit(numbered(45, 0, [stats, unread, at("after_batch", look)]))
    for step, kept, numbers in seen:
        possible = list(range(0, step + 1, every))
        assert kept == numbers
        assert kept[-1] == possible[-1]
        assert min(len(possible), keep // 2) <= len(kept) <= keep
        assert len(possible) > keep or kept == possible
        gaps = {(b - a) / every for a, b in itertools.pairwise(kept[:-1])}
        assert kept[0] == 0
        assert len(gaps) <= 1
        assert gaps <= {1, 2, 4, 8, 16, 32}
    assert steps(unread.stats) == steps(stats.stats)


def test_thinning_takes_histograms_and_validation_along():
    stats = tags(keep=4, with_hist=True, on_valid=True, hist_range=(-0.5, 49.5), bins=50)
    fit(numbered(12, 3, stats), 4)
    assert 2 <= len(stats.stats) <= 4
    assert 2 <= len(stats.valid_stats) <= 4
    assert ids(stats.stats) == [step % 12 for step in steps(stats.stats)]
    assert stats.valid_stats[-1]["tag"]["mean"] == 102
    counts = stats.hist("tag")
    assert counts.shape == (52, len(stats.stats))
    assert counts.argmax(0).tolist() == [1 + number for number in ids(stats.stats)]


def test_several_with_names_of_their_own_do_not_disturb_each_other():
    a, b = ActivationStats(name="a", modules="0", every=2), ActivationStats(True, name="b", modules="2")
    learn = fit(make_learner(4, 1, cbs=[a, b, ActivationStats()]))
    assert [list(cb.names) for cb in (learn.a, learn.b, learn.activation_stats)] == [["0"], ["2"], ["0", "2"]]
    assert [len(cb.stats) for cb in (a, b, learn.activation_stats)] == [2, 4, 4]
    assert learn.activation_stats.series("2", "std") == b.series("2", "std")
    assert learn.activation_stats.series("0", "std")[::2] == a.series("0", "std")
    with pytest.raises(ValueError, match="activation_stats"):
        learn.add_cb(ActivationStats())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_made_and_used_in_mid_fit_records_nothing(copied):
    def use_copy(cb):
        twin = copied(cb.model)
        assert twin is not cb.model
        twin(torch.full((4, 2), NAN))

    plain, stats = tags(), tags()
    fit(numbered(4, 1, plain))
    for event in ("after_pred", "after_batch"):
        fit(numbered(4, 1, [stats, at(event, use_copy)]))
        assert_same_readings(stats, plain)
        del stats.learn


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cb: pickle.loads(pickle.dumps(cb))])
def test_a_copy_of_the_callback_reads_the_same_and_can_be_fitted(copied):
    stats, twins = tags(with_hist=True, on_valid=True), []
    learn = numbered(4, 2, [stats, at("after_batch", lambda cb: twins.append(copied(stats)))])
    fit(learn)
    assert [len(twin.stats) for twin in twins] == [1, 2, 3, 4]
    twin = copied(stats)
    assert_same_readings(twin, stats)
    assert torch.equal(twin.hist("tag"), stats.hist("tag"))
    before = repr(stats.table())
    fit(numbered(2, 0, twin))
    assert ids(twin.stats) == [0, 1]
    assert repr(stats.table()) == before
    both = copied(learn) if copied is copy.deepcopy else copy.deepcopy(learn)
    fit(both)
    assert repr(both.activation_stats.table()) == before == repr(stats.table())


def test_reading_in_mid_fit_sees_each_finished_batch_and_changes_nothing():
    stats, unread = ActivationStats(True, keep=8), ActivationStats(True, keep=8, name="unread")
    lengths = {}

    def read(cb, event):
        lengths.setdefault(event, []).append(len(stats.stats))
        if stats.names:
            layer = stats.names[-1]
            assert len(stats.series(layer, "mean")) == len(stats.stats) == stats.hist(layer).shape[1]
            assert len(stats.table()) == len(stats.stats) * len(stats.names) * len(STATS)
        stats.report()

    cbs = [Callback(name=event, **{event: lambda cb, event=event: read(cb, event)}) for event in BATCH[:-1]]
    after = at("after_batch", lambda cb: read(cb, "after_batch"))
    fit(make_learner(6, 0, cbs=[stats, unread, *cbs, after]))
    assert lengths.pop("after_batch") == [1, 2, 3, 4, 5, 6]
    assert lengths == {event: [0, 1, 2, 3, 4, 5] for event in BATCH[:-1]}
    assert_same_readings(stats, unread)


def test_hooks_left_on_after_the_fit_record_nothing_more():
    stats = tags(remove_end=False)
    learn = fit(numbered(3, 1, stats))
    assert count_hooks(learn.model) == 1
    learn.model.train()(torch.full((1, 2), 7.0))
    learn.validate()
    assert ids(stats.stats) == [0, 1, 2]
    fit(learn)
    assert ids(stats.stats) == [0, 1, 2]
    stats.remove()
    assert_no_hooks(learn.model)


@in_turn(
    ("make", "kind"),
    [
        (lambda x: x.to(torch.complex64), "Tensor, complex64"),
        (lambda x: x.to_sparse(), "Tensor, sparse_coo"),
        (lambda x: x.to_sparse_csr(), "Tensor, sparse_csr"),
        (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), "NestedTensor, nested"),
        (lambda x: x.to("meta"), "Tensor, on meta"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "Tensor, qint8"),
        (lambda x: "text", "str"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_statistics_says_what_it_is(make, kind):
    stats = watch(make(torch.ones(2, 2)))
    assert stats.left_out == {"odd": kind}
    assert stats.coverage.left_out["odd"] == kind


def test_layers_of_another_model_take_the_place_of_the_former_ones():
    stats, on = ActivationStats(), ActivationStats(append=True, name="on")
    learn = fit(numbered(2, 0, [stats, on], nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
    assert list(stats.names) == ["0", "1"]
    learn.model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    fit(learn)
    assert list(stats.names) == ["0", "2"]
    assert list(on.names) == ["0", "1", "2"]
    fired = [[value == value for value in on.series(name, "mean")] for name in on.names]
    assert fired == [[True] * 4, [True, True, False, False], [False, False, True, True]]


def test_a_layer_that_stops_firing_or_begins_late_is_nan_in_the_other_records():
    class Changes(Around):
        def forward(self, x):
            k = int(x[0, 0])
            if k < 2:
                self.odd(x)
            return self.late(x) if k > 2 else self.fc(x)

    model = Changes(nn.Linear(2, 3))
    model.late = nn.Linear(2, 1)
    stats = ActivationStats(with_hist=True)
    fit(numbered(5, 0, stats, model))
    assert sorted(stats.names) == ["fc", "late", "odd"]
    assert all(len(record) == len(list(record)) == 3 for record in stats.stats)
    fired = {name: [value == value for value in stats.series(name, "nonfinite")] for name in stats.names}
    assert fired == {
        "odd": [True, True, False, False, False],
        "fc": [True, True, True, False, False],
        "late": [False, False, False, True, True],
    }
    assert all(value != value for value in stats.stats[4]["odd"].values())
    rows = {(row.record, row.layer) for row in stats.table()}
    assert rows == {(k, name) for name, marks in fired.items() for k, mark in enumerate(marks) if mark}


@pytest.mark.parametrize("name", ["shared", "recursive"])
def test_each_call_of_a_layer_in_a_batch_has_its_own_entry(name):
    x = randn(4, 4)
    model = zoo.make(name)
    with torch.no_grad():
        outs = [model.fc(x)]
        outs.append(model.fc(outs[0].tanh()))
    stats = ActivationStats(keep=4)
    fit(Learner([x] * 9, model, torch.mean, torch.optim.SGD, lr=0.0, cbs=stats))
    assert list(stats.names) == ["fc#0", "fc#1"]
    for k, out in enumerate(outs):
        assert stats.stats[-1][f"fc#{k}"]["mean"] == pytest.approx(out.mean().item(), abs=1e-6)
        assert stats.series(f"fc#{k}", "max") == pytest.approx([out.max().item()] * len(stats.stats))


def test_a_module_that_calls_itself_is_recorded_by_call():
    stats = ActivationStats(modules="net")
    model = zoo.Plain(lambda s, x: s.net(x), net=zoo.Recursive())
    fit(Learner([randn(4, 4)] * 3, model, torch.mean, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["net#0", "net#1", "net#2"]
    assert len(stats.stats) == 3


@pytest.mark.parametrize("counts", [(1, 2, 1), (2, 1, 3), (3, 0, 1)])
def test_a_number_of_calls_that_changes_loses_none_of_them(counts):
    def several(s, x):
        k = int(x[0, 0])
        for call in range(counts[k]):
            s.tag(x + 10 * (call + 1))
        return s.fc(x)

    stats = tags(modules=["tag", "fc"])
    fit(numbered(3, 0, stats, zoo.Plain(several, tag=nn.Identity(), fc=nn.Linear(2, 1))))
    for k, record in enumerate(stats.stats):
        of_tag = [one["mean"] for name, one in zip(stats.names, record, strict=True) if name != "fc"]
        means = sorted(mean for mean in of_tag if mean == mean)
        assert means == [k + 10.0 * (call + 1) for call in range(counts[k])]


@pytest.mark.parametrize("name", ["checkpoint", "reentrant_checkpoint", "nested_checkpoint"])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputation_under_checkpointing_is_not_counted(name, every):
    torch.manual_seed(0)
    stats = ActivationStats(include_paramless=True, every=every)
    batches = [randn(4, 4, seed=k).requires_grad_() for k in range(4)]
    fit(Learner(batches, zoo.make(name), torch.mean, torch.optim.SGD, cbs=stats))
    assert not [name for name in stats.names if "#" in name]
    assert steps(stats.stats) == list(range(0, 4, every))
    assert all(value == value for name in stats.names for value in stats.series(name, "mean"))


def test_a_model_that_is_one_layer_is_recorded():
    stats = ActivationStats()
    fit(make_learner(model=nn.Linear(2, 1), cbs=stats))
    assert len(stats.names) == 1
    assert len(stats.stats) == 3


def test_the_whole_model_goes_by_its_class_and_a_shared_layer_by_its_first_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.again, model.end = model[0], nn.Linear(2, 1)
    stats = ActivationStats(modules=[model, model.again])
    fit(Learner(make_batches(2), model, nn.functional.mse_loss, torch.optim.SGD, cbs=stats))
    assert sorted(stats.names) == ["0#0", "0#1", "Sequential"]
    assert len(stats.stats) == 2


def test_its_options_can_be_read_as_in_fastai():
    stats = ActivationStats(True, eps=0.1, bins=7, hist_range=(0, 1), sample=64, keep=9)
    assert (stats.with_hist, stats.eps, stats.bins, stats.hist_range) == (True, 0.1, 7, (0, 1))
    assert (stats.sample, stats.keep) == (64, 9)


def test_a_layer_whose_output_has_no_statistics_is_not_seen():
    nothing = watch(None, None).coverage
    assert nothing.fired == ()
    assert nothing.silent == {"odd": "no statistics of its output: NoneType"}
    assert str(nothing).startswith("0 of 1 layer seen in 2 batches")
    some = watch((torch.ones(3), None)).coverage
    assert (some.fired, some.silent) == (("odd",), {})
    later = watch(None, torch.ones(3)).coverage
    assert later.fired == ("odd",)


@pytest.mark.parametrize("with_hist", [False, True])
def test_validations_in_and_out_of_inference_mode_are_recorded_together(with_hist):
    model = nn.Linear(2, 2)
    stats = ActivationStats(with_hist, on_valid=True)
    with hookcb.watch(model, stats):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            model(torch.randn(4, 2)).sum().backward()
            model.eval()
            with mode():
                for _ in range(70):
                    model(torch.randn(4, 2))
            model.train()
    means = stats.store_of("valid").series("Linear")[:, 0]
    assert len(means) == 210
    assert means.isfinite().all()
