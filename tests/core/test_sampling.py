"""SamplingCallback looks at every n-th batch, and counts."""

import pytest

from hookcb import Callback, CancelBatchException, SamplingCallback
from tests.support import fit, in_turn, make_learner


class Looks(SamplingCallback):
    """Keeps the batches that it looks at."""

    def before_fit(self):
        self.seen = []

    def after_loss(self):
        if self.is_looking:
            self.seen.append((self.training, self.train_iter if self.training else self.iter))


@pytest.mark.parametrize(("every", "seen"), [(None, range(6)), (1, range(6)), (4, [0, 4])])
def test_batches_are_counted_over_the_fit(every, seen):
    looks = Looks(every)
    fit(make_learner(3), 2, cbs=looks)
    assert looks.seen == [(True, i) for i in seen]
    assert (looks.n_batches, looks.n_skipped) == (len(seen), 6 - len(seen))


def test_a_cancelled_batch_is_skipped():
    def cancel(cb):
        if cb.training and cb.train_iter == 2:
            raise CancelBatchException

    looks = Looks()
    fit(make_learner(3), 1, cbs=[looks, Callback(name="canceller", after_loss=cancel)])
    assert (looks.n_batches, looks.n_skipped) == (2, 1)


def test_a_subclass_that_forgets_super_counts_all_the_same():
    looks = Looks(2)
    for _ in range(2):  # its before_fit, which does not call that of the base, still resets
        fit(make_learner(3), 1, cbs=looks)
        assert (looks.n_batches, looks.n_skipped) == (2, 1)


def test_what_a_subclass_does_before_super_counts():
    class Choosy(SamplingCallback):
        def before_batch(self):
            self.every = 1 if self.epoch == 0 else 2
            super().before_batch()

        def after_batch(self):
            self.is_looking = self.is_looking and self.train_iter != 1
            super().after_batch()

    choosy = Choosy()
    fit(make_learner(4), 2, cbs=choosy)
    assert (choosy.n_batches, choosy.n_skipped) == (3 + 2, 1 + 2)


def test_a_subclass_that_forgets_super_is_told_of_its_own_batch():
    class Told(SamplingCallback):
        def before_fit(self):
            self.told = []

        def before_batch(self):
            self.told.append(self.is_looking)

        def after_batch(self):
            self.told.append(self.n_batches)

    told = Told(2)
    fit(make_learner(3), 1, cbs=told)
    assert told.told[:6] == [True, 1, False, 1, True, 2]


def test_validations_are_looked_at_only_if_a_subclass_says_so():
    class Both(Looks):
        run_valid = True

    looks = Both(2)
    fit(make_learner(3), 1, cbs=looks)
    assert [training for training, _ in looks.seen].count(True) == 2
    assert [i for training, i in looks.seen if not training] == [0]


@in_turn("every", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_batches_is_refused(every):
    with pytest.raises((TypeError, ValueError), match="every must be a whole number"):
        SamplingCallback(every)
