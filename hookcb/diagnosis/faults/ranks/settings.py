"""replica.settings: ranks that train one model with different settings of the optimizer."""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.faults.loss.worse import WorseLoss
from hookcb.diagnosis.measurements.group_settings import NAMES, Groups, GroupSettings
from hookcb.diagnosis.measurements.replicas import apart_from_most
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.processes.groups import name_ranks

N_SHOWN = 3  # settings, and values of each


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
    2, 4, 8 … and 10, 100 … steps, in the step after each of these, and in one of the last 16 batches.
    Compared are groups whose first parameter has replicas of DistributedDataParallel, or parts of a DTensor,
    as under FSDP2, on these ranks. Its step is that of a change that was seen on some of them only, as
    `train.changed` knows it, or else the first one in which they differ. Replicas come apart by it, see
    `replica.diverged`; shards cannot, but are then trained in different ways. Rates that are on a device are
    not read, nor is `clip_grad_norm_` of another library.

    Source: PyTorch, DistributedDataParallel, "Internal Design".
    """

    headline = "Ranks train one model with different settings"
    uses = (GroupSettings, *WorseLoss.uses)
    passed = "settings that differ between ranks"

    def findings(self, run: Run) -> Iterator[Result]:
        if not (of_ranks := run.measured(GroupSettings).of_ranks):
            yield Skipped("the settings of all ranks were not compared")
            return
        last: dict[int, int] = {}  # steps in which all had the same, by group
        for n in sorted({*chain.from_iterable(of_ranks)}):
            looks = {rank: found[n] for rank, found in enumerate(of_ranks) if n in found}
            step = max(step for step, _ in looks.values())
            for key, of_each in _by_group({rank: groups for rank, (_, groups) in looks.items()}).items():
                if unlike := _unlike(of_each):
                    yield self._found(run, step, last.get(key), unlike)
                    return
                last |= {key: step} if len(of_each) > 1 else {}
        yield Passed(self.passed) if last else Skipped("no two ranks have replicas or parts of one model")

    def _found(self, run: Run, step: int, last: int | None, unlike: dict[str, dict[int, Any]]) -> Finding:
        new = run.measured(WorseLoss).facts(run)
        new = [x for x in new if x.ranks and (-1 if last is None else last) < x.step <= step]
        # of rates and limits, or of one of these settings
        changes = [x for x in new if not x.what or any(x.what.startswith(f"{name} of ") for name in unlike)]
        said = "; ".join(_text_of(name, values) for name, values in [*unlike.items()][:N_SHOWN])
        before = "" if last is None else f"; at step {last:,} they were the same"
        what = f" What changed: {'; '.join(x.text for x in changes[:N_SHOWN])}." if changes else ""
        ranks = [*next(iter(unlike.values()))]
        apart = apart_from_most(ranks, [[values[rank] for values in unlike.values()] for rank in ranks])
        changed = tuple(sorted({*chain.from_iterable(x.ranks for x in changes)}))
        return self.finding(
            f"Ranks that train the same parameters have, at step {step:,}, {said}{before}.{what}",
            when=changes[0].step if changes else step,
            causes=(
                "code that changes the optimizer, or clips, on some ranks only",
                "a schedule that follows a number of its rank only, such as the loss of its batch",
            ),
            next_steps=("Have all ranks change settings alike, by numbers that are means over ranks",),
            ranks=changed or apart,
        )


def _by_group(of_ranks: dict[int, Groups]) -> dict[int, dict[int, tuple[Any, ...]]]:
    """The settings of each group, by the ranks that have it."""
    keys = dict.fromkeys(chain.from_iterable(of_ranks.values()))
    return {key: {rank: groups[key] for rank, groups in of_ranks.items() if key in groups} for key in keys}


def _unlike(of_each: dict[int, tuple[Any, ...]]) -> dict[str, dict[int, Any]]:
    """Settings of a group that all ranks have and that differ, by name, and their values by rank."""
    columns = zip(NAMES, zip(*of_each.values(), strict=True), strict=True)
    return {
        name: dict(zip(of_each, values, strict=True))
        for name, values in columns
        if None not in values and len({*values}) > 1
    }


def _text_of(name: str, values: dict[int, Any]) -> str:
    """A setting, and its values with their ranks."""
    by_value: dict[str, list[int]] = {}
    for rank, x in values.items():
        by_value.setdefault("none" if x == math.inf else repr(x), []).append(rank)
    said = [f"{x} on {name_ranks(ranks)}" for x, ranks in [*by_value.items()][:N_SHOWN]]
    return f"{name} {', '.join(said)}{f' and {len(by_value) - N_SHOWN} more' * (len(by_value) > N_SHOWN)}"
