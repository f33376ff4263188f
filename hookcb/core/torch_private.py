"""All private names of torch that hookcb uses, each in one place; no other file uses any.

If a docstring says no more, then the name is in torch 2.6 already, the oldest that hookcb supports, nothing
public gives the same, and without it the call raises an AttributeError that names it. What each gives is
tested by `test_<name>` in tests/core/test_torch_private.py.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.dataloader import _BaseDataLoaderIter

Hooks = dict[int, Callable[..., Any]]
SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack

# looked up once, as hooks call these at each call of a layer
_task_id: Callable[[], int] = torch._C._current_graph_task_id
_running_node: Callable[[], Any] = torch._C._current_autograd_node
_will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
_interpreters: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_is_jit_tracing: Callable[[], bool] = torch._C._is_tracing

# ---- classes


DispatchMode = TorchDispatchMode
"""Base of modes that see each operation; without it `import hookcb` fails, as it is a base of classes."""

DataLoaderIter = _BaseDataLoaderIter
"""Base of the iterators of DataLoaders; without it `import hookcb` fails."""

BatchNorm = nn.modules.batchnorm._BatchNorm
"""Base of all batch norms, SyncBatchNorm too; to be replaced by a tuple of the public classes."""

Dropout = nn.modules.dropout._DropoutNd
"""Base of all dropouts; to be replaced by a tuple of the public classes."""

Convolution = nn.modules.conv._ConvNd
"""Base of all convolutions, transposed too; to be replaced by a tuple of the public classes."""


# ---- modules


def parameters_of(m: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, None among them; reads no attribute, which may be computed."""
    return m._parameters


