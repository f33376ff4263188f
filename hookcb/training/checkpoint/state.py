"""The state of a fit: all that is needed to resume it bit-identically, in this process or another."""

import copy
from collections import Counter, OrderedDict
from contextlib import suppress
from itertools import islice
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.files import PLAIN
from hookcb.core.randomness import random_state, saves_itself, set_random_state
from hookcb.core.ranks import Ranks, is_sharded
from hookcb.core.state import TrainingState
from hookcb.core.torch_private import buffers_of
from hookcb.hooks.modules import unsaved_buffers

FORMAT = 2  # version of the file format; increased by a change that older versions cannot read
KEYS = {"format", "torch", "phase", "epoch", "iter", "n_epoch", "train_iter", "row", "model", "buffers"}
KEYS |= {"ranks", "loss_func", "opt_kind", "opt", "grads", "random", "random_of_phase", "loaders", "cbs"}


def capture(learn: TrainingState, phase: str, random_of_phase: dict[str, Any]) -> dict[str, Any]:
    """State of the running fit, to be saved at once, as its tensors are those in use.

    Args:
        learn: the learner.
        phase: "train" after a batch, "validate" after the training of an epoch, "epoch" after an epoch.
        random_of_phase: `random_state` at the start of this training or validation.

    Raises:
        TypeError: If a part, such as the state of a callback, could not be read again; the message names it.
    """
    in_train, model = phase == "train", learn.model.state_dict()
    state = {
        "format": FORMAT,
        "torch": str(torch.__version__),
        "phase": phase,
        "epoch": learn.epoch + (phase == "epoch"),
        "iter": learn.iter + 1 if in_train else 0,
        "n_epoch": learn.n_epoch,
        "train_iter": learn.epoch_began + learn.iter + 1 if in_train else learn.train_iter,
        "row": dict(learn.row),
        "model": model,
        "buffers": unsaved_buffers(learn.model, model),
        "loss_func": learn.loss_func.state_dict() if isinstance(learn.loss_func, nn.Module) else {},
        "opt_kind": type(learn.opt).__name__,
        "opt": learn.opt.state_dict(),
        "grads": {name: p.grad for name, p in learn.model.named_parameters() if p.grad is not None},
        "random": random_of_phase if phase == "validate" else random_state(*loaders_of(learn)),
        "random_of_phase": random_of_phase,
        "loaders": [dl.state_dict() if saves_itself(dl) else None for dl in loaders_of(learn)],
        "cbs": {cb.name: cb_state for cb in learn.cbs if (cb_state := cb.state_dict())},
    }
    plain: dict[str, Any] = _plain(state, "the state of the fit")
    ranks = learn.ranks
    plain["ranks"] = ranks.gather(_of_rank(plain, learn)) if ranks.world > 1 else []
    return plain


def _of_rank(state: dict[str, Any], learn: TrainingState) -> dict[str, Any]:
    """The part of a state that differs by rank: random streams, positions of loaders, records of a shard."""
    own = {cb.name for cb in learn.cbs if cb.has_rank_state}
    mine = {key: state[key] for key in ("random", "random_of_phase", "loaders")}
    grads = {"grads": state["grads"]} if learn.accumulating else {}
    return mine | grads | {"cbs": {name: x for name, x in state["cbs"].items() if name in own}}


