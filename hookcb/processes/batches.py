"""The batches of a Learner's training or validation: fetched, numbered, and as many on all ranks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from hookcb.core.batch import batch_size, map_tensors, split_batch
from hookcb.core.console import warn
from hookcb.core.events import CancelFitException, CancelValidException
from hookcb.core.fetches import FetchListener, ObservedFetches
from hookcb.core.loop import Loop, label_of
from hookcb.hooks.modules import device_of

Batches = Iterable[tuple[int, Any]]
UNEVEN = ("error", "stop")  # what to do if ranks have different numbers of batches
HINT_UNEVEN = '; use a DistributedSampler, or drop_last=True, or fit(…, uneven="stop") to end at the shortest'


def labels_of(learn: Loop) -> list[str]:
    """Labels of the callbacks that all ranks must have."""
    return [label_of(cb) for cb in learn.cbs if not cb.shows_only]


def check_uneven(uneven: str) -> None:
    """Checks the argument of a fit.

    Raises:
        ValueError: If it is not one of `UNEVEN`.
    """
    if uneven not in UNEVEN:
        raise ValueError(f"uneven must be 'error' or 'stop', got {uneven!r:.80}")


def agree_on_length(learn: Loop, uneven: str) -> None:
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
    learn: Loop, batches: Batches, listeners: Sequence[FetchListener], uneven: str
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


def _even(learn: Loop, batches: Batches, uneven: str) -> Batches:
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


def _without_padding(learn: Loop, batches: Batches) -> Iterator[tuple[int, Any]]:
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


def own_order(loader: Any) -> list[int] | None:
    """Indices of a DistributedSampler's samples on this rank, without padding; None for another sampler.

    The sampler repeats samples so that all ranks have as many; rank r's sample i is one of these if
    r + i · world is not below the number of samples.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None) if type(batch_sampler) is BatchSampler else None
    sampler = getattr(loader, "sampler", None) if inner is None else inner
    if not isinstance(sampler, DistributedSampler):
        return None
    dataset: Any = sampler.dataset
    n = len(range(sampler.rank, len(dataset), sampler.num_replicas))
    return list(sampler)[:n]


def up_to(batches: Iterable[tuple[int, Any]], n: int | None) -> Iterator[tuple[int, Any]]:
    """Numbered batches with numbers below `n`; fetches no other."""
    for i, batch in batches:
        if n is None or i < n:
            yield i, batch
        if n is not None and i + 1 >= n:
            return


def cut(batch: Any, n: int | None) -> Any:
    """The first `n` samples of a batch; all of them if None."""
    size = batch_size(batch)
    return (
        batch
        if n is None or size <= n
        else map_tensors(lambda x: x[:n] if x.ndim and len(x) == size else x, batch)
    )
