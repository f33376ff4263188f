"""One of several ranks with an Accelerator; does one case after another: `engine_worker.py FOLDER CASE,CASE`."""

import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hookcb import Callback, Checkpoint, Diagnose, Distributed, Freeze, GradientClip, GradientHealth, Learner
from tests.distributed.distributed_worker import data, learner, quiet_fit, rows, trained, weights
from tests.ranks.support import answer, run_cases


def accelerator(**kwargs):
    """A new Accelerator, as one shares its settings with the next."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **kwargs)


def ddp():
    engine, inside = accelerator(), []

    class Inside(Callback):
        def before_fit(self):
            inside.append(type(self.model).__name__)

    learn = learner([Distributed(engine=engine), Inside()])
    before = {*vars(learn.model)}
    return trained(learn) | {
        "inside": inside,
        "kept": len(engine._models),
        "same": before == {*vars(learn.model)},
    }


def fsdp2():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10
    )
    return trained(learner([Distributed(engine=accelerator(fsdp_plugin=plugin))]))


def frozen():
    learn = learner([Distributed(engine=accelerator()), Freeze("0")])
    before = [p.clone() for p in learn.model.parameters()]
    quiet_fit(learn, 1)
    return [torch.equal(a, b) for a, b in zip(before, learn.model.parameters(), strict=True)]


def counted(learn):
    """Trains; returns rows, weights and the number of steps."""
    steps = []
    quiet_fit(learn, 2, cbs=Callback(after_step=lambda cb: steps.append(cb.iter)))
    return {"rows": rows(learn), "weights": weights(learn.model), "steps": steps}


def accumulated(fsdp_plugin=None):
    """Groups of 4 and 2 batches; equal parts, so that a batch of one process is half of one."""
    options = {} if fsdp_plugin is None else {"fsdp_plugin": fsdp_plugin}
    engine = accelerator(gradient_accumulation_steps=4, **options)
    return counted(learner([Distributed(engine=engine)]))


def accumulated_fsdp2():
    return accumulated(FullyShardedDataParallelPlugin(fsdp_version=2))


def bf16():
    dtypes = []

    class Dtypes(Callback):
        def before_fit(self):
            self.hook = self.model.register_forward_hook(lambda m, x, y: dtypes.append(str(y.dtype)))
            inner = getattr(self.model, "module", self.model)[0]
            self.inner = inner.register_forward_hook(lambda m, x, y: dtypes.append(str(y.dtype)))

        def after_fit(self):
            self.hook.remove()
            self.inner.remove()

    learn = learner([Distributed(engine=accelerator(mixed_precision="bf16")), Dtypes()])
    quiet_fit(learn, 1)
    outside = learn.model(torch.zeros(1, 4))
    with torch.no_grad():
        inner = learn.model[0](torch.zeros(1, 4)).dtype
    return {"rows": rows(learn), "inside": dtypes[:2], "outside": [str(outside.dtype), str(inner)]}


def others():
    """Callbacks that read gradients, and a checkpoint, beside it."""
    with TemporaryDirectory() as folder:
        shared = [folder]
        distributed.broadcast_object_list(shared)
        parts = [GradientClip(1e-3), GradientHealth(), Diagnose()]
        learn = quiet_fit(
            learner([Distributed(engine=accelerator())]), 2, cbs=[*parts, Checkpoint(shared[0])]
        )
        resumed = learner([Distributed(engine=accelerator())])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is left to train
            quiet_fit(resumed, 2, resume=shared[0])
        file = learn.save(Path(shared[0]) / "model.pt")
        distributed.barrier()
        loaded = learner([Distributed(engine=accelerator())])
        loaded.load(file)
        distributed.barrier()
    return {
        "clipped": learn.gradient_clip.coefs[0] < 1,
        "n_steps": len(learn.gradient_clip.norms),
        "verdict": str(learn.diagnose()).splitlines()[0],
        "resumed": weights(resumed.model) == weights(learn.model),
        "loaded": weights(loaded.model) == weights(learn.model),
    }


def resumed():
    """A fit that ended in the middle of a group goes on there."""

    class Ends(Callback):
        def after_batch(self):
            if self.training and self.learn.train_iter == 7:
                raise KeyboardInterrupt

    def make(*cbs):
        return learner([Distributed(engine=accelerator(gradient_accumulation_steps=4)), *cbs])

    whole = quiet_fit(make(), 2)
    with TemporaryDirectory() as folder:
        shared = [folder]
        distributed.broadcast_object_list(shared)
        first = make(Ends())
        try:
            quiet_fit(
                first, 2, cbs=Checkpoint(shared[0], every=2, unit="batch") if False else Checkpoint(shared[0])
            )
        except KeyboardInterrupt:
            pass
        second = quiet_fit(make(), 2, resume=shared[0])
    return {"weights": weights(second.model), "whole": weights(whole.model)}


def lr_find():
    found = []
    for cb in (Distributed(), Distributed(engine=accelerator(gradient_accumulation_steps=2))):
        learn = learner([cb])
        before = weights(learn.model)
        with learn.no_logging():
            losses = learn.lr_find(num_it=10).losses
        found.append(list(losses))
        assert weights(learn.model) == before
    return found


def raises():
    learn = learner([Distributed(engine=accelerator(gradient_accumulation_steps=4))])
    own = learn.model

    class Fails(Callback):
        def before_backward(self):
            raise ValueError("planted")

    try:
        quiet_fit(learn, 1, cbs=Fails)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    learn.validate()
    return {"text": text, "restored": learn.model is own, "world": learn.ranks.world}


CASES = {
    name: case
    for name, case in vars().items()
    if callable(case) and getattr(case, "__module__", "") == __name__
}

if __name__ == "__main__":
    run_cases({name: CASES[name] for name in sys.argv[2].split(",")}, sys.argv[1])
