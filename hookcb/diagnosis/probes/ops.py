"""OpHooks: has operations inside a model's forward looked at, in the batches that are."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.diagnosis.probes.attention import OpProbe
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import is_compiled, named_modules


class OpHooks:
    """Enters an `OpProbe` when the model is called, and leaves it when the call ends, however it does.

    A model that is compiled, in whole or in part, is left alone: it would run uncompiled. One in which the
    first call has shown no attention is not looked at again.

    Args:
        model: whose forward.
        acts: whether a call that begins is looked at.
        found: takes a layer's name and what `OpProbe` has found there.
        is_here: whether it is the training that calls, and not another thread.
    """

    def __init__(
        self,
        model: nn.Module,
        acts: Callable[[], bool],
        found: Callable[[str, Tensor], object],
        is_here: Callable[[], bool],
    ) -> None:
        self._acts, self._found = acts, found
        self._names = {id(m): name for name, m in named_modules(model).items()}
        self._open: list[OpProbe] = []
        self.has_looked = False  # in one whole call of the model
        self.sees_attention = False
        self.is_left_out = any(map(is_compiled, model.modules()))
        self._hooks = (
            []
            if self.is_left_out
            else [
                Hook(model, self._enter, pre=True, detach=False, gate=is_here),
                Hook(model, self._leave, always_call=True, detach=False, gate=is_here),
            ]
        )

    def _enter(self, m: nn.Module, args: Any) -> None:
        is_useless = self.has_looked and not self.sees_attention  # looking costs as much as what it looks at
        if torch.compiler.is_compiling() or is_useless or not self._acts():
            return
        self._close()
        if not any(map(is_compiled, m.modules())):  # it may have been compiled since
            probe = OpProbe(self._layer, self._tell)
            probe.__enter__()  # type: ignore[no-untyped-call]
            self._open.append(probe)

    def _tell(self, layer: str, share: Tensor) -> None:
        self.sees_attention = True
        self._found(layer, share)

    def _leave(self, m: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.has_looked = self.has_looked or bool(self._open and output is not None)
            self._close()

    def _close(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _layer(self) -> str:
        """The innermost module of the model whose code is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            names = frame.f_code.co_varnames
            if (
                names
                and names[0] == "self"
                and (name := self._names.get(id(frame.f_locals["self"]))) is not None
            ):
                return name
            frame = frame.f_back
        return ""

    def remove(self) -> None:
        """Takes the hooks off; Ctrl-C in a forward has left one open, as torch then calls no hook."""
        self._close()
        for hook in self._hooks:
            hook.remove()
