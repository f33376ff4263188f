"""Helpers for testing callbacks: a small learner, counting hooks, and the contract of callbacks."""

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import nn

from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks
from hookcb.core.events import LEVELS, Event
from hookcb.core.torch_private import HOOK_KINDS
from hookcb.loops.learner import Learner


def synth_learner(
    n_train: int = 10,
    n_valid: int = 2,
    bs: int = 16,
    lr: float = 0.05,
    seed: int = 0,
    cbs: Callbacks = (),
    **kwargs: Any,
) -> Learner:
    """Creates a learner for a small regression, `y = 3x + 2` with noise, that trains in milliseconds.

    Args:
        n_train: number of training batches.
        n_valid: number of validation batches; 0 for no validation.
        bs: samples in a batch; inputs and targets are float32 `(bs, 1)`.
        lr: learning rate of plain SGD.
        seed: seed of data and weights; torch's global generator is not changed.
        cbs: callbacks.
        **kwargs: arguments of `Learner` that replace the defaults here.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        batches = [(x, 3 * x + 2 + 0.1 * torch.randn(bs, 1)) for x in torch.randn(n_train + n_valid, bs, 1)]
        model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    defaults: dict[str, Any] = {
        "dls": (batches[:n_train], batches[n_train:] or None),
        "model": model,
        "loss_func": nn.functional.mse_loss,
        "opt_func": torch.optim.SGD,
        "lr": lr,
    }
    return Learner(**(defaults | kwargs), cbs=cbs)


def count_hooks(model: nn.Module) -> int:
    """Number of hooks of all kinds on the modules and parameters of `model`."""
    holders: list[Any] = [*model.modules(), *model.parameters()]
    return sum(len(getattr(holder, kind, None) or ()) for holder in holders for kind in HOOK_KINDS)


def assert_no_hooks(model: nn.Module) -> None:
    """Raises an AssertionError if there are hooks on modules or parameters of `model`; names each of them."""
    named: list[tuple[str, Any]] = [*model.named_modules(), *model.named_parameters()]
    hooked = [
        f"{name or type(holder).__name__}{kind}"
        for name, holder in named
        for kind in HOOK_KINDS
        if getattr(holder, kind, None)
    ]
    if hooked:
        raise AssertionError(f"{count_hooks(model)} hooks are still on: {', '.join(hooked)}")


def check_callback(make: Callable[[], Callback], alters_training: bool = False) -> None:
    """Checks that a callback keeps the contract; in a test suite, call `check_callback(MyCallback)`.

    It can be created, printed, used in two fits, pickled and copied. However a fit ends, the callback is
    detached afterwards, leaves no hook behind, and keeps neither learner nor model alive. Weights, random
    state and modes are bit-identical with and without it.

    Args:
        make: returns a new callback at each call: its class, or a function.
        alters_training: True for one that is meant to change the weights; then they are not compared.

    Raises:
        AssertionError: If it breaks one of these; the message says which.
        TypeError: If `make` cannot be called.
    """
    if not callable(make):
        raise TypeError(f"make must be a callback's class, or a function that returns one, got {make!r:.80}")
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), redirect_stdout(io.StringIO()):
        checks = [_check_made, _check_refits, _check_copies, _check_released, _check_ends]
        for check in checks if alters_training else [*checks, _check_unperturbed]:
            try:
                check(make)
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{check.__name__.removeprefix('_')} fails: {error!r}") from error


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _learner_for(cb: Callback | None) -> Learner:
    """Creates a learner with dropout and batch norm, without a default callback that has the name of `cb`."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    learn = Learner(_data(), model, nn.functional.mse_loss, torch.optim.SGD, lr=0.05)
    unwanted = {"progress", cb.name} if cb is not None else {"progress"}
    learn.remove_cbs([other for other in learn.cbs if other.name in unwanted])
    return learn


@cache
def _data() -> Any:
    return synth_learner(n_train=3, n_valid=1, bs=4).dls


