"""The state of a fit: all that is needed to resume it bit-identically, in this process or another."""

import zlib
from contextlib import suppress
from itertools import islice
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.console import warn
from hookcb.core.files import PLAIN, read_saved, save_whole
from hookcb.core.randomness import random_state, saves_itself, set_random_state, set_seed
from hookcb.core.state import TrainingState
from hookcb.core.torch_private import buffers_of
from hookcb.hooks.modules import unsaved_buffers
from hookcb.processes.groups import is_sharded, without_replicas
from hookcb.processes.shards import is_dtensor, local_part
from hookcb.training.checkpoint.folder import MARKER, mapped, rank_name, with_tensors, write_folder
from hookcb.training.checkpoint.names import with_own_names, with_plain_names
from hookcb.training.checkpoint.position import Position, check_position, rest_of_epoch

FORMAT = 3  # version of the file format; increased by a change that older versions cannot read
READ = (2, FORMAT)  # versions that can be read; in 2, random states are lists in place of tensors
KEYS = {"format", "torch", "phase", "epoch", "iter", "n_epoch", "train_iter", "row", "model", "buffers"}
KEYS |= {"ranks", "loss_func", "opt_kind", "opt", "grads", "random", "random_of_phase", "loaders", "cbs"}
OF_RANK = ("random", "random_of_phase", "loaders")  # parts that differ by rank
CPU = torch.device("cpu")


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
    plain: dict[str, Any] = mapped(state, _plain)
    plain["ranks"] = []
    return plain


def save_state(state: dict[str, Any], file: Path, learn: TrainingState) -> None:
    """Writes the result of `capture`: a file, or the folder to which all ranks write."""
    if not in_folder(learn):
        save_whole(state, file)
        return
    _check_divided(learn.opt)
    model, averaged = learn.model, without_replicas(learn.model)
    plain = {part: with_plain_names(model, state[part]) for part in ("model", "buffers", "grads")}
    cbs = {
        name: {**x, "averaged": with_plain_names(averaged, x["averaged"])} if has_average(x) else x
        for name, x in state["cbs"].items()
    }
    ranks = [rank_name(rank) for rank in range(learn.ranks.world)]
    mine = {key: state[key] for key in OF_RANK}
    mine["cbs"] = {cb.name: cbs[cb.name] for cb in learn.cbs if cb.has_rank_state and cb.name in cbs}
    buffers = with_plain_names(model, dict(model.named_buffers()))
    for part, named in (("buffers", buffers), ("grads", plain["grads"])):
        mine[part] = {name: x for name, x in named.items() if not is_dtensor(x)}
    write_folder({**state, **plain, "cbs": cbs, "ranks": ranks}, mine, file, learn.ranks)


def _check_divided(opt: Optimizer) -> None:
    """Checks that what an optimizer knows of a shard is divided as its parameter is.

    Raises:
        ValueError: If it is a plain tensor, of which that of rank 0 would be saved for all.
    """
    for p in (p for group in opt.param_groups for p in group["params"]):
        if is_dtensor(p) and (shape := local_part(p).shape) != p.shape:
            for key, x in opt.state.get(p, {}).items():
                if isinstance(x, Tensor) and not is_dtensor(x) and x.shape == shape:
                    raise ValueError(
                        f"{type(opt).__name__} has {key!r} of this rank's shard as a plain tensor, which a "
                        "checkpoint cannot divide; make it with torch.zeros_like(p), as a DTensor"
                    )


def in_folder(learn: TrainingState) -> bool:
    """Whether a checkpoint is a folder, to which each rank writes its part."""
    return learn.ranks.world > 1 or is_sharded(learn.model)


def is_checkpoint(state: Any) -> bool:
    """Whether what was read is the state of a fit."""
    return isinstance(state, dict) and set(state) == KEYS


def has_average(saved: Any) -> bool:
    """Whether the state of a callback is that of an `EMA`."""
    return isinstance(saved, dict) and isinstance(saved.get("averaged"), dict)


def check_whole(learn: TrainingState) -> None:
    """Checks that all of the model can be saved.

    Raises:
        ValueError: If it has flat parameters, in which nobody else would find the weights.
    """
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in learn.model.modules()):
        raise ValueError(
            "the parameters are parts of the flat ones of FullyShardedDataParallel, which are not saved; use "
            "torch.distributed.fsdp.fully_shard, or save with torch.distributed.checkpoint"
        )


