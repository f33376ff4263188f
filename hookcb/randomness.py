"""The state of random numbers: the process's own, and those of generators that loaders keep."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def random_state(*loaders: Any) -> dict[str, Any]:
    """What the next random numbers depend on: of Python, NumPy where it is imported, torch and its GPUs.

    Args:
        *loaders: whose generators, and those of their samplers and datasets, count too.

    Returns:
        Plain values and tensors on the CPU, for `set_random_state`.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    state["loaders"] = [_of(generator) for generator in _generators(loaders)]
    return state


def set_random_state(state: dict[str, Any], *loaders: Any) -> None:
    """Has the random numbers go on as they did when `random_state` gave `state` for the same loaders."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy  # which draws numbers of its own only where it is used

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and len(state["cuda"]) <= torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    for generator, own in zip(_generators(loaders), state["loaders"], strict=False):
        _set(generator, own)


def _generators(loaders: tuple[Any, ...]) -> list[Any]:
    """The generators in the attributes of loaders, their samplers and datasets, each once."""
    found = {id(x): x for loader in loaders for part in _parts(loader) for x in _attributes(part)}
    return [x for x in found.values() if isinstance(x, torch.Generator | random.Random) or _is_numpy(x)]


def _parts(loader: Any) -> Iterator[Any]:
    yield loader
    for name in ("sampler", "batch_sampler", "dataset"):
        if (part := getattr(loader, name, None)) is not None:
            yield part
            yield getattr(part, "sampler", None)


def _attributes(part: Any) -> list[Any]:
    return list(getattr(part, "__dict__", {}).values())


def _is_numpy(x: Any) -> bool:
    return hasattr(x, "bit_generator") and isinstance(getattr(x.bit_generator, "state", None), dict)


def _of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if _is_numpy(generator) else generator.getstate()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif _is_numpy(generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
