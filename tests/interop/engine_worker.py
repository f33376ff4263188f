"""One of several ranks with an Accelerator; does one case after another: `engine_worker.py FOLDER CASES`."""

import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import distributed

from hookcb import (
    Callback,
    CancelFitException,
    Checkpoint,
    Diagnose,
    Distributed,
    Freeze,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
)
from tests.ranks.support import run_cases
from tests.training.distributed_worker import interleaved, learner, quiet_fit, rows, trained, weights

FOLDER = Path()


def accelerator(**kwargs):
    """A new Accelerator; without the reset, it would share the settings of the one before."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **kwargs)


def engine(**kwargs):
    return Distributed(engine=accelerator(**kwargs))


def sharding(**kwargs):
    """FSDP2 on the CPU, where Accelerate itself ignores the plugin, and replicates."""
    given = accelerator(**kwargs)
    given.state.distributed_type = DistributedType.FSDP
    given.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10
    )
    return Distributed(engine=given)


def dtypes(learn):
    """Trains an epoch; returns the types of the outputs of the model and of its first layer."""
    seen = []

    class Dtypes(Callback):
        def before_fit(self):
            inner = getattr(self.model, "module", self.model)[0]
            self.hooks = [
                m.register_forward_hook(lambda m, x, y: seen.append(y.dtype)) for m in (inner, self.model)
            ]

        def after_fit(self):
            for hook in self.hooks:
                hook.remove()

    quiet_fit(learn, 1, cbs=Dtypes)
    return [str(x) for x in seen[:2]]


def accumulated_alone():
    """One process that has the global batches, without an Accelerator."""
    learn = learner([GradientAccumulation(4)])
    learn.dls = type(learn.dls)(interleaved(), learn.dls.valid)
    return counted(learn)


def counted(learn):
    """Trains; returns rows, weights and the batches after which steps were made."""
    steps = []
    quiet_fit(learn, 2, cbs=Callback(after_step=lambda cb: steps.append(cb.iter)))
    return {"rows": rows(learn), "weights": weights(learn.model), "steps": steps}


# ---- cases


def ddp():
    given, inside = accelerator(), []
    learn = learner([Distributed(engine=given)])
    learn.add_cb(Callback(before_fit=lambda cb: inside.append(type(cb.learn.model).__name__)))
    before = {*vars(learn.model)}
    found = trained(learn)
    return found | {"inside": inside, "kept": len(given._models), "same": before == {*vars(learn.model)}}


def fsdp2():
    learn = learner([sharding()])
    return trained(learn) | {"kinds": [type(p).__name__ for p in learn.model.parameters()]}


def accumulated():
    """Groups of 4 and 2 batches."""
    return counted(learner([engine(gradient_accumulation_steps=4)]))


def accumulated_fsdp2():
    return counted(learner([sharding(gradient_accumulation_steps=4)]))


def frozen():
    learn = learner([engine(), Freeze("0")])
    before = [p.clone() for p in learn.model.parameters()]
    quiet_fit(learn, 1)
    return [torch.equal(a, b) for a, b in zip(before, learn.model.parameters(), strict=True)]


def bf16():
    learn = learner([engine(mixed_precision="bf16")])
    inside, x = dtypes(learn), torch.zeros(1, 4)
    return {"inside": inside, "outside": [str(learn.model[0](x).dtype), str(learn.model(x).dtype)]}


def beside():
    """Callbacks that read gradients or clip them, with the engine and with DistributedDataParallel."""
    found = []
    for cb in (engine(), Distributed()):
        learn = quiet_fit(learner([cb]), 2, cbs=[GradientHealth(), GradientClip(1e-3), Diagnose(show=False)])
        norms = [float(x) for x in learn.gradient_clip.norms]
        verdict = learn.diagnose()
        found.append([rows(learn), weights(learn.model), norms, [str(x) for x in verdict.findings]])
    return found


def resumed():
    """A training that ends in the middle of a group of batches goes on there."""

    class Ends(Callback):
        def after_batch(self):
            if self.training and self.learn.train_iter == 7:  # with the next epoch's second batch
                raise CancelFitException

    def fit(*cbs, **kwargs):
        learn = learner([engine(gradient_accumulation_steps=4)], shuffle=True)
        return quiet_fit(learn, 2, cbs=cbs, **kwargs)

    whole, first = fit(), fit(Ends(), Checkpoint(FOLDER / "resumed"))
    names = [file.name for file in first.checkpoint.files]
    distributed.barrier()
    second = fit(Checkpoint(FOLDER / "resumed"), resume="latest")
    return {
        "names": names,
        "same": weights(second.model) == weights(whole.model),
        "same_losses": list(second.recorder.losses) == list(whole.recorder.losses),
    }


def saved():
    learn = quiet_fit(learner([engine()]), 1)
    file = learn.save(FOLDER / "engine.pt")
    distributed.barrier()
    found = {"names": list(torch.load(file)["model"])}
    for kind, cbs in {"alone": [], "ddp": [engine()], "fsdp2": [sharding()]}.items():
        other = learner(cbs)
        with torch.no_grad():
            other.model[0].weight.zero_()
        other.load(file)
        found[kind] = weights(other.model) == weights(learn.model)
    return found


def lr_find():
    found = []
    for cb in (Distributed(), engine()):
        learn = learner([cb])
        before = weights(learn.model)
        with learn.no_logging():
            found.append(list(learn.lr_find(num_it=10).losses))
        assert weights(learn.model) == before
    return found


def raises():
    learn = learner([engine(gradient_accumulation_steps=4)])
    own, n = learn.model, len(learn.cbs)

    class Fails(Callback):
        def after_train(self):
            if distributed.get_rank() == 1:
                raise ValueError("planted")

    try:
        quiet_fit(learn, 1, cbs=Fails)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return {"text": text, "restored": learn.model is own and len(learn.cbs) == n and learn.device is None}


def main():
    global FOLDER
    FOLDER, names = Path(sys.argv[1]), sys.argv[2].split(",")
    # torch's, as Accelerate prepares a model for FSDP2
    warnings.filterwarnings("ignore", category=FutureWarning)
    run_cases({name: globals()[name] for name in names}, FOLDER)


if __name__ == "__main__":
    main()
