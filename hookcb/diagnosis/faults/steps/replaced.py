"""param.replaced, param.converted: parameters that change under an optimizer: the object, dtype or device."""

from collections.abc import Iterator
from dataclasses import dataclass
from traceback import walk_tb
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import NOTES, Fault, Site, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loads import Loads
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import named_sketches, unchanged
from hookcb.gradients.stats import is_readable
from hookcb.hooks.optimizer_steps import params_of
from hookcb.hooks.params import Held, named_params
from hookcb.processes.shards import is_shard

MIN_BATCHES, MIN_GRADIENTS = 20, 2  # since a parameter is new; comparisons at which it had a gradient
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(slots=True)
class _New:
    """A parameter in the place of one that an optimizer has stepped."""

    p: ReferenceType[nn.Parameter]
    old: int  # id of that one
    began: Tensor
    since: tuple[int, int]  # compared batches between which it came
    n_gradients: int = 0


@fault(
    "param.replaced",
    Site.OPTIMIZER,
    needs="batches",
    leads_to="param.not_* param.frozen* param.overwritten loss.* update.* train.unfinished",
    exact=True,
)
class Replaced(Fault):
    """Parameters that were replaced by new objects, while the optimizer goes on with the old ones.

    Exact: under the name of a parameter that an optimizer has stepped, the model has another object, which
    had gradients in two compared batches, which no optimizer that makes steps has, and of which no sampled
    element has changed in 20 batches or more, up to the end.
    """

    headline = "The optimizer holds parameters that were replaced"
    cadence = NOTES
    uses = (Steps,)
    hears = (Loads,)
    passed = "parameters that were replaced while the optimizer holds the old ones"
    unless = "too little was seen of the backward"

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, ReferenceType[nn.Parameter]] = {}
        self._known: Held | None = None
        self._held: set[int] = set()  # ids of what optimizers have
        self._optimizers: set[int] = set()  # ids of these
        self._latest = 0  # number of the batch that was compared last
        self._new: dict[str, _New] = {}
        self.names: frozenset[str] = frozenset()  # of those that are found

    def on_model(self, run: Run) -> None:
        self._own = {name: ref(p) for name, p in named_params(run.loop.model).items() if not is_shard(p)}
        self._known = Held(run.loop.model)

    def on_gradients(self, run: Run) -> None:
        optimizers = run.measured(Steps).optimizers
        if run.looking or optimizers.keys() != self._optimizers:
            self._optimizers = set(optimizers)
            self._held |= {key for opt in optimizers.values() for key in params_of(opt)}
        if not self._new and self._known is not None and self._known.is_same():  # the usual case, soon told
            self._latest = run.step
            return
        now, fresh = named_params(run.loop.model), dict[str, nn.Parameter]()
        for name, known in self._own.items():
            p, old, new = now.get(name), known(), self._new.get(name)
            if p is None or p is old:
                self._new.pop(name, None)
                continue
            if (new is None or new.p() is not p) and id(old) in self._held and is_readable(p):
                fresh[name] = p
            elif new is not None:
                new.n_gradients += p.grad is not None
        for name, began in named_sketches(fresh).items():
            p, n = fresh[name], int(fresh[name].grad is not None)
            self._new[name] = _New(ref(p), id(self._own[name]()), began, (self._latest, run.step), n)
        self._latest = run.step

    def tell(self, run: Run) -> None:
        self.seen, self.unless = [], "" if run.measured(Steps).n_backward else self.unless
        trained = {key for opt in run.measured(Steps).optimizers.values() for key in params_of(opt)}
        found: dict[str, nn.Parameter] = {}
        for name, new in self._new.items():
            p = new.p()
            is_long = run.n_batches - new.since[1] >= MIN_BATCHES and new.n_gradients >= MIN_GRADIENTS
            if p is not None and is_long and id(p) not in trained:
                found[name] = p
        same = unchanged(found, {name: self._new[name].began for name in found})
        found = {name: p for name, p in found.items() if name in same}
        self.names = frozenset(found)
        if not found:
            return
        first = next(iter(found))
        since = self._new[first].since
        holds = trained.issuperset(self._new[name].old for name in found)
        which = "which still has the old ones" if holds else "which has other ones"
        self.see(
            f"Between steps {since[0]} and {since[1]}, {len(found)} of the model's parameters "
            f"({join_names(list(found), 3)}) were replaced by new ones that are not in the optimizer, "
            f"{which}: they get gradients, but no step changes them.",
            at=run.params.get(first, first.rpartition(".")[0]),
            param=first,
            when=(since[0], None),
            value=float(len(found)),
            limit=0.0,
            causes=(_cause(found),),
            next_steps=(
                "Create the optimizer anew after that, or keep the parameters: load_state_dict() without "
                "assign=True, and p.copy_(value) under torch.no_grad()",
            ),
        )

    def freeze(self) -> None:
        self._own, self._new, self._held, self._known = {}, {}, set(), None


