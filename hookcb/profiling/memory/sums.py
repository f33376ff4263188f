"""Memory of the calls of a batch by layer, and which layers to checkpoint."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn

from hookcb.core.torch_private import parameters_of
from hookcb.hooks.modules import named_modules, names_around
from hookcb.profiling.memory.ledger import Call, LiveStorage
from hookcb.profiling.memory.sizes import total_bytes
from hookcb.profiling.memory.watch import Forward

MAX_ADVICE = 3
Params = list[tuple[str | None, nn.Parameter]]  # with the layer of each parameter, None outside the layers
Use = Counter[str]  # of a layer in one batch: the fields of `LayerMemory` that are about its calls
MIN_LOWERED = 0.01  # share of the kept bytes; recomputation that frees less is not worth a line


@dataclass(frozen=True, slots=True)
class Advice:
    """Layers that would free memory if their activations were recomputed in the backward.

    Attributes:
        layers: name of a layer, or a pattern such as `blocks.*`.
        type: class of the layers.
        n_calls: number of their calls.
        frees: bytes that the forward would no longer keep: those kept only by these calls, except for their
            inputs.
        lowers: bytes by which the peak of the kept bytes would fall; less than `frees`, because in the
            backward one call after another has its bytes again.
    """

    layers: str
    type: str
    n_calls: int
    frees: int
    lowers: int


def sum_layers(forward: Forward, layers: Iterable[str]) -> dict[str, Use]:
    """Memory of each of `layers`; that of other layers counts for the layers that called them."""
    uses = {name: Use() for name in layers}
    for call in forward.calls:
        if (use := uses.get(call.layer)) is not None:
            _add_call(use, call)
    by_call: Counter[Call | None] = Counter()
    for live in forward.saved:
        by_call[live.saved_in] += live.n_bytes
    for innermost, n_bytes in by_call.items():
        around = [call.layer for call in _path(innermost) if call.layer in uses]
        for name in {outer for layer in around for outer in _with_lists(layer, uses)}:
            uses[name]["kept"] += n_bytes
        if around:
            uses[around[-1]]["kept_self"] += n_bytes
    return uses


def _add_call(use: Use, call: Call) -> None:
    use["calls"] += 1
    use["output_bytes"] += call.output_bytes
    if not any(outer.layer == call.layer for outer in call.path()[:-1]):  # else the outer call includes it
        use["allocated"] += call.allocated
        use["peak"] = max(use["peak"], call.peak)


def _with_lists(layer: str, uses: Mapping[str, Use]) -> list[str]:
    """A layer, and the containers around it that are never called, such as a ModuleList."""
    around = (name for name in names_around(layer) if name in uses)
    return [layer, *(name for name in around if name and not uses[name]["calls"])]


def _path(call: Call | None) -> list[Call]:
    return [] if call is None else call.path()


# ---- parameters


def param_layers(model: nn.Module, layers: Iterable[str]) -> Params:
    """Each parameter once, with the innermost of `layers` that contains its first owner."""
    names, params = set(layers), dict[int, tuple[str | None, nn.Parameter]]()
    for name, m in named_modules(model).items():
        for p in parameters_of(m).values():
            if p is not None:
                innermost = next((x for x in (name, *names_around(name)) if x in names), None)
                params.setdefault(id(p), (innermost, p))
    return list(params.values())


def bytes_by_layer(params: Params, get: Callable[[nn.Parameter], Iterable[Tensor]]) -> Counter[str | None]:
    """Bytes of the tensors that `get` returns for each parameter, by layer; 0 if a subclass hides them."""
    sizes: Counter[str | None] = Counter()
    for name, p in params:
        with suppress(Exception):  # from a tensor subclass
            sizes[name] += total_bytes(get(p))
    return sizes


# ---- checkpointing


def advise(forward: Forward, types: Mapping[str, str]) -> tuple[Advice, ...]:
    """Layers to checkpoint, best first; layers of one class whose names differ by a number form a group.

    Never the whole model, which would have all activations again at once. Of nested layers only the better;
    none with checkpointed parts, because a nested recomputation has all of them again in the backward.
    """
    freed = _freed_by_call(forward)
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in forward.calls:
        if call.layer in types and freed[id(call)] > 0 and not _is_ruled_out(call.layer, forward):
            groups.setdefault((_pattern(call.layer), types[call.layer]), []).append(call)
    candidates = [(_advice(forward, calls, freed, types), calls) for calls in groups.values()]
    least = MIN_LOWERED * forward.kept
    candidates = [(advice, calls) for advice, calls in candidates if advice.lowers > least]
    candidates.sort(key=lambda pair: (-pair[0].lowers, -pair[0].frees))
    chosen: list[tuple[Advice, list[Call]]] = []
    for advice, calls in candidates:
        if not any(_overlap(calls, others) for _, others in chosen):
            chosen.append((advice, calls))
    return tuple(advice for advice, _ in chosen[:MAX_ADVICE])


def _is_ruled_out(layer: str, forward: Forward) -> bool:
    """Whether it is the whole model, or overlaps layers under other hooks, such as checkpointing."""
    others = [f"{other}." for other in forward.other_hooks]
    return not layer or any(f"{layer}.".startswith(x) or x.startswith(f"{layer}.") for x in others)


def _freed_by_call(forward: Forward) -> Counter[int]:
    """Bytes that each call, by id, would no longer keep, minus those it would keep instead."""
    freed: Counter[int] = Counter()
    for live in forward.saved:
        for call in _path(live.within):
            if not any(live is x for x in call.inputs):
                freed[id(call)] += live.n_bytes
    for call in forward.calls:
        unsaved: dict[int, LiveStorage] = {id(live): live for live in call.inputs if not live.is_saved}
        freed[id(call)] -= sum(live.n_bytes for live in unsaved.values())
    return freed


def _advice(
    forward: Forward, calls: Sequence[Call], freed: Mapping[int, int], types: Mapping[str, str]
) -> Advice:
    names = dict.fromkeys(call.layer for call in calls)
    frees, most = 0, 0
    for call in calls:  # in its backward a call has its bytes again, in addition to those kept before it
        most = max(most, call.kept_before - frees + freed[id(call)])
        frees += freed[id(call)]
    lowers = forward.kept - max(most, forward.kept - frees)
    layer = next(iter(names))
    return Advice(_pattern(layer) if len(names) > 1 else layer, types[layer], len(calls), frees, lowers)


def _pattern(name: str) -> str:
    return ".".join(re.sub(r"\d+", "*", part) for part in name.split("."))


def _overlap(calls: Iterable[Call], others: Iterable[Call]) -> bool:
    inner = {id(x) for call in calls for x in call.path()}
    outer = {id(x) for call in others for x in call.path()}
    return any(id(call) in outer for call in calls) or any(id(call) in inner for call in others)
