"""Restores: states that optimizers load, how far their schedules were, and the schedulers afterwards."""

from collections.abc import Generator, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CellType, FunctionType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, SequentialLR

from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.measurements.changes import is_number
from hookcb.diagnosis.measurements.group_rates import RISE, as_number
from hookcb.diagnosis.measurements.loads import RATES
from hookcb.diagnosis.measurements.schedules import RISING, Schedulers, inner_of, length_of, position

Observer = Generator[None, Any, None]
Rates = tuple[float, float]  # largest `lr` and largest `initial_lr` of the groups
ENDED = 1e-3  # share of the highest rate at which a schedule has come to its end, as for lr.schedule
MAX_KEPT, MAX_ITEMS, MAX_DEPTH = 1_000, 64, 4
# attributes of a scheduler that are not its settings
PROGRESS = ("last_epoch", "_step_count", "_last_lr", "T_cur", "T_i", "verbose", "optimizer")


class Place(NamedTuple):
    """How far a schedule was when `state_dict` of its optimizer was called.

    Attributes:
        settings: see `settings_of`.
        at: its number of steps.
        is_sure: whether it was nowhere else with these rates.
        is_falling: whether its rate had come down to half of its highest one, and not to its end; False for
            schedules that rise again.
    """

    settings: Hashable
    at: int
    is_sure: bool
    is_falling: bool


class Restored(NamedTuple):
    """A state that an optimizer has loaded, whose learning rate a scheduler had moved.

    Attributes:
        opt: the optimizer.
        number: number of the load, of all optimizers.
        rate, base: largest `lr` and largest `initial_lr` of the groups.
        place: how far its schedule was, None if that is unknown.
    """

    opt: ReferenceType[Optimizer]
    number: int
    rate: float
    base: float
    place: Place | None


@dataclass(slots=True)
class Made:
    """A scheduler, the number of loads of optimizers before it was made, and whether it was loaded itself."""

    scheduler: ReferenceType[Any]
    n_loads: int
    is_loaded: bool = False


