"""Weights that are loaded and saved: wrong names, no copies, files that lack something; and right uses."""

from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from io import BytesIO
from typing import Any

import torch
from case import Callbacks, Case, Run, control, fault, follow
from data import digit_batches, image_batches
from nets import Cnn, Mlp
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from hookcb.diagnosis.heard import EARS, listen

FACTS_LOADS_FAULTS: list[Case] = []
FACTS_LOADS_CONTROLS: list[Case] = []
N_STEPS = 60


@contextmanager
def _heard():  # type: ignore[no-untyped-def]  # as under the command
    end = listen(EARS, from_start=True)
    try:
        yield
    finally:
        end()


def _train(model: nn.Module, opt: Optimizer, seed: int, cbs: Callbacks, **given: Any) -> Run:
    batches = (image_batches if isinstance(model, Cnn) else digit_batches)(seed, n_step=N_STEPS)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, **given)


def _copied(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    return {prefix + name: x.clone() for name, x in model.state_dict().items()}


def _read(content: Any) -> Any:
    file = BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file)


def _at(step: int, act: Callable[[], object]) -> Callable[[int], object]:
    return lambda i: act() if i == step else None


# ---- faults


@fault(FACTS_LOADS_FAULTS, "pretrained weights with the prefix module.", codes=["load.unmatched"])
def prefix(seed: int, cbs: Callbacks) -> Run:
    with _heard():
        model = Mlp()
        model.load_state_dict(_read(_copied(Mlp(), "module.")), strict=False)
        return _train(model, Adam(model.parameters(), lr=2e-3), seed, cbs)


@fault(FACTS_LOADS_FAULTS, "a whole checkpoint given as a state dict", codes=["load.unmatched"])
def whole_checkpoint(seed: int, cbs: Callbacks) -> Run:
    with _heard():
        model = Cnn()
        model.load_state_dict(_read({"epoch": 3, "model": _copied(Cnn())}), strict=False)
        return _train(model, Adam(model.parameters(), lr=2e-3), seed, cbs)


@fault(FACTS_LOADS_FAULTS, "best weights without a copy, loaded at the end", codes=["checkpoint.no_copy"])
def best_loaded(seed: int, cbs: Callbacks) -> Run:
    model, kept = Mlp(), {}

    def each(i: int) -> None:
        if i in (10, 30):
            kept["best"] = model.state_dict()
        if i == N_STEPS - 1:
            model.load_state_dict(kept["best"])

    return _train(model, Adam(model.parameters(), lr=2e-3), seed, cbs, after_step=each)


@fault(FACTS_LOADS_FAULTS, "best weights without a copy, saved at the end", codes=["checkpoint.no_copy"])
def best_saved(seed: int, cbs: Callbacks) -> Run:
    model, kept = Cnn(), {}

    def each(i: int) -> None:
        if i in (10, 30):
            kept["best"] = {name: x.cpu() for name, x in model.state_dict().items()}
        if i == N_STEPS - 1:
            torch.save({"model": kept["best"]}, BytesIO())

    return _train(model, SGD(model.parameters(), lr=0.05, momentum=0.9), seed, cbs, after_step=each)


def _untrained(model: nn.Module, seed: int, cbs: Callbacks) -> Run:
    first = deepcopy(model)
    save = _at(N_STEPS - 1, lambda: torch.save(first.state_dict(), BytesIO()))
    return _train(model, Adam(model.parameters(), lr=2e-3), seed, cbs, after_step=save)


@fault(FACTS_LOADS_FAULTS, "the original is saved, a copy trained", codes=["checkpoint.untrained"])
def untrained(seed: int, cbs: Callbacks) -> Run:
    return _untrained(Mlp(), seed, cbs)


@fault(FACTS_LOADS_FAULTS, "the original CNN is saved, a copy trained", codes=["checkpoint.untrained"])
def untrained_cnn(seed: int, cbs: Callbacks) -> Run:
    return _untrained(Cnn(), seed, cbs)


def _without_last(model: nn.Module, seed: int, cbs: Callbacks) -> Run:
    opt = Adam(model.parameters(), lr=2e-3)
    last = list(model.state_dict())[-2:]

    def save() -> None:
        weights = {name: x for name, x in model.state_dict().items() if name not in last}
        torch.save({"model": weights, "optimizer": opt.state_dict()}, BytesIO())

    return _train(model, opt, seed, cbs, after_step=_at(N_STEPS - 1, save))


@fault(FACTS_LOADS_FAULTS, "a checkpoint without the head", codes=["checkpoint.incomplete"])
def without_head(seed: int, cbs: Callbacks) -> Run:
    return _without_last(Mlp(), seed, cbs)


