"""replica.diverged: ranks whose weights should be alike, and are not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.processes import Processes, Role
from hookcb.diagnosis.measurements.replica_hashes import SET_BY_OTHERS, Look, OfRank, ReplicaHashes
from hookcb.diagnosis.measurements.replicas import apart_from_most, name_others
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from hookcb.processes.groups import name_ranks

MIN_APART = 2  # looks in turn, if no single step shows the difference
NOT_COMPARED = Skipped("the parameters of all ranks were not compared")
Member = tuple[Role, OfRank]
Cause = tuple[str, str, str]  # what was seen, a cause, and what to do


@dataclass(frozen=True, slots=True)
class Parting:
    """A parameter that was alike on ranks, and then was not.

    Attributes:
        place: of the parameter.
        before: steps made at the last look at which it was alike; None if it never was.
        first: steps made at the first look at which it was not.
        members: the ranks.
    """

    place: int
    before: int | None
    first: int
    members: Sequence[Member]

    def looks(self, n: int) -> list[Look]:
        return [own.looks[n] for _, own in self.members]

    def are_alike(self, n: int, kind: str) -> bool | None:
        """Whether hashes of a kind are equal at a look; None if they are unknown, or all gradients zero."""
        of_ranks = [getattr(look, kind) for look in self.looks(n)]
        found = {hashes[self.place] for hashes in of_ranks} if all(of_ranks) else set()
        return len(found) == 1 if any(found) else None

    @property
    def apart(self) -> tuple[int, ...]:
        """Numbers of the ranks unlike most, see `apart_from_most`."""
        found = [look.weights[self.place] for look in self.looks(self.first)]
        return apart_from_most([role.rank for role, _ in self.members], found)


@fault(
    "replica.diverged", Site.OPTIMIZER, needs="batches", leads_to="loss.*", subject="processes", exact=True
)
class DivergedReplicas(Fault):
    """Ranks whose parameters must be equal, and differ.

    Exact: hashes of up to 1,024 elements of each parameter before the first step, after 1, 2, 4, 8 … and 10,
    100 … steps, one step later, and at the end, compared between ranks that have made as many steps. Replicas
    of DistributedDataParallel must be equal from the start, unless its hook is that of post-local SGD. Other
    ranks count if a parameter of them was equal, and also its gradient, which is not zero: halves under
    tensor parallelism, shards, experts and stages of a pipeline never are, nor are ranks that average their
    weights from time to time. If they are apart right after such a step, it is an error, unless all were
    trained on the same batch; a warning if they stay apart in two looks or more, to the last, and nothing
    else than the optimizer was seen to write weights. Ranks with rates of their own from the first step on,
    or that do not communicate, are not compared. Hashes of the gradients in the step before, after the
    backward and as the optimizer has got them, tell the cause.

    Source: Jiang et al., "TrainCheck: Detecting Silent Training Errors", OSDI 2025; PyTorch,
    DistributedDataParallel, "Internal Design".
    """

    headline = "Replicas no longer have the same parameters"
    uses = (Processes, ReplicaHashes)
    passed = "replicas that differ"

    def findings(self, run: Run) -> Iterator[Result]:
        if not (members := members_of(run)):
            yield NOT_COMPARED
            return
        names, groups = run.measured(ReplicaHashes).names, list(groups_of(members))
        for group in groups:
            is_ddp = len(group[0][0].replicas) > 1
            parting = first_apart(group) if is_ddp else first_parting(group)
            if parting is not None:
                yield self._found(parting, names, is_ddp)
                return
        if any(map(is_comparable, groups)):
            yield Passed(self.passed)
        elif all(role.is_sharded for role, _ in members):
            yield Absent("ranks have different parts of the parameters")
        elif all(role.is_periodic for role, _ in members):
            yield Absent("ranks average their weights from time to time")
        else:
            yield Skipped("no two ranks have weights that must be equal")

    def _found(self, parting: Parting, names: Sequence[str], is_ddp: bool) -> Result:
        apart, members = parting.apart, parting.members
        # of many parameters on many ranks, one hash is sent
        name = names[parting.place] if len(members[0][1].places) == len(names) else ""
        others = name_others(members[0][0].rank, apart)
        since = "before the first step" if not parting.first else f"after {_steps(parting.first)}"
        if parting.first and parting.before is not None:
            since += (
                f", and was equal after {parting.before}" if parting.before else ", and was equal at first"
            )
        what = f"Parameter {name}" if name else "A parameter"
        why, cause, advice = cause_of(parting, is_ddp)
        return self.finding(
            f"{what} differs on {name_ranks(apart)} from that of {others} {since}; {why}.",
            "error" if is_ddp or is_certain(parting) else "warning",
            at=name.rpartition(".")[0],
            param=name,
            when=parting.looks(parting.first)[0].step,
            value=float(len(apart)),
            causes=(cause,),
            next_steps=(advice,),
            ranks=apart,
        )


def members_of(run: Run) -> list[Member]:
    """All ranks, with what they have hashed; none unless all have told both."""
    roles, of_ranks = run.measured(Processes).roles, run.measured(ReplicaHashes).of_ranks
    return list(zip(roles, of_ranks, strict=True)) if len(roles) == len(of_ranks) else []


def groups_of(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Ranks that train replicas, and ranks without a wrapper that train models of the same structure."""
    groups: dict[tuple[Sequence[int], int], list[Member]] = {}
    for role, own in members:
        if not role.is_periodic:
            replicas = role.replicas if len(role.replicas) > 1 else ()
            groups.setdefault((replicas, own.structure), []).append((role, own))
    yield from (group for group in groups.values() if len(group) > 1)


