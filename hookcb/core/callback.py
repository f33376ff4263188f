"""Callback: acts at the events of a loop."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import getattr_static, signature
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from fastcore.basics import camel2snake
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core import orders
from hookcb.core.arguments import NAMED, hinted, unknown_argument
from hookcb.core.events import BATCH_EVENTS, Event, event_meant, looks_like_event
from hookcb.core.state import TrainingState

T = TypeVar("T")


class LoopState(Generic[T]):
    """A part of the loop's state as a read-only attribute of every callback attached to it."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, cb: None, owner: type) -> "LoopState[T]": ...
    @overload
    def __get__(self, cb: "Callback", owner: type) -> T: ...
    def __get__(self, cb: "Callback | None", owner: type) -> "LoopState[T] | T":
        if cb is None:
            return self
        value: T = getattr(cb.learn, self.name)
        return value

    def __set__(self, cb: "Callback", value: T) -> None:
        kind = type(cb).__name__
        raise AttributeError(f"{kind}.{self.name} is read-only, set self.learn.{self.name} instead")


class _Detached:
    """Descriptor of `learn` while a callback is not attached; raises an error that says so."""

    def __get__(self, cb: "Callback | None", owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} is not attached to a learner; pass it as cbs= or to add_cb")


class _Switch:
    """A class attribute that decides when a callback acts; a change on an instance reaches the loop."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default

    def __get__(self, cb: "Callback | None", owner: type) -> Any:
        return self.default if cb is None else cb.__dict__.get(self.name, self.default)

    def __set__(self, cb: "Callback", value: Any) -> None:
        cb.__dict__[self.name] = value
        if "learn" in cb.__dict__:
            cb.learn.build_dispatch()


class Callback:
    """Acts at the events of a loop, by methods named like events, or by functions passed as arguments.

    In them, the loop's state can be read as `self.pred`, `self.loss` …; to change it, set `self.learn.loss`.
    Callbacks act in the order of their `order`, lower first, then in the order in which they were added.

    Args:
        name: its name as an attribute, `learn.<name>`; by default the class name in snake case without
            "Callback".
        **functions: by event name, called as `f(callback)`.

    Raises:
        TypeError: If a method or an argument is named like an event that does not exist, such as
            `after_bacth` or Lightning's `on_train_batch_end`; for a method, when its class is defined.

    >>> from hookcb import Callback, synth_learner
    >>> class CountBatches(Callback):
    ...     def before_fit(self):
    ...         self.n = 0
    ...     def after_batch(self):
    ...         self.n += self.training
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=CountBatches())
    >>> learn.count_batches.n
    10
    """

    default_name: str = ""  # its name if it is given none; "" is the class name in snake case, see `name`
    learn: TrainingState = _Detached()  # type: ignore[assignment]  # the loop, while attached
    order: int = orders.READ
    run: bool = True
    run_train: bool = True
    run_valid: bool = True
    run_lr_find: bool = True  # whether it takes part in learn.lr_find, as a copy
    may_cancel: frozenset[str] = frozenset()  # levels inside a batch that it may cancel on some ranks only
    shows_only: bool = False  # whether it only shows or logs, so that some ranks may lack it
    has_rank_state: bool = False  # whether its `state_dict` differs by rank, as the losses of a shard do
    hook_options: tuple[str, ...] = ()  # names of arguments that a subclass passes on to its hooks

    model = LoopState[nn.Module]("The model being trained.")
    opt = LoopState[Optimizer]("The optimizer.")
    xb = LoopState[Any]("The inputs of the batch: a tuple, or a mapping of keyword arguments.")
    yb = LoopState[tuple[Any, ...]]("The targets of the batch.")
    x = LoopState[Any]("The input of the batch; all of `xb` if there are several.")
    y = LoopState[Any]("The target of the batch; all of `yb` if there are several.")
    pred = LoopState[Any]("What the model returned for the batch.")
    loss = LoopState[Tensor]("The loss of the batch, a 0-d tensor.")
    dl = LoopState[Any]("The loader the batches come from.")
    epoch = LoopState[int]("Index of the epoch in this fit, from 0.")
    n_epoch = LoopState[int]("Number of epochs this fit runs.")
    iter = LoopState[int]("Index of the batch in its epoch's training or validation, from 0.")
    n_iter = LoopState[int | None]("Number of batches in `dl`, None if it has no length.")
    train_iter = LoopState[int]("Number of training batches of this fit that ended before this one.")
    pct_train = LoopState[float]("Share of the fit's training that is done, from 0 to 1.")
    training = LoopState[bool]("Whether this is the training phase, and not the validation.")

    def __init__(self, *, name: str | None = None, **functions: Callable[[Any], object]) -> None:
        if name is not None:
            self.name = name
        for event, function in functions.items():
            _check_argument(type(self), event)
            if not callable(function):
                raise TypeError(f"{event} must be a function that takes the callback, got {function!r}")
            self.__dict__[event] = MethodType(function, self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for attribute in dir(cls):
            if looks_like_event(attribute) and callable(getattr_static(cls, attribute)):
                _check_event(attribute)
        _make_switches(cls)
        if "__init__" in vars(cls) and _is_ours(cls):
            cls.__init__ = hinted(cls.__init__)  # type: ignore[method-assign]

    if not TYPE_CHECKING:  # else a type checker would assume that every attribute exists

        def __getattr__(self, name: str) -> Any:
            # other trainers look these up in their own callbacks
            if name == "state_key" or name.startswith("on_"):
                raise AttributeError(_WRONG_TRAINER.format(type(self).__name__))
            return object.__getattribute__(self, name)  # raises the same error again

    @property
    def name(self) -> str:
        """Name of its attribute of the loop: `learn.<name>`."""
        named: str | None = self.__dict__.get("_name")
        kind = type(self).__name__.removesuffix("Callback") or "Callback"
        return named or self.default_name or camel2snake(kind)

    @name.setter
    def name(self, name: str) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"name must be an identifier, as in learn.<name>, got {name!r}")
        if "learn" in self.__dict__:
            raise AttributeError(f"{self.name} is attached; rename it before you add it to a learner")
        self.__dict__["_name"] = name

    @property
    def phase_state(self) -> dict[str, Any]:
        """State of this callback for the phase in progress; a nested validation has its own."""
        return self.learn.phase_state[id(self)]

    def wrapping_model(self, name: str) -> AbstractContextManager[object]:
        """The context of each fit, validation and prediction of a Learner, whatever its events.

        It is entered before the optimizer is made and the ranks are found, so a callback that replaces the
        model or the loaders does that here, and undoes it; a validation in a fit enters it a second time.

        Args:
            name: what was called, "learn.fit".
        """
        return nullcontext()

    def handler(self, event: str) -> Callable[[], object] | None:
        """The method or function that acts at `event`, or None."""
        method: Callable[[], object] = getattr(self, event)
        return None if getattr(method, "__func__", None) is getattr(Callback, event) else method

    def takes_error(self, error: Exception, event: str) -> bool:
        """Whether the loop goes on after an error of this callback, which tells of it; False by default."""
        return False

    def acts(self, event: str, training: bool) -> bool:
        """Whether it acts at an event: depends on `run` and, in batches, on `run_train` or `run_valid`."""
        return self.run and (event not in BATCH_EVENTS or (self.run_train if training else self.run_valid))

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed fit needs, as it is between events; empty by default.

        Values are None, bool, int, float, str, tensors, and lists, tuples and dicts of these.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; called in a resumed fit before its first batch."""

    def __repr__(self) -> str:
        given = [f"name={self.name!r}"] if "_name" in self.__dict__ else []
        given += [event for event in Event if event in self.__dict__]
        return f"{type(self).__name__}({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        # a copy is not attached, and unpickling would look up a bound function by its own name
        state = {key: value for key, value in self.__dict__.items() if key != "learn"}
        return state | {event: state[event].__func__ for event in Event if event in state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        functions = {event: MethodType(state[event], self) for event in Event if event in state}
        self.__dict__.update(state, **functions)

    def before_fit(self) -> None:
        """A fit begins: discard the results of the last one."""

    def before_epoch(self) -> None:
        """An epoch begins."""

    def before_train(self) -> None:
        """The training phase of an epoch begins; the model is in train mode."""

    def before_batch(self) -> None:
        """`xb` and `yb` are set, on the model's device."""

    def after_pred(self) -> None:
        """`pred` is set."""

    def after_loss(self) -> None:
        """`loss` is set."""

    def before_backward(self) -> None:
        """The backward pass begins."""

    def after_cancel_backward(self) -> None:
        """The backward pass was cancelled."""

    def after_backward(self) -> None:
        """The gradients of this batch are added; a GradScaler has not unscaled them yet."""

    def before_step(self) -> None:
        """Gradients are complete and unscaled; they are clipped here too, at the order of clipping."""

    def after_cancel_step(self) -> None:
        """The optimizer's step was cancelled; gradients stay."""

    def after_step(self) -> None:
        """Parameters are updated; gradients are still there."""

    def after_cancel_batch(self) -> None:
        """The batch was cancelled: `after_batch` comes next, and the batch should not count."""

    def after_batch(self) -> None:
        """The batch has ended."""

    def after_cancel_train(self) -> None:
        """The training phase was cancelled."""

    def after_train(self) -> None:
        """The training phase of an epoch has ended."""

    def before_validate(self) -> None:
        """The validation begins; the model is in eval mode, gradients are off."""

    def after_cancel_validate(self) -> None:
        """The validation was cancelled."""

    def after_validate(self) -> None:
        """The validation has ended."""

    def after_cancel_epoch(self) -> None:
        """The epoch was cancelled."""

    def after_epoch(self) -> None:
        """The epoch has ended."""

    def after_cancel_fit(self) -> None:
        """The fit was cancelled."""

    def after_fit(self) -> None:
        """The fit has ended, even if by an error: release resources."""


_WRONG_TRAINER = (
    "{0} is a callback of hookcb; for Lightning wrap it in hookcb.adapters.lightning.HookcbCallback({0}(…)), "
    "for Hugging Face in hookcb.adapters.transformers.HookcbCallback({0}(…)); in other loops use hookcb.watch"
)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == __package__.partition(".")[0]


def _check_event(name: str) -> None:
    if name not in set(Event):
        meant = event_meant(name)
        hint = f"did you mean {meant.value!r}?" if meant else f"events are {', '.join(Event)}"
        raise TypeError(f"unknown event {name!r}; {hint}")


def _check_argument(cls: type[Callback], name: str) -> None:
    if name in set(Event) or looks_like_event(name):
        return _check_event(name)
    raise unknown_argument(cls.__name__, name, _parameters(cls), ", and functions named like events")


def _parameters(cls: type[Callback]) -> list[str]:
    """Names of the arguments of `cls`, including those that it passes on to its bases."""
    inits = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    params = [param for init in inits for param in list(signature(init).parameters.values())[1:]]
    names = [param.name for param in params if param.kind in NAMED]
    return list(dict.fromkeys([*names, *cls.hook_options]))


def _make_switches(cls: type[Callback]) -> None:
    """Turns plain values of `order`, `run` … on a class into switches that keep them as their default."""
    for name in ("order", "run", "run_train", "run_valid"):
        value = getattr_static(cls, name)
        if not hasattr(value, "__get__"):
            setattr(cls, name, _Switch(name, value))


_make_switches(Callback)