def restore(learn: TrainingState, state: dict[str, Any], file: Path) -> "enumerate[Any] | None":
    """Restores the result of `capture`, which was read from `file`, on several ranks without the tensors.

    Returns:
        In the middle of a training, the remaining batches with their numbers; else None.
    """
    is_same = _n_writers(state) == learn.ranks.world
    mine = read_saved(file / rank_name(learn.ranks.rank), CPU) if state["ranks"] and is_same else {}
    state = {**state, **{key: mine[key] for key in OF_RANK if key in mine}}
    _start_workers(learn, state)
    if is_same:
        for dl, saved in zip(loaders_of(learn), state["loaders"], strict=False):
            if saved is not None:
                dl.load_state_dict(saved)
    batches, took_over = _batches_left(learn, state) if state["phase"] == "train" else (None, Position())
    model, named = learn.model, dict(learn.model.named_parameters())
    model.load_state_dict(fitted(model, state["model"], file, "model", model.state_dict()))
    buffers = dict(model.named_buffers())
    unsaved = fitted(model, state["buffers"], file, "buffers", buffers)
    for name, value in {**unsaved, **with_own_names(model, mine.get("buffers", {}), buffers)}.items():
        _set_buffer(model, name, value)
    if isinstance(learn.loss_func, nn.Module):
        learn.loss_func.load_state_dict(state["loss_func"])
    _load_opt(learn.opt, read_opt(learn.opt, state["opt"], file))
    grads = fitted(model, state["grads"], file, "grads", named)
    grads |= _summed_here(with_own_names(model, mine.get("grads", {}), named), named, file)
    for name, p in named.items():
        p.grad = grads[name].to(p.device) if name in grads else None
    learn.train_iter, learn.row = state["train_iter"], state["row"]
    cbs = state["cbs"] | mine.get("cbs", {})
    for cb in learn.cbs:
        if cb.name in cbs:
            cb.load_state_dict(_for_callback(model, cbs[cb.name], file, cb.name, took_over))
    if is_same:
        set_random_state(state["random"], *loaders_of(learn))
    else:
        _seed_rank(state, learn, file)
    return batches


def _summed_here(grads: dict[str, Any], params: dict[str, Any], file: Path) -> dict[str, Any]:
    """Gradients that this rank has accumulated for itself.

    Raises:
        ValueError: If the model is sharded now, so that ranks have no gradients for themselves.
    """
    if any(name in params and is_dtensor(params[name]) for name in grads):
        raise ValueError(
            f"{file} was written while each rank accumulated gradients of the whole model, which a sharded "
            "one cannot continue; resume from another checkpoint"
        )
    return grads


def _n_writers(state: dict[str, Any]) -> int:
    """Number of processes that have written a state."""
    return len(state["ranks"]) or 1


def _must_take_over(state: dict[str, Any], learn: TrainingState) -> bool:
    """Whether the samples left of an epoch are divided anew, as another number of ranks has begun it."""
    position = _position_in(state)
    return _n_writers(state) != learn.ranks.world or (position is not None and position["took_over"] > 0)


def _position_in(state: dict[str, Any]) -> Any:
    """Position in the epoch in samples, as `Position.saved` gave it; None if it was not saved."""
    cbs = [x for x in state["cbs"].values() if isinstance(x, dict)]
    return next((x["position"] for x in cbs if "random_of_phase" in x and x.get("position")), None)


def _seed_rank(state: dict[str, Any], learn: TrainingState, file: Path) -> None:
    """Seeds the random numbers of this rank, as other ranks than before cannot go on with theirs."""
    drawn = zlib.crc32(state["random"]["torch"].numpy().tobytes())
    set_seed(zlib.crc32(repr((drawn, state["epoch"], state["train_iter"], learn.ranks.rank)).encode()))
    n, now = _n_writers(state), learn.ranks.world
    warn(
        f"{file} was written by {n} process{'es' if n > 1 else ''} and is resumed by {now}, so "
        "random numbers, as of dropout and augmentations, are others than they would have been",
        stacklevel=2,
    )


def _for_callback(model: nn.Module, saved: Any, file: Path, name: str, took_over: Position) -> Any:
    """State of a callback, with its tensors divided as the model's are."""
    if not isinstance(saved, dict):
        return saved
    if has_average(saved):
        model = without_replicas(model)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        saved = {**saved, "averaged": fitted(model, saved["averaged"], file, f"cbs.{name}.averaged", named)}
    if "position" in saved:
        saved = {**saved, "took_over": tuple(took_over)}
    return with_tensors(saved, f"cbs.{name}", file)


def read_opt(opt: Optimizer, saved: dict[str, Any], file: Path) -> dict[str, Any]:
    """State of an optimizer in a file or folder, divided as its parameters are."""
    params = {str(i): p for i, p in enumerate(p for group in opt.param_groups for p in group["params"])}
    read: dict[str, Any] = with_tensors(
        saved, "opt", file, lambda place: params.get(place.removeprefix("opt.state.").partition(".")[0])
    )
    return read