def _check_made(make: Callable[[], Callback]) -> None:
    cb = make()
    _expect(isinstance(cb, Callback), f"make() must return a Callback, got {cb!r}")
    _expect(make() is not cb, "make() returned the same instance twice; it must create a new one")
    _expect(isinstance(repr(cb), str) and bool(repr(cb)), "repr() is empty")


def _check_refits(make: Callable[[], Callback]) -> None:
    cb = make()
    learn = _learner_for(cb)
    for _ in range(2):
        learn.fit(2, cbs=cb)


def _check_copies(make: Callable[[], Callback]) -> None:
    cb = make()
    _learner_for(cb).fit(1, cbs=cb)
    for copied in (pickle.loads(pickle.dumps(cb)), copy.deepcopy(cb)):
        _expect(not hasattr(copied, "learn"), f"a copy of {cb!r} is attached to the learner")
        _learner_for(copied).fit(1, cbs=copied)


def _check_released(make: Callable[[], Callback]) -> None:
    cb = make()
    learn = _learner_for(cb)
    learn.fit(1, cbs=cb)
    refs: dict[str, weakref.ref[Any]] = {"learner": weakref.ref(learn), "model": weakref.ref(learn.model)}
    del learn
    for generation in (1, 2):  # collecting young objects is usually enough, and much cheaper
        if any(ref() is not None for ref in refs.values()):
            gc.collect(generation)
    for name, ref in refs.items():
        _expect(ref() is None, f"{cb!r} keeps the {name} alive after the fit")


def _check_ends(make: Callable[[], Callback]) -> None:
    cancels = [level.cancel for level in LEVELS.values()]
    # a cancel is seen by all callbacks, so it makes no difference which one raises it
    raised: list[tuple[type[BaseException], int]] = [(cancel, -1000) for cancel in cancels]
    raised += product((_Planted, KeyboardInterrupt), (-1000, 1000))
    for event, (error, order) in product(Event, raised):
        cb = make()
        learn = _learner_for(cb)
        hooks = count_hooks(learn.model)
        case = f"after {error.__name__} at {event}"
        try:
            learn.fit(2, cbs=[cb, *_saboteurs(event, error, order)])
        except (_Planted, KeyboardInterrupt):
            pass_on = error in (_Planted, KeyboardInterrupt)
        except RuntimeError as stray:
            pass_on = error in cancels and isinstance(stray.__cause__, error)
        else:
            pass_on = error in cancels
        _expect(pass_on, f"{case}, the fit ends differently with {cb!r} than without it")
        _expect(not hasattr(cb, "learn"), f"{cb!r} is still attached {case}")
        left = count_hooks(learn.model) - hooks
        _expect(left == 0, f"{cb!r} leaves {left} hooks on the model {case}")


class _Planted(Exception):
    """An error raised on purpose."""


def _saboteurs(event: Event, error: type[BaseException], order: int) -> list[Callback]:
    def fail(cb: Callback) -> None:
        raise error

    saboteur: Callback = Callback(name="saboteur", **{str(event): fail})
    saboteur.order = order
    if not event.startswith("after_cancel_"):
        return [saboteur]
    level = LEVELS[event.removeprefix("after_cancel_")]

    def cancel(cb: Callback) -> None:
        raise level.cancel

    return [saboteur, Callback(name="canceller", **{level.before: cancel})]


def _check_unperturbed(make: Callable[[], Callback]) -> None:
    without, with_it = _trained(None), _trained(make())
    for name, plain in without.items():
        _expect(_same(plain, with_it[name]), f"{make()!r} changes the {name}")


def _trained(cb: Callback | None) -> dict[str, Any]:
    learn = _learner_for(cb)
    random.seed(0)
    torch.set_grad_enabled(True)
    learn.fit(2, cbs=cb)
    return {
        "random state of torch": [torch.get_rng_state()],
        "random state of Python": random.getstate(),
        "weights": list(learn.model.state_dict().values()),
        "state of the optimizer": [v for state in learn.opt.state.values() for v in state.values()],
        "gradients": [p.grad for p in learn.model.parameters()],
        "grad mode": torch.is_grad_enabled(),
        "train and eval modes": [m.training for m in learn.model.modules()],
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
