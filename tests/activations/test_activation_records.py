"""Which batches leave a record, and under which layers."""

import copy
import itertools
import pickle

import pytest
import torch

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelFitException,
    assert_no_hooks,
    count_hooks,
)
from tests.activations.support import NAN, Tagged, assert_same_readings, ids, numbered, steps, tags, watch
from tests.support import BATCH, CANCELS, fit, make_learner, spy

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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("every", [None, 1, 2, 3, 7, 100])
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "event", ["before_batch", "after_pred", "after_loss", "before_backward", "after_step"]
)
def test_a_cancelled_batch_leaves_no_record(event, order):
    stats = tags(with_hist=True)
    fit(numbered(4, 1, [stats, raises(event, CancelBatchException(), 1, order)]), 2)
    assert steps(stats.stats) == [0, 2, 3, 4, 5, 6, 7]
    assert ids(stats.stats) == [0, 2, 3, 0, 1, 2, 3]
    assert stats.hist("tag").shape == (42, 7)


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_of_which_every_one_is_cancelled_leaves_nothing_that_breaks_reading(order):
    def cancel(cb):
        raise CancelBatchException

    stats = tags()
    fit(numbered(4, 0, [stats, at("after_loss", cancel, order)]))
    assert len(stats.stats) == len(stats.table()) == 0
    assert list(stats.names) in ([], ["tag"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("event", "level"), [("before_backward", "backward"), ("before_step", "step"), ("after_step", "step")]
)
def test_a_batch_without_backward_or_step_is_recorded(event, level, order):
    stats = tags()
    fit(numbered(4, 0, [stats, raises(event, CANCELS[level](), 1, order)]))
    assert ids(stats.stats) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", ["train", "epoch", "fit"])
@pytest.mark.parametrize(("event", "first"), [("after_loss", [0, 1]), ("after_batch", [0, 1, 2])])
def test_a_cancel_of_more_leaves_no_record_of_a_batch_it_cuts_short_and_one_of_a_whole(
    event, first, level, order
):
    stats = tags()
    fit(numbered(4, 0, [stats, raises(event, CANCELS[level](), 2, order)]), 2)
    second = [] if level == "fit" else [0, 1, 2, 3]
    assert ids(stats.stats) == [*first, *second]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("event", BATCH[:-1])
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("on_valid", [False, True])
@pytest.mark.parametrize("event", BATCH)
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
    assert on.hist("tag").shape == (42, 9)


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


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("keep", [2, 3, 4, 5, 8, 13])
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
            assert len(stats.table()) == len(stats.stats) * len(stats.names) * 8
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


@pytest.mark.parametrize(
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
