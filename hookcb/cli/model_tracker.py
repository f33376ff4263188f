"""Finds each model that a script trains, and watches it."""

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hookcb.cli.config import Config
from hookcb.cli.ignored import Scope
from hookcb.cli.limits import EndAtLimit, Limit, LimitReached
from hookcb.cli.live import ScriptReport
from hookcb.cli.optimizer_names import OptimizerNames, foreign_optimizers
from hookcb.cli.ownership import (
    belongs,
    gives_to_loss,
    has_part,
    kept_by_script,
    models_behind,
    owner_at_work,
    shared,
)
from hookcb.cli.ranks import Exit
from hookcb.cli.tracked_model import ScriptWatch, TrackedModel, kind_of, say_sick
from hookcb.cli.unseen import WITHOUT_GRAD, how_called, why_unseen
from hookcb.core.call_hook import CallHook, Observer
from hookcb.core.callback import Callback
from hookcb.core.callback_list import listed
from hookcb.core.restore import preserve_attribute
from hookcb.core.torch_private import in_backward
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.failures import describe_failure
from hookcb.diagnosis.heard import EARS, listen
from hookcb.diagnosis.reader import by_command
from hookcb.diagnosis.verdict import Verdict
from hookcb.gradients.hand_steps import StepByHand
from hookcb.hooks.modules import has_params, without_wrappers
from hookcb.hooks.optimizer_steps import StepHook
from hookcb.loops.learner import Learner
from hookcb.loops.loss_finder import Backward, LossFinder, is_real_scalar
from hookcb.loops.lr_find import LRFinder
from hookcb.loops.preflight import NAME as PREFLIGHT
from hookcb.report.collect import collect, with_series
from hookcb.report.data import PageData
from hookcb.report.live import LivePage, LiveServer, how_ended

N_ANEW = 2  # batches after which a model that turns out to be in another module has a verdict of its own
MAX_MODELS = 4  # watched at a time, as their memory is held until their verdict
UNSEEN = "none of .* was seen in the first batch"  # a warning of callbacks


class Result(NamedTuple):
    """Result of a model.

    Attributes:
        title: its class or name, and what has trained it.
        verdict: the verdict.
        counts: whether the exit code depends on the verdict.
        page: what a page shows, if one is wanted.
    """

    title: str
    verdict: Verdict
    counts: bool
    page: PageData | None = None


