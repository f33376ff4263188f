"""A device that does not exist: its tensors are on a CPU, say that they are not, and notice who waits.

A program that does not wait for a GPU leaves values there: it reads none, and copies none to or from the host
unless the copy is asynchronous. Run as a script, this trains with each callback and writes down who waited.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).parents[2]
READS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim"}
READS |= {"_unique2", "unique_consecutive", "repeat_interleave.Tensor", "bincount", "allclose"}
BY_INDEX = {"index", "index_put", "index_put_", "_unsafe_index"}


class Card(torch.Tensor):
    """A tensor on the device; `on_cpu` has its values."""

    @staticmethod
    def __new__(cls, x):
        card = torch.Tensor._make_wrapper_subclass(
            cls,
            x.shape,
            strides=x.stride(),
            storage_offset=x.storage_offset(),
            dtype=x.dtype,
            device="card:0",
        )
        card.on_cpu = x.detach()
        return card

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return WATCH.run(func, args, kwargs or {})

    def tolist(self):
        WATCH.waits("tolist")
        return self.on_cpu.tolist()

    def numpy(self, **kwargs):
        raise TypeError("can't convert card:0 device type tensor to numpy")


def is_card(x):
    return isinstance(x, Card)


def on_card(device):
    return device is not None and torch.device(device).type == "card"


class Watch(TorchDispatchMode):
    """Runs operators, and keeps in `waited` where something waited for the device while `is_strict`."""

    def __init__(self):
        super().__init__()
        self.is_strict, self.waited = False, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def waits(self, why):
        if self.is_strict:
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT / "hookcb"))]
            where = [f"{Path(f.filename).relative_to(ROOT)}:{f.name}" for f in frames[-1:]]
            self.waited.append(" ".join([why, *where]))

    def run(self, func, args, kwargs):
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        cards = [x for x in leaves if is_card(x)]
        device = kwargs.get("device")
        name = func._schema.name.removeprefix("aten::")
        if why := self.reason(name, func, args, kwargs, leaves, cards):
            self.waits(why)
        own = {id(card.on_cpu): card for card in cards}
        if on_card(device):
            kwargs = kwargs | {"device": torch.device("cpu")}
        args, kwargs = tree_map(lambda x: x.on_cpu if is_card(x) else x, (args, kwargs))
        out = func(*args, **kwargs)
        to_card = on_card(device) if device is not None else bool(cards)
        if name == "copy_" and id(out) not in own:
            return out

        def placed(x):
            return own.get(id(x), Card(x) if to_card else x) if isinstance(x, torch.Tensor) else x

        return tree_map(placed, out)

    def reason(self, name, func, args, kwargs, leaves, cards):
        """What waits, "" if nothing does."""
        if cards and (name in READS or f"{name}.{func._overloadname}" in READS):
            return name
        if cards and name in BY_INDEX:
            indices = [x for x in args[1] if isinstance(x, torch.Tensor)]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                return f"{name} by a mask"
            if is_card(args[0]) and not all(map(is_card, indices)):
                return f"{name} by numbers of the host"
        is_async = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        if is_async:
            return ""
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and is_card(args[0]) != on_card(to):
            return "copy"
        if name == "copy_" and is_card(args[0]) != is_card(args[1]):
            return "copy"
        return ""


WATCH = Watch()


def to_card(model):
    """Moves parameters and buffers; `Module.to` would need a device that exists."""
    for m in model.modules():
        for name, p in m._parameters.items():
            if p is not None:
                m._parameters[name] = torch.nn.Parameter(Card(p.detach()), p.requires_grad)
        for name, x in m._buffers.items():
            if x is not None:
                m._buffers[name] = Card(x)
    return model


def main(path):
    from tests.contract.support import each, planted, trained

    backend_registration._setup_privateuseone_for_python_backend("card")
    found = {}
    for name, make in [*each(), *planted()]:
        WATCH.waited = []
        try:
            with WATCH, contextlib.redirect_stdout(sys.stderr):
                trained(make(), to_card, lambda batch: tuple(map(Card, batch)), strict)
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
        else:
            found[name] = sorted(set(WATCH.waited))
    Path(path).write_text(json.dumps(found))
    os._exit(0)  # torch's profiler sometimes aborts a process that ends by itself


def strict(is_on):
    WATCH.is_strict = is_on


if __name__ == "__main__":
    main(sys.argv[1])
