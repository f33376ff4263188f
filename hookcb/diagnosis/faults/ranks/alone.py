"""replica.alone: processes that each train the whole model, and do not communicate."""

from collections.abc import Iterator, Sequence

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.faults.ranks.diverged import (
    NOT_COMPARED,
    Member,
    common_looks,
    communicates,
    groups_of,
    members_of,
)
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.replica_hashes import ReplicaHashes
from hookcb.diagnosis.run import Passed, Run, Skipped

MIN_STEPS = 16  # that each process must have made


@fault("replica.alone", Site.OPTIMIZER, needs="batches", leads_to="loss.*", subject="processes", exact=True)
class LoneProcesses(Fault):
    """Processes of one group that each train a whole model of the same structure alone.

    Exact: without DistributedDataParallel and shards, with a loss on each, and 16 steps or more. Either no
    collective or message was begun from the first step to the last look, or weights that were equal at the
    first look are apart at all later ones in all parameters that have moved, the gradients that optimizers
    got were never equal, and nothing else than the optimizer was seen to write weights. A warning; a note if
    rates or first weights differ, as in a search for hyperparameters or an ensemble, which may be meant.
    Ranks that average weights or gradients by hand are equal at times, and are not told. What other packages
    than torch.distributed send is not seen.
    """

    headline = "Processes train alone"
    uses = (Processes, ReplicaHashes)
    severity = "warning"
    passed = "processes that train alone"

    def findings(self, run: Run) -> Iterator[Result]:
        if not (members := members_of(run)):
            yield NOT_COMPARED
            return
        groups = [ranks for group in groups_of(members) if len(ranks := _training(group)) > 1]
        if not groups:
            n_ddp = sum(len(role.replicas) > 1 or role.is_sharded for role, _ in members)
            unseen = Skipped(f"no two processes have made {MIN_STEPS} steps without a wrapper")
            yield Passed(self.passed) if n_ddp == len(members) else unseen
        for group in groups:
            yield self._judge(group)

    def _judge(self, group: Sequence[Member]) -> Result:
        looks, is_silent = common_looks(group), not communicates(group)
        if not is_silent and not _never_meet(group, looks):
            return Passed(self.passed)
        ranks, n = tuple(role.rank for role, _ in group), min(own.n_steps for _, own in group)
        is_meant = _differ(group, "rates", looks[0]) or _differ(group, "weights", looks[0])
        seen = "no collective was begun" if is_silent else "neither gradients nor weights were averaged"
        if is_meant:
            seen += ", and their settings or first weights differ, as in a search or an ensemble"
        return self.finding(
            f"{len(group)} processes each train the whole model alone: in {n} steps {seen}.",
            "info" if is_meant else None,
            when=group[0][1].looks[looks[0]].step,
            value=float(len(group)),
            causes=("a model that is not wrapped in DistributedDataParallel", "a wrapper that is not called"),
            next_steps=(
                "Wrap it: model = DistributedDataParallel(model), and train what that returns",
                "If one process is enough, start one",
            ),
            ranks=ranks,
        )


def _training(group: Sequence[Member]) -> list[Member]:
    """The members that train a whole model by themselves."""
    return [
        (role, own)
        for role, own in group
        if len(role.replicas) < 2
        and not role.is_sharded
        and own.has_loss
        and own.n_steps >= MIN_STEPS
        and len(own.looks) > 1
    ]


def _never_meet(group: Sequence[Member], looks: Sequence[int]) -> bool:
    """Whether ranks that began alike part at once, and no weight or gradient is ever equal again."""
    if _differ(group, "weights", looks[0]) or any(own.n_written for _, own in group):
        return False
    first = [own.looks[looks[0]].weights for _, own in group]
    for n in looks:
        now = [own.looks[n] for _, own in group]
        for place in range(len(first[0])):
            weights = [look.weights[place] for look in now]
            has_moved = any(x != own[place] for x, own in zip(weights, first, strict=True))
            given = [look.given[place] for look in now if look.given and look.given[place]]
            if (has_moved and len(set(weights)) < len(group)) or len(set(given)) < len(given):
                return False
    return len(looks) > 1


def _differ(group: Sequence[Member], what: str, n: int) -> bool:
    """Whether ranks differ in weights or rates at a look."""
    first, *others = [getattr(own.looks[n], what) for _, own in group]
    return any(other != first for other in others)
