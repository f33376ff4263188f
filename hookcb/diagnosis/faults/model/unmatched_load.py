"""load.unmatched: pretrained weights whose names do not match."""

import math
from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Site, Unknown, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loads import Load, LoadClock, Loads, Shapes
from hookcb.diagnosis.measurements.state_dicts import Renaming, is_initial, renaming
from hookcb.diagnosis.run import Absent, Run
from hookcb.diagnosis.verdict import Severity

MIN_SHARE = 0.1  # of the weights, that a change of names fits; and that a load fills at least
LARGE_SHARE = 0.5  # of the weights, on both sides, that do not match
UNHEARD = "loads before the training were not heard; hookcb diagnose script.py hears them"


@fault(
    "load.unmatched",
    Site.INPUT,
    needs="batches",
    leads_to="loss.flat loss.trivial train.unfinished unit.* update.*",
    subject="loads",
    exact=True,
)
class UnmatchedLoad(Fault):
    """Weights that load_state_dict did not load, as their names do not match those of the model.

    Exact: with strict=False, none of the names given is in the model; or with a prefix removed or added,
    names and shapes of a tenth of the weights or more match; or a tenth or less of what was given is loaded,
    and fills a tenth or less of the module. A load of the model's own memory before the first step counts as
    none if a file was read. Left out are parameters that another load has filled, as in a second attempt, and
    loads of which all names match, as of adapters or without a head. A note if half of both sides does not
    match. Or a file gives all parameters but no running statistics of batch norms: a warning if these are 0
    and 1 to the end, else a note.

    Source: torch.nn.Module.load_state_dict, "missing_keys" and "unexpected_keys".
    """

    headline = "Pretrained weights do not match by name"
    uses = (LoadClock,)
    passed = "names that do not match in load_state_dict"
    unless: Unknown = UNHEARD

    def tell(self, run: Run) -> None:
        clock, ear = run.measured(LoadClock), heard(Loads)
        ours = clock.loads()
        self.unless = "" if ours else UNHEARD
        if clock.has_heard_start and len(ours) == 0:
            self.unless = Absent("no weights were loaded into the model by load_state_dict")
        self.seen = []
        for load in ours:
            self._judge_statistics(load, clock)
            lost = [name for name, x in load.params.items() if _is_unfilled(x, ear)]
            self._judge(load, lost, clock.steps(load.clock))

    def _judge(self, load: Load, lost: list[str], step: int) -> None:
        missing = {name: load.own[name] for name in load.missing if name in lost}
        other = {name: load.given[name] for name in load.unexpected if name in load.given}
        n_own, n_given, n_lost, n_other = map(_size, (load.own, load.given, missing, other))
        fix = renaming(missing, other)
        severity: Severity = "error"
        if fix is not None and _size({name: missing[name] for name in fix.fits}) >= MIN_SHARE * n_own:
            more, advice = (
                f"{_change(fix)}, {len(fix.fits)} of {len(missing)} missing names match.",
                _how(fix),
            )
        elif missing and len(missing) == len(load.own) and (other or load.nested):
            entry = f" The entry {load.nested!r} of what was given has such names." if load.nested else ""
            more, advice = f"no name matches.{entry}", _compare(load)
        elif step == 0 and len(lost) == len(load.own) and load.n_files and load.n_same == len(load.given):
            self._see_nothing_given(load, step)
            return
        elif min(n_lost / max(n_own, 1), n_other / max(n_given, 1)) >= LARGE_SHARE:
            is_most = min(n_lost / n_own, n_other / n_given) >= 1 - MIN_SHARE
            severity = "warning" if is_most else "info"
            more, advice = f"{n_other / n_given:.0%} of what was given was not used.", _compare(load)
        else:
            return
        named = f": it was given {_named(other)}, and the model has {_named(missing)}" if other else ""
        self.see(
            f"load_state_dict(strict=False) of {load.about} left {len(missing)} of its {len(load.own)} "
            f"parameters, {n_lost / max(n_own, 1):.0%} of the weights, as they were initialized{named}. "
            f"{more[0].upper()}{more[1:]}",
            severity,
            when=step,
            value=n_lost / max(n_own, 1),
            limit=0.0,
            causes=("names with the prefix of a wrapper, such as DataParallel or torch.compile",),
            next_steps=(advice, "Load with strict=True, or print what load_state_dict returns"),
        )

    def _judge_statistics(self, load: Load, clock: LoadClock) -> None:
        """Judges a file with all parameters, and no running statistics."""
        known, own = {name: x() for name, x in load.statistics.items()}, clock.statistics()
        ours = [name for name, x in own.items() if any(x is y for y in known.values())]
        is_all = len(known) == len(ours) == len(own) > 0 and not load.missing and load.file is not None
        if not is_all or any(heard(Loads).was_loaded(own[name]) for name in ours):
            return
        step, is_still = clock.steps(load.clock), all(is_initial(name, own[name]) for name in ours)
        after = "stay" if is_still else "begin"
        self.see(
            f"load_state_dict(strict=False) of {load.about} was given all {len(load.own)} parameters, but no "
            f"running statistics of its {len(ours) // 2} batch norms, which {after} at mean 0 and variance 1"
            f"{'.' if is_still else '; the training has changed them since.'}",
            "warning" if is_still else "info",
            when=step,
            value=float(len(ours)),
            limit=0.0,
            causes=("a file of named_parameters(), which have no buffers, instead of state_dict()",),
            next_steps=("Save and load model.state_dict() as a whole, with strict=True",),
        )

    def _see_nothing_given(self, load: Load, step: int) -> None:
        given = f"the model's own weights, {len(load.given)} tensors" if load.given else "no tensors"
        self.see(
            f"A file was read, but load_state_dict of {load.about} was given {given}: nothing of the file "
            "was loaded.",
            "warning",
            when=step,
            value=0.0,
            causes=("a filter of names that keeps none of those in the file",),
            next_steps=("Print the names in the file beside those of model.state_dict()",),
        )


def _is_unfilled(param: ReferenceType[Any], ear: Loads) -> bool:
    p = param()
    return p is not None and not ear.was_loaded(p)


def _size(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _named(names: Iterable[str]) -> str:
    return join_names(list(map(repr, names)), 2)


def _change(fix: Renaming) -> str:
    if fix.kind == "add":
        return f"with the prefix {fix.text!r} added to what was given"
    return f"with {'the prefix ' * (fix.kind == 'strip')}{fix.text!r} removed from what was given"


def _how(fix: Renaming) -> str:
    changed = {
        "add": f"{fix.text!r} + k",
        "strip": f"k.removeprefix({fix.text!r})",
        "remove": f"k.replace({fix.text!r}, '')",
    }[fix.kind]
    return f"model.load_state_dict({{{changed}: v for k, v in state.items()}})"


def _compare(load: Load) -> str:
    if load.nested:
        return f"Load that entry: model.load_state_dict(state[{load.nested!r}])"
    return "Compare the names in the file with those of model.state_dict()"
