"""Engine: Accelerate's Accelerator, which wraps the model and runs the backward in place of torch's own."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from hookcb.core.callback import Callback
from hookcb.training.accumulate import GradientAccumulation
from hookcb.training.amp import MixedPrecision

CALLS = ("prepare", "backward", "no_sync")
STEPS_ITSELF = ("DEEPSPEED", "MEGATRON_LM", "XLA")
OWNS = {  # callbacks that do what the Accelerator does, and its argument for that
    MixedPrecision: "mixed_precision='bf16'",
    GradientAccumulation: "gradient_accumulation_steps",
}
MISSING = object()


class Engine:
    """What `Distributed` has an Accelerator do: wrap the model, run the backward, accumulate gradients.

    Loaders, optimizer, checkpoints and metrics stay the Learner's.

    Args:
        accelerator: the Accelerator.

    Raises:
        TypeError, ValueError: If it is not one, or does what the Learner does; the message says what to do.
    """

    def __init__(self, accelerator: Any) -> None:
        if isinstance(accelerator, type) or not all(callable(getattr(accelerator, x, None)) for x in CALLS):
            raise TypeError(
                "engine must be an Accelerator of the package accelerate (pip install 'hookcb[accelerate]'), "
                f"as in engine=Accelerator(), got {accelerator!r:.80}"
            )
        _check_settings(accelerator)
        self.accelerator = accelerator
        self.n_steps: int = accelerator.gradient_accumulation_steps
        self._group_size = 1  # batches whose gradients are added up for a step
        self._changed: dict[str, Any] = {}  # attributes of the model that `wrap` has changed, as they were
        self._open = ExitStack()  # the batch's no_sync

    # ---- the model

    def device(self, given: torch.device | None) -> torch.device:
        """The Accelerator's device.

        Raises:
            ValueError: If the learner was given another one.
        """
        own: torch.device = self.accelerator.device
        if given is not None and (given.type != own.type or given.index not in (None, own.index)):
            raise ValueError(
                f"the Learner has device={str(given)!r}, but the Accelerator trains on {str(own)!r}; leave "
                "device out, or make an Accelerator for it, as Accelerator(cpu=True)"
            )
        return own

    @property
    def shards(self) -> bool:
        """Whether it changes the model for good, as FSDP does."""
        return _kind(self.accelerator) == "FSDP"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Has the Accelerator prepare a model."""
        before = dict(vars(model))
        if getattr(
            self.accelerator, "is_fsdp2", False
        ):  # it wants an optimizer, whose parameters it replaces
            made: nn.Module = self.accelerator.prepare(model, SGD(model.parameters(), lr=0.0))[0]
        else:
            made = self.accelerator.prepare(model)
        self._changed |= {
            name: before.get(name, MISSING)
            for name, x in vars(model).items()
            if before.get(name, MISSING) is not x
        }
        return made

    def unwrap(self, model: nn.Module, wrapper: nn.Module | None) -> None:
        """Undoes `wrap`: the model is as it was, and the Accelerator keeps nothing of it."""
        for name, x in self._changed.items():
            if x is MISSING:
                vars(model).pop(name, None)
            else:
                vars(model)[name] = x
        self._changed = {}
        known = getattr(self.accelerator, "_models", [])
        known[:] = [m for m in known if m is not wrapper]

    # ---- batches

    def begin_batch(self, model: nn.Module, index: int, n_batches: int | None) -> bool:
        """Begins a training batch, without communication unless it ends a group.

        Args:
            model: the wrapped model.
            index: number of the batch in its epoch, from 0.
            n_batches: number of batches of the epoch.

        Returns:
            Whether gradients are kept for the next batch.

        Raises:
            ValueError: If several batches make a step, and the epoch's number of batches is unknown.
        """
        self.end_batch()
        if self.n_steps == 1:
            return False
        if n_batches is None:
            raise ValueError(
                f"gradient_accumulation_steps={self.n_steps} needs a training loader with a length, "
                "as the last group of an epoch may be smaller; give it a __len__"
            )
        place = index % self.n_steps
        self._group_size = max(1, min(self.n_steps, n_batches - index + place))
        keeps = place + 1 < self.n_steps and index + 1 < n_batches
        self.accelerator.sync_gradients = not keeps
        if keeps:
            self._open.enter_context(self.accelerator.no_sync(model))
        return keeps

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of the mean loss of a group's batches; the Accelerator divides by `n_steps`."""
        n = self._group_size
        self.accelerator.backward(loss if n == self.n_steps else loss * (self.n_steps / n))

    def end_batch(self) -> None:
        """Ends a batch, however it ended."""
        self._group_size = 1
        self._open.close()

    # ---- what stands beside it

    def check_beside(self, cbs: Iterable[Callback], n_processes: int) -> None:
        """Checks what trains together with it.

        Raises:
            ValueError: If a callback does what the Accelerator does, or that was made for other processes.
        """
        for cb in cbs:
            owned = next((argument for kind, argument in OWNS.items() if isinstance(cb, kind)), None)
            if owned is not None:
                raise ValueError(
                    f"{cb!r} cannot be used beside engine=Accelerator(…), whose backward does this itself; "
                    f"give it to the Accelerator, {owned}, or train without engine="
                )
        if self.accelerator.num_processes != n_processes:
            raise ValueError(
                f"the Accelerator was made for {self.accelerator.num_processes} process(es), but there are "
                f"{n_processes}; make it in each process that torchrun or accelerate launch has started"
            )


def _kind(accelerator: Any) -> str:
    """How an Accelerator distributes, by name: "NO", "MULTI_GPU", or "FSDP"."""
    kind = accelerator.distributed_type
    return str(getattr(kind, "value", kind))


def _check_settings(accelerator: Any) -> None:
    """Checks that an Accelerator does nothing that the Learner does.

    Raises:
        ValueError: If it does; the message says what to do.
    """
    if (kind := _kind(accelerator)) in STEPS_ITSELF:
        raise ValueError(
            f"an Accelerator of the type {kind} makes the optimizer's steps itself, where no callback sees "
            "them; write the loop with it, and use hookcb.watch(model, optimizer)"
        )
    refused: list[tuple[bool, str, str]] = [
        (
            getattr(accelerator, "scaler", None) is not None,
            "mixed_precision='fp16'",
            "it scales the loss, which callbacks would not know; use 'bf16', or Distributed() and "
            "MixedPrecision('fp16') without engine=",
        ),
        (
            bool(getattr(accelerator, "split_batches", False)),
            "split_batches=True",
            "the Learner divides samples by process; leave it out, and give loaders the batch size of one",
        ),
        (
            _compiles(accelerator),
            "dynamo_backend",
            "it would compile the model behind the callbacks; leave it out, and add hookcb's Compile()",
        ),
    ]
    for is_set, setting, why in refused:
        if is_set:
            raise ValueError(f"the Accelerator has {setting}, which cannot be used as engine: {why}")


def _compiles(accelerator: Any) -> bool:
    plugin = getattr(getattr(accelerator, "state", None), "dynamo_plugin", None)
    return getattr(getattr(plugin, "backend", None), "value", "NO") != "NO"
