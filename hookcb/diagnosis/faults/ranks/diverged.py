"""replica.diverged: replicas whose parameters differ."""

from collections.abc import Iterator

from hookcb.core.ranks import name_ranks
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.replicas import can_compare, hashes, is_shared, others_of, ranks_apart
from hookcb.diagnosis.run import Run

OF_PARAMETER = (
    "parameters that are changed outside the optimizer, or on one rank only",
    "Look for code that runs on one rank only, and for parameters that DDP does not manage",
)
OF_RATE = (
    "a schedule that follows a number of its rank only",
    "Have the schedule follow numbers that are the same on all ranks, such as means over them",
)


@fault("replica.diverged", Site.OPTIMIZER, needs="batches", leads_to="loss.*", subject="replicas", exact=True)
class DivergedReplicas(Fault):
    """Replicas of DistributedDataParallel whose parameters differ.

    Formula: 64-bit hashes of the bits of each parameter, and the learning rates, compared between ranks at
    the end of an epoch of a Learner's fit.
    """

    headline = "Replicas no longer have the same parameters"
    passed = "replicas that differ"
    has_looked = False

    def on_epoch(self, run: Run) -> None:
        loop = run.loop
        if not can_compare(loop):
            return
        self.has_looked, model = True, loop.model
        names, own = hashes((name, p) for name, p in model.named_parameters() if is_shared(model, name))
        for group in loop.opt.param_groups if loop.opt is not None else ():
            names.append("")
            own.append(float(group["lr"]))
        if (found := ranks_apart(own, loop.ranks)) is None:
            return
        name, apart = names[found[0]], found[1]
        what = f"Parameter {name}" if name else "The learning rate"
        cause, advice = OF_PARAMETER if name else OF_RATE
        self.see(
            f"{what} differs on {name_ranks(apart)} from that of {others_of(apart)}; replicas must be "
            "identical.",
            param=name,
            when=run.step,
            value=float(len(apart)),
            causes=(cause,),
            next_steps=(advice,),
            ranks=tuple(apart),
        )

    def findings(self, run: Run) -> Iterator[Result]:
        unless = "" if self.has_looked else "too little was seen of the replicas at the end of an epoch"
        return self.told(run, self.seen, unless)