@fault(FACTS_LOADS_FAULTS, "a checkpoint without the head of a CNN", codes=["checkpoint.incomplete"])
def without_head_of_cnn(seed: int, cbs: Callbacks) -> Run:
    return _without_last(Cnn(), seed, cbs)


def _parameters_only(model: nn.Module, seed: int, cbs: Callbacks) -> Run:
    opt = Adam(model.parameters(), lr=2e-3)

    def save() -> None:
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        torch.save({"model": weights, "optimizer": opt.state_dict()}, BytesIO())

    return _train(model, opt, seed, cbs, after_step=_at(N_STEPS - 1, save))


@fault(FACTS_LOADS_FAULTS, "a CNN saved without running statistics", codes=["checkpoint.incomplete"])
def parameters_only(seed: int, cbs: Callbacks) -> Run:
    return _parameters_only(Cnn(), seed, cbs)


@fault(FACTS_LOADS_FAULTS, "an MLP saved without running statistics", codes=["checkpoint.incomplete"])
def parameters_only_of_mlp(seed: int, cbs: Callbacks) -> Run:
    return _parameters_only(Mlp(norm=True), seed, cbs)


@contextmanager
def _resumed(model: nn.Module, seed: int):  # type: ignore[no-untyped-def]  # a file, and what is made anew
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    rate = StepLR(opt, 40)
    _train(model, opt, seed, [], schedule=rate)
    read = _read({"model": model.state_dict(), "opt": opt.state_dict(), "rate": rate.state_dict()})
    again = type(model)()
    opt = SGD(again.parameters(), lr=0.05, momentum=0.9)
    yield read, again, opt, StepLR(opt, 40)


@fault(FACTS_LOADS_FAULTS, "a resume without the optimizer", codes=["load.not_resumed"])
def without_optimizer(seed: int, cbs: Callbacks) -> Run:
    with _heard(), _resumed(Mlp(), seed) as (read, model, opt, rate):
        model.load_state_dict(read["model"])
        rate.load_state_dict(read["rate"])
        return _train(model, opt, seed, cbs, schedule=rate)


@fault(FACTS_LOADS_FAULTS, "a resume without the scheduler", codes=["load.not_resumed"])
def without_scheduler(seed: int, cbs: Callbacks) -> Run:
    with _heard(), _resumed(Cnn(), seed) as (read, model, opt, rate):
        model.load_state_dict(read["model"])
        opt.load_state_dict(read["opt"])
        return _train(model, opt, seed, cbs, schedule=rate)


def _falling(step: int) -> float:
    return min((step + 1) / 10, max(0.05, 1 - step / 70))


def _second_job(seed: int) -> tuple[Mlp, SGD, dict[str, Any]]:
    """A model and its optimizer as after 60 steps of a schedule, in memory, and the state of the schedule."""
    model = Mlp()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    rate = LambdaLR(opt, _falling)
    _train(model, opt, seed, [], schedule=rate)
    weights, state = deepcopy(model.state_dict()), deepcopy(opt.state_dict())
    model = Mlp()
    model.load_state_dict(weights)
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt.load_state_dict(state)
    return model, opt, rate.state_dict()


@fault(FACTS_LOADS_FAULTS, "a resume in memory, whose schedule begins anew", codes=["load.not_resumed"])
def schedule_begins_anew(seed: int, cbs: Callbacks) -> Run:
    with _heard():
        model, opt, _ = _second_job(seed)
        return _train(model, opt, seed, cbs, schedule=LambdaLR(opt, _falling))


