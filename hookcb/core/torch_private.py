"""All private names of torch that hookcb uses; no other file uses any.

Unless a docstring says otherwise, the name exists since torch 2.6, the oldest version that hookcb supports,
torch has no public equivalent, and without it the call raises an AttributeError that names it. Each function
is tested by `test_<name>` in tests/core/test_torch_private.py.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

Hooks = dict[int, Callable[..., Any]]
SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack
Edit = Callable[[Any], Callable[[], None] | None]  # of a graph; what undoes it, if it was changed

# looked up once, as hooks call these for each call of a layer
_task_id: Callable[[], int] = torch._C._current_graph_task_id
_running_node: Callable[[], Any] = torch._C._current_autograd_node
_will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
_interpreters: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_is_jit_tracing: Callable[[], bool] = torch._C._is_tracing

# ---- classes


DispatchMode = TorchDispatchMode
"""Base class of modes that see each operation; without it `import hookcb` fails."""

DataLoaderIter = _BaseDataLoaderIter
"""Base class of the iterators of DataLoaders; without it `import hookcb` fails."""

ListFetcher = _MapDatasetFetcher
"""Class whose `fetch` makes each batch of a dataset with indices; without it `import hookcb` fails."""

BatchNorm = nn.modules.batchnorm._BatchNorm
"""Base class of all batch norms, SyncBatchNorm included; a tuple of the public classes could replace it."""

Dropout = nn.modules.dropout._DropoutNd
"""Base class of all dropouts; a tuple of the public classes could replace it."""

Convolution = nn.modules.conv._ConvNd
"""Base class of all convolutions, transposed included; a tuple of the public classes could replace it."""


# ---- modules


def parameters_of(m: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, some may be None; reads no attribute, which could be a property."""
    return m._parameters


def children_of(m: nn.Module) -> dict[str, nn.Module | None]:
    """Modules directly in a module, by name, as it holds them."""
    return m._modules


def is_initialized(m: nn.Module) -> bool:
    """Whether `nn.Module.__init__` has ended, which sets `_modules` last; before it, attributes fail."""
    return "_modules" in vars(m)


