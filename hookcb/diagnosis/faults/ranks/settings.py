"""replica.settings: ranks that train one model with different settings of the optimizer."""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.faults.loss.worse import WorseLoss
from hookcb.diagnosis.measurements.group_settings import GroupSettings, Settled, Shared
from hookcb.diagnosis.measurements.replicas import apart_from_most
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.processes.groups import name_ranks

N_SHOWN = 3  # settings, and values of each


class _Unlike(NamedTuple):
    """Settings that differ between ranks: in which batch, the last one before in which they did not."""

    step: int
    last: int | None
    by_name: dict[str, dict[int, Any]]  # values by rank


@fault(
    "replica.settings",
    Site.OPTIMIZER,
    needs="batches",
    leads_to="replica.diverged loss.* nonfinite.* update.*",
    subject="processes",
    exact=True,
)
class UnlikeSettings(Fault):
    """Ranks that train one model with different settings of the optimizer.

    Exact: the learning rate, `betas`, `eps`, `weight_decay`, `momentum` and other numbers that torch's
    optimizers have, of up to eight groups, and the limit of `clip_grad_norm_`, in the first step and after 1,
    2, 4, 8 … and 10, 100 … steps, in the next one each, and in one of the last 16. Compared are groups of
    which the first parameter has replicas of DistributedDataParallel, or parts of a DTensor, as under FSDP2,
    on these ranks. Its step is that of a change that was seen on some of them only, see `train.changed`.
    Replicas come apart by it, see `replica.diverged`; shards cannot, and are then parts of models that are
    trained in different ways. Rates that are on a device are not read.

    Source: PyTorch, DistributedDataParallel, "Internal Design": the optimizers of all ranks must do the same.
    """

    headline = "Ranks train one model with different settings"
    uses = (GroupSettings, *WorseLoss.uses)
    passed = "settings that differ between ranks"

    def findings(self, run: Run) -> Iterator[Result]:
        of_ranks = run.measured(GroupSettings).of_ranks
        if not of_ranks:
            yield Skipped("the settings of all ranks were not compared")
        elif unlike := _first_unlike(of_ranks):
            yield self._found(run, unlike)
        elif any(len(ranks) > 1 for _, _, ranks in _groups(of_ranks)):
            yield Passed(self.passed)
        else:
            yield Skipped("no two ranks have replicas or parts of one model")

    def _found(self, run: Run, unlike: _Unlike) -> Result:
        step, last, by_name = unlike
        ranks = sorted({*chain.from_iterable(by_name.values())})
        of_each = [[values.get(rank) for values in by_name.values()] for rank in ranks]
        changes = [
            x
            for x in run.measured(WorseLoss).facts(run)
            if x.ranks and not x.layer and (-1 if last is None else last) < x.step <= step
        ]
        said = "; ".join(_text_of(name, values) for name, values in [*by_name.items()][:N_SHOWN])
        before = "" if last is None else f"; at step {last:,} they were the same"
        what = f" What changed: {'; '.join(x.text for x in changes[:N_SHOWN])}." if changes else ""
        return self.finding(
            f"Ranks that train the same parameters have, at step {step:,}, {said}{before}.{what}",
            when=changes[0].step if changes else step,
            causes=(
                "code that changes the optimizer, or clips, on some ranks only",
                "a schedule that follows a number of its rank only, such as the loss of its batch",
            ),
            next_steps=("Have all ranks change settings alike, by numbers that are means over ranks",),
            ranks=tuple(sorted({*chain.from_iterable(x.ranks for x in changes)}))
            or apart_from_most(ranks, of_each),
        )


def _groups(of_ranks: list[dict[int, Settled]]) -> Iterator[tuple[int, Shared, dict[int, Settled]]]:
    """In the order of steps: their numbers, groups, and the ranks that have told these."""
    for n in sorted({*chain.from_iterable(of_ranks)}):
        at = {rank: looks[n] for rank, looks in enumerate(of_ranks) if n in looks}
        for shared in dict.fromkeys(chain.from_iterable(look.of_groups for look in at.values())):
            yield n, shared, {rank: look for rank, look in at.items() if shared in look.of_groups}


def _first_unlike(of_ranks: list[dict[int, Settled]]) -> _Unlike | None:
    last: dict[Shared, int] = {}
    for _, shared, ranks in _groups(of_ranks):
        if len(ranks) < 2:
            continue
        of_each = {rank: look.of_groups[shared] for rank, look in ranks.items()}
        step = max(look.step for look in ranks.values())
        common = set.intersection(*map(set, of_each.values()))
        by_name = {
            name: {rank: settings[name] for rank, settings in of_each.items()}
            for name in next(iter(of_each.values()))
            if name in common and len({settings[name] for settings in of_each.values()}) > 1
        }
        if by_name:
            return _Unlike(step, last.get(shared), by_name)
        last[shared] = step
    return None


def _text_of(name: str, values: dict[int, Any]) -> str:
    """A setting, and its values with their ranks."""
    by_value: dict[Any, list[int]] = {}
    for rank, x in values.items():
        by_value.setdefault(x, []).append(rank)
    said = [f"{_shown(x)} on {name_ranks(ranks)}" for x, ranks in [*by_value.items()][:N_SHOWN]]
    more = f" and {len(by_value) - N_SHOWN} more" if len(by_value) > N_SHOWN else ""
    return f"{name} {', '.join(said)}{more}"


def _shown(x: Any) -> str:
    return "none" if x == math.inf else repr(x)
