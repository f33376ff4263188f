"""One of several ranks; does what strangers do, one after another: `strangers_worker.py FOLDER CASE,CASE`."""

import copy
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, multi_margin_loss
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset

from hookcb import Callback, Checkpoint, Diagnose, EarlyStopping, GradientAccumulation, Learner, diagnose
from hookcb.processes import exchange
from tests.ranks.support import data, digest, join_group, make_learner, run_cases

RANK, WORLD = 0, 1
FOLDER = Path()


def fit(learn, n_epoch=2, **kwargs):
    with learn.no_logging():
        learn.fit(n_epoch, **kwargs)
    return learn


def with_loaders(train=None, valid=None, **kwargs):
    learn = make_learner(**kwargs)
    parts = {"train": train, "valid": valid}
    learn.dls = learn.dls._replace(**{name: part for name, part in parts.items() if part is not None})
    return learn


def uneven_loader():
    """Seven batches on rank 0, six on the others."""
    return DataLoader(Subset(data(28), range(28 if RANK == 0 else 24)), 4)


def own_shard():
    """51 samples to validate, 40 of them on rank 0."""
    return DataLoader(Subset(data(51, 1), range(40) if RANK == 0 else range(40, 51)), 10)


def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def truth(learn):
    x, y = data(51, 1).tensors
    with torch.no_grad():
        return float(cross_entropy(learn.model.eval()(x), y))


def last_loss(learn):
    return float(learn.recorder.rows[-1]["valid_loss"])


# ---- different numbers of batches


def uneven_stop():
    learn = with_loaders(uneven_loader())
    with learn.no_logging():
        learn.fit_one_cycle(2, lr_max=0.1, uneven="stop")
    return {"n": len(learn.recorder.losses), "lrs": learn.recorder.lrs, "weights": digest(learn.model)}


def uneven_without_length():
    class Stream:
        def __iter__(self):
            return iter([(torch.ones(4, 4), torch.ones(4).long())] * (6 + RANK))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn = fit(with_loaders(Stream()))
    told = ["uneven" in str(w.message) for w in caught]
    return {"n": len(learn.recorder.losses), "told": any(told)}


def uneven_lr_find():
    curve = with_loaders(uneven_loader()).lr_find(num_it=20)
    return {"n": len(curve.losses), "suggestion": curve.suggestion}


def uneven_validation():
    """FSDP2 needs as many forwards on all ranks."""
    learn = fit(with_loaders(valid=own_shard(), wrap=sharded))
    return {"difference": last_loss(learn) - truth(learn), "targets": learn.get_preds()[1].tolist()}


# ---- numbers


def preds_without_sampler():
    return with_loaders(valid=DataLoader(data(51, 1), 10)).get_preds()[1].tolist()


def batch_sampler():
    valid = data(51, 1)
    batches = BatchSampler(DistributedSampler(valid, shuffle=False), 10, drop_last=False)
    learn = fit(with_loaders(valid=DataLoader(valid, batch_sampler=batches)))
    return {"difference": last_loss(learn) - truth(learn), "targets": learn.get_preds()[1].tolist()}


# ---- groups, copies, files


def other_groups():
    """Rank 0 is in one more group than the others."""
    distributed.new_group([0])
    exchange._controls.clear()  # the group of hookcb is made anew
    return digest(fit(make_learner()).model)


def copies():
    learn = fit(make_learner(), 1)
    other = copy.deepcopy(learn)
    return [digest(fit(x, 1).model) for x in (learn, other)]


def files():
    learn = fit(make_learner(), 1)
    learn.save(FOLDER / "weights.pt")
    distributed.barrier()
    wrapped, alone = make_learner(), make_learner(wrap=lambda model: model)
    for other in (wrapped, alone):
        other.load(FOLDER / "weights.pt")
    return [digest(x.model) for x in (learn, wrapped, alone)]


def checked_on_main_only():
    learn = make_learner()
    if RANK == 0:
        diagnose(learn.model, next(iter(learn.dls.train)), cross_entropy)
    return digest(fit(learn, 1).model)


# ---- errors


def again_after_a_failure():
    class Raises(Callback):
        def before_epoch(self):
            if RANK == WORLD - 1:
                raise ValueError("mine")

    learn, text = make_learner(), ""
    try:
        fit(learn, cbs=Raises())
    except (ValueError, exchange.RankError) as error:
        text = str(error)
    return {"text": text, "weights": digest(fit(learn).model)}


class Broken(Dataset):
    """Fails in a loader's worker, whose error begins with its traceback."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        if os.environ["RANK"] != "0":
            raise ValueError(f"sample is {'very ' * 50}broken")
        return torch.ones(4), 1


def dataset_in_a_worker():
    fit(with_loaders(valid=DataLoader(Broken(), 4, num_workers=1)))


def other_rate():
    fit(make_learner(lr=0.1 * (1 + RANK)))


def other_optimizer():
    fit(make_learner(opt=torch.optim.Adam if RANK else torch.optim.SGD))


def other_loss():
    learn = make_learner()
    learn.loss_func = multi_margin_loss if RANK else cross_entropy
    fit(learn)


def other_layer():
    activation = nn.Tanh() if RANK else nn.ReLU()
    fit(make_learner(model=nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 2))))


def other_option():
    fit(make_learner(), cbs=GradientAccumulation(2 + 2 * RANK))


def other_metrics():
    learn = make_learner()
    metrics = [] if RANK else learn.metrics._metrics
    fit(Learner(learn.dls, learn.model, cross_entropy, metrics=[m.function for m in metrics]))


def no_validation():
    learn = make_learner()
    fit(Learner((learn.dls.train, None if RANK else learn.dls.valid), learn.model, cross_entropy))


def checkpoint_of_some():
    fit(make_learner(), 1, cbs=Checkpoint(FOLDER / f"of-{RANK}"))


def checkpoint_unwritable():
    (FOLDER / "file").touch()
    fit(make_learner(), 1, cbs=Checkpoint(FOLDER / ("file" if RANK else "folder") / "below"))


def diagnose_on_some():
    fit(make_learner(), cbs=[EarlyStopping(), Diagnose()] if RANK else EarlyStopping())


def fit_and_validate():
    learn = make_learner()
    fit(learn) if RANK else learn.validate()


def validate_on_main_inside():
    class Validates(Callback):
        def after_epoch(self):
            if RANK == 0:
                self.learn.validate()

    fit(make_learner(), cbs=Validates())


def main():
    global RANK, WORLD, FOLDER
    FOLDER, exchange.GRACE, exchange.MAX_WAIT = Path(sys.argv[1]), 0.5, timedelta(seconds=1)
    RANK, WORLD = join_group()
    run_cases({name: globals()[name] for name in sys.argv[2].split(",")}, FOLDER)


if __name__ == "__main__":
    main()
