"""Running a model to look at it, and leaving it as it was."""

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from hookcb.core.batch import map_leaves
from hookcb.core.torch_private import buffers_of, put_back_buffers, unsaved_buffer_names, version_of
from hookcb.hooks.hook import hook_outputs
from hookcb.hooks.modules import is_compiled
from hookcb.hooks.taps import taps_on


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Runs a `with` block in eval mode and without gradients, and leaves nothing changed by it.

    That is the modes of all modules, buffers such as batch-norm statistics, random numbers, and what hooks of
    ours have stored. Compiled modules run uncompiled.
    """
    devices = {x.device for x in [*model.parameters(), *model.buffers()] if x.device.type == "cuda"}
    numbers = random.getstate()
    try:
        with ExitStack() as stack:
            if any(map(is_compiled, model.modules())):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_no_fast_path())
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_set(taps_on(model), "hook", None))
            # not by model.eval(), which some override to merge weights or keep a mode
            stack.enter_context(_set(model.modules(), "training", False))
            stack.enter_context(_on_copies_of_buffers(model))
            # some models take gradients in their forward; those that wait for a step stay apart
            params = [p for p in model.parameters() if not isinstance(p, UninitializedParameter)]
            stack.enter_context(_set(params, "grad", None))
            # with a largest norm they write to their weights in each forward, in eval mode too
            embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
            stack.enter_context(_set(embeddings, "max_norm", None))
            yield
    finally:
        random.setstate(numbers)


@contextmanager
def _set(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    before = [(x, getattr(x, name)) for x in objects]
    for x, _ in before:
        setattr(x, name, value)
    try:
        yield
    finally:
        for x, own in before:
            setattr(x, name, own)


@contextmanager
def _on_copies_of_buffers(model: nn.Module) -> Iterator[None]:
    """Not putting values back afterwards: a graph may have saved the buffer itself for its backward.

    Only a buffer that was written to all the same, through another reference, gets its value back.
    """
    copies: dict[int, Tensor] = {}
    values: list[tuple[Tensor, int, Tensor]] = []
    plain = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(m, dict(buffers_of(m)), set(unsaved_buffer_names(m))) for m in plain]
    for m, buffers, _ in before:
        for name, x in buffers.items():
            if x is None or isinstance(x, UninitializedBuffer):
                continue
            if id(x) not in copies:
                copies[id(x)] = x.detach().clone()
                if not x.is_inference():
                    values.append((x, version_of(x), x.detach().clone()))
            buffers_of(m)[name] = copies[id(x)]
    try:
        yield
    finally:
        for m, buffers, non_persistent in before:
            put_back_buffers(m, buffers, non_persistent)
        for x, version, value in values:
            if version_of(x) != version:
                x.detach().copy_(value)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Has attention and TransformerEncoder call their parts, which in eval mode they else do not."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def dummy_eval(m: nn.Module, size: tuple[int, ...] = (64, 64)) -> Any:
    """The output of `m` for one random sample in [-1, 1], in eval mode; `m` stays as it is.

    Args:
        m: whose first layer with channels or features tells how many there are.
        size: height and width; for convolutions of one or three dimensions the first counts for each.

    Raises:
        ValueError: where no layer tells what the input may be.
    """
    with untouched(m):
        return m(_random_input(m, size))


def model_sizes(m: nn.Module, size: tuple[int, ...] = (64, 64)) -> list[Any]:
    """Shapes of the outputs of the children of `m` for a dummy input, see `dummy_eval`.

    >>> import torch
    >>> from hookcb import model_sizes
    >>> model_sizes(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AvgPool2d(2)), (16, 16))
    [torch.Size([1, 8, 14, 14]), torch.Size([1, 8, 7, 7])]
    """
    with untouched(m), hook_outputs(list(m.children()) or m) as hooks:
        m(_random_input(m, size))
    return [shapes(output) for output in hooks.stored]


def num_features_model(m: nn.Module) -> int:
    """Number of output features of `m`: the channels its last child puts out.

    Raises:
        RuntimeError, ValueError: what `m` raises for images of 32×32, where it does for larger ones too.
    """
    first: Exception | None = None
    for size in (32, 64, 128, 256, 512, 1024, 2048):
        try:
            return int(model_sizes(m, (size, size))[-1][1])
        except (RuntimeError, ValueError) as error:
            if first is not None and str(error) == str(first):
                break  # it is not about the size
            first = first or error
    assert first is not None
    first.add_note("the same or another error came with larger images too")
    raise first


def shapes(output: Any) -> Any:
    """`output` with each tensor in it replaced by its shape, a nested one by those of its parts."""

    def shape(x: Tensor) -> Any:
        return [part.shape for part in x.unbind()] if x.is_nested else x.shape

    return map_leaves(shape, output, lambda x: isinstance(x, Tensor))


def _random_input(m: nn.Module, size: tuple[int, ...]) -> Tensor:
    for layer in m.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        if isinstance(n := getattr(layer, "in_channels", None), int):
            n_dims = weight.ndim - 2
            shape = (1, n, *(size if len(size) == n_dims else size[:1] * n_dims))
        elif isinstance(n := getattr(layer, "in_features", None), int):
            shape = (1, n)
        else:
            continue
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return x.to(weight.device, weight.dtype)
    raise ValueError(
        f"no layer of {type(m).__name__} tells what its input may be, by in_channels or in_features; "
        "call it on an input of yours, or module_summary(model, x)"
    )
