"""Finds each model that a script trains, and watches it."""

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hookcb.cli.optimizer_names import OptimizerNames, numbered
from hookcb.cli.ownership import has_part, models_behind, owner_at_work
from hookcb.cli.tracked_model import ScriptWatch, TrackedModel, say_sick
from hookcb.core.callback_list import listed
from hookcb.core.shards import plain_class
from hookcb.core.torch_private import in_backward
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.failures import describe_failure
from hookcb.diagnosis.reader import by_command
from hookcb.diagnosis.verdict import Verdict
from hookcb.gradients.hand_steps import StepByHand
from hookcb.hooks.modules import without_wrappers
from hookcb.hooks.optimizer_steps import StepHook
from hookcb.loops.learner import Learner
from hookcb.loops.lr_find import LRFinder
from hookcb.loops.preflight import NAME as PREFLIGHT
from hookcb.report.collect import collect
from hookcb.report.data import PageData

MAX_MODELS = 4  # watched at a time, as their memory is held until their verdict
UNSEEN = "none of .* was seen in the first batch"  # a warning of callbacks


class ModelTracker:
    """Finds and watches each model that is trained in this thread during `watching`.

    Args:
        makes_pages: whether to collect what a page shows of each model.

    Attributes:
        notes: sentences for the user about what could not be watched, and why.
    """

    def __init__(self, makes_pages: bool = False) -> None:
        self._makes_pages = makes_pages
        self.notes: list[str] = []
        self._all: list[TrackedModel] = []
        self._open: list[TrackedModel] = []  # being watched, the most recently called one last
        self._model_of: Any = WeakIdKeyDictionary()  # from modules to the model they belong to
        self._unscaled: Any = WeakIdKeyDictionary()  # from scaled losses to the loss, and its GradScaler
        self._optimizers = OptimizerNames()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._in_call = self._in_backward = False
        self._n_fits = 0  # fits of a Learner in progress
        self._is_fork = False  # whether the script has forked this process

    def verdicts(self) -> list[tuple[str, Verdict, bool]]:
        """Heading and verdict of each model that was meant to be trained, and whether the verdict counts."""
        shown = [m for m in self._all if m.is_part_of_result]
        return [(m.heading, m.verdict, m.counts) for m in shown if m.verdict is not None]

    def pages(self) -> list[tuple[str, PageData]]:
        """Heading and page of each model that has a verdict."""
        return [(m.heading, m.page) for m in self._all if m.is_part_of_result and m.page is not None]

    def _note_optimizers(self) -> None:
        named = {name for m in self._all for name in m.optimizers}
        for name in self._optimizers.names:
            if name not in named:
                called = "that was called in the main thread with gradients on"
                self.notes.append(f"{name} has no parameters of a model {called}")
            elif name not in self._optimizers.stepped:
                self.notes.append(f"{name} made no step")

    def _note_unmoved(self) -> None:
        for title in [m.title for m in self._all if m.has_gradients and not m.is_trained]:
            self.notes.append(
                f"{title} got gradients, but its parameters were not moved, neither by an optimizer nor by "
                "hand; to train it, call step() of an optimizer that has its parameters()"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches all training in a `with` block; afterwards torch is as it was."""
        with ExitStack() as stack:
            stack.enter_context(by_command())
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", UNSEEN, UserWarning)  # the verdict says what was not observed
            stack.enter_context(_replaced(nn.Module, "__call__", self._wrap_call))
            stack.enter_context(_replaced(Tensor, "backward", self._wrap_backward))
            stack.enter_context(_replaced(torch.amp.GradScaler, "scale", self._wrap_scale))
            stack.enter_context(_replaced(Learner, "fit", self._wrap_fit))
            stack.enter_context(_replaced(Optimizer, "add_param_group", self._wrap_add_param_group))
            stack.callback(StepHook(self._note_step, after=True).remove)
            try:
                yield
            except BaseException as error:
                self._close_all(error)  # inside the except, as a verdict looks at the error being raised
                raise
            self._close_all(None)

    # ---- wrappers of methods of torch and hookcb

    def _wrap_call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        # not a global hook: torch warns about those on compiled models, and they miss keyword arguments
        def call(m: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._in_call or threading.get_ident() != self._thread:
                return real(m, *args, **kwargs)
            self._in_call = True
            try:
                owner = self._guarded(self._begin_call, m, args or kwargs)
                output = real(m, *args, **kwargs)
                if owner is not None and owner.watch is not None:
                    self._guarded(owner.watch.report_pred, output)
            finally:
                self._in_call = False
            return output

        return call

    def _wrap_backward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._in_backward or self._n_fits or in_backward() or threading.get_ident() != self._thread:
                return real(loss, *args, **kwargs)
            self._in_backward = True  # a subclass of Tensor comes here twice
            try:
                self._guarded(self._report_loss, loss)
                return real(loss, *args, **kwargs)
            finally:
                self._in_backward = False

        return backward

    def _note_step(self, opt: Optimizer, *seen: Any) -> None:
        self._guarded(self._optimizers.note_step, opt)

    def _wrap_scale(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = real(scaler, outputs)
            if isinstance(scaled, Tensor) and scaled is not outputs:
                self._guarded(self._unscaled.__setitem__, scaled, (outputs, scaler))
            return scaled

        return scale

    def _wrap_add_param_group(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def add_param_group(opt: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = real(opt, *args, **kwargs)
            if not self._n_fits and not isinstance(opt, StepByHand):  # created by the script itself
                self._guarded(self._optimizers.note_group, opt)
            return result

        return add_param_group

    def _wrap_fit(self, real: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        @wraps(real)
        def fit(learn: Learner, *args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(learn, *args, **kwargs)
            except TypeError:
                return real(learn, *args, **kwargs)  # which says what is wrong
            cbs = given.arguments["cbs"] = listed(given.arguments.get("cbs"))
            attached = [cb for cb in [*learn.cbs, *cbs] if _is_diagnose(cb)]
            diagnose = attached[0] if attached else None
            if diagnose is None and not any(isinstance(cb, LRFinder) for cb in cbs):
                diagnose = Diagnose(say_sick, show=False, name="script_diagnosis")
                cbs.append(diagnose)
            self.begin_anew()
            for model in [model for model in self._open if model.model is learn.model]:
                self._close(model)
            self._n_fits += 1
            try:
                return real(*given.args, **given.kwargs)
            finally:
                self._n_fits -= 1
                self._guarded(self._add_verdict, learn, diagnose)

        return fit

    def _add_verdict(self, learn: Learner, diagnose: Any) -> None:
        """Adds the verdict of a fit that has ended, unless the fit was a preflight."""
        if isinstance(diagnose, type):
            diagnose = next((cb for cb in vars(learn).values() if type(cb) is diagnose), None)
        if isinstance(diagnose, Diagnose) and diagnose.name != PREFLIGHT and diagnose.verdict is not None:
            names = self._optimizers.names_for(learn.model) or (type(learn.opt).__name__,)
            model = TrackedModel(self._title(learn.model), None, verdict=diagnose.verdict, is_trained=True)
            model.optimizers = model.steppers = names
            model.page = collect(learn) if self._makes_pages else None
            self._all.append(model)

    # ---- models

    def begin_anew(self) -> bool:
        """Forgets the models of the process that this one was forked from; True if it has none of its own."""
        if os.getpid() != self._process:
            self._process, self._is_fork = os.getpid(), True
            self._all, self._open, self.notes = [], [], []
            self._model_of = WeakIdKeyDictionary()
        return self._is_fork and not self._all

    def _begin_call(self, m: nn.Module, inputs: Any) -> TrackedModel | None:
        """Handles the start of an outermost call; returns its model if a method of the model makes it."""
        self.begin_anew()
        if self._n_fits or in_backward() or not torch.is_grad_enabled():
            return None
        model = self._model_of.get(m)
        if model is None and any(p.requires_grad for p in m.parameters()):
            model = self._find_model(m)
        if model is None or model.watch is None:
            return None
        if self._open[-1] is not model:
            self._open.remove(model)
            self._open.append(model)
        if model.model is m or not m.training or not model.is_by_parts:
            return None
        if not model.watch.is_waiting:
            model.watch.begin_batch(True, inputs)
        return model  # type: ignore[no-any-return]  # the dictionary is untyped

    def _find_model(self, m: nn.Module) -> TrackedModel | None:
        """Finds the model of a module that is called for the first time, and begins to watch a new one."""
        for model in self._open:
            if model.model is not None and has_part(model.model, m):
                self._model_of[m] = model
                return model
        root = owner_at_work(m)
        if root is None or any(is_lazy(p) for p in root.parameters()):
            return None
        for part in [model for model in self._open if model.model and has_part(root, model.model)]:
            self._close(part)
            if not part.is_trained:  # it was only tried out, and is watched as a part of `root` from now on
                self._all.remove(part)
        if len(self._open) == MAX_MODELS:
            self._close(self._open[0])
        return self._watch(root)

    def _watch(self, root: nn.Module) -> TrackedModel:
        model = TrackedModel(self._title(root), root, makes_page=self._makes_pages)
        for part in root.modules():
            self._model_of[part] = model
        try:
            model.watch = ScriptWatch(root, [], [Diagnose(say_sick, show=False)], None)
        except Exception as error:
            self.notes.append(f"{model.title} could not be watched: {error!r}")
            return model
        self._all.append(model)
        self._open.append(model)
        return model

    def _title(self, root: nn.Module) -> str:
        kind = plain_class(without_wrappers(root)).__name__
        return numbered(kind, [model.title for model in self._all])

    def _close(self, model: TrackedModel, error: BaseException | None = None) -> None:
        self._open.remove(model)
        watch = model.watch
        if model.model is not None:
            model.optimizers = self._guarded(self._optimizers.names_for, model.model) or ()
            model.steppers = tuple(name for name in model.optimizers if name in self._optimizers.stepped)
        self._guarded(model.close, error)
        if watch is not None and watch.failure is not None:
            self.notes.append(
                f"the verdict on {model.title} covers what was seen until "
                f"{describe_failure('a part of hookcb', watch.failure)}"
            )

    def _close_all(self, error: BaseException | None) -> None:
        if self.begin_anew():
            return
        for model in list(self._open):
            self._close(model, error)
        self._note_unmoved()
        self._note_optimizers()

    # ---- losses

    def _report_loss(self, loss: Tensor) -> None:
        """Reports a loss to the last model that it depends on.

        If it depends on several models with different optimizers, it is reported to none of them: in a GAN,
        the loss of one network depends on the parameters of the other too.
        """
        if loss.numel() != 1:
            return
        loss, scaler = self._unscaled.get(loss, (loss, None))
        waiting = [model for model in self._open if model.watch is not None and model.watch.is_waiting]
        concerned = waiting if len(waiting) < 2 else models_behind(loss, waiting)
        optimizers = {frozenset(model.watch.optimizers) for model in concerned if model.watch}
        is_common = len(concerned) < 2 or (len(optimizers) == 1 and optimizers != {frozenset()})
        for model in concerned:
            watch: Any = model.watch
            watch.scaler = scaler or watch.scaler
            # networks that take turns, as in a GAN: it belongs to none of them
            takes_turns = not is_common or (model.is_by_parts and len(watch.optimizers) > 1)
            if model is concerned[-1] and not takes_turns:
                watch.tell(loss)
            else:
                watch.follow(loss)

    def _guarded(self, act: Callable[..., Any], *args: Any) -> Any:
        """Calls `act`; an error in it becomes a note, and is not raised into the script."""
        try:
            return act(*args)
        except Exception as error:
            note = describe_failure("a part of hookcb", error)
            if note not in self.notes:
                self.notes.append(note)


def _is_diagnose(cb: Any) -> bool:
    """Whether a callback is a `Diagnose`, or a class that makes one."""
    return isinstance(cb, Diagnose) or (isinstance(cb, type) and issubclass(cb, Diagnose))


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)
