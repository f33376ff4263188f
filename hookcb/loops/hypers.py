"""Hypers: fastai's names of an optimizer's settings, `opt.hypers` and `opt.set_hyper`."""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, overload
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from hookcb.core.optim import Rates, rates_of


class Hyper(MutableMapping[str, Any]):
    """Settings of one parameter group by torch's names, and by fastai's `wd`, `mom` and `sqr_mom`.

    Reads from the group and writes into it: `wd` is `weight_decay`; `mom` is `momentum`, or the first of
    `betas`; `sqr_mom` is the second of these, or `alpha`.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group

    def _place(self, name: str) -> tuple[str, int | None]:
        """Torch's name, and the index in it."""
        has_betas = "betas" in self._group
        places: dict[str, tuple[str, int | None]] = {
            "wd": ("weight_decay", None),
            "mom": ("betas", 0) if has_betas else ("momentum", None),
            "sqr_mom": ("betas", 1) if has_betas else ("alpha", None),
        }
        return places.get(name, (name, None))

    def __getitem__(self, name: str) -> Any:
        key, i = self._place(name)
        if key not in self._group:
            raise KeyError(f"{name}: the optimizer has no {key}; it has {', '.join(self)}")
        return self._group[key] if i is None else self._group[key][i]

    def __setitem__(self, name: str, value: Any) -> None:
        key, i = self._place(name)
        now = self[name]
        if isinstance(now, Tensor):
            now.fill_(value)
        elif i is None:
            self._group[key] = value
        else:
            self._group[key] = tuple(value if j == i else x for j, x in enumerate(self._group[key]))

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name} cannot be deleted, as the optimizer needs its settings; set it instead")

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._group if name != "params")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class Hypers(Sequence[Hyper]):
    """Settings of each parameter group of an optimizer, as they are now.

    >>> import torch
    >>> from hookcb.loops.hypers import Hypers
    >>> opt = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
    >>> hypers = Hypers(opt)
    >>> hypers[-1]["wd"], hypers[-1]["mom"]
    (0.01, 0.9)
    >>> hypers.set_hyper("lr", 0.2)
    >>> opt.param_groups[0]["lr"]
    0.2
    """

    def __init__(self, opt: Optimizer) -> None:
        self._opt = ref(opt)  # which has this as an attribute

    def _groups(self) -> list[dict[str, Any]]:
        return [] if (opt := self._opt()) is None else opt.param_groups

    @overload
    def __getitem__(self, i: int) -> Hyper: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hyper]: ...
    def __getitem__(self, i: int | slice) -> Hyper | list[Hyper]:
        found = self._groups()[i]
        return Hyper(found) if isinstance(found, dict) else [Hyper(group) for group in found]

    def __len__(self) -> int:
        return len(self._groups())

    def __repr__(self) -> str:
        return repr(list(self))

    def set_hyper(self, name: str, value: Rates) -> None:
        """Sets a setting of all groups: a number, or one for each group, or a range, see `rates_of`.

        Raises:
            KeyError: If the optimizer does not have it.
            ValueError: If there are not as many numbers as groups.
        """
        for hyper, x in zip(self, rates_of(value, len(self), name), strict=True):
            hyper[name] = x


def with_hypers(opt: Optimizer) -> Optimizer:
    """Gives an optimizer fastai's `hypers` and `set_hyper`, unless it has its own; it does not save them."""
    if not hasattr(opt, "hypers"):
        hypers = Hypers(opt)
        vars(opt).update(hypers=hypers, set_hyper=hypers.set_hyper)
    return opt
