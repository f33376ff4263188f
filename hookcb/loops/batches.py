"""The batches of a Learner's training or validation: fetched, numbered, and as many on all ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

from hookcb.core.batch import array_hint, batch_size, describe, split_batch
from hookcb.core.console import warn
from hookcb.core.events import CancelException, CancelFitException, CancelValidException
from hookcb.core.fetches import FetchListener, ObservedFetches
from hookcb.hooks.modules import device_of
from hookcb.loops.alike import labels_of
from hookcb.loops.data import cut, own_order, up_to

T = TypeVar("T")
Batches = Iterable[tuple[int, Any]]
UNEVEN = ("error", "stop")  # what to do if ranks have different numbers of batches
HINT_UNEVEN = '; use a DistributedSampler, or drop_last=True, or fit(…, uneven="stop") to end at the shortest'


def check_uneven(uneven: str) -> None:
    """Checks the argument of a fit.

    Raises:
        ValueError: If it is not one of `UNEVEN`.
    """
    if uneven not in UNEVEN:
        raise ValueError(f"uneven must be 'error' or 'stop', got {uneven!r:.80}")


def agree_on_length(learn: Any, uneven: str) -> None:
    """Sets the number of training batches on all ranks, None if one of them does not know it.

    Raises:
        RankError: If they differ, and `uneven` is "error", or if ranks have different callbacks.
    """
    if learn.ranks.world == 1 or not learn.training:
        return
    facts: dict[str, Any] = {"callbacks": labels_of(learn)}  # a callback may add some
    if uneven == "stop":
        learn.ranks.check_alike(facts)
        unknown = -1
        least = -int(learn.ranks.max([-(unknown if learn.n_iter is None else learn.n_iter)])[0])
        learn.n_iter = None if least == unknown else least
    else:
        learn.ranks.check_alike(facts | {"number of training batches": learn.n_iter}, HINT_UNEVEN)


def fetched(
    learn: Any, batches: Batches, listeners: Sequence[FetchListener], uneven: str
) -> Iterator[tuple[int, Any]]:
    """Yields numbered batches; ends when a signal has ended the training and the loader's workers.

    Args:
        learn: the Learner, in the phase that needs them.
        batches: what its loader yields.
        listeners: notified of each fetch in training.
        uneven: one of `UNEVEN`.

    Raises:
        ValueError: If there is no batch.
    """
    try:
        if learn.training and listeners:
            batches = ObservedFetches(batches, tuple(listeners))
        yield from _even(learn, batches, uneven)
    except Exception as error:
        if not learn.stop_requested or learn.ranks.world > 1:  # other ranks may be at another batch
            raise
        cancel = CancelFitException() if learn.training else CancelValidException()
        cancel.raised_in = "a signal"
        raise cancel from error
    last = learn.iter if learn.training else learn.ranks.max([learn.iter])[0]  # some ranks may have none
    if last < 0:
        raise ValueError(f"the {'training' if learn.training else 'validation'} loader gave no batch")


def _even(learn: Any, batches: Batches, uneven: str) -> Batches:
    """As many batches on all ranks in training; in a validation, each sample on one rank only."""
    if learn.training and learn.n_iter is None:

        def tell_uneven() -> None:
            if uneven != "stop" and learn.ranks.is_main:
                warn(
                    "an epoch ended when a rank had no more batches, though others had; give all ranks as "
                    'many, or fit(…, uneven="stop")'
                )

        even: Batches = learn.ranks.until_one_ends(batches, tell_uneven)
        return even
    if learn.ranks.world == 1:
        return batches
    if learn.training:
        return up_to(batches, learn.n_iter) if uneven == "stop" else batches
    return _without_padding(learn, batches)


def _without_padding(learn: Any, batches: Batches) -> Iterator[tuple[int, Any]]:
    """Numbered batches of a validation, without the samples that a DistributedSampler repeats."""
    order = own_order(learn.dl)
    n_left = None if order is None else len(order)
    for item in learn.ranks.until_all_end(batches) if learn.ranks.is_sharded else batches:
        if item is not None and n_left != 0:
            yield item[0], cut(item[1], n_left)
            n_left = None if n_left is None else max(0, n_left - batch_size(item[1]))
        elif learn.ranks.is_sharded or (item is not None and item[0] == 0):
            # the others need this rank: for their forwards, or for the buffers, which
            # DistributedDataParallel sends in the first one
            if item is not None:
                device = device_of(learn.model, learn.device)
                learn.xb, learn.yb = split_batch(item[1], device, learn.n_inp)
            learn.predict()


def names_batch(body: Callable[[T], None]) -> Callable[[T], None]:
    """Has the errors of a Learner's method say in which batch they were raised, and what that is."""

    @wraps(body)
    def named(learn: Any) -> None:
        try:
            body(learn)
        except BaseException as error:
            if not isinstance(error, CancelException) and not hasattr(error, "__notes__"):
                where = ", ".join(learn.position("after_pred"))
                hint = array_hint((learn.xb, learn.yb))
                if isinstance(error, TypeError) and not learn.yb and isinstance(learn.xb, tuple):
                    hint += "; a batch with a target is (x, y)"
                error.add_note(f"in {where}, with xb {describe(learn.xb)} and yb {describe(learn.yb)}{hint}")
            raise

    return named