def _for_rank(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A state with this rank's own part in it."""
    if not state["ranks"]:
        return state
    mine: dict[str, Any] = state["ranks"][ranks.rank]
    return {**state, **mine, "cbs": {**state["cbs"], **mine["cbs"]}}


def check_whole(learn: TrainingState) -> None:
    """Checks that this process has the whole model.

    Raises:
        ValueError: If its parameters are sharded, so that one file would have only a part of them.
    """
    if is_sharded(learn.model):
        raise ValueError(
            "the parameters of the model are sharded, and a file of this rank would have only its part; save "
            "with torch.distributed.checkpoint, which has all ranks write"
        )


def restore(learn: TrainingState, state: dict[str, Any]) -> "enumerate[Any] | None":
    """Restores the result of `capture`.

    Returns:
        In the middle of a training, the remaining batches with their numbers; else None.
    """
    batches, state = None, _for_rank(state, learn.ranks)
    _start_workers(learn, state)
    for dl, saved in zip(loaders_of(learn), state["loaders"], strict=False):
        if saved is not None:
            dl.load_state_dict(saved)
    if state["phase"] == "train":
        batches = _batches_left(learn, state)
    learn.model.load_state_dict(state["model"])
    for name, value in state["buffers"].items():
        _set_buffer(learn.model, name, value)
    if isinstance(learn.loss_func, nn.Module):
        learn.loss_func.load_state_dict(state["loss_func"])
    _load_opt(learn.opt, state["opt"])
    for name, p in learn.model.named_parameters():
        p.grad = state["grads"][name].to(p.device) if name in state["grads"] else None
    learn.train_iter, learn.row = state["train_iter"], state["row"]
    for cb in learn.cbs:
        if cb.name in state["cbs"]:
            cb.load_state_dict(state["cbs"][cb.name])
    set_random_state(state["random"], *loaders_of(learn))
    return batches


def check_fits(state: dict[str, Any], learn: TrainingState) -> None:
    """Checks that a state is of this model and optimizer.

    Raises:
        ValueError: If it is not; the message says what differs.
    """
    if (n := len(state["ranks"]) or 1) != learn.ranks.world:
        raise ValueError(
            f"was written by {n} process{'es' if n > 1 else ''}, and can only be resumed by as many, not by "
            f"{learn.ranks.world}: torchrun --nproc_per_node {n}"
        )
    current, saved = learn.model.state_dict(), state["model"]
    kind = type(learn.model).__name__
    if odd := sorted(current.keys() ^ saved.keys()):
        where = f"only in {kind}" if odd[0] in current else f"not in {kind}"
        raise ValueError(f"is of another model: {odd[0]!r} is {where}, {len(odd)} names differ")
    if foreign := [name for name in state["buffers"] if not _accepts_buffer(learn.model, name)]:
        raise ValueError(f"is of another model: {kind} has no buffer {foreign[0]!r}")
    for name, x in current.items():
        if isinstance(x, Tensor) and x.shape != saved[name].shape:
            shapes = f"{tuple(saved[name].shape)}, in {kind} {tuple(x.shape)}"
            raise ValueError(f"is of another model: {name!r} has shape {shapes}")
    if state["opt_kind"] != type(learn.opt).__name__:
        raise ValueError(f"is of a training with {state['opt_kind']}, not {type(learn.opt).__name__}")
    saved_sizes, sizes = map(_group_sizes, (state["opt"]["param_groups"], learn.opt.param_groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"has parameter groups of {saved_sizes} parameters, but this optimizer has {sizes}; "
            "create it with the same groups"
        )


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _accepts_buffer(model: nn.Module, name: str) -> bool:
    """Whether the model has a buffer, or may still create it."""
    owner, _, last = name.rpartition(".")
    m = dict(model.named_modules()).get(owner)
    return m is not None and (last in buffers_of(m) or not hasattr(m, last))


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    m = model.get_submodule(owner)
    buffer = buffers_of(m).get(last)
    if buffer is not None and buffer.shape == value.shape:
        buffer.copy_(value)
    else:  # the model creates it, or lets it grow, during training
        device = next((x.device for x in model.parameters()), value.device)
        m.register_buffer(last, value.to(device), persistent=False)


def _load_opt(opt: Optimizer, state: dict[str, Any]) -> None:
    opt.load_state_dict(state)
    params = [p for group in opt.param_groups for p in group["params"]]
    for i, values in state["state"].items():
        loaded = opt.state[params[i]] if isinstance(i, int) else opt.state[i]
        for key, value in values.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)  # torch has cast it to the parameter's dtype


def checkpoints_in(folder: Path) -> list[Path]:
    """Files written by `Checkpoint` into a folder, oldest first, without `best.pt`."""
    ages = {}
    for file in folder.glob("epoch-*.pt"):
        with suppress(FileNotFoundError):  # a running fit may remove old files
            ages[file] = file.stat().st_mtime_ns, file.name
    return sorted(ages, key=ages.__getitem__)


def remove_unfinished(folder: Path) -> None:
    """Removes incomplete files of a killed `Checkpoint`; only safe if no one else uses the folder."""
    for kind in ("epoch-*.pt*.partial", "best.pt*.partial"):
        for left in folder.glob(kind):
            left.unlink()


def loaders_of(learn: Any) -> list[Any]:
    """The loaders of training and validation, if there are any."""
    return [dl for dl in (learn.dls.train, getattr(learn.dls, "valid", None)) if dl is not None]


def _start_workers(learn: TrainingState, state: dict[str, Any]) -> None:
    """Has persistent workers draw their seed now, as they did in their first epoch."""
    for dl in loaders_of(learn):
        began = state["epoch"] > 0 or (dl is learn.dls.train and state["phase"] == "validate")
        if began and getattr(dl, "persistent_workers", False):
            iter(dl)


def _batches_left(learn: TrainingState, state: dict[str, Any]) -> "enumerate[Any]":
    """Begins the epoch's training again, and skips the batches that were trained on."""
    done = state["iter"]
    learn.iter = done - 1
    if state["loaders"][0] is not None:  # its `load_state_dict` has skipped them
        return enumerate(learn.dl, done)
    set_random_state(state["random_of_phase"], *loaders_of(learn))
    batches = enumerate(learn.dl)
    if (skipped := sum(1 for _ in islice(batches, done))) < done:
        raise ValueError(
            f"the checkpoint is of batch {done} of an epoch, but the training loader has only {skipped} "
            "batches; resume with the data it was written with"
        )
    return batches


def _plain(value: Any, where: str) -> Any:
    """Converts `value` to types that `torch.load(weights_only=True)` reads.

    Raises:
        TypeError: If that is not possible; the message names the item and the possible types.
    """
    if type(value) in (dict, OrderedDict, Counter):
        plain = copy.copy(value)  # not a new one, as the state of a model has attributes
        plain.clear()
        for key, item in value.items():
            plain[_plain(key, f"a key of {where}")] = _plain(item, f"{where}[{key!r}]")
        return plain
    if type(value) in (list, tuple):
        if set(map(type, value)) <= {int, float}:  # faster for long lists, which are of numbers
            return value
        return type(value)(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) in PLAIN or isinstance(value, Tensor):
        return value
    kinds: tuple[Any, ...] = (int, float, complex, str)
    for kind in kinds:
        if isinstance(value, kind):  # an IntEnum, a float64 of NumPy
            return kind(value)
    if isinstance(value, Number) and hasattr(value, "item"):  # other numbers of NumPy
        return value.item()
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot contain; use None, bool, int, "
        "float, str, a tensor, or lists, tuples and dicts of these"
    )