class Restores(Ear):
    """Hears of states of optimizers that are taken and loaded, and of schedulers that are made and loaded.

    A state that is loaded is known again by its rates, also as a copy or from a file.

    Attributes:
        restored: the last load of each optimizer, by its id, unless its rate had not moved, or a program has
            set `initial_lr` since, before it made a scheduler.
        groups: numbers of the groups that each optimizer has loaded last, by its id, until it is asked for.
    """

    calls = (
        (Optimizer, "state_dict", "observe_state"),
        (Optimizer, "load_state_dict", "observe_load"),
        *((x, "__init__", "observe_made") for x in (LRScheduler, SequentialLR, ChainedScheduler, OneCycleLR)),
        *((kind, "load_state_dict", "observe_rate") for kind in RATES if "load_state_dict" in vars(kind)),
    )
    options = {"nested": False, "all_threads": True}  # noqa: RUF012  # as in its base

    def __init__(self) -> None:
        self.restored: dict[int, Restored] = {}
        self.groups: dict[int, tuple[ReferenceType[Optimizer], list[dict[str, Any]]]] = {}
        self._n_loads = 0
        self._made: list[Made] = []
        self._taken: dict[Rates, Place] = {}

    def restored_by(self, opt: Optimizer) -> Restored | None:
        """The last load of an optimizer, or of one with its groups."""
        every = list(self.restored.values())
        return next((x for x in every if (own := x.opt()) is not None and _is_same(own, opt)), None)

    def schedulers_of(self, opt: Optimizer) -> list[tuple[Made, Any]]:
        """Schedulers of an optimizer that no other one steps, in the order in which they were made."""
        alive = [(made, x) for made in self._made if (x := made.scheduler()) is not None]
        own = [(made, x) for made, x in alive if _is_same(getattr(x, "optimizer", None), opt)]
        inner = {id(y) for _, x in own for y in inner_of(x)}
        return [(made, x) for made, x in own if id(x) not in inner]

    def observe_state(self, opt: Optimizer, /, *args: Any, **kwargs: Any) -> Observer:
        yield
        rate, base = rates_of(opt)
        found = self.schedulers_of(opt) if _has_moved(rate, base) else []
        if len(found) != 1:
            return
        now, before = _place_of(found[0][1], rate), self._taken.get((rate, base))
        if before is not None and before.at != now.at:
            now = now._replace(at=min(before.at, now.at), is_sure=False)
        elif len(self._taken) >= MAX_KEPT:
            self._taken.pop(next(iter(self._taken)))
        self._taken[rate, base] = now

    def observe_load(self, opt: Optimizer, /, *args: Any, **kwargs: Any) -> Observer:
        yield
        self._n_loads += 1
        self.groups = {key: x for key, x in self.groups.items() if x[0]() is not None}
        self.groups[id(opt)] = ref(opt), [numbers_of(group) for group in opt.param_groups]
        alive = [(key, x, x.opt()) for key, x in self.restored.items()]
        self.restored = {key: x for key, x, own in alive if own is not None and own is not opt}
        rate, base = rates_of(opt)
        if _has_moved(rate, base):
            place = self._taken.get((rate, base))
            self.restored[id(opt)] = Restored(ref(opt), self._n_loads, rate, base, place)

    def observe_made(self, scheduler: Any, /, *args: Any, **kwargs: Any) -> Observer:
        if not any(made.scheduler() is scheduler for made in self._made):
            opt = next((x for x in (*args, *kwargs.values()) if isinstance(x, Optimizer)), None)
            load = None if opt is None else self.restored_by(opt)
            if opt is not None and load is not None and rates_of(opt)[1] != load.base:
                self.restored = {key: x for key, x in self.restored.items() if x is not load}
            self._made = [x for x in self._made if x.scheduler() is not None][-MAX_KEPT:]
            self._made.append(Made(ref(scheduler), self._n_loads))
        yield

    def observe_rate(self, scheduler: Any, /, *args: Any, **kwargs: Any) -> Observer:
        yield
        for made in self._made:
            made.is_loaded |= made.scheduler() is scheduler


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a group of an optimizer, and tuples of numbers."""
    named = {**group, "lr": as_number(group.get("lr"))}
    return {name: x for name, x in named.items() if is_number(x) and type(x) is not bool}


def settings_of(scheduler: Any) -> Hashable:
    """Settings of a schedule, which tell it from others: its class, numbers, functions, and inner schedules.

    Functions are compared by their code, defaults and closures, without globals.
    """
    return _plain(scheduler, MAX_DEPTH)


def _plain(x: Any, depth: int) -> Hashable:
    if type(x) in (int, float, str):
        return x  # type: ignore[no-any-return]
    if not depth:
        return type(x).__name__
    if type(x) in (list, tuple):
        return tuple(_plain(y, depth - 1) for y in x[:MAX_ITEMS])
    if isinstance(x, dict):
        return tuple((str(key), _plain(y, depth - 1)) for key, y in islice(dict.items(x), MAX_ITEMS))
    if isinstance(x, LRScheduler | ChainedScheduler | SequentialLR):
        parts = {key: y for key, y in vars(x).items() if key not in PROGRESS and type(y) is not bool}
        return type(x).__name__, _plain(parts, depth)
    if isinstance(x, partial):
        return _plain([x.func, x.args, x.keywords], depth)
    if isinstance(x, FunctionType):
        return hash(x.__code__), _plain([x.__defaults__, *map(_contents, x.__closure__ or ())], depth)
    return type(x).__name__


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _place_of(scheduler: Any, rate: float) -> Place:
    known, at, (_, length) = heard(Schedulers).of(scheduler), position(scheduler), length_of(scheduler)
    top = known.top if known is not None else 0.0
    has_ended = (length is not None and at + 1 >= length) or rate <= ENDED * top
    rises = any(isinstance(x, RISING) for x in (scheduler, *inner_of(scheduler)))
    return Place(settings_of(scheduler), at, True, RISE * rate <= top and not (has_ended or rises))


def rates_of(opt: Optimizer) -> Rates:
    """Largest `lr` and `initial_lr` of the groups of an optimizer; NaN if one is unknown."""
    pairs = [(as_number(group.get("lr")), as_number(group.get("initial_lr"))) for group in opt.param_groups]
    rates, bases = zip(*pairs, strict=True) if pairs else ((), ())
    return _largest(rates), _largest(bases)


def _largest(rates: tuple[float, ...]) -> float:
    return max(rates, default=float("nan")) if all(x == x for x in rates) else float("nan")


def _has_moved(rate: float, base: float) -> bool:
    return abs(rate - base) > 1e-9 * abs(base)  # False if one is unknown


def _is_same(one: Any, other: Optimizer) -> bool:
    """Whether two optimizers are one, or one of them wraps the other and has its groups."""
    groups = getattr(one, "param_groups", ()) if one is not other else ()
    return one is other or not {*map(id, groups)}.isdisjoint(map(id, other.param_groups))