def _steps(n: int) -> str:
    return f"{n} step{'s' * (n > 1)}"


def is_comparable(group: Sequence[Member]) -> bool:
    """Whether ranks have a parameter that must be equal, or that they have trained alike."""
    looks = common_looks(group)
    parts = [(i, part) for i in range(len(group[0][1].places)) for part in with_same_part(group, i)]
    if len(group[0][0].replicas) > 1:
        return bool(parts and looks)
    return any(True for i, part in parts for n in looks for _ in _trained_alike(part, i, n))


def common_looks(group: Sequence[Member]) -> list[int]:
    """Looks that all ranks of a group have, as numbers of steps made before."""
    return sorted(set.intersection(*(set(own.looks) for _, own in group)))


def with_same_part(group: Sequence[Member], place: int) -> Iterator[list[Member]]:
    """The ranks of a group that have the same part of a parameter."""
    parts: dict[int, list[Member]] = {}
    for role, own in group:
        if own.places[place] != SET_BY_OTHERS:
            parts.setdefault(own.places[place], []).append((role, own))
    yield from (part for part in parts.values() if len(part) > 1)


def first_apart(group: Sequence[Member]) -> Parting | None:
    """The first difference of replicas that must be alike at each look."""
    before: int | None = None
    for n in common_looks(group):
        for place in range(len(group[0][1].places)):
            for part in with_same_part(group, place):
                parting = Parting(place, before, n, part)
                if len({look.weights[place] for look in parting.looks(n)}) > 1:
                    return parting
        before = n
    return None


def first_parting(group: Sequence[Member]) -> Parting | None:
    """The first difference of ranks without a wrapper that have trained a parameter alike."""
    looks = common_looks(group)
    if not looks or not communicates(group) or len({own.looks[looks[0]].rates for _, own in group}) > 1:
        return None
    every = (
        parting
        for place in range(len(group[0][1].places))
        for part in with_same_part(group, place)
        for n in looks
        for ranks in _trained_alike(part, place, n)
        if (parting := _parted(ranks, place, n, looks)) is not None
    )
    return min(every, key=lambda x: (x.first, x.place), default=None)


def communicates(group: Sequence[Member]) -> bool:
    """Whether ranks were seen to begin collectives in the training, or may have."""
    for _, own in group:
        known = [look.n_collectives for _, look in sorted(own.looks.items())]
        if None in known or len(set(known)) > 1:
            return True
    return False


def _trained_alike(part: Sequence[Member], place: int, n: int) -> Iterator[list[Member]]:
    """Ranks of which a parameter and its gradient are equal at a look, and the gradient is not zero."""
    alike: dict[tuple[int, ...], list[Member]] = {}
    for role, own in part:
        look = own.looks[n]
        for kind, hashes in ((0, look.backward), (1, look.given)):
            if hashes and hashes[place]:
                alike.setdefault((look.weights[place], kind, hashes[place]), []).append((role, own))
    yield from (ranks for ranks in alike.values() if len(ranks) > 1)


