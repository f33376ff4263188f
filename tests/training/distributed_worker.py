"""One of several ranks; does one case after another: `distributed_worker.py FOLDER CASE,CASE`."""

import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler

from hookcb import Callback, ChannelsLast, Distributed, Freeze, Learner, accuracy
from hookcb.training import distributed as module
from tests.ranks.support import answer, data, run_cases, small_model

FOLDER, SHARDED = Path(), []


def learner(cbs=(), n_train=48, n_valid=51, model=None, shuffle=False, size=4, opt=torch.optim.SGD):
    torch.manual_seed(0)
    model = model or small_model()
    loaders = DataLoader(data(n_train), size, shuffle=shuffle), DataLoader(data(n_valid, 1), 10)
    return Learner(loaders, model, cross_entropy, opt, lr=0.1, metrics=accuracy, cbs=cbs)


def quiet_fit(learn, *args, **kwargs):
    with learn.no_logging():
        learn.fit(*args, **kwargs)
    return learn


def rows(learn):
    return [[row[name] for name in ("train_loss", "valid_loss", "accuracy")] for row in learn.recorder.rows]


def weights(model):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [p.detach().flatten().tolist() for p in whole]


def interleaved():
    """The global batches of two processes, for one: rank r has samples r, r + 2, …"""
    x, y = data(48).tensors
    places = [[8 * i + 2 * j + r for r in (0, 1) for j in range(4)] for i in range(6)]
    return [(x[i], y[i]) for i in places]


def reference():
    """What one process gives that has the batches of all, in the same order."""
    learn = learner()
    learn.dls = type(learn.dls)(interleaved(), learn.dls.valid)
    quiet_fit(learn, 2)
    preds, _ = learn.get_preds()
    return {"rows": rows(learn), "weights": weights(learn.model), "preds": preds.tolist()}


def trained(learn):
    own = learn.model
    quiet_fit(learn, 2)
    whole = weights(learn.model)
    preds, targets = learn.get_preds()
    _, y = learn.dls.valid.dataset.tensors
    other = DataLoader(learn.dls.valid.dataset, 7)
    return {
        "rows": rows(learn),
        "weights": whole,
        "preds": preds.tolist(),
        "same_targets": torch.equal(targets, y),
        "validated": list(learn.validate()),
        "validated_other": list(learn.validate(other)),
        "n_preds_other": len(learn.get_preds(other)[0]),
        "is_own": learn.model is own,
        "world": learn.ranks.world,
    }


def ddp():
    inside = []

    class Inside(Callback):
        def before_fit(self):
            inside.append(type(self.model).__name__)

    learn = learner([Distributed()])
    learn.add_cb(Inside)
    return trained(learn) | {"inside": inside}


def ddp_in_fit():
    learn = learner()
    quiet_fit(learn, 2, cbs=Distributed())
    return {"rows": rows(learn), "weights": weights(learn.model)}


def fsdp2():
    SHARDED.append(learner([Distributed("fsdp2", shard=nn.Linear)]))
    return trained(SHARDED[0])


def fsdp2_on_mesh():
    learn = learner([Distributed("fsdp2", mesh={"replicate": 2, "shard": 1})])
    return trained(learn)


def tensor_parallel():
    """Both ranks get the same samples."""
    calls = []

    def parallelize(model, mesh):
        calls.append(mesh.size())
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    learn = learner([Distributed(prepare=parallelize, mesh={"tp": 2})])
    learn.dls = type(learn.dls)(DataLoader(data(48), 4), learn.dls.valid)
    found = trained(learn)
    return found | {"calls": calls}


def prepared_ddp():
    learn = learner([Distributed(prepare=lambda model, mesh: DistributedDataParallel(model))])
    return trained(learn)


def seeds_that_differ():
    """All ranks get the weights of rank 0."""
    found = []
    for cb in (Distributed(), Distributed("fsdp2")):
        learn = learner([cb])
        torch.manual_seed(distributed.get_rank() + 5)
        for p in learn.model.parameters():
            p.data = torch.randn_like(p)
        quiet_fit(learn, 1)
        found.append(weights(learn.model))
    return found


def shuffled():
    orders = []

    class Order(Callback):
        def before_epoch(self):
            orders.append(list(self.learn.dls.train.sampler))

    learn = quiet_fit(learner([Distributed(), Order()], shuffle=True), 2)
    return {"orders": orders, "own": type(learn.dls.train.sampler).__name__}