def buffers_of(m: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, in the dict that the module uses; no dict for TorchScript."""
    return m._buffers


def unsaved_buffer_names(m: nn.Module) -> set[str]:
    """Names of a module's own buffers that are not in its `state_dict`, in the set that the module uses."""
    return m._non_persistent_buffers_set


def forward_hooks(m: nn.Module) -> tuple[Hooks, Hooks]:
    """A module's hooks after and before its forward, by id."""
    return m._forward_hooks, m._forward_pre_hooks


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
"""Attributes of modules and tensors that hold hooks; a name that is gone counts as no hooks."""


def plain_call(m: nn.Module) -> Callable[..., Any]:
    """The call of a module with its hooks, uncompiled even if the module is compiled in place."""
    return m._call_impl


CALL_NAME = "_wrapped_call_impl"
"""Name of the function in whose frame a module's call runs; without it nested calls count as one."""


# ---- torch.compile


def compiled_call(m: nn.Module) -> Any:
    """What a module's call runs after `m.compile()`, None if the module is not compiled in place."""
    return m._compiled_call_impl


def set_compiled_call(m: nn.Module, call: Any) -> None:
    """Has a module's call run `call`, with the arguments of the call and no hooks but those in `call`."""
    m._compiled_call_impl = call


def undo_compile(m: nn.Module) -> None:
    """Takes `m.compile()` back; does nothing if the module is not compiled in place."""
    m.__dict__.pop("_compiled_call_impl", None)


COMPILED_NAME = "_orig_mod"
"""Part that the wrapper of `torch.compile(m)` adds to the names of parameters and modules."""


def is_compile_wrapper(m: nn.Module) -> bool:
    """Whether a module is what `torch.compile(m)` returned; by name, as its import takes a second."""
    return type(m).__name__ == "OptimizedModule" and COMPILED_NAME in m._modules


def without_compile_wrapper(m: nn.Module) -> nn.Module:
    """The module inside the wrapper of `torch.compile(m)`, `m` itself if it is no wrapper."""
    inside: nn.Module = getattr(m, "_orig_mod", m)
    return inside


def is_dynamo_imported() -> bool:
    """Whether anything can be compiled yet; by name, as the import takes a second."""
    return "torch._dynamo" in sys.modules


def compile_counts(kind: str) -> Counter[str]:
    """What torch.compile counts, of `kind` "frames" or "stats"; empty if dynamo is not imported, or gone."""
    utils = sys.modules.get("torch._dynamo.utils")
    counts: Counter[str] = Counter() if utils is None else utils.counters[kind]
    return counts


# ---- tensors and storages


def version_of(x: Tensor) -> int:
    """How often a tensor was changed in place; RuntimeError for an inference tensor."""
    return x._version


def is_view(x: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return x._is_view()


def tensor_hooks(x: Tensor) -> Hooks:
    """A tensor's hooks of `register_hook`, by id; empty if it has none."""
    return x._backward_hooks or {}


def coo_indices(x: Tensor) -> Tensor:
    """The indices of a sparse COO tensor, also if it is not coalesced."""
    return x._indices()


def coo_values(x: Tensor) -> Tensor:
    """The values of a sparse COO tensor, also if it is not coalesced."""
    return x._values()


def storage_id(storage: torch.UntypedStorage) -> int:
    """The address of the storage itself, which each Python object of it shares; `data_ptr` may be 0."""
    return int(storage._cdata)


def flattened(xs: list[Tensor]) -> Tensor:
    """All elements in one row, a view if there is one tensor; several times as fast as `torch.cat`."""
    flat: Tensor = torch._C._nn.flatten_dense_tensors(xs)
    return flat


def norms_of(xs: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor, in a few kernels; `torch.linalg.vector_norm` of each gives the same."""
    return list(torch._foreach_norm(xs))


def operator_schema(func: Any) -> Any:
    """The schema of an operator as modes get it, with `name` and `is_mutable`."""
    return func._schema


def cudnn_rnn() -> Any:
    """The operator of RNNs on CUDA."""
    return torch.ops.aten._cudnn_rnn


def cpu_attention() -> Any:
    """The operator of attention on the CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


# ---- graphs and backwards


def in_backward() -> bool:
    """Whether autograd is in a backward, in this thread or in one of its own that this is."""
    return _task_id() != -1


def running_node() -> Any:
    """The node whose backward is running in this thread, None outside of backwards."""
    return _running_node()


def will_run(node: Node) -> bool:
    """Whether the backward that is running will run a node; RuntimeError outside of backwards."""
    return _will_run(node)


def after_backward(call: Callable[[], Any]) -> None:
    """Calls `call` at the end of the backward that is running; RuntimeError outside of backwards."""
    Variable._execution_engine.queue_callback(call)


def sequence_nr(node: Any) -> int:
    """Number of a node, larger for nodes that were made later in the same thread."""
    number: int = node._sequence_nr()
    return number


def input_shape(node: Any) -> tuple[int, ...]:
    """Shape of the first gradient that a node is given, which is that of its first output."""
    return tuple(node._input_metadata[0].shape)


def saved(node: Any, name: str, default: Any = None) -> Any:
    """What a node has saved by a name of its own, such as "reduction"; RuntimeError if it is freed.

    The default if it saves nothing of that name, also as torch has renamed it.
    """
    return getattr(node, f"_saved_{name}", default)


def raw_saved(node: Any) -> list[Any]:
    """The `SavedTensor` objects of a node, for use while it lives; none that torch refuses."""
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(RuntimeError):  # its backward has run
                value = getattr(node, name)
                found += value if isinstance(value, tuple) else [value]
    return [x for x in found if x is not None]


# ---- hooks on saved tensors


def saved_hooks_enabled() -> bool:
    """Whether hooks on saved tensors are allowed now; transforms of torch.func do not allow them."""
    autograd: Any = torch._C._autograd  # whose stub lacks it
    return bool(autograd._saved_tensors_hooks_is_enabled())


def push_saved_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Puts hooks on all tensors that autograd saves in this thread; the last ones pushed act."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_hooks() -> None:
    """Takes off the hooks that were pushed last."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


KNOWS_TOP = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Whether torch tells which hooks on saved tensors act; since 2.8."""


def top_saved_hooks() -> SavedHooks | None:
    """The hooks on saved tensors that act now; None if there are none, or torch cannot tell, before 2.8."""
    if not KNOWS_TOP:
        return None
    top: SavedHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


disable_saved_hooks: Callable[..., None] = torch._C._autograd._saved_tensors_hooks_disable
"""Forbids hooks on saved tensors, with the text of the error; a transform of torch.func calls it."""

enable_saved_hooks: Callable[[], None] = torch._C._autograd._saved_tensors_hooks_enable
"""Allows hooks on saved tensors again; a transform of torch.func calls it as it ends."""


def replace_saved_hooks_switch(disable: Callable[..., None], enable: Callable[[], None]) -> None:
    """Has transforms of torch.func call these two in place of torch's own, to hear of transforms."""
    torch._C._autograd._saved_tensors_hooks_disable = disable
    torch._C._autograd._saved_tensors_hooks_enable = enable


CHECKPOINT_HOOKS = "_checkpoint_hook"
"""Name of the hooks on saved tensors of activation checkpointing without reentry; for a text alone."""


# ---- transforms and traces


def in_transform() -> bool:
    """Whether a transform of torch.func is at work, whose tensors must not outlive it."""
    return _interpreters() is not None


def is_transform_tensor(x: Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def without_transform(x: Tensor) -> Tensor:
    """The tensor inside one that belongs to a transform of torch.func, one level."""
    return torch._C._functorch.get_unwrapped(x)


def transforms_left() -> AbstractContextManager[Any]:
    """Leaves all transforms of torch.func for a `with` block; to be used inside of one."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace records; the public `torch.jit.is_tracing` is a scripted function's."""
    return _is_jit_tracing()


# ---- profilers, optimizers and scalers


def is_profiling() -> bool:
    """Whether a profiler of torch is running."""
    return bool(torch._C._autograd._profiler_enabled())


def start_memory_history(max_entries: int) -> None:
    """Has CUDA's allocator remember what it does, with Python stacks; torch's own tutorial calls it too."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def stop_memory_history() -> None:
    """Has CUDA's allocator remember no more."""
    torch.cuda.memory._record_memory_history(enabled=None)


def memory_history() -> Any:
    """What CUDA's allocator remembers, to be pickled for pytorch.org/memory_viz."""
    return torch.cuda.memory._snapshot()


def is_memory_history_on() -> bool:
    """Whether CUDA's allocator remembers what it does; False without a GPU, or if torch cannot tell."""
    asked: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(asked and torch.cuda.is_available() and asked())  # without a driver it raises


OPT_CALLED = "_opt_called"
"""Attribute that a scheduler has `step` set on the optimizer, and looks at before it warns."""


def mark_stepped(opt: Optimizer) -> None:
    """Says that an optimizer has made a step, so that no scheduler warns; no effect if torch drops it."""
    setattr(opt, OPT_CALLED, True)


def scaler_stage(scaler: GradScaler, opt: Optimizer) -> Any:
    """Where a GradScaler is with an optimizer, an `OptState`: READY, UNSCALED or STEPPED."""
    return scaler._per_optimizer_states[id(opt)]["stage"]
