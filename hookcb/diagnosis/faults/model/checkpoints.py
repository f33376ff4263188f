"""checkpoint.no_copy and checkpoint.untrained: weights that are kept or saved as they were not meant."""

from collections.abc import Iterable

from torch import Tensor

from hookcb.diagnosis.fault import Fault, Site, Unknown, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loads import LoadClock, Save, Saves
from hookcb.diagnosis.measurements.state_dicts import is_plain
from hookcb.diagnosis.run import Absent, Run

NOTHING = "nothing was saved by torch.save, or loaded, that has weights of the model"
UNSEEN = "no file with weights of the model was saved while the training was watched"


@fault(
    "checkpoint.no_copy",
    Site.RUN,
    needs="batches",
    leads_to="train.unfinished",
    subject="checkpoints",
    exact=True,
)
class KeptWithoutCopy(Fault):
    """A state_dict that is kept without a copy, and saved or loaded after further steps.

    Exact: the tensors that `state_dict` gave are in the memory of the parameters. After further steps, they
    are loaded into the same memory, which changes nothing, or they are saved; then they were taken after the
    first step, as the best weights so far. Copies on another device are copies.

    Source: the PyTorch tutorial "Saving and Loading Models": a state_dict must be copied to keep the best
    weights, "otherwise your best best_model_state will keep getting updated".
    """

    headline = "The weights kept are those of the last step"
    severity = "warning"
    uses = (LoadClock,)
    passed = "weights that are kept without a copy"
    unless: Unknown = UNSEEN

    def tell(self, run: Run) -> None:
        clock = run.measured(LoadClock)
        memory, loaded = memory_of(clock.params().values()), clock.loads()
        kept = [x for x in heard(Saves).saves if any(x.memory & memory for x in x.dicts)]
        self.unless = "" if loaded or kept else Absent(NOTHING) if clock.has_heard_start else UNSEEN
        self.seen = []
        for load in loaded:
            if load.taken is not None and 0 < load.n_same == len(load.given):
                self._judge("loaded", clock.steps(load.taken), clock.steps(load.clock))
        for save in kept:
            takes = [x.taken for x in save.dicts if x.taken is not None and x.memory & memory]
            first = min((clock.steps(taken) for taken in takes), default=0)
            if first:
                self._judge("saved", first, clock.steps(save.clock))

    def _judge(self, done: str, taken: int, now: int) -> None:
        if taken >= now:
            return
        what = "nothing was loaded" if done == "loaded" else f"the file has the weights of step {now}"
        self.see(
            f"The state_dict that was taken after {taken} steps was {done} after {now}. It is no copy: its "
            f"tensors are the memory of the parameters, which each step changes, so {what}.",
            when=(taken, now),
            value=float(now - taken),
            limit=0.0,
            causes=("best = model.state_dict() keeps references, not values",),
            next_steps=(
                "Keep a copy: best = copy.deepcopy(model.state_dict()), or save it to a file at once",
            ),
        )


@fault("checkpoint.untrained", Site.RUN, needs="batches", subject="checkpoints", exact=True)
class UntrainedCheckpoint(Fault):
    """A file with the weights of before the training, and none with those of afterwards.

    Exact: after twenty steps or more, 1,024 elements of each weight that was saved are bit-identical to
    those before the first step, while those of the model have all changed, and no other file has weights of
    the model.
    """

    headline = "The weights that were saved are not trained"
    severity = "error"
    uses = (LoadClock,)
    passed = "a checkpoint of untrained weights"
    unless: Unknown = UNSEEN

    def tell(self, run: Run) -> None:
        clock, saves = run.measured(LoadClock), heard(Saves).saves
        memory, names = memory_of(clock.params().values()), clock.params().keys()
        old = [save for save in saves if clock.key in save.begun]
        ours = [
            x
            for x in saves
            if x.is_opaque or any(y.memory & memory or names & y.shapes.keys() for y in x.dicts)
        ]
        self.unless = "" if ours else Absent(NOTHING) if clock.has_heard_start else UNSEEN
        self.seen = []
        others = [x for x in ours if x not in old and clock.steps(x.clock)]
        if not old or others or any(x.memory & memory for save in old for x in save.dicts):
            return
        now = clock.steps(old[-1].clock)
        self.see(
            f"The weights that were saved after {now} steps{place_of(old[-1])} are bit-identical to those "
            "before the first step, while those of the model have changed, and no other file has them.",
            when=now,
            value=0.0,
            causes=("a copy of the model was trained, and the original saved", "a copy that was made before"),
            next_steps=("Save the state_dict of the model that is trained, after its training",),
        )


def memory_of(params: Iterable[Tensor]) -> set[int]:
    """Addresses of parameters."""
    return {p.data_ptr() for p in params if is_plain(p) and p.numel()}


def place_of(save: Save) -> str:
    """End of a sentence: the name of a file, if it has one."""
    return f" to {save.path.rpartition('/')[2]}" if save.path else ""