def _parted(ranks: Sequence[Member], place: int, n: int, looks: Sequence[int]) -> Parting | None:
    """The difference after look `n` that stays to the end."""
    later = [m for m in looks if m > n]
    differ = [len({own.looks[m].weights[place] for _, own in ranks}) > 1 for m in later]
    if not differ or not differ[-1]:
        return None
    n_equal = max((i + 1 for i, x in enumerate(differ) if not x), default=0)
    before = later[n_equal - 1] if n_equal else n
    parting = Parting(place, before, later[n_equal], ranks)
    is_shown = is_certain(parting) or (
        len(later) - n_equal >= MIN_APART and not any(own.n_written for _, own in ranks)
    )
    return parting if is_shown else None


def is_certain(parting: Parting) -> bool:
    """Whether the same gradient of the same weights has led to other weights, and not by design.

    Ranks that train all parameters alike may try settings of their own on the same batches.
    """
    n = parting.before
    if n is None or parting.first != n + 1 or not parting.are_alike(n, "backward"):
        return False
    first, *others = parting.looks(n)
    return any(first.backward != other.backward for other in others) or n > 0


def cause_of(parting: Parting, is_ddp: bool) -> Cause:
    """The cause, as gradients show it: in the step before the weights differ, or else in a later one."""
    if not parting.first and is_ddp:
        return (
            "they were not equal at the start, though DistributedDataParallel sends those of rank 0 to all",
            "weights that were loaded or changed on one rank after wrapping, init_sync=False, or a broadcast "
            "that loses data",
            "Load and initialize weights before DistributedDataParallel(model), or on all ranks",
        )
    looks = [n for n in (parting.before, parting.first) if n is not None]
    known = [n for n in looks if parting.looks(n)[0].given]
    for n in known:
        backward, given = parting.are_alike(n, "backward"), parting.are_alike(n, "given")
        is_raw = any(role.n_raw for role, _ in parting.members)  # its backward may not be seen
        if backward is False or (backward is None and given is False and is_raw):
            return _not_synced(parting, n, is_ddp)
        if given is False:
            return (
                "its gradients were equal after the backward, but not as the optimizer got them",
                "gradients that are clipped, scaled or changed on one rank only",
                "Clip and scale gradients on all ranks alike, and by the same norm",
            )
        if len({look.rates for look in parting.looks(n)}) > 1:
            return (
                "its gradients are equal, but learning rates differ",
                "a schedule that follows a number of its rank only",
                "Have the schedule follow numbers that are the same on all ranks, such as means over them",
            )
    what = (
        "its gradients are equal" if known and parting.are_alike(known[-1], "given") else "ranks must agree"
    )
    return (
        f"{what}, so they were written differently",
        "parameters or a state of the optimizer that are changed on one rank only",
        "Look for code that runs on one rank only, and for parameters that DDP does not manage",
    )


def _not_synced(parting: Parting, n: int, is_ddp: bool) -> Cause:
    """Why gradients differ between ranks after the backward."""
    roles, what = [role for role, _ in parting.members], "its gradients differ after the backward"
    if not is_ddp:
        return (
            what,
            "an all-reduce that leaves this parameter out, or loses data",
            "Compare the gradients of ranks after the code that averages them",
        )
    if n_replaced := max(role.n_replaced for role in roles):
        return (
            f"{what}, and DistributedDataParallel does not know {n_replaced} of the trained parameters",
            "parameters that were replaced after the model was wrapped, so its hooks are lost",
            "Change, move and load the model first, and wrap it then",
        )
    if n_raw := max(role.n_raw for role in roles):
        return (
            f"{what}, and {n_raw} forwards did not go through DistributedDataParallel",
            "a call of the model inside, as model.module(x), which averages no gradients",
            "Call the wrapped model in training",
        )
    if not all(look.was_synced for look in parting.looks(n)):
        return (
            f"{what}, which was inside of no_sync()",
            "an optimizer step after a backward in no_sync(), which averages no gradients",
            "Leave no_sync() for the last batch before each step",
        )
    hooks = sorted({hook for role in roles for hook in role.hooks})
    return (
        f"{what}, so they were not averaged over ranks",
        f"the communication hook {', '.join(hooks)}, which loses data"
        if hooks
        else "an all-reduce that loses data, hooks of DistributedDataParallel that are lost, or a forward "
        "through model.module",
        "Train with DistributedDataParallel's own all-reduce, and call the wrapped model",
    )