def frozen():
    """Freeze acts before the model is wrapped for the fit."""
    learn = learner([Distributed(), Freeze("0"), ChannelsLast()])
    before = learn.model[0].weight.clone()
    quiet_fit(learn, 2)
    return {"same": torch.equal(before, learn.model[0].weight), "weights": weights(learn.model)}


def thawed_in_training():
    class Thaws(Callback):
        def before_batch(self):
            self.learn.model.requires_grad_()

    learn = learner([Distributed(), Thaws()])
    learn.model[0].requires_grad_(False)
    quiet_fit(learn, 1)


def frozen_on_one():
    class Freezes(Callback):
        def before_epoch(self):
            self.learn.model.module[2 * distributed.get_rank()].requires_grad_(False)

    quiet_fit(learner([Distributed(), Freezes()]), 1)


def batch_norm():
    """A rank without samples to validate takes part in what DistributedDataParallel sends."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    learn = quiet_fit(learner([Distributed()], model=model, n_valid=1), 2)
    return {"rows": rows(learn), "validated": list(learn.validate())}


def lr_find():
    learn = learner([Distributed()])
    before = weights(learn.model)
    found = learn.lr_find(num_it=20)
    whole = type(learn.model).__name__
    return {"suggestion": found.suggestion, "losses": list(found.losses), "model": whole} | {
        "same": before == weights(learn.model)
    }


def not_divided():
    sampler = WeightedRandomSampler(torch.ones(48), 48)
    learn = learner([Distributed()])
    loader = DataLoader(data(48), 4, sampler=sampler)
    learn.dls = type(learn.dls)(loader, [(torch.ones(4, 4), torch.ones(4).long())])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_fit(learn, 1)
    return [str(w.message) for w in caught if "Distributed" in str(w.message)]


def optimizer_object():
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    quiet_fit(learner([Distributed()], model=model, opt=opt), 1)
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    quiet_fit(learner([Distributed("fsdp2")], model=model, opt=opt), 1)


def prepared_wrongly():
    quiet_fit(learner([Distributed(prepare=lambda model, mesh: model)]), 1)


def saved():
    """Saved by main alone, or by all; read by the other kinds of model."""
    learn = quiet_fit(learner([Distributed()]), 1)
    file, sharded_file = FOLDER / "ddp.pt", FOLDER / "fsdp2.pt"
    if learn.ranks.is_main:
        learn.save(file)
    sharded = quiet_fit(learner([Distributed("fsdp2")]), 1)
    sharded.save(sharded_file)
    distributed.barrier()
    found, wanted = {}, weights(learn.model)
    kinds = {"alone": [], "ddp": [Distributed()], "fsdp2": [Distributed("fsdp2")]}
    for written in (file, sharded_file):
        for kind, cbs in kinds.items():
            torch.manual_seed(1)
            other = learner(cbs and [type(cbs[0])(cbs[0].mode)])
            other.load(written)
            apart = [
                torch.tensor(a) - torch.tensor(b) for a, b in zip(weights(other.model), wanted, strict=True)
            ]
            found[f"{written.stem} {kind}"] = max(float(x.abs().max()) for x in apart)
    return found | {"names": list(torch.load(file)["model"])}


def fails_while_wrapping():
    def parallelize(model, mesh):
        if distributed.get_rank() == 1:
            raise ValueError("planted")
        return DistributedDataParallel(model)

    quiet_fit(learner([Distributed(prepare=parallelize)]), 1)


def validate_on_main_only():
    module.MAX_WAIT = timedelta(seconds=2)
    if distributed.get_rank() == 0:
        learner([Distributed()]).validate()
    else:
        time.sleep(3)


def summary_on_main_only():
    module.MAX_WAIT = timedelta(seconds=1)
    if distributed.get_rank() == 0:
        SHARDED[0].summary()


def raises_in_fit():
    class Fails(Callback):
        def after_train(self):  # the other rank waits where it can be freed
            if distributed.get_rank() == 1:
                raise ValueError("planted")

    learn = learner([Distributed(), Fails()])
    own, dls = learn.model, learn.dls
    try:
        quiet_fit(learn, 1)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return {"text": text, "restored": learn.model is own and learn.dls is dls and learn.device is None}


def main():
    global FOLDER
    FOLDER, names = Path(sys.argv[1]), sys.argv[2].split(",")
    learner([Distributed()]).validate()  # opens the group
    answer(FOLDER, {})
    run_cases({name: globals()[name] for name in names}, FOLDER)


if __name__ == "__main__":
    main()