def fitted(
    model: nn.Module, saved: dict[str, Any], file: Path, part: str, own: dict[str, Any]
) -> dict[str, Any]:
    """The tensors `saved` of a part of a state by the names of this model, divided as its `own` are."""
    names = with_own_names(model, {name: name for name in saved}, own)
    like = {f"{part}.{there}": own.get(name) for name, there in names.items()}
    return with_own_names(model, with_tensors(saved, part, file, like.get), own)


def check_fits(state: dict[str, Any], learn: TrainingState) -> None:
    """Checks that a state is of this model and optimizer, and that as many processes can continue it.

    Raises:
        ValueError: If it is not; the message says what differs.
    """
    current = learn.model.state_dict()
    saved = with_own_names(learn.model, state["model"], current)
    kind = type(learn.model).__name__
    if odd := sorted(current.keys() ^ saved.keys()):
        where = f"only in {kind}" if odd[0] in current else f"not in {kind}"
        raise ValueError(f"is of another model: {odd[0]!r} is {where}, {len(odd)} names differ")
    buffers = with_own_names(learn.model, state["buffers"], dict(learn.model.named_buffers()))
    modules = dict(learn.model.named_modules())
    if foreign := [name for name in buffers if not _accepts_buffer(modules, name)]:
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
    if state["phase"] == "train" and _must_take_over(state, learn):
        check_position(_position_in(state), learn.dls.train)
    if state["grads"] and (n := _n_writers(state)) != learn.ranks.world:
        raise ValueError(
            f"was written while {n} process{'es' if n > 1 else ''} accumulated gradients, which "
            f"{learn.ranks.world} cannot continue; resume with as many, or from another checkpoint"
        )


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _accepts_buffer(modules: dict[str, nn.Module], name: str) -> bool:
    """Whether one of a model's modules has a buffer, or may still create it."""
    owner, _, last = name.rpartition(".")
    m = modules.get(owner)
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
    """Files and folders written by `Checkpoint` into a folder, oldest first, without the best one."""
    ages = {}
    for file in folder.glob("epoch-*"):
        with suppress(FileNotFoundError, NotADirectoryError):  # a running fit may remove old files
            if file.suffix in ("", ".pt"):
                written = file if file.suffix else file / MARKER
                # the end of an epoch sorts behind its batches, with a suffix or without
                ages[file] = written.stat().st_mtime_ns, f"{file.stem}."
    return sorted(ages, key=ages.__getitem__)


def loaders_of(learn: Any) -> list[Any]:
    """The loaders of training and validation, if there are any."""
    return [dl for dl in (learn.dls.train, getattr(learn.dls, "valid", None)) if dl is not None]


def _start_workers(learn: TrainingState, state: dict[str, Any]) -> None:
    """Has persistent workers draw their seed now, as they did in their first epoch."""
    for dl in loaders_of(learn):
        began = state["epoch"] > 0 or (dl is learn.dls.train and state["phase"] == "validate")
        if began and getattr(dl, "persistent_workers", False):
            iter(dl)


def _batches_left(learn: TrainingState, state: dict[str, Any]) -> "tuple[enumerate[Any], Position]":
    """The batches left of an epoch, with their numbers, and where it was taken over from other ranks."""
    if _must_take_over(state, learn):
        rest, began = rest_of_epoch(_position_in(state), learn.dl)
        learn.iter, learn.epoch_began = began.batches - 1, state["train_iter"] - began.batches
        return enumerate(rest, began.batches), began
    done = state["iter"]
    learn.iter = done - 1
    if state["loaders"][0] is not None:  # its `load_state_dict` has skipped them
        return enumerate(learn.dl, done), Position()
    set_random_state(state["random_of_phase"], *loaders_of(learn))
    batches = enumerate(learn.dl)
    if (skipped := sum(1 for _ in islice(batches, done))) < done:
        raise ValueError(
            f"the checkpoint is of batch {done} of an epoch, but the training loader has only {skipped} "
            "batches; resume with the data it was written with"
        )
    return batches, Position()


def _plain(place: str, value: Any) -> Any:
    """Converts `value` to a type that `torch.load(weights_only=True)` reads.

    Raises:
        TypeError: If that is not possible; the message names the item and the possible types.
    """
    if type(value) in PLAIN or isinstance(value, Tensor):
        return value
    kinds: tuple[Any, ...] = (int, float, complex, str)
    for kind in kinds:
        if isinstance(value, kind):  # an IntEnum, a float64 of NumPy
            return kind(value)
    if isinstance(value, Number) and hasattr(value, "item"):  # other numbers of NumPy
        return value.item()
    raise TypeError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot contain; use None, bool, int, "
        "float, str, a tensor, or lists, tuples and dicts of these"
    )