class ModelTracker:
    """Finds and watches each model that is trained in this thread during `watching`.

    Args:
        makes_pages: whether to collect what a page shows of each model.
        limit: ends the script; by default it does not.
        ignored: codes of findings to leave out, as `fnmatch` patterns.
        live: server that shows each model while it is trained, None for none; needs `makes_pages`.
        config: habits of the project: findings to leave out, too, and the share of batches to inspect.
        is_test: whether it watches a test: then it prints nothing, and does not expect whole trainings.

    Attributes:
        limit: the limit of the script.
        exit: agrees with other processes on the exit code.
        notes: sentences for the user about what could not be watched, and why.
        unseen: what an optimizer trains and why it was not seen, by its name; "" if a model was seen.
        n_losses_of_none: number of backwards of losses while no model was watched.
    """

    def __init__(
        self,
        makes_pages: bool = False,
        limit: Limit | None = None,
        ignored: Sequence[str] = (),
        live: LiveServer | None = None,
        config: Config | None = None,
        is_test: bool = False,
    ) -> None:
        self._makes_pages, self._live, self._is_test = makes_pages, live, is_test
        self._config, self.limit, self._how_ended = config or Config(), limit or Limit(), ""
        self._scope = Scope(ignored, self._config, self.limit, is_test)
        self.exit = Exit()
        self.notes: list[str] = []
        self._all: list[TrackedModel] = []
        self._open: list[TrackedModel] = []  # being watched, the most recently called one last
        self._model_of: Any = WeakIdKeyDictionary()  # from modules to the model they belong to
        self._optimizers = OptimizerNames()
        self.unseen: dict[str, str] = {}
        self.n_losses_of_none = 0
        self._called_aside: Any = WeakIdKeyDictionary()  # how modules are called that are not trained by it
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._is_closed = False
        self._n_fits = 0  # fits of a Learner in progress
        self._is_fork = False  # whether the script has forked this process

    def results(self, only_trained: bool = False) -> list[Result]:
        """Results of the models that were meant to be trained, or only of those that were."""
        shown = [m for m in self._all if m.is_part_of_result and (m.is_trained or not only_trained)]
        found = [(m, m.verdict) for m in shown]
        return [Result(m.heading, x, self._counts(m), m.page) for m, x in found if x is not None]

    def _counts(self, model: TrackedModel) -> bool:
        """Whether a verdict counts; not on a model whose training the script might begin after its limit."""
        is_unseen = model.verdict is not None and model.verdict.status == "unknown"
        return model.counts and not (is_unseen and self.limit.is_over)

    def explain(self, explain: Callable[[Verdict, str], Verdict]) -> None:
        """Replaces the first verdict for which `explain` has another one, given the class of the model."""
        for m in self._all:
            if m.is_part_of_result and m.verdict is not None:
                told = explain(m.verdict, m.kind)
                if told is not m.verdict:
                    m.verdict = told
                    if m.page is not None:
                        m.page.headline, m.page.verdict = told.headline, with_series(told, m.page)
                    return

    def _note_optimizers(self) -> None:
        named = {name for m in self._all for name in m.optimizers}
        for name in self._optimizers.names:
            if what := self.unseen.get(name):
                self.notes.append(f"{name} trains {what}")
            elif name not in named:
                called = "that was called in the main thread with gradients on"
                self.notes.append(f"{name} has no parameters of a model {called}")
            elif name not in self._optimizers.stepped:
                self.notes.append(f"{name} made no step")

    def _note_unmoved(self) -> None:
        for title in [m.title for m in self._all if m.has_gradients and not m.is_trained and m.is_trainable]:
            self.notes.append(
                f"{title} got gradients, but its parameters were not moved, neither by an optimizer nor by "
                "hand; to train it, call step() of an optimizer that has its parameters()"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches all training in a `with` block; afterwards torch is as it was."""
        with ExitStack() as stack:
            stack.enter_context(by_command())
            stack.callback(listen(EARS, from_start=True))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", UNSEEN, UserWarning)  # the verdict says what was not observed
            stack.enter_context(preserve_attribute([Learner], "fit", self._wrap_fit(Learner.fit)))
            for remove in self._hooks():
                stack.callback(remove)
            try:
                yield
            except BaseException as error:
                self.close(error)  # inside the except, as a verdict looks at the error being raised
                raise
            self.close()

    # ---- calls of torch and hookcb

    def _hooks(self) -> list[Callable[[], None]]:
        """Hooks torch; what removes each hook."""
        observe = partial(CallHook, failed=self._note_failure, in_forks=True)
        # not a global hook: torch warns about those on compiled models, and they miss keyword arguments
        return [
            observe(nn.Module, "__call__", self._observe_call, nested=False).remove,
            observe(Optimizer, "add_param_group", self._observe_add_param_group, all_threads=True).remove,
            LossFinder(self._note_failure, self._report_loss, in_forks=True).remove,
            StepHook(self._note_step, after=True, is_last=True).remove,
        ]

    def _observe_call(self, m: nn.Module, /, *args: Any, **kwargs: Any) -> Observer:
        self._guarded(self.limit.note_call, m)
        owner = self._begin_call(m, args or kwargs)
        output = yield
        if owner is not None and owner.watch is not None:
            owner.watch.report_pred(output)
        model = self._model_of.get(m)
        if model is not None and any(map(self.limit.note_step, model.new_steps_by_hand())):
            self.limit.end()  # as after the step of an optimizer

    def _note_step(self, opt: Optimizer, *seen: Any) -> None:
        self._guarded(self._optimizers.note_step, opt)
        self._guarded(self._look_for_model, opt)
        if not self._n_fits and self._guarded(self.limit.note_step, opt):
            self.limit.end()  # raises out of the step of the script, which has asked for it

    def _look_for_model(self, opt: Optimizer) -> None:
        """Learns at the first step of an optimizer why no model was seen that it trains, if so."""
        name = self._optimizers.name_of(opt)
        if not name or name in self.unseen or self._n_fits:
            return
        is_known = any(name in self._optimizers.names_for(m.model) for m in self._all if m.model is not None)
        is_here = threading.get_ident() == self._thread
        self.unseen[name] = why_unseen(opt, self._called_aside) if is_here and not is_known else ""

    def _observe_add_param_group(self, opt: Optimizer, /, *args: Any, **kwargs: Any) -> Observer:
        yield
        if not self._n_fits and not isinstance(opt, StepByHand):  # created by the script itself
            self._optimizers.note_group(opt)

    def _wrap_fit(self, real: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        @wraps(real)
        def fit(learn: Learner, *args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(learn, *args, **kwargs)
            except TypeError:
                return real(learn, *args, **kwargs)  # which says what is wrong
            cbs = given.arguments["cbs"] = listed(given.arguments.get("cbs"))
            with self._following(learn, cbs):
                return real(*given.args, **given.kwargs)

        return fit

    @contextmanager
    def _following(self, learn: Learner, cbs: list[Any]) -> Iterator[None]:
        """Follows a fit by callbacks, which it adds to those of the fit."""
        attached = [cb for cb in [*learn.cbs, *cbs] if self._observes(cb)]
        diagnose = attached[0] if attached else None
        if diagnose is None and not any(isinstance(cb, LRFinder) for cb in cbs):
            diagnose = self._observer("script_diagnosis")
            cbs.append(diagnose)
        is_training = getattr(diagnose, "name", "") != PREFLIGHT and diagnose is not None
        if self.limit and is_training:
            cbs.append(EndAtLimit(self.limit))
        live = self._reports(kind_of(learn.model)) if is_training else []
        cbs += live
        self.begin_anew()
        for model in [model for model in self._open if model.model is learn.model]:
            self._close(model)
        self._n_fits += 1
        try:
            yield
        finally:
            self._n_fits -= 1
            self._guarded(self._add_verdict, learn, diagnose, [cb.page for cb in live])
        if self.limit.is_over and is_training:
            self.limit.end()

    def _add_verdict(self, learn: Learner, diagnose: Any, live: Sequence[LivePage]) -> None:
        """Adds the verdict of a fit that has ended, unless the fit was a preflight."""
        if isinstance(diagnose, type):
            diagnose = next((cb for cb in vars(learn).values() if type(cb) is diagnose), None)
        if isinstance(diagnose, Diagnose) and diagnose.name != PREFLIGHT and diagnose.verdict is not None:
            names = self._optimizers.names_for(learn.model) or (type(learn.opt).__name__,)
            model = TrackedModel(kind_of(learn.model), "", None)
            model.verdict, model.is_trained = self._scope.last(diagnose.verdict), True
            model.optimizers = model.steppers = names
            model.page = collect(learn, model.verdict) if self._makes_pages else None
            model.live = next(iter(live), None)
            self._add(model)

    def _reports(self, title: str) -> list[ScriptReport]:
        """A callback that shows a model on a live page; none without a server."""
        return (
            []
            if self._live is None
            else [ScriptReport(self._live.page(title), self._scope.shown, self._note)]
        )

    def _note(self, text: str) -> None:
        self.notes += [text] * (text not in self.notes)

    def end_live(self, nothing: str) -> None:
        """Shows the end on the live pages, for a few seconds if they are open.

        Args:
            nothing: why there is no verdict, if there is none.
        """
        if self._live is None:
            return
        if nothing:
            self._live.pages[0].show(PageData(nothing))
        for m in self._all:
            self._show_end(m)
        self._live.end(self.limit.reached or self._how_ended)
        with suppress(KeyboardInterrupt):  # by somebody who does not want to wait
            self._live.close()

    def _show_end(self, model: TrackedModel) -> None:
        """Shows the verdict of a model on its live page."""
        if model.live is not None and model.page is not None:
            model.page.title = model.title
            model.live.show(model.page)

    def _observer(self, name: str | None = None) -> Callback:
        """A callback that watches a training."""
        on_sick: Any = "ignore" if self._is_test else self._say_sick
        budget: Any = {} if self._config.budget is None else {"budget": self._config.budget}
        return Diagnose(on_sick, show=False, name=name, **budget)

    def _observes(self, cb: Any) -> bool:
        """Whether a callback, or a class that makes one, watches a training as `_observer` does."""
        return isinstance(cb, Diagnose) or (isinstance(cb, type) and issubclass(cb, Diagnose))

    def _say_sick(self, verdict: Verdict) -> None:
        say_sick(self._scope.told(verdict))

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
        if self._n_fits:
            return None
        model = self._model_of.get(m)
        if in_backward() or not torch.is_grad_enabled():
            if model is None and self._called_aside.get(m) in (None, WITHOUT_GRAD):
                self._called_aside[m] = how_called()
            return None
        if model is None and self._is_to_be_trained(m):
            model = self._find_model(m)
        if model is None or model.watch is None:
            return None
        if model.foreign is None and model.watch.facts.n_moved_by_hand and model.model is not None:
            model.foreign = foreign_optimizers(model.model)
        if self._open[-1] is not model:
            self._open.remove(model)
            self._open.append(model)
        if model.model is m or not m.training or not model.is_by_parts or not has_part(model.model, m):
            return None
        if not model.watch.is_waiting:
            model.watch.begin_batch(True, inputs)
        return model  # type: ignore[no-any-return]  # the dictionary is untyped

    def _is_to_be_trained(self, m: nn.Module) -> bool:
        """Whether a module has parameters that are trained, or an optimizer has only frozen ones."""
        if any(p.requires_grad for p in m.parameters()):
            return True
        return not self._open and has_params(m) and bool(self._optimizers.without_trained())

    def _find_model(self, m: nn.Module) -> TrackedModel | None:
        """Finds the model of a module that is called for the first time, and begins to watch a new one."""
        for model in self._open:
            if model.model is not None and belongs(m, model.model):
                self._model_of[m] = model
                return model
        root = owner_at_work(m)
        if root is None or any(is_lazy(p) for p in root.parameters()):
            return None
        root, name = kept_by_script(root)
        for model in list(self._open):
            root = self._merged(model, root)
            if root is model.model:
                self._model_of[m] = model
                return model
        if len(self._open) == MAX_MODELS and not self._make_room(root):
            return None
        model = self._watch(root, name)
        self._model_of[m] = model
        return model

    def _make_room(self, root: nn.Module) -> bool:
        """Gives one of the open models its verdict, so that `root` can be watched; False if none can be."""
        bare = [m for m in self._open if m.model is not None and not self._optimizers.names_for(m.model)]
        # the others take turns with it if they have had one batch each so far
        done = [m for m in self._open if m.watch is not None and m.watch.seen["before_batch"] > 1]
        if bare and self._optimizers.names_for(root):
            done = bare
        if done:
            self._close(done[0])
            return True
        kind = kind_of(root)
        if self._optimizers.names_for(root):
            why = f"no more than {MAX_MODELS} models that are trained in turns are"
            self.notes.append(f"{kind} was not watched: {why}")
        for part in root.modules():
            self._model_of[part] = TrackedModel(kind, "", None)
        return False

    def _merged(self, model: TrackedModel, root: nn.Module) -> nn.Module:
        """The module to watch from now on: `root`, or what it has in common with an open model."""
        own, watch = model.model, model.watch
        if own is None or watch is None:
            return root
        if belongs(root, own):
            return own
        inside = shared(root, own)
        if inside is own and watch.seen["before_backward"] and without_wrappers(root) is not own:
            return own  # `root` was made around it meanwhile
        if inside is None and not has_part(root, own):
            return root
        # the same parameters in another module, which may be made anew for each step
        is_tried = inside is not None and watch.seen["before_batch"] <= N_ANEW
        self._close(model)
        is_sick = model.verdict is not None and model.verdict.primary is not None
        if not model.is_trained or (is_tried and not is_sick):
            self._all.remove(model)
            if self._live is not None and model.live is not None:
                self._live.give_back(model.live)
        return root if inside is None or inside is own else inside

    def _watch(self, root: nn.Module, name: str) -> TrackedModel:
        model = TrackedModel(kind_of(root), name, root, makes_page=self._makes_pages)
        for part in root.modules():
            self._model_of[part] = model
        try:
            opts = [] if model.is_trainable else self._optimizers.without_trained()
            live = self._reports(model.title)
            model.live = next((cb.page for cb in live), None)
            model.watch = ScriptWatch(root, opts, [self._observer(), *live], None)
        except Exception as error:
            self.notes.append(f"{model.title} could not be watched: {error!r}")
            return model
        self._add(model)
        self._open.append(model)
        return model

    def _add(self, model: TrackedModel) -> None:
        """Adds a model; models of one class are told apart by their variables, or numbered."""
        self._all.append(model)
        self.exit.begin()
        for kind in {m.kind for m in self._all}:
            alike = [m for m in self._all if m.kind == kind]
            names = [m.name for m in alike]
            for n, m in enumerate(alike, 1):
                is_known = len(alike) > 1 and m.name and names.count(m.name) == 1
                m.title = f"{m.name} ({kind})" if is_known else kind if n == 1 else f"{kind} ({n})"
                if m.live is not None:
                    m.live.title = m.title

    def _close(self, model: TrackedModel, error: BaseException | None = None) -> None:
        self._open.remove(model)
        watch = model.watch
        if model.model is not None:
            model.optimizers = self._guarded(self._optimizers.names_for, model.model) or ()
            model.steppers = tuple(name for name in model.optimizers if name in self._optimizers.stepped)
            if not model.optimizers:
                model.optimizers = model.steppers = model.foreign or ()
        self._guarded(model.close, error, self._scope.last)
        self._guarded(self._show_end, model)
        if watch is not None and watch.failure is not None:
            self.notes.append(
                f"the verdict on {model.title} covers what was seen until "
                f"{describe_failure('a part of hookcb', watch.failure)}"
            )

    def close(self, error: BaseException | None = None) -> None:
        """Gives each model that is being watched its verdict; a second call does nothing.

        Args:
            error: what has ended the script; once its limit is reached, that counts instead.
        """
        if self._is_closed or self.begin_anew():
            return
        self._is_closed, self._how_ended = True, how_ended(error)
        error = LimitReached() if error is not None and self.limit.is_over else error
        for model in list(self._open):
            self._close(model, error)
        for model in self._all:  # some were closed before their first step, to make room
            model.steppers = model.steppers or tuple(
                name for name in model.optimizers if name in self._optimizers.stepped
            )
            model.is_trained |= bool(model.steppers) and model.is_trainable
        self._note_unmoved()
        self._note_optimizers()
        self.notes += filter(None, [self.limit.note_of_end(), self._scope.note()])

    # ---- losses

    def _report_loss(self, backward: Backward) -> None:
        """Reports the loss of a backward that begins to the last model that it depends on.

        If it depends on several models with different optimizers, it is reported to none of them: in a GAN,
        the loss of one network depends on the parameters of the other too.
        """
        loss = backward.losses[0]
        is_loss = len(backward.losses) == 1 and is_real_scalar(loss)
        if self._n_fits or not is_loss or not backward.trains(self._open_params()):
            return
        self.n_losses_of_none += not self._open
        waiting = [model for model in self._open if model.watch is not None and model.watch.is_waiting]
        behind = concerned = waiting
        is_last_called = (
            bool(waiting) and waiting[0] is self._open[-1]
        )  # else another one, or a part of it, is
        if len(waiting) > 1 or (waiting and not is_last_called):
            behind = models_behind(loss, self._open) or waiting[: len(waiting) == 1]
            concerned = [model for model in waiting if model in behind]
            for model in waiting:
                model.watch.facts.n_beside += model not in concerned  # type: ignore[union-attr]
        optimizers = {frozenset(model.watch.optimizers) for model in behind if model.watch}
        is_common = len(behind) < 2 or (len(optimizers) == 1 and optimizers != {frozenset()})
        for model in concerned:
            watch: Any = model.watch
            watch.scaler = backward.scaler or watch.scaler
            # networks that take turns, as in a GAN: it belongs to none of them
            takes_turns = not is_common or (model.is_by_parts and len(watch.optimizers) > 1)
            if model is concerned[-1] and not takes_turns:
                watch.tell(loss)
            else:
                gives = not watch.optimizers and gives_to_loss(model, loss, self._open)
                watch.follow(loss, gives)

    def _open_params(self) -> Iterator[nn.Parameter]:
        return (p for m in self._open if m.model is not None for p in m.model.parameters())

    def _guarded(self, act: Callable[..., Any], *args: Any) -> Any:
        """Calls `act`; an error in it becomes a note, and is not raised into the script."""
        try:
            return act(*args)
        except Exception as error:
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        self._note(describe_failure("a part of hookcb", error))
