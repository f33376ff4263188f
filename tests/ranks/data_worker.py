"""Data of all kinds, divided by `Distributed`; in one process the same global batches."""

from itertools import chain, zip_longest

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from hookcb import Distributed, Learner, accuracy
from tests.ranks.support import data, small_model
from tests.training.distributed_worker import quiet_fit, rows, weights


class Global:
    """The batches of two processes as one has them, with the samples that they get."""

    def __init__(self, dataset, size=4, shuffle=False, drop_last=False):
        self.dataset, self.size, self.drop_last, self.epoch = dataset, size, drop_last, 0
        self.samplers = [DistributedSampler(dataset, 2, rank, shuffle=shuffle) for rank in (0, 1)]

    def set_epoch(self, epoch):
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __len__(self):
        return len(BatchSampler(self.samplers[0], self.size, self.drop_last))

    def __iter__(self):
        parts = [BatchSampler(sampler, self.size, self.drop_last) for sampler in self.samplers]
        for places in zip_longest(*parts):
            yield default_collate([self.dataset[i] for i in chain(*places)])


def is_alone():
    return not distributed.is_initialized()


def learner(train, valid=None, model=small_model, loss_func=cross_entropy, **options):
    torch.manual_seed(0)
    valid = DataLoader(data(51, 1), 10) if valid is None else valid
    metrics = accuracy if loss_func else ()
    cbs = [Distributed(**options)]
    return Learner((train, valid), model(), loss_func, torch.optim.SGD, 0.1, metrics, cbs)


def fitted(train, valid=None, **kwargs):
    learn = quiet_fit(learner(train, valid, **kwargs), 2)
    return {"rows": rows(learn) if learn.loss_func else [], "weights": weights(learn.model)}


def divided(n=48, shuffle=False, drop_last=False, make=DataLoader, **kwargs):
    """A fit whose training samples are divided by `Distributed`."""
    if is_alone():
        return fitted(Global(data(n), 4, shuffle, drop_last))
    if "batch_sampler" not in kwargs:
        kwargs |= {"batch_size": 4, "drop_last": drop_last} | ({"shuffle": True} if shuffle else {})
    return fitted(make(data(n), **kwargs))


def drop_last():
    return divided(51, drop_last=True)


def smaller_last():
    return divided(50)


def uneven_samples():
    return divided(49, shuffle=True)


def batch_sampler():
    return divided(50, batch_sampler=BatchSampler(SequentialSampler(range(50)), 4, False))


def random_batch_sampler():
    if is_alone():
        return divided(51, shuffle=True, drop_last=True)
    return divided(51, batch_sampler=BatchSampler(RandomSampler(range(51)), 4, True))


def generators_that_differ():
    seed = 0 if is_alone() else distributed.get_rank()
    return divided(48, shuffle=True, generator=torch.Generator().manual_seed(seed))


def workers_that_stay():
    return divided(48, shuffle=True, num_workers=1, persistent_workers=True)


def two_fits_with_workers():
    loader = DataLoader(data(48), 4, num_workers=1, persistent_workers=True)
    learn = learner(Global(data(48)) if is_alone() else loader, DataLoader(data(51, 1), 10, num_workers=1))
    quiet_fit(learn, 1)
    quiet_fit(learn, 1)
    preds, _ = learn.get_preds()
    return {"weights": weights(learn.model), "preds": preds.tolist()}


def fewer_samples_than_ranks():
    loader = Global(data(1)) if is_alone() else DataLoader(data(1), 4)
    return fitted(loader, DataLoader(data(1, 1), 4))


class Stream(IterableDataset):
    """The same samples on all ranks, on rank 1 fewer."""

    def __init__(self, n_less=0):
        self.n_less = n_less

    def __iter__(self):
        n_less = 0 if is_alone() else self.n_less * distributed.get_rank()
        yield from list(data(48))[: 48 - n_less]


def stream():
    return fitted(DataLoader(Stream(), 4))


def uneven_stream():
    """It ends with the shortest."""
    batches = [*DataLoader(Stream(), 4)][:9]
    return fitted(batches if is_alone() else DataLoader(Stream(12), 4))


def list_of_batches():
    return fitted([*DataLoader(data(48), 4)])


class Named(Dataset):
    def __init__(self, n, seed=0):
        self.pairs = data(n, seed)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        x, y = self.pairs[i]
        return {"input": x, "labels": y}


class WithLoss(nn.Sequential):
    def forward(self, input, labels=None):
        pred = super().forward(input)
        return type("Output", (), {"loss": cross_entropy(pred, labels), "logits": pred})()


def mappings():
    def model():
        return WithLoss(*small_model())

    loader = Global(Named(48)) if is_alone() else DataLoader(Named(48), 4)
    return fitted(loader, DataLoader(Named(51, 1), 10), model=model, loss_func=None)


# ---- the same on both ranks


def batch_norm():
    """Each rank normalizes by its own batches; buffers are those of rank 0."""

    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    learn = quiet_fit(learner(DataLoader(data(48), 4), model=model), 2)
    buffers = [x.tolist() for x in learn.model.buffers()]
    return {"rows": rows(learn), "buffers": buffers, "validated": list(learn.validate())}


class TwoHeads(nn.Module):
    """Uses one of its heads, depending on the batch."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x):
        return self.heads[int(x.sum() > 0)](x)


def unused_parameters():
    return fitted(DataLoader(data(48), 4), model=TwoHeads, find_unused_parameters=True)


# ---- refused


def empty_validation():
    return fitted(DataLoader(data(8), 4), DataLoader(data(0, 1), 4))


def empty_training():
    return fitted(DataLoader(data(0), 4))


def no_whole_batch():
    return fitted(DataLoader(data(8), 8, drop_last=True))


COMPARED = [
    drop_last, smaller_last, uneven_samples, batch_sampler, random_batch_sampler, generators_that_differ,
    fewer_samples_than_ranks, stream, uneven_stream, list_of_batches, mappings,
]  # fmt: skip
WITH_WORKERS = [workers_that_stay, two_fits_with_workers]
ALIKE = [batch_norm, unused_parameters]
REFUSED = [empty_validation, empty_training, no_whole_batch]
