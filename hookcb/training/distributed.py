"""Distributed: one training on several processes, from the same script."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.console import warn
from hookcb.core.state import whole
from hookcb.core.text import join_names
from hookcb.hooks.modules import Where, device_of
from hookcb.processes.exchange import MAX_WAIT, Exchange
from hookcb.processes.failures import shared_failures
from hookcb.processes.groups import MAX_SHOWN
from hookcb.processes.loaders import Share, divided, with_loaders
from hookcb.processes.process_group import n_processes, open_group, own_device
from hookcb.processes.wrap import is_wrapped, layout, prepared, replicated, sharded
from hookcb.training.compile import check_options
from hookcb.training.engine import Engine

MODES = ("ddp", "fsdp2")
NOT_OPTIONS = ("self", "module", "mesh", "device_mesh", "device_ids", "output_device", "dim", "process_group")
DATA_PARALLEL = "dp"  # how names of dimensions of a mesh begin along which samples are divided


class Distributed(Callback):
    """Trains on all processes that torchrun has started; a process alone trains as without it.

    Give it to the Learner, so that `validate`, `get_preds`, `lr_find`, `save` and `load` have it too:
    `torchrun --nproc_per_node 2 train.py`. It opens the process group unless you have, and closes it when the
    process ends. A model on a GPU, or given to a machine with one for each process, goes to the GPU of its
    process; it is wrapped with the weights of rank 0.

    - "ddp": DistributedDataParallel for the length of a fit, validation or prediction; then `learn.model` is
      your own object again.
    - "fsdp2": `fully_shard`, in place: parameters stay shards (DTensors) after the fit, and `learn.save`
      gathers them. Make the optimizer from a class, as parameters are replaced.
    - `prepare`: your own function, such as `parallelize_module` for tensor parallelism; called once.
    - `engine`: an `Accelerator`, which wraps the model and runs the backward, also on one process. Its
      settings of mixed precision, gradient accumulation, DDP and FSDP count; loaders, optimizer and
      checkpoints stay the Learner's.

    Each process gets a part of the samples of a DataLoader that has the sampler of `shuffle=True` or
    `shuffle=False`; `batch_size` is that of one process. A loader with a DistributedSampler stays as it is,
    and so does any other, with a warning: there, you divide the samples. A model that is wrapped already
    stays as it is.

    Args:
        mode: "ddp" or "fsdp2".
        shard: with "fsdp2", the modules that are gathered one at a time, such as
            `nn.TransformerEncoderLayer`: a type, a predicate, a glob on names, or several of these; without
            it, the whole model is gathered for each forward.
        prepare: called as `prepare(model, mesh)`; returns the model, or changes it and returns None.
        mesh: with "fsdp2" or `prepare`, a DeviceMesh, or the sizes of its dimensions by name,
            `{"dp": 2, "tp": 4}`. With `prepare`, samples are divided along dimensions whose names begin with
            "dp"; processes along others get the same. Without a mesh, among all processes.
        engine: an `accelerate.Accelerator`; needs `pip install 'hookcb[accelerate]'`.
        name: name of the callback in the learner.
        **options: options of DistributedDataParallel, such as `find_unused_parameters`, or of `fully_shard`,
            such as `mp_policy`.

    >>> from hookcb import Distributed, synth_learner
    >>> learn = synth_learner(cbs=Distributed())
    >>> with learn.no_logging():
    ...     learn.fit(1)
    >>> learn.ranks
    Ranks(rank=0, world=1)
    """

    order = orders.DISTRIBUTED
    run_lr_find = False  # the model is wrapped around it

    def __init__(
        self,
        mode: str = "ddp",
        *,
        shard: Where | Iterable[Where] | None = None,
        prepare: Callable[[nn.Module, Any], nn.Module | None] | None = None,
        mesh: Any = None,
        engine: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name)
        self._engine = None if engine is None else Engine(engine)
        if engine is not None:
            others = {"shard": shard, "prepare": prepare, "mesh": mesh, **options}
            unused = next((key for key, x in others.items() if x is not None), None)
            if mode != "ddp" or unused:
                raise ValueError(
                    f"{unused or f'mode={mode!r}'} is not used if there is engine=; set it in the Accelerator"
                )
        if mode not in MODES:
            raise ValueError(
                f"mode must be 'ddp' or 'fsdp2', got {mode!r}; for another way to parallelize, give prepare="
            )
        if prepare is not None and not callable(prepare):
            raise TypeError(f"prepare must be a function (model, mesh) -> model, got {prepare!r:.80}")
        if prepare is not None and (mode != "ddp" or shard is not None or options):
            given = f"mode={mode!r}" if mode != "ddp" else next(iter(options), "shard")
            raise ValueError(f"{given} is not used if there is prepare=; do in it what the model needs")
        if shard is not None and mode != "fsdp2":
            raise ValueError("shard needs 'fsdp2', as DistributedDataParallel does not shard the model")
        if mesh is not None and mode == "ddp" and prepare is None:
            raise ValueError("mesh needs 'fsdp2' or prepare=; DistributedDataParallel uses all processes")
        if mesh is not None and not isinstance(mesh, Mapping) and not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(
                f"mesh must be a DeviceMesh, or sizes by name, as in {{'dp': 2, 'tp': 4}}, got {mesh!r}"
            )
        if isinstance(mesh, Mapping) and not all(type(n) is int and n > 0 for n in mesh.values()):
            raise ValueError(f"mesh must have sizes by name, as in {{'dp': 2, 'tp': 4}}, got {mesh!r}")
        if prepare is not None and mesh is not None and not _names_of(mesh):
            raise ValueError(
                "the mesh has no names of its dimensions, which say which processes get the same samples; "
                "make it with mesh_dim_names, or give sizes by name, mesh={'dp': 2, 'tp': 4}"
            )
        if options:
            check_options(_wrapper_of(mode), options, NOT_OPTIONS)
        self.mode, self.shard, self.prepare, self.mesh, self.options = mode, shard, prepare, mesh, options
        self._is_on = False  # while the model is wrapped
        self._whole: nn.Module | None = None  # the user's model, while it is replicated
        self._wrapper: nn.Module | None = None  # what is the learner's model instead of the user's
        self._layout: list[tuple[Any, ...]] = []  # of its parameters when it was
        self._made: tuple[nn.Module, nn.Module] | None = None  # a model, and what it became for good
        self._share = Share(1, 0)
        self._parts: dict[str, tuple[Any, Any]] = {}  # the learner's loaders, and what was made of them
        self._left: dict[str, str] = {}  # loaders that are not divided, and why

    # ---- around a fit

    @contextmanager
    def wrapping_model(self, name: str) -> Iterator[None]:
        learn: Any = self.learn
        engine, is_alone = self._engine, n_processes() == 1
        if self._is_on or (is_alone and engine is None) or not _can_train(learn.model):
            yield
            return
        model, dls, device, divided_dls = learn.model, learn.dls, learn.device, None
        self._is_on = True
        try:
            with nullcontext() if engine is None else engine.running(learn):
                given = own_device(device, device_of(model)) if engine is None else engine.device(device)
                learn.device = given
                if is_alone and not (engine and engine.shards):
                    learn.model = self._replicated(model, learn.device)
                else:
                    open_group(learn.device)
                    ranks = Exchange(distributed.group.WORLD)
                    with shared_failures(ranks, lambda: "wrapping the model"):
                        ranks.join(name, MAX_WAIT)
                        learn.model = self._wrapped(model, learn.device)
                    self._share = self._find_share()
                    learn.dls = divided_dls = self._divided_all(dls)
                    learn.own_part = self._own_part
                yield
        finally:
            learn.device, learn.own_part = device, whole
            if learn.dls is divided_dls:  # else it was replaced meanwhile
                learn.dls = dls
            if learn.model is self._wrapper:
                learn.model = model
            self._is_on, self._whole, self._wrapper = False, None, None

    def before_fit(self) -> None:
        if n_processes() == 1 and self._engine is None:
            return
        if not self._is_on:
            raise RuntimeError(
                "Distributed wraps the model before a fit of a Learner begins; give it to the Learner, "
                "Learner(…, cbs=[Distributed()]), or to its fit"
            )
        self._follow_changes()
        if self._left:
            each = "; ".join(f"the {role} loader, as {why}" for role, why in self._left.items())
            warn(
                f"Distributed does not divide {each}: each process takes all that its loader yields; "
                "if that is the same on all of them, divide it yourself, as with a DistributedSampler"
            )

    def before_train(self) -> None:
        self._follow_changes()  # parameters may be trained from this epoch on

    def after_train(self) -> None:
        if self._whole is not None and layout(self._whole) != self._layout:
            raise RuntimeError(
                "parameters were frozen, unfrozen or reshaped after the training of an epoch began; do it "
                "in before_fit or before_epoch, as DistributedDataParallel averages only gradients of those "
                "that were trained then"
            )

    def _follow_changes(self) -> None:
        """Wraps the model anew if other callbacks have changed which parameters are trained, or their layout.

        DistributedDataParallel averages only gradients of parameters that were trained when it was made.
        """
        if (model := self._whole) is None:
            return
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        self.learn.ranks.check_alike({"frozen parameters": join_names(frozen, MAX_SHOWN) or "none"})
        if layout(model) != self._layout:
            self.learn.model = self._replicated(model, device_of(model))

    # ---- the model

    def _wrapped(self, model: nn.Module, device: torch.device) -> nn.Module:
        if self._made is not None and self._made[0] is model:
            self._wrapper = self._made[1]
            return self._wrapper
        if is_wrapped(model):
            return model
        if self.mode == "ddp" and self.prepare is None and not (self._engine and self._engine.shards):
            return self._replicated(model, device)
        if isinstance(getattr(self.learn, "opt_func", None), Optimizer):
            raise TypeError(
                "opt_func is an optimizer of the whole model, whose parameters are replaced by shards; "
                f"give its class, or a function, opt_func={type(self.opt).__name__}"
            )
        if isinstance(self.mesh, Mapping):
            self.mesh = _make_mesh(self.mesh, device)
        if (engine := self._engine) is not None:
            made = prepared(model, device, lambda model, _: engine.wrap(model), None)
        elif self.prepare is not None:
            made = prepared(model, device, self.prepare, self.mesh)
        else:
            mesh = self.mesh or _make_mesh({"dp": n_processes()}, device)
            made = sharded(model, self.shard, mesh, self.options)
        self._made, self._wrapper = (model, made), made
        return made

    def _replicated(self, model: nn.Module, device: torch.device) -> nn.Module:
        engine = self._engine
        made = replicated(model, device, self.options) if engine is None else engine.wrap(model)
        self._wrapper = made
        if made is not model:  # else an Accelerator trains it alone
            self._whole, self._layout = model, layout(model)
        return made

    # ---- the data

    def _find_share(self) -> Share:
        if self.prepare is None or self.mesh is None:
            return Share(distributed.get_world_size(), distributed.get_rank())
        share = Share(1, 0)
        for dim in _names_of(self.mesh):
            if dim.startswith(DATA_PARALLEL):
                n = self.mesh[dim].size()
                share = Share(share.n_parts * n, share.own * n + self.mesh.get_local_rank(dim))
        return share

    def _divided_all(self, dls: Any) -> Any:
        """The learner's loaders, divided once, as they may have workers that stay."""
        self._left = {}
        for role, loader in (("training", dls.train), ("validation", getattr(dls, "valid", None))):
            if role in self._parts and self._parts[role][0] is loader:
                continue
            part, why = divided(loader, self._share, role == "training")
            self._parts[role] = None if why else loader, part
            if why and loader is not None:
                self._left[role] = why
        return with_loaders(dls, *(part for _, part in self._parts.values()))

    def _own_part(self, loader: Any) -> Any:
        return divided(loader, self._share, training=False)[0]


def _can_train(model: nn.Module) -> bool:
    """Whether a model has anything to train, and shapes; if not, the Learner says what to do."""
    params = list(model.parameters())
    return any(p.requires_grad for p in params) and not any(map(is_lazy, params))


def _wrapper_of(mode: str) -> Callable[..., Any]:
    if mode == "ddp":
        return DistributedDataParallel
    from torch.distributed.fsdp import fully_shard

    return fully_shard


def _names_of(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh) if isinstance(mesh, Mapping) else tuple(mesh.mesh_dim_names or ())


def _make_mesh(sizes: Mapping[str, int], device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
