"""Running a model for inspection without changing it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.batch import map_leaves
from hookcb.core.randomness import parts_of
from hookcb.core.restore import preserve_attribute, preserve_buffers, preserve_contents, preserve_random
from hookcb.hooks.hook import hook_outputs
from hookcb.hooks.modules import is_compiled
from hookcb.hooks.taps import taps_on


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Runs a `with` block in eval mode and without gradients, and restores the model.

    Restored are the modes of all modules, buffers such as batch-norm statistics, random numbers, and the
    stored values of hookcb's hooks. Compiled modules run uncompiled.
    """
    with ExitStack() as stack:
        if any(map(is_compiled, model.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # else attention and TransformerEncoder do not call their submodules in eval mode
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(preserve_random())
        stack.enter_context(torch.no_grad())
        stack.enter_context(preserve_attribute(taps_on(model), "hook", None))
        # not by model.eval(), which some override to merge weights or keep a mode
        stack.enter_context(preserve_attribute(model.modules(), "training", False))
        stack.enter_context(preserve_buffers(model))
        # some models compute gradients in their forward; those that wait for a step stay apart
        stack.enter_context(preserve_attribute(model.parameters(), "grad", None))
        # with a max_norm they write to their weights in each forward, in eval mode too
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        stack.enter_context(preserve_attribute(embeddings, "max_norm", None))
        yield


@contextmanager
def preserve_loader(loader: Any) -> Iterator[None]:
    """Restores a loader after the block, so that it yields the batches it would have yielded.

    That covers the global random state, and the generators and attributes of the loader, its samplers and
    datasets.
    """
    parts = list(parts_of(loader))  # each by itself, as a loader that saves itself hides its generators
    attributes = [vars(part) for part in parts if hasattr(part, "__dict__")]
    with preserve_random(*parts), preserve_contents(*attributes):
        yield


def dummy_eval(m: nn.Module, size: tuple[int, ...] = (64, 64)) -> Any:
    """The output of `m` for one random sample in [-1, 1], in eval mode; `m` stays as it is.

    Args:
        m: a model whose first layer has `in_channels` or `in_features`, which give the shape of the sample.
        size: height and width; for convolutions of one or three dimensions the first counts for each.

    Raises:
        ValueError: If no layer has these attributes.
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
    """Number of output features of `m`: the channels of its last child's output.

    Raises:
        RuntimeError, ValueError: If `m` raises for images of 32×32 and for larger ones too.
    """
    first: Exception | None = None
    for size in (32, 64, 128, 256, 512, 1024, 2048):
        try:
            return int(model_sizes(m, (size, size))[-1][1])
        except (RuntimeError, ValueError) as error:
            if first is not None and str(error) == str(first):
                break  # the size is not the problem
            first = first or error
    assert first is not None
    first.add_note("the same or another error came with larger images too")
    raise first


def shapes(output: Any) -> Any:
    """`output` with each tensor replaced by its shape, a nested one by the shapes of its parts."""

    def shape(x: Tensor) -> Any:
        return [part.shape for part in x.unbind()] if x.is_nested else x.shape

    return map_leaves(shape, output, lambda x: isinstance(x, Tensor))


def sample_inputs(
    sizes: Sequence[int] | Sequence[Sequence[int]],
    dtypes: torch.dtype | Sequence[torch.dtype] = torch.float32,
) -> list[Tensor]:
    """Inputs of these sizes: numbers in [-1, 1], the same each time; zeros if the dtype is not floating.

    Args:
        sizes: the shape of an input with its batch, such as (1, 3, 224, 224), or a list of several.
        dtypes: dtype of all inputs, or a list with that of each.

    Raises:
        ValueError: If a size is no list of whole numbers, 0 or more, or dtypes are not as many as inputs.
    """
    shapes: Any = [sizes] if any(isinstance(x, int) for x in sizes) else list(sizes)
    types = [dtypes] * len(shapes) if isinstance(dtypes, torch.dtype) else list(dtypes)
    if len(types) != len(shapes):
        raise ValueError(
            f"there are {len(shapes)} inputs and {len(types)} dtypes; give one for each, or one for all"
        )
    for shape in shapes:
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(
                f"the size of an input is whole numbers, such as (1, 3, 224, 224), got {shape!r}"
            )
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(tuple(shape), generator=generator, device="cpu") * 2 - 1).to(dtype)
        if dtype.is_floating_point or dtype.is_complex
        else torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        for shape, dtype in zip(shapes, types, strict=True)
    ]


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
        return sample_inputs(shape, weight.dtype)[0].to(weight.device)
    raise ValueError(
        f"no layer of {type(m).__name__} has in_channels or in_features, which give the shape of its input; "
        "call the model on your own input, or use module_summary(model, x)"
    )