def _cause(found: dict[str, nn.Parameter]) -> str:
    loads = (load for load in heard(Loads).loads if load.is_assigned)
    if any(known() is found[name] for load in loads for name, known in _ending(load.params, found)):
        return "load_state_dict(…, assign=True), which puts new parameters into the model"
    return "a layer or parameter that was created anew, or a conversion that makes new ones"


def _ending(
    params: dict[str, ReferenceType[Tensor]], found: dict[str, nn.Parameter]
) -> Iterator[tuple[str, ReferenceType[Tensor]]]:
    """Parameters of a module that was loaded, which may be a part of the model, by names in the model."""
    return ((name, params[key]) for name in found for key in params if name.endswith(key))


@fault(
    "param.converted",
    Site.OPTIMIZER,
    needs="batches",
    leads_to="nonfinite.* update.* loss.* param.not_stepped param.overwritten train.unfinished",
    exact=True,
)
class Converted(Fault):
    """Parameters whose dtype changes in mid-run, or whose optimizer has states that do not fit.

    Exact: the dtype of a parameter at a step differs from that at an earlier inspected step of the same
    optimizer; a note if it is more precise. Or an error in a step of torch.optim has ended the training, and
    a state of the optimizer has another dtype or device than its parameter.
    """

    headline = "Parameters change their dtype under the optimizer"
    cadence = 64
    uses = (Steps,)
    severity = "warning"
    passed = "parameters whose dtype changes under the optimizer"
    unless = "no optimizer step was inspected"

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[ReferenceType[Optimizer], int, dict[int, torch.dtype]]] = {}

    def on_step(self, run: Run) -> None:
        opt = run.loop.opt
        if not isinstance(opt, Optimizer):
            return
        self.unless = ""
        now = {id(p): p.dtype for group in opt.param_groups for p in group["params"]}
        known, step, before = self._known.get(id(opt), (None, 0, now))
        self._known[id(opt)] = ref(opt), run.step, now
        if now != before and known is not None and known() is opt:
            names = {id(p): name for name, p in named_params(run.loop.model).items()}
            both = ((i, before[i], dtype) for i, dtype in now.items() if i in before and i in names)
            changed = [i for i, old, new in both if old != new and {old, new} <= FLOATS]
            if changed:
                pair = before[changed[0]], now[changed[0]]
                self._see(run, opt, [names[i] for i in changed], (step, run.step), pair)

    def _see(
        self,
        run: Run,
        opt: Optimizer,
        names: list[str],
        steps: tuple[int, int],
        pair: tuple[torch.dtype, torch.dtype],
    ) -> None:
        old, new = pair
        is_worse = torch.finfo(new).eps > torch.finfo(old).eps
        loses = f", and updates below {torch.finfo(new).eps / 2:.1g} of a weight are lost" * is_worse
        states = f"; its states were made for {_text(old)}" if opt.state else ""
        self.see(
            f"Between steps {steps[0]} and {steps[1]} the dtype of {len(names)} parameters "
            f"({join_names(names, 3)}) changed from {_text(old)} to {_text(new)}, while the same optimizer "
            f"goes on{states}{loses}.",
            "warning" if is_worse else "info",
            at=run.params.get(names[0], names[0].rpartition(".")[0]),
            param=names[0],
            when=steps,
            value=float(len(names)),
            limit=0.0,
            causes=("half(), bfloat16() or to() in the training loop, as for an evaluation or a file",),
            next_steps=(
                "Convert a copy of the model, or use torch.autocast and keep the weights in float32",
            ),
        )

    def on_error(self, run: Run, error: BaseException) -> None:
        opt = run.loop.opt
        inside = {frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)}
        is_of_step = isinstance(error, RuntimeError) and any(x.startswith("torch.optim.") for x in inside)
        found = list(_misfits(opt, run.loop.model)) if is_of_step and isinstance(opt, Optimizer) else []
        if not found:
            return
        name, key, state, p = found[0]
        is_device = state.device != p.device
        here, there = (p.device, state.device) if is_device else (_text(p.dtype), _text(state.dtype))
        self.seen = []
        self.see(
            f"torch.optim has ended the training at step {run.step}: {len(found)} states of the optimizer do "
            f"not fit their parameters; {key!r} of {name} is {'on' if is_device else 'in'} {there}, and the "
            f"parameter {'on' if is_device else 'in'} {here}.",
            "error",
            at=run.params.get(name, name.rpartition(".")[0]),
            param=name,
            when=run.step,
            value=float(len(found)),
            limit=0.0,
            causes=(
                "a model that was moved or converted after its optimizer had made a step or loaded a state",
            ),
            next_steps=("Move and convert the model first; then create its optimizer, and load its state",),
        )

    def freeze(self) -> None:
        self._known = {}


def _misfits(opt: Optimizer, model: nn.Module) -> Iterator[tuple[str, str, Tensor, nn.Parameter]]:
    """States as large as their parameter, with another device, or another dtype of floating point."""
    for name, p in named_params(model).items():
        for key, x in opt.state.get(p, {}).items():
            is_like = isinstance(x, Tensor) and x.shape == p.shape and x.is_floating_point()
            if is_like and (x.device, x.dtype) != (p.device, p.dtype):
                yield name, str(key), x, p


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