class _Scaled(nn.Module):
    """Scales images by the mean and deviation of the batches that it has seen."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=persistent)
        self.register_buffer("std", torch.ones(()), persistent=persistent)
        self.net = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 5 + 2 * x
        with torch.no_grad():
            self.mean += 0.1 * (x.mean() - self.mean)
            self.std += 0.1 * (x.std() - self.std)
        return self.net((x - self.mean) / self.std)


def _rescaled(persistent: bool, seed: int, cbs: Callbacks) -> Run:
    with _heard():
        first, again = _Scaled(persistent), _Scaled(persistent)
        opt, new = (SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (first, again))
        _train(first, opt, seed, [])
        again.load_state_dict(deepcopy(first.state_dict()))
        new.load_state_dict(deepcopy(opt.state_dict()))
        return _train(again, new, seed, cbs)


@fault(
    FACTS_LOADS_FAULTS,
    "a resume without statistics of the inputs",
    codes=["load.left_out", "loss.init"],
    note_suffices=True,
)
def without_statistics(seed: int, cbs: Callbacks) -> Run:
    return _rescaled(False, seed, cbs)


# ---- right uses


@control(FACTS_LOADS_CONTROLS, "a resume with statistics of the inputs", target=1.5)
def with_statistics(seed: int, cbs: Callbacks) -> Run:
    return _rescaled(True, seed, cbs)


@control(FACTS_LOADS_CONTROLS, "fine-tuning with a new head, strict=False", target=2.0)
def new_head(seed: int, cbs: Callbacks) -> Run:
    with _heard():
        model = Mlp()
        given = _read({k: v for k, v in _copied(Mlp()).items() if k not in list(model.state_dict())[-2:]})
        model.load_state_dict(given, strict=False)
        opt = Adam(model.parameters(), lr=2e-3)
        save = _at(N_STEPS - 1, lambda: torch.save({"m": _copied(model), "o": opt.state_dict()}, BytesIO()))
        return _train(model, opt, seed, cbs, after_step=save)


@control(
    FACTS_LOADS_CONTROLS, "names that are stripped at a second attempt, and a CNN saved in half", target=1.5
)
def stripped(seed: int, cbs: Callbacks) -> Run:
    with _heard():
        model, given = Cnn(), _read(_copied(Cnn(), "module."))
        model.load_state_dict(given, strict=False)
        model.load_state_dict({name.removeprefix("module."): x for name, x in given.items()})
        opt = Adam(model.parameters(), lr=2e-3)
        half = lambda: {"m": deepcopy(model).half().state_dict(), "opt": opt.state_dict()}  # noqa: E731
        return _train(
            model, opt, seed, cbs, after_step=_at(N_STEPS - 1, lambda: torch.save(half(), BytesIO()))
        )


@control(FACTS_LOADS_CONTROLS, "best weights that are copied and put back, EMA and target", target=2.0)
def copied_best(seed: int, cbs: Callbacks) -> Run:
    model, kept = Mlp(), {}
    target, average = deepcopy(model), deepcopy(model)

    def each(i: int) -> None:
        for name, x in average.state_dict().items():
            x.lerp_(model.state_dict()[name], 0.1)
        if i in (10, 30):
            kept["best"] = deepcopy(model.state_dict())
            target.load_state_dict(model.state_dict())
            torch.save({"ema": average.state_dict(), "model": model.state_dict()}, BytesIO())
        if i == N_STEPS - 1:
            torch.save(kept["best"], BytesIO())
            model.load_state_dict(kept["best"])

    with _heard():
        return _train(model, Adam(model.parameters(), lr=2e-3), seed, cbs, after_step=each)


@control(FACTS_LOADS_CONTROLS, "averages of parameters of a CNN, with its buffers beside them", target=1.5)
def averaged_parameters(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def each(i: int) -> None:
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.1)
        if i == N_STEPS - 1:
            torch.save({"ema": average, "buffers": dict(model.named_buffers())}, BytesIO())

    with _heard():
        return _train(model, Adam(model.parameters(), lr=2e-3), seed, cbs, after_step=each)


@control(FACTS_LOADS_CONTROLS, "a whole resume", target=1.5)
def whole_resume(seed: int, cbs: Callbacks) -> Run:
    with _heard(), _resumed(Mlp(), seed) as (read, model, opt, rate):
        model.load_state_dict(read["model"])
        opt.load_state_dict(read["opt"])
        rate.load_state_dict(read["rate"])
        return _train(model, opt, seed, cbs, schedule=rate)


@control(FACTS_LOADS_CONTROLS, "a whole resume in memory", target=1.5)
def whole_resume_in_memory(seed: int, cbs: Callbacks) -> Run:
    with _heard():
        model, opt, state = _second_job(seed)
        rate = LambdaLR(opt, _falling)
        rate.load_state_dict(state)
        return _train(model, opt, seed, cbs, schedule=rate)


@control(FACTS_LOADS_CONTROLS, "a second phase of SGD at a small rate", target=1.5)
def second_phase(seed: int, cbs: Callbacks) -> Run:
    with _heard():
        model, opt, _ = _second_job(seed)
        return _train(model, opt, seed, cbs, schedule=LambdaLR(opt, lambda step: 0.1))


@control(FACTS_LOADS_CONTROLS, "an adapter, and a part, that are saved alone", target=2.3)
def adapter(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    parts = list(model.children())
    parts[0].requires_grad_(False)
    opt = Adam(model.parameters(), lr=2e-3)

    def save() -> None:
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        torch.save({"adapter": trained, "opt": opt.state_dict()}, BytesIO())

    with _heard():
        model.load_state_dict({name: 0.9 * x for name, x in model.state_dict().items()})  # pretrained
        return _train(model, opt, seed, cbs, after_step=_at(N_STEPS - 1, save))
