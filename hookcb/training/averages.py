"""Averages of the weights during training: what `EMA` and `SWA` have in common."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.callback import Callback
from hookcb.processes.groups import is_sharded, without_replicas
from hookcb.processes.shards import is_dtensor, joined_like, local_part


class AverageCallback(Callback):
    """Base class of callbacks that average the weights of the trained model.

    The averages are in a copy of the model; of a sharded one, they are this rank's parts, without a copy.
    Weights are averaged if they are floating-point or complex numbers, all others are copied. torch's
    `AveragedModel` has no shards, rounds averages of counters, and waits for the device at each update.

    Attributes:
        n_averaged: number of times that the weights were added in this fit.
    """

    use_buffers = False  # whether buffers are averaged too; else they are copied

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._model: nn.Module | None = None
        self._shards: dict[str, Tensor] = {}  # in place of a model
        self._names: set[str] = set()  # names of what is averaged; all else is copied
        self.n_averaged = 0

    def _average(self, averages: list[Tensor], now: list[Tensor]) -> None:
        """Updates averages, all of one device and dtype, by what the model has now."""
        raise NotImplementedError

    @property
    def model(self) -> nn.Module:  # type: ignore[override]  # elsewhere it is the trained model
        """The averaged model."""
        if self._model is not None:
            return self._model
        if self._shards:
            use = f"with {self.name}.applied(model):"
            raise AttributeError(f"a sharded model cannot be copied; use the averages in a block: {use}")
        raise AttributeError(f"{type(self).__name__} has no averaged model before its first fit")

    @property
    def _trained(self) -> nn.Module:
        return without_replicas(self.learn.model)

    @property
    def _has_begun(self) -> bool:
        return self._model is not None or bool(self._shards)

    def _begin(self) -> None:
        trained, self._model, self._shards, self.n_averaged = self._trained, None, {}, 0
        if is_sharded(trained):
            self._shards = {name: x.clone() for name, x in parts_of(trained).items()}
        else:
            self._model = copy.deepcopy(trained).eval()
        params, parts = dict(trained.named_parameters()), parts_of(trained)
        self._names = {
            name
            for name, x in parts.items()
            if x.is_floating_point() or x.is_complex()
            # a buffer may be a mask of -inf
            if name in params or (self.use_buffers and bool(x.isfinite().all()))
        }

    def _averages(self) -> dict[str, Tensor]:
        return self._shards or parts_of(self.model)

    def _add(self) -> None:
        """Adds what the model has now; the first time, this is the average."""
        averages = self._averages()
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for name, x in parts_of(self._trained).items():
            average = averages[name]
            if self._shards and average.shape != x.shape:  # it was gathered when this began
                self._shards[name] = x.clone()
            elif self.n_averaged and name in self._names:
                alike.setdefault((average.device, average.dtype), []).append((average, x.to(average.device)))
            else:
                average.copy_(x)
        for pairs in alike.values():
            self._average(*(list(xs) for xs in zip(*pairs, strict=True)))
        self.n_averaged += 1

    def state_dict(self) -> dict[str, Any]:
        if not self._has_begun:
            return {}
        model, averages, averaged = self._trained if self._shards else self.model, self._averages(), {}
        first = {id(x): averages[name] for name, x in _tensors(model)}
        for name, x in _tensors(model, remove_duplicate=False):
            average = first[id(x)]
            if is_dtensor(x):
                average = joined_like(average if self.n_averaged else local_part(x.data), x)
            averaged[name] = average
        return {"averaged": averaged, "n_averaged": self.n_averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._has_begun:
            return
        for name, average in self._averages().items():
            if name in state["averaged"]:  # older files of SWA have no buffers that are not persistent
                average.copy_(local_part(state["averaged"][name]))
        self.n_averaged = state["n_averaged"]


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one once; of a sharded model, this rank's part.

    Writes to them bypass autograd.
    """
    return {name: local_part(x.data) for name, x in _tensors(model)}


def _tensors(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, Tensor]]:
    both = model.named_parameters, model.named_buffers
    return [pair for named in both for pair in named(remove_duplicate=remove_duplicate)]
