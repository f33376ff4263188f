"""script: runs a training script that stays as it is, and says of each model in it whether it is healthy."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hookcb.core.callback import Callback
from hookcb.core.console import safe_console, show, show_error
from hookcb.core.torch_private import in_backward, without_compile_wrapper
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.failures import told_failure
from hookcb.diagnosis.verdict import Verdict
from hookcb.gradients.hand_steps import StepByHand
from hookcb.hooks.optimizer_steps import StepHook
from hookcb.loops.external import ExternalLoop
from hookcb.loops.learner import Learner
from hookcb.loops.lr_find import LRFinder
from hookcb.loops.preflight import NAME as PREFLIGHT
from hookcb.loops.watch import Watch

MOST = 4  # models that are watched at a time, as their memory is held until their verdict
MOST_NODES = 50_000  # of a loss's graph, to tell which models it is of
OURS = (__file__, str(Path(__file__).parents[1] / "diagnosis"))  # files whose frames no traceback shows
UNSEEN = "none of .* was seen in the first batch"  # a warning of callbacks
INTERRUPTED = 130  # exit code of a program that Ctrl-C has ended


def run_script(path: str | Path, args: Sequence[str] = ()) -> int:
    """Runs a script as `python path args…` does, watches what is trained in it, and prints the verdicts.

    The script need not know. A model is the outermost module that is called, with gradients on and with
    parameters that train, or whose method calls its parts; its loss is what `backward` is called on. Models
    that a `Learner` fits are looked at by a `Diagnose` among its callbacks. At most 4 models are watched at
    a time; for a fifth the one that was not called for longest gets its verdict.

    Args:
        path: the script.
        args: its arguments.

    Returns:
        Exit code: 0 if all models are healthy; 1 if one is suspect or sick, if one has an optimizer and
        nothing was seen of its training, if nothing was trained, or if the script has raised; its own if that
        is not 0; 130 after Ctrl-C.
    """
    models = Models()
    code, has_failed = _run(os.fspath(path), list(args), models)
    shown = models.verdicts()
    for title, verdict, _ in shown:
        until = ", until the script failed" if has_failed else ""
        show(f"\n{title}{until}", style="bold", highlight=False, markup=False, soft_wrap=True)
        show(verdict, soft_wrap=True)
    for note in [*([] if shown else [_nothing_in(path)]), *models.notes]:
        show(f"hookcb diagnose: {note}", soft_wrap=True, highlight=False, markup=False)
    counted = [verdict for _, verdict, counts in shown if counts]
    is_well = bool(counted) and all(counted)
    return code or (0 if is_well else 1)


def _nothing_in(path: str | Path) -> str:
    return (
        f"no training was seen in {os.fspath(path)}, so there is no verdict; a model is seen when it is "
        "called with gradients on, in the main thread, and its parameters move, by an optimizer or by hand"
    )


def _run(path: str, args: list[str], models: "Models") -> tuple[int, bool]:
    """Runs the script to its end, whatever that is; the exit code of Python, and whether it has raised."""
    try:
        with models.watched(), _as_main(path, args) as main:
            exec(compile(Path(path).read_bytes(), main["__file__"], "exec"), main)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0, False
        safe_console().file.flush()
        show_error(f"{ended.code}")
        return 1, False
    except BaseException as error:
        safe_console().file.flush()  # what the script has printed comes first
        _forget_ours(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, True
    return 0, False


@contextmanager
def _as_main(path: str, args: list[str]) -> Iterator[dict[str, Any]]:
    """Makes the script's module `__main__`, with the arguments and the import path that Python gives it."""
    module = ModuleType("__main__")
    # the path is absolute from Python 3.9 on, and what multiprocessing starts its processes with
    vars(module).update(__file__=os.path.abspath(path), __builtins__=__builtins__)
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv, sys.modules["__main__"] = [path, *args], module
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        yield vars(module)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def _forget_ours(error: BaseException | None) -> None:
    """Takes our frames out of the traceback, and out of those of what the error came from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        if (now := waiting.pop()) is None or id(now) in seen:
            continue
        seen.add(id(now))
        now.__traceback__ = _others(now.__traceback__)
        waiting += [now.__cause__, now.__context__]
        waiting += now.exceptions if isinstance(now, BaseExceptionGroup) else ()


def _others(tb: TracebackType | None) -> TracebackType | None:
    kept = []
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(OURS):
            kept.append(tb)
        tb = tb.tb_next
    for i, this in enumerate(kept):
        this.tb_next = kept[i + 1] if i + 1 < len(kept) else None
    return kept[0] if kept else None


def _say_sick(verdict: Verdict) -> None:
    """Says at once that a training is sick, in a line; a warning could be made an error by the script."""
    if verdict.primary is not None:
        show_error(f"hookcb diagnose: {verdict.primary.head}: {verdict.primary.message}")


class _ScriptWatch(Watch):
    """A watch that raises nothing into the script; what has failed in it is kept, and ends it."""

    failure: Exception | None = None

    def emit(self, event: str) -> None:
        """See `ExternalLoop`."""
        try:
            super().emit(event)
        except Exception as error:  # it is ours, and not the script's to bear
            self.failure = self.failure or error

    def close_failed(self) -> bool:
        """See `ExternalLoop`; its hooks stay until the end, as the failure may be within one of torch's loops."""
        return self._error is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a training batch is open whose backward has yet to come."""
        return self._is_waiting()

    @property
    def optimizers(self) -> set[int]:
        """Ids of those that have made a step of this model."""
        return {id(opt) for opt in self._optimizers}

    def look_for_loss(self) -> None:
        """See `Watch`; the script's losses are told, or nobody's."""

    def tell(self, loss: Tensor) -> None:
        """Tells the loss of the batch, also one without a graph, of which `Watch` cannot know that it is."""
        ExternalLoop.report_loss(self, loss)

    def follow(self, loss: Tensor) -> None:
        """Has the backward of a loss that is not told begin with it, not where it comes to the model."""
        self._follow_backward(loss)


@dataclass(eq=False)
class _Model:
    """A model of the script; it is held, as what has become of it is part of the verdict."""

    title: str
    model: nn.Module | None
    watch: _ScriptWatch | None = None
    verdict: Verdict | None = None
    is_trained: bool = False
    has_gradients: bool = False
    optimizers: tuple[str, ...] = ()  # that have its parameters
    steppers: tuple[str, ...] = ()  # those of them that made a step

    @property
    def heading(self) -> str:
        """Its title, and the optimizers that train it, or should."""
        if self.is_trained:
            return f"{self.title}, trained by {', '.join(self.steppers)}" if self.steppers else self.title
        names = ", ".join(self.optimizers)
        why = f"{names} made no step" if names else "no optimizer has its parameters"
        return f"{self.title}, not trained: {why}"

    @property
    def is_part_of_result(self) -> bool:
        """Whether it was trained, or was meant to be; not of one that is used as it is."""
        is_used_only = not (self.is_trained or self.has_gradients or self.optimizers)
        return self.verdict is not None and not (is_used_only and self.verdict.primary is None)

    @property
    def counts(self) -> bool:
        """Whether its verdict decides; a model that gets gradients may be used as it is, say as a loss."""
        is_known = self.verdict is not None and self.verdict.status != "unknown"
        return self.is_trained or bool(self.optimizers) or is_known

    def close(self, error: BaseException | None = None) -> None:
        """Ends its watch, takes its verdict, and lets go of it."""
        watch, self.watch = self.watch, None
        if watch is None:
            return
        watch.close(error)
        self.verdict = watch.diagnose()
        # a watch follows no steps of LBFGS, but they are made
        has_moved = bool(self.steppers) or watch.seen["after_step"] > 0 or watch.facts.n_moved_by_hand > 0
        self.is_trained = has_moved or watch.failure is not None
        self.has_gradients = watch.seen["before_backward"] > 0
        self.model = None

    @property
    def is_by_parts(self) -> bool:
        """Whether its parts are called by a method of its own, and never it itself."""
        return self.watch is not None and not self.watch.facts.n_calls


class Models:
    """Finds and watches each model that is trained in this thread while `watched` lasts.

    Attributes:
        notes: what could not be done, as sentences.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._all: list[_Model] = []
        self._open: list[_Model] = []  # that are watched, the one called last at the end
        self._of: Any = WeakIdKeyDictionary()  # modules to the model they are a part of
        self._unscaled: Any = WeakIdKeyDictionary()  # scaled losses to the loss, and its GradScaler
        self._optimizers: Any = WeakIdKeyDictionary()  # parameters to the names of what has them
        self._names: list[str] = []  # of all optimizers of the script
        self._name_of: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._stepped: set[str] = set()
        self._thread = threading.get_ident()
        self._is_inside = self._is_backward = False  # a call, or a backward
        self._n_fits = 0  # of a Learner, in progress

    def verdicts(self) -> list[tuple[str, Verdict, bool]]:
        """Of each model that was trained, or got gradients, or has an optimizer; and whether it decides."""
        shown = [m for m in self._all if m.is_part_of_result]
        return [(m.heading, m.verdict, m.counts) for m in shown if m.verdict is not None]

    def _note_optimizers(self) -> None:
        named = {name for m in self._all for name in m.optimizers}
        for name in self._names:
            if name not in named:
                self.notes.append(f"{name} has no parameters of a model that was called with gradients on")
            elif name not in self._stepped:
                self.notes.append(f"{name} made no step")

    def _note_unmoved(self) -> None:
        for title in [m.title for m in self._all if m.has_gradients and not m.is_trained]:
            self.notes.append(
                f"{title} got gradients, and its parameters were not moved, by an optimizer or by hand; if "
                "it is to be trained, make the optimizer from this model's parameters()"
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follows all that is trained in a `with` block; afterwards torch is as it was."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", UNSEEN, UserWarning)  # a verdict says what was not looked at
            stack.enter_context(_replaced(nn.Module, "__call__", self._calling))
            stack.enter_context(_replaced(Tensor, "backward", self._going_back))
            stack.enter_context(_replaced(torch.amp.GradScaler, "scale", self._scaling))
            stack.enter_context(_replaced(Learner, "fit", self._fitting))
            stack.enter_context(_replaced(Optimizer, "add_param_group", self._grouping))
            stack.callback(StepHook(self._note_step, after=True).remove)
            try:
                yield
            except BaseException as error:
                self._close_all(error)  # now, as a verdict looks at what is being raised
                raise
            self._close_all(None)

    # ---- what stands before torch's own

    def _calling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        # no global hook: torch warns of those beside compiled models, and they miss keyword arguments
        def call(m: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_inside or threading.get_ident() != self._thread:
                return real(m, *args, **kwargs)
            self._is_inside = True
            try:
                owner = self._guarded(self._begin, m, args or kwargs)
                output = real(m, *args, **kwargs)
                if owner is not None and owner.watch is not None:
                    self._guarded(owner.watch.report_pred, output)
            finally:
                self._is_inside = False
            return output

        return call

    def _going_back(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_backward or self._n_fits or in_backward() or threading.get_ident() != self._thread:
                return real(loss, *args, **kwargs)
            self._is_backward = True  # a subclass of Tensor comes here twice
            try:
                self._guarded(self._tell, loss)
                return real(loss, *args, **kwargs)
            finally:
                self._is_backward = False

        return backward

    def _scaling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = real(scaler, outputs)
            if isinstance(scaled, Tensor) and scaled is not outputs:
                self._unscaled[scaled] = outputs, scaler
            return scaled

        return scale

    def _grouping(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def add_param_group(opt: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = real(opt, *args, **kwargs)
            if not self._n_fits and not isinstance(opt, StepByHand):  # else a Learner's, or one of ours
                self._guarded(self._note_group, opt)
            return result

        return add_param_group

    def _note_group(self, opt: Optimizer) -> None:
        if opt not in self._name_of:
            kind = type(opt).__name__
            n = sum(name.partition(" ")[0] == kind for name in self._names)
            self._name_of[opt] = f"{kind} ({n + 1})" if n else kind
            self._names.append(self._name_of[opt])
        for p in opt.param_groups[-1]["params"]:
            self._optimizers.setdefault(p, []).append(self._name_of[opt])

    def _note_step(self, opt: Optimizer, *seen: Any) -> None:
        self._stepped |= {self._name_of[opt]} if opt in self._name_of else set()

    def _of_model(self, model: nn.Module) -> tuple[str, ...]:
        """The names of the optimizers that have parameters of it, in the order in which they were made."""
        found = {name for p in model.parameters() for name in self._optimizers.get(p, ())}
        return tuple(name for name in self._names if name in found)

    def _fitting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def fit(learn: Learner, n_epoch: int, lr: float | None = None, cbs: Any = (), **options: Any) -> Any:
            cbs = [cbs] if isinstance(cbs, Callback | type) else list(cbs)
            own = next((cb for cb in [*learn.cbs, *cbs] if isinstance(cb, Diagnose) or cb is Diagnose), None)
            if own is None and not any(isinstance(cb, LRFinder) for cb in cbs):
                own = Diagnose(_say_sick, show=False, name="script_diagnosis")
                cbs.append(own)
            for model in [model for model in self._open if model.model is learn.model]:
                self._close(model)
            self._n_fits += 1
            try:
                return real(learn, n_epoch, lr, cbs, **options)
            finally:
                self._n_fits -= 1
                self._add_verdict(learn, own)

        return fit

    def _add_verdict(self, learn: Learner, own: Any) -> None:
        """Of a fit that has ended, in which `own` looked on, unless that was a preflight."""
        if isinstance(own, type):
            own = next((cb for cb in vars(learn).values() if type(cb) is own), None)
        if isinstance(own, Diagnose) and own.name != PREFLIGHT and own.verdict is not None:
            names = self._of_model(learn.model) or (type(learn.opt).__name__,)
            title = self._title(learn.model)
            self._all.append(_Model(title, None, None, own.verdict, True, optimizers=names, steppers=names))

    # ---- models

    def _begin(self, m: nn.Module, given: Any) -> _Model | None:
        """The outermost call of a module begins; gives the model where its parts are to be followed."""
        if self._n_fits or in_backward() or not torch.is_grad_enabled():
            return None
        model = self._of.get(m)
        if model is None and any(p.requires_grad for p in m.parameters()):
            model = self._meet(m)
        if model is None or model.watch is None:
            return None
        if self._open[-1] is not model:
            self._open.remove(model)
            self._open.append(model)
        if model.model is m or not m.training or not model.is_by_parts:
            return None
        if not model.watch.is_waiting:
            model.watch.begin_batch(True, given)
        return model  # type: ignore[no-any-return]  # of a dictionary without types

    def _meet(self, m: nn.Module) -> _Model | None:
        """Of a module that is called for the first time the model, which is watched from now on."""
        for model in self._open:
            if model.model is not None and _has_part(model.model, m):
                self._of[m] = model
                return model
        root = _owner_at_work(m)
        if root is None or any(is_lazy(p) for p in root.parameters()):
            return None
        for part in [model for model in self._open if model.model and _has_part(root, model.model)]:
            self._close(part)
            if not part.is_trained:  # it was tried by itself, and is looked at as a part from now on
                self._all.remove(part)
        if len(self._open) == MOST:
            self._close(self._open[0])
        return self._watch(root)

    def _watch(self, root: nn.Module) -> _Model:
        model = _Model(self._title(root), root)
        for part in root.modules():
            self._of[part] = model
        try:
            model.watch = _ScriptWatch(root, [], [Diagnose(_say_sick, show=False)], None)
        except Exception as error:
            self.notes.append(f"{model.title} could not be watched: {error!r}")
            return model
        self._all.append(model)
        self._open.append(model)
        return model

    def _title(self, root: nn.Module) -> str:
        kind = type(without_compile_wrapper(root)).__name__
        n = sum(model.title.partition(" ")[0] == kind for model in self._all)
        return f"{kind} ({n + 1})" if n else kind

    def _close(self, model: _Model, error: BaseException | None = None) -> None:
        self._open.remove(model)
        watch = model.watch
        if model.model is not None:
            model.optimizers = self._of_model(model.model)
            model.steppers = tuple(name for name in model.optimizers if name in self._stepped)
        self._guarded(model.close, error)
        if watch is not None and watch.failure is not None:
            self.notes.append(
                f"the verdict on {model.title} is of what was seen until "
                f"{told_failure('a part of hookcb', watch.failure)}"
            )

    def _close_all(self, error: BaseException | None) -> None:
        for model in list(self._open):
            self._close(model, error)
        self._note_unmoved()
        self._note_optimizers()

    # ---- losses

    def _tell(self, loss: Tensor) -> None:
        """Tells a loss to the model whose output it is made of, the last of those that it depends on.

        Where these have optimizers of their own it is told to none: in a game the loss of one player depends
        on the other's parameters too.
        """
        if loss.numel() != 1:
            return
        loss, scaler = self._unscaled.get(loss, (loss, None))
        waiting = [model for model in self._open if model.watch is not None and model.watch.is_waiting]
        concerned = waiting if len(waiting) < 2 else _concerned(loss, waiting)
        optimizers = {frozenset(model.watch.optimizers) for model in concerned if model.watch}
        is_common = len(concerned) < 2 or (len(optimizers) == 1 and optimizers != {frozenset()})
        for model in concerned:
            watch: Any = model.watch
            watch.scaler = scaler or watch.scaler
            # of a game, where players take turns, it is nobody's
            takes_turns = not is_common or (model.is_by_parts and len(watch.optimizers) > 1)
            if model is concerned[-1] and not takes_turns:
                watch.tell(loss)
            else:
                watch.follow(loss)

    # ---- nothing of ours breaks the script

    def _guarded(self, look: Callable[..., Any], *args: Any) -> Any:
        try:
            return look(*args)
        except Exception as error:
            return self._note(error)

    def _note(self, error: Exception) -> None:
        note = told_failure("a part of hookcb", error)
        if note not in self.notes:
            self.notes.append(note)


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def _has_part(root: nn.Module, m: nn.Module) -> bool:
    return any(part is m for part in root.modules())


def _owner_at_work(m: nn.Module) -> nn.Module | None:
    """The outermost module whose method is in progress and that `m` is a part of, else `m`.

    None where a module is being made, which tries a part of it to learn a shape.
    """
    frame: FrameType | None = sys._getframe(1)
    root = m
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # self, by any name
        if isinstance(owner, nn.Module):
            if code.co_name == "__init__":
                return None
            root = owner if _has_part(owner, root) else root
        frame = frame.f_back
    return root


def _concerned(loss: Tensor, waiting: list[_Model]) -> list[_Model]:
    """Of several models that wait for a backward those that the loss depends on, in the order of calls."""
    params = {id(p): model for model in waiting if model.model for p in model.model.parameters()}
    reached = {id(model) for leaf in _leaves(loss.grad_fn) if (model := params.get(id(leaf)))}
    return [model for model in waiting if id(model) in reached]


def _leaves(node: Any) -> Iterator[Tensor]:
    """The tensors that gradients come to."""
    waiting, seen = [node], {node, None}
    while waiting and len(seen) < MOST_NODES:
        now = waiting.pop()
        if now is None:
            continue
        if (leaf := getattr(now, "variable", None)) is not None:
            yield leaf
        new = {behind for behind, _ in now.next_functions} - seen
        seen |= new
        waiting.extend(new)