def buffers_of(m: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, in the dict that the module uses; not a dict for TorchScript."""
    return m._buffers


def unsaved_buffer_names(m: nn.Module) -> set[str]:
    """Names of a module's own non-persistent buffers, in the set that the module uses."""
    return m._non_persistent_buffers_set


def forward_hooks(m: nn.Module) -> tuple[Hooks, Hooks]:
    """A module's hooks after and before its forward, by id."""
    return m._forward_hooks, m._forward_pre_hooks


def backward_in_python(node: Any) -> Any:
    """The backward of a node that a subclass of `torch.autograd.Function` has made, None of another one."""
    kind: Any = type(node)
    return kind._forward_cls.backward if issubclass(kind, BackwardCFunction) else None


def backward_hooks(m: nn.Module) -> tuple[Hooks, Hooks]:
    """A module's hooks after and before its backward, by id."""
    return m._backward_hooks, m._backward_pre_hooks


HOOK_KINDS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of modules and tensors that hold hooks; a name that torch drops counts as no hooks."""


def plain_call(m: nn.Module) -> Callable[..., Any]:
    """A module's call including its hooks, uncompiled even if the module is compiled in place."""
    return m._call_impl


CALL_NAME = "_wrapped_call_impl"
"""Name of the function that runs a module's call; if torch renames it, nested calls count as one."""


# ---- torch.compile


def compiled_call(m: nn.Module) -> Any:
    """The function that a module's call runs after `m.compile()`, None if it is not compiled in place."""
    return m._compiled_call_impl


def set_compiled_call(m: nn.Module, call: Any) -> None:
    """Has a module's call run `call` with the same arguments; its hooks run only if `call` runs them."""
    m._compiled_call_impl = call


def undo_compile(m: nn.Module) -> None:
    """Undoes `m.compile()`; does nothing if the module is not compiled in place."""
    m.__dict__.pop("_compiled_call_impl", None)


COMPILED_NAME = "_orig_mod"
"""Attribute in which the wrapper of `torch.compile(m)` has `m`; part of the names of parameters in it."""


def is_compile_wrapper(m: nn.Module) -> bool:
    """Whether a module was returned by `torch.compile(m)`; checks names, as importing its class takes 1 s."""
    return type(m).__name__ == "OptimizedModule" and COMPILED_NAME in m._modules


def without_compile_wrapper(m: nn.Module) -> nn.Module:
    """The module inside the wrapper of `torch.compile(m)`, `m` itself if it is not a wrapper."""
    inside: nn.Module = getattr(m, COMPILED_NAME, m)
    return inside


WRAPPERS = {  # torch.compile, activation checkpointing, FullyShardedDataParallel
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""Attribute in which a wrapper has the module inside, by its class; part of the names of what is in it."""


def wrapped_module(m: nn.Module) -> nn.Module | None:
    """The module inside a wrapper, None if it is no wrapper; checks names, as importing classes takes 1 s."""
    name = WRAPPERS.get(type(m).__name__)
    return None if name is None else m._modules.get(name)


def is_dynamo_imported() -> bool:
    """Whether anything can have been compiled yet."""
    return "torch._dynamo" in sys.modules


def mark_static_address(x: Tensor) -> None:
    """Tells torch.compile, which must be imported, that a tensor stays where it is.

    Another one may come in its place without compiling again; CUDA graphs are captured again then.
    """
    torch._dynamo.mark_static_address(x, guard=False)  # torch 2.6 guards by default


COMPILES_GRAPH = "call_user_compiler"
"""Method of Dynamo's OutputGraph that has a backend compile a graph."""


def edit_graphs(edit: Edit) -> Callable[[], None]:
    """Has torch.compile, which must be imported, show each graph before a backend compiles it.

    Args:
        edit: called with the GraphModule, which it may change; then it returns a function that undoes that,
            which is called before the graph is compiled again if it could not be compiled.

    Returns:
        A function that ends this.
    """
    from torch._dynamo.output_graph import OutputGraph

    real = getattr(OutputGraph, COMPILES_GRAPH)
    edits: list[Edit] = getattr(real, "edits", [])  # of all, by one wrapper

    @wraps(real)
    def call(graph: Any, gm: Any, *args: Any) -> Any:
        undos = [undo for edit in edits if (undo := edit(gm)) is not None]
        try:
            return real(graph, gm, *args)
        except Exception:
            if not undos:
                raise
            for undo in reversed(undos):
                undo()
            return real(graph, gm, *args)

    def end() -> None:
        if edit in edits:
            edits.remove(edit)
        there = getattr(OutputGraph, COMPILES_GRAPH)
        # if other code has replaced it since, ours is called by theirs and stays
        if not edits and getattr(there, "edits", None) is edits:
            setattr(OutputGraph, COMPILES_GRAPH, there.__wrapped__)

    if not hasattr(real, "edits"):
        vars(call)["edits"] = edits
        setattr(OutputGraph, COMPILES_GRAPH, call)
    edits.append(edit)
    return end


def compile_counts(kind: str) -> Counter[str]:
    """Counters of torch.compile, of `kind` "frames" or "stats"; empty if dynamo is not imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    counts: Counter[str] = Counter() if utils is None else utils.counters[kind]
    return counts


untraced = torch._compile._disable_dynamo
"""`torch.compiler.disable`, but torch._dynamo is imported at the first call, as for methods of optimizers."""


def skip_frames(function: Any) -> None:
    """Has torch.compile run a function as it is where it does not inline it, but compile what it calls."""
    engine = torch._C._dynamo.eval_frame
    if hasattr(engine, "skip_code"):  # before torch 2.8
        engine.skip_code(function.__code__)
    else:
        action = engine._FrameAction
        strategy = engine._FrameExecStrategy(action.SKIP, action.DEFAULT)
        engine.set_code_exec_strategy(function.__code__, strategy)


def script_instead(wrapper: Any, function: Callable[..., Any]) -> None:
    """Has torch.jit.script compile a function where it meets a wrapper of it, which it cannot compile."""
    vars(wrapper).update(__script_if_tracing_wrapper=True, __original_fn=function)


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled code, such as a step that calls backward, calls without compiling it."""
    quiet = untraced(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (quiet if is_dynamo_imported() else function)(*args, **kwargs)

    skip_frames(call)
    return call


# ---- tensors and storages


def version_of(x: Tensor) -> int:
    """Number of in-place changes of a tensor; RuntimeError for an inference tensor."""
    return x._version


def held_versions(opt: Optimizer) -> list[int]:
    """`version_of` each parameter of an optimizer, in one comprehension, as it is needed in every step."""
    return [p._version for group in opt.param_groups for p in group["params"]]


def is_view(x: Tensor) -> bool:
    """Whether autograd treats a tensor as a view of another."""
    return x._is_view()


def tensor_hooks(x: Tensor) -> Hooks:
    """A tensor's hooks of `register_hook`, by id; empty if it has none."""
    return x._backward_hooks or {}


def coo_indices(x: Tensor) -> Tensor:
    """Indices of a sparse COO tensor, coalesced or not."""
    return x._indices()


def coo_values(x: Tensor) -> Tensor:
    """Values of a sparse COO tensor, coalesced or not."""
    return x._values()


def storage_id(storage: torch.UntypedStorage) -> int:
    """Address of the storage object, the same for all its Python wrappers; `data_ptr` may be 0."""
    return int(storage._cdata)


def flattened(xs: list[Tensor]) -> Tensor:
    """All elements in one dimension, a view of a single tensor; several times as fast as `torch.cat`."""
    flat: Tensor = torch._C._nn.flatten_dense_tensors(xs)
    return flat


def norms_of(xs: list[Tensor], order: float = 2) -> list[Tensor]:
    """Norm of each tensor, in a few kernels; `torch.linalg.vector_norm` of each gives the same."""
    return list(torch._foreach_norm(xs, order))


def operator_schema(func: Any) -> Any:
    """Schema of an operator that is passed to a mode, with `name` and `is_mutable`."""
    return func._schema


def cudnn_rnn() -> Any:
    """The operator of RNNs on CUDA."""
    return torch.ops.aten._cudnn_rnn


def cpu_attention() -> Any:
    """The operator of attention on the CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


# ---- graphs and backwards


def in_backward() -> bool:
    """Whether a backward is running in this thread, which may be one of autograd's own."""
    return _task_id() != -1


def running_node() -> Any:
    """The node that a backward is running in this thread, None outside of backwards."""
    return _running_node()


def will_run(node: Node) -> bool:
    """Whether the running backward will run a node; RuntimeError outside of backwards."""
    return _will_run(node)


RUN_BACKWARD = "_engine_run_backward"
"""The function in `torch.autograd` by which its `backward` and `grad` run a backward."""


after_backward: Callable[[Callable[[], Any]], None] = Variable._execution_engine.queue_callback
"""Calls a function at the end of the running backward; RuntimeError outside of backwards."""


def sequence_nr(node: Any) -> int:
    """Sequence number of a node, larger for nodes created later in the same thread."""
    number: int = node._sequence_nr()
    return number


def input_shape(node: Any) -> tuple[int, ...]:
    """Shape of the first gradient that a node receives, which is that of its first output; () if unknown."""
    known = () if node is None else node._input_metadata
    return tuple(known[0].shape) if known else ()


def input_dtype(node: Any) -> torch.dtype | None:
    """Dtype of the first gradient that a node receives, as of its first output; None if unknown."""
    known = () if node is None else node._input_metadata
    return getattr(known[0], "dtype", None) if known else None


def saved(node: Any, name: str, default: Any = None) -> Any:
    """An argument that a node has saved for its backward, such as "reduction"; the default if it has none.

    Raises:
        RuntimeError: If it is freed, or a hook of the program would run, as one of activation checkpointing,
            which would compute its region again. Torch before 2.8 does not tell of hooks.
    """
    no_tensor = ()
    if (raw := getattr(node, f"_raw_saved_{name}", no_tensor)) is None:
        return None
    for x in raw if isinstance(raw, tuple) else (raw,):
        hook = getattr(x, "unpack_hook", None)
        if hook is not None and not getattr(hook, READS_ONLY, False):
            raise RuntimeError(f"a hook would run to read {name}")
    value = getattr(node, f"_saved_{name}", default)
    return tuple(map(signed, value)) if isinstance(value, tuple) else signed(value)


READS_ONLY = "hookcb_reads_only"
"""Attribute of hooks of ours that only give back the tensor that was saved; it may be read at any time."""


def signed(x: Any) -> Any:
    """A saved value as it was given: torch shows negative integers, such as a dim of -1, as unsigned ones."""
    return x - 2**64 if isinstance(x, int) and x >= 2**63 else x


def raw_saved(node: Any) -> list[Any]:
    """The `SavedTensor` objects of a node, valid while it lives; those already freed are left out."""
    saved_tensors: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(RuntimeError):  # its backward has run
                value = getattr(node, name)
                saved_tensors += value if isinstance(value, tuple) else [value]
    return [x for x in saved_tensors if x is not None]


# ---- hooks on saved tensors


def saved_hooks_enabled() -> bool:
    """Whether hooks on saved tensors are allowed now; transforms of torch.func disable them."""
    autograd: Any = torch._C._autograd  # its stub lacks the function
    return bool(autograd._saved_tensors_hooks_is_enabled())


def push_saved_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Puts hooks on all tensors that autograd saves in this thread; only the last ones pushed are called."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_hooks() -> None:
    """Removes the hooks on saved tensors that were pushed last."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


KNOWS_TOP = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Whether torch can tell which hooks on saved tensors are active; since 2.8."""


def top_saved_hooks() -> SavedHooks | None:
    """The active hooks on saved tensors; None if there are none, or before torch 2.8."""
    if not KNOWS_TOP:
        return None
    top: SavedHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


disable_saved_hooks: Callable[..., None] = torch._C._autograd._saved_tensors_hooks_disable
"""Disables hooks on saved tensors, with an error message; a transform of torch.func calls it."""

enable_saved_hooks: Callable[[], None] = torch._C._autograd._saved_tensors_hooks_enable
"""Enables hooks on saved tensors again; a transform of torch.func calls it at its end."""


def replace_saved_hooks_switch(disable: Callable[..., None], enable: Callable[[], None]) -> None:
    """Has transforms of torch.func call these two functions, to be notified of transforms."""
    torch._C._autograd._saved_tensors_hooks_disable = disable
    torch._C._autograd._saved_tensors_hooks_enable = enable


CHECKPOINT_HOOKS = "_checkpoint_hook"
"""Name of the hooks on saved tensors of non-reentrant activation checkpointing; used for a message only."""


# ---- transforms and traces


def in_transform() -> bool:
    """Whether a transform of torch.func is active; its tensors must not outlive it."""
    return _interpreters() is not None


def is_transform_tensor(x: Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_batched_gradient(x: Tensor) -> bool:
    """Whether a tensor stands for each of those of a backward with `is_grads_batched=True`."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def without_transform(x: Tensor) -> Tensor:
    """The tensor inside a tensor of a torch.func transform, one level down."""
    return torch._C._functorch.get_unwrapped(x)


def transforms_left() -> AbstractContextManager[Any]:
    """Leaves all transforms of torch.func for a `with` block; only valid inside a transform."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def keeps_snapshots() -> AbstractContextManager[Any]:
    """Lets operators be called with tensors without values where transforms are left, as in torch.func.vmap.

    There, up to torch 2.11, an assertion of torch fails without; later nothing changes.
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot
    included = torch._C._dispatch_tls_local_include_set().add(key)
    return torch._C._ForceDispatchKeyGuard(included, torch._C._dispatch_tls_local_exclude_set().remove(key))


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace is recording; the public `torch.jit.is_tracing` is for scripted functions."""
    return _is_jit_tracing()


# ---- GPUs, profilers, optimizers and scalers


def is_profiling() -> bool:
    """Whether a torch profiler is running."""
    return bool(torch._C._autograd._profiler_enabled())


def raw_stream(device: torch.device) -> int:
    """Number of a card's current stream, of which `torch.cuda.current_stream` makes an object each time."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def start_memory_history(max_entries: int) -> None:
    """Starts recording the CUDA allocator's history, with Python stacks; torch's tutorial calls it too."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def stop_memory_history() -> None:
    """Stops recording the CUDA allocator's history."""
    torch.cuda.memory._record_memory_history(enabled=None)


def memory_history() -> Any:
    """Recorded history of the CUDA allocator, to be pickled for pytorch.org/memory_viz."""
    return torch.cuda.memory._snapshot()


def is_memory_history_on() -> bool:
    """Whether the CUDA allocator's history is recorded; False without a GPU, or if torch cannot tell."""
    is_enabled: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(is_enabled and torch.cuda.is_available() and is_enabled())  # raises without a driver


OPT_CALLED = "_opt_called"
"""Attribute of an optimizer that its `step` sets and a scheduler checks before it warns."""


def mark_stepped(opt: Optimizer) -> None:
    """Marks an optimizer as stepped, so that no scheduler warns; no effect if torch drops the attribute."""
    setattr(opt, OPT_CALLED, True)


CLIP = "_clip_grads_with_norm_"
"""Function that `clip_grad_norm_` calls in torch.nn.utils.clip_grad; clipping is not heard if it is gone."""


def scaler_stage(scaler: GradScaler, opt: Optimizer) -> Any:
    """Stage of a GradScaler for an optimizer, an `OptState`: READY, UNSCALED or STEPPED."""
    return scaler._per_optimizer_states[id(opt)]["stage"]


# ---- processes


def make_store(prefix: str) -> Any:
    """A part of the store through which the processes of the default group meet."""
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


def store_client(timeout: timedelta) -> Any:
    """A connection of our own to the store of the default group, or else to that of torchrun.

    The group's own connection is held by whoever waits in it, and ends with the group.

    Args:
        timeout: of an answer.

    Returns:
        The connection; None if there is no store that other processes reach.

    Raises:
        RuntimeError: If the process that hosts the store does not answer.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    c10d: Any = distributed  # which has the stores, but does not list them
    if distributed.is_initialized():
        store: Any = distributed_c10d._get_default_store()
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        if isinstance(store, c10d.FileStore):
            return c10d.FileStore(store.path, -1)  # which leaves the file to the group
        address = (store.host, store.port) if isinstance(store, c10d.TCPStore) else None
    else:  # a store that torchrun hosts, and not rank 0, is there before the group
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) if is_hosted else None
    return None if address is None else c10d.TCPStore(*address, wait_for_workers=False, timeout=timeout)


def n_collectives() -> int | None:
    """Number of collectives that this process has begun in all open groups; None if that is unknown."""
    from torch.distributed import distributed_c10d

    groups: list[Any] = list(distributed_c10d._world.pg_map)
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except RuntimeError:
        return None


def calling_replica() -> nn.Module | None:
    """The DistributedDataParallel whose forward runs now; None if there is none."""
    found: nn.Module | None = nn.parallel.DistributedDataParallel._active_ddp_module
    return found


def replicated_parameters(model: Any) -> list[Tensor]:
    """The parameters whose gradients a DistributedDataParallel averages: those it was made with."""
    return list(model._module_parameters)


def communication_hooks(model: Any) -> list[str]:
    """Names of the communication hooks of a DistributedDataParallel."""
    return [getattr(hook, "__name__", type(hook).__name__) for hook, _ in model._comm_hooks]


def group_timeout(group: Any) -> timedelta:
    """Timeout of the collectives of a process group; torch's default if its backend does not tell."""
    from torch.distributed import distributed_c10d

    devices = group._device_types  # none for a group that is written in Python
    options = getattr(group._get_backend(devices[0]), "options", None) if devices else None
    found: timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return found


def is_joining(model: nn.Module) -> bool:
    """Whether a DistributedDataParallel runs inside `with model.join():`."""
    if not getattr(getattr(model, "_join_config", None), "enable", False):
        return False
    from torch.distributed.algorithms.join import Join

    # `enable` stays on after the block, but the block's object ends with it
    return any(type(x) is Join and id(model) in map(id, x._joinables) for x in gc.get_objects())


def is_fully_sharded(m: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module."""
    return hasattr(m, "set_reshard_after_backward")


def plain_class(x: object) -> type:
    """Class of an object; of a module, without the one that `fully_shard` makes, as FSDPLinear of Linear."""
    kind = type(x)
    if kind.__name__.startswith("FSDP") and isinstance(x, nn.Module) and is_fully_sharded(x):
        kind = next(base for base in kind.__bases__ if issubclass(base, nn.Module))
    return kind


def is_flattened(p: Tensor) -> bool:
    """Whether FullyShardedDataParallel has made a parameter a part of a flat one, or it is the flat one."""
    return hasattr(p, "_fsdp_flattened")


def flat_handles(model: nn.Module) -> list[Any]:
    """Handles of the flat parameters in a model; each FullyShardedDataParallel in it has one at most."""
    wrappers = [m for m in model.modules() if type(m).__name__ == "FullyShardedDataParallel"]
    return [handle for m in wrappers if (handle := getattr(m, "_handle", None)) is not None]


def flattened_sizes(model: nn.Module) -> dict[int, int]:
    """Numbers of elements of flattened parameters on all ranks together, by id; with padding of flat ones."""
    sizes: dict[int, int] = {}
    for handle in flat_handles(model):
        flat = handle.flat_param
        sizes[id(flat)] = flat._sharded_size.numel() * handle.world_size
        own = [parameters_of(info.module).get(info.param_name) for info in flat._param_infos]
        sizes |= {id(p): n for p, n in zip(own, flat._numels, strict=True) if p is not None}
    return sizes


def flattened_modules(model: nn.Module) -> set[int]:
    """Ids of the modules whose parameters are now only parts of a flat one."""
    infos = (info for handle in flat_handles(model) for info in handle.flat_param._param_infos)
    return {id(info.module) for info in infos}


def reshard_flat(model: nn.Module) -> None:
    """Has FullyShardedDataParallels drop the parameters that they have gathered."""
    for handle in flat_handles(model):
        # before its first forward, it has gathered nothing
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
            handle.reshard(True)
            handle.post_reshard()


def place_in(whole: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and first element of this rank's part of a DTensor of shape `whole`."""
    from torch.distributed.tensor import _utils

    shape, first = _utils.compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(shape), tuple(first)
