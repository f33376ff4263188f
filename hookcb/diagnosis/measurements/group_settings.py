"""GroupSettings: settings of the optimizer's groups at a few steps, by which ranks are compared."""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.changes import LIMIT, is_number
from hookcb.diagnosis.measurements.group_rates import as_number
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.replica_hashes import next_look, replicated
from hookcb.diagnosis.measurements.step_scales import StepScales
from hookcb.diagnosis.run import Run
from hookcb.hooks.params import named_params
from hookcb.processes.shards import is_dtensor

MAX_GROUPS = 8  # of an optimizer
OF_GROUPS = (  # what torch's optimizers have, without how they compute
    "lr betas eps weight_decay momentum dampening nesterov amsgrad maximize alpha rho lambd t0 lr_decay "
    "momentum_decay decoupled_weight_decay etas step_sizes"
)
NAMES = (LIMIT, *OF_GROUPS.split())

Groups = dict[int, tuple[Any, ...]]  # values of `NAMES`, None if unknown, by what ranks know a group by
Looks = dict[int, tuple[int, Groups]]  # the number of the batch and its settings, by number of steps made


class GroupSettings(Measurement):
    """Rates and other settings of up to eight groups of the optimizer, and the limit of clipping, of a step.

    Known are groups whose first parameter has replicas of DistributedDataParallel, or parts of a DTensor, on
    other ranks. The steps are the 1st, 2nd, 4th, 8th … and 10th, 100th …, that after each of these, and the
    last one in a batch of `Run.noting`. What is on a device is left out.

    Attributes:
        looks: those of this rank, by number of steps made.
        of_ranks: of all ranks that have told them.
        n_sharing: ranks that train each parameter of these groups together, the least number; 0 if unknown.
    """

    cadence = EVERY
    uses = (Processes, StepScales)

    def __init__(self) -> None:
        self.looks: Looks = {}
        self.of_ranks: list[Looks] = []
        self.n_sharing = 0
        self._next = self._next_whole = 1  # as in `ReplicaHashes`
        self._is_spare = False  # whether the last look stays only until the next one
        self._groups: MutableMapping[Optimizer, list[int]] = WeakKeyDictionary()

    def on_between(self, run: Run) -> None:
        self.done = run.measured(Processes).world == 1
        n, opt = run.n_steps, run.loop.opt
        is_spare = n < self._next
        if self.done or (is_spare and not run.noting) or not isinstance(opt, Optimizer):
            return
        if self._is_spare:
            self.looks.popitem()
        self._is_spare = is_spare
        if not is_spare:
            is_whole = n >= self._next_whole
            self._next_whole = next_look(n) if is_whole else self._next_whole
            self._next = n + 1 if is_whole else self._next_whole
        self.looks[n] = run.step, self._read(run, opt)

    def _read(self, run: Run, opt: Optimizer) -> Groups:
        groups = opt.param_groups
        if len(self._groups.get(opt, ())) != len(groups):
            known, n = _shared(run, groups)
            self.n_sharing = min(n, self.n_sharing) if self._groups else n
            self._groups[opt] = known
        pairs = [*zip(self._groups[opt], groups, strict=True)][:MAX_GROUPS]
        limit = run.measured(StepScales).limit
        found = {key: tuple(_values(group | {LIMIT: limit})) for key, group in pairs if key}
        before = next((groups for _, groups in reversed(self.looks.values())), {})
        return before if before == found else found  # the same object is sent once

    def state(self, run: Run) -> Looks:
        return dict(self.looks)

    def merge(self, run: Run, of_ranks: Sequence[Looks], rank: int) -> None:
        self.of_ranks = list(of_ranks)

    def freeze(self) -> None:
        self._groups = {}


def _shared(run: Run, groups: Sequence[dict[str, Any]]) -> tuple[list[int], int]:
    """Number by which ranks know each group, 0 if only this one trains its first parameter; `n_sharing`."""
    role, ddp = run.measured(Processes).own, run.measured(Processes).ddp
    own = set() if ddp is None or role.is_periodic else {id(p) for _, p in replicated(ddp)}
    names = {id(p): name for name, p in named_params(run.loop.model).items()}
    of_each = {id(p): role.replicas if id(p) in own else _ranks_of(p) for x in groups for p in x["params"]}
    firsts = [id(next(iter(x["params"]), None)) for x in groups]
    known = [(names.get(i), tuple(of_each.get(i, ()))) for i in firsts]
    keys = [crc32(repr(key).encode()) if key[0] and len(key[1]) > 1 else 0 for key in known]
    return keys, min(map(len, of_each.values()), default=0)


def _ranks_of(p: Tensor) -> tuple[int, ...]:
    """Ranks that have parts of a DTensor; none of another tensor."""
    return tuple(p.device_mesh.mesh.flatten().tolist()) if is_dtensor(p) else ()  # type: ignore[attr-defined]


def _values(group: dict[str, Any]) -> Iterator[Any]:
    for name in NAMES:
        x = as_number(group.get(name)) if name == "lr" else group.get(name)
        yield x if is_number(x) and x == x else None  # a NaN is a number on a device
