"""Engine: Accelerate's Accelerator, which wraps the model and runs the backward in place of torch's own."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from hookcb.core.callback import Callback
from hookcb.core.restore import preserve_attribute
from hookcb.processes.process_group import n_processes
from hookcb.training.accumulate import GradientAccumulation
from hookcb.training.amp import MixedPrecision

CALLS = ("prepare", "backward")
STEPS_ITSELF = ("MEGATRON_LM", "XLA")
OWNS = {  # callbacks that do what the Accelerator is asked for, and its argument for that
    MixedPrecision: "mixed_precision='bf16'",
    GradientAccumulation: "gradient_accumulation_steps=…",
}
MISSING = object()


class Engine:
    """Uses an Accelerator to wrap the model and to run the backward, for `Distributed`.

    Loaders, optimizer, checkpoints and metrics stay the Learner's. Gradients are accumulated by
    GradientAccumulation, over as many batches as the Accelerator says.

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
        self._model: nn.Module | None = None  # what is wrapped for a while, not for good
        self._changed: dict[str, tuple[Any, Any]] = {}  # its attributes that changed: before, and then
        self._known: list[nn.Module] = []  # models that the Accelerator knew before

    @property
    def shards(self) -> bool:
        """Whether it changes the model for good, as FSDP2 does."""
        return _kind(self.accelerator) == "FSDP"

    @contextmanager
    def running(self, learn: Any) -> Iterator[None]:
        """Has it run the learner's backwards in a `with` block, after which the model is unwrapped.

        Raises:
            ValueError: If a callback does what the Accelerator does, or that was made for other processes.
        """
        self._check_beside(learn.cbs)
        n = self.accelerator.gradient_accumulation_steps
        accumulating = learn.added_cbs(GradientAccumulation(n)) if n > 1 else nullcontext()
        try:
            with accumulating, preserve_attribute([learn], "run_backward", self._backward):
                yield
        finally:
            self._unwrap()

    # ---- the model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Has the Accelerator prepare a model, for good if it shards it."""
        self._unwrap()
        if self.shards:
            # it wants an optimizer, whose parameters it replaces; the Learner makes its own
            sharded: nn.Module = self.accelerator.prepare(model, SGD(model.parameters(), lr=0.0))[0]
            return sharded
        before, self._known, self._model = dict(vars(model)), list(self._models), model
        try:
            made: nn.Module = self.accelerator.prepare(model)
            return made
        finally:
            self._changed = {
                name: (before.get(name, MISSING), x)
                for name, x in vars(model).items()
                if before.get(name, MISSING) is not x
            }

    @property
    def _models(self) -> list[nn.Module]:
        """Models that the Accelerator keeps."""
        models: list[nn.Module] = getattr(self.accelerator, "_models", [])
        return models

    def _unwrap(self) -> None:
        """Undoes `wrap`: the model is as it was, and the Accelerator does not keep it."""
        if self._model is None:
            return
        attributes = vars(self._model)
        for name, (before, after) in self._changed.items():
            if attributes.get(name) is not after:  # somebody else has changed it since
                continue
            if before is MISSING:
                del attributes[name]
            else:
                attributes[name] = before
        self._models[:] = self._known
        self._model, self._changed, self._known = None, {}, []

    # ---- the training

    def device(self, given: torch.device | None) -> torch.device:
        """Device of the Accelerator.

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

    def _backward(self, loss: Tensor) -> None:
        # else it divides by the number of batches, which GradientAccumulation has done by their samples
        with preserve_attribute([self.accelerator], "gradient_accumulation_steps", 1):
            self.accelerator.backward(loss)

    def _check_beside(self, cbs: Iterable[Callback]) -> None:
        for cb in cbs:
            owned = next((argument for kind, argument in OWNS.items() if isinstance(cb, kind)), None)
            if owned is not None:
                raise ValueError(
                    f"{cb!r} cannot be used beside engine=Accelerator(…), which has a setting for it; "
                    f"leave it out, and give Accelerator({owned}), or train without engine="
                )
        if self.accelerator.num_processes != n_processes():
            raise ValueError(
                f"the Accelerator was made for {self.accelerator.num_processes} process(es), but there are "
                f"{n_processes()}; make it in each process that torchrun or accelerate launch has started"
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
    kind = _kind(accelerator)
    if kind == "DEEPSPEED":  # measured with ZeRO 1, 2 and 3 of DeepSpeed 0.19
        raise ValueError(
            "an Accelerator with DeepSpeed cannot be used as engine: ZeRO has no gradients at the time of "
            "a step, its next step undoes what callbacks write to weights, and Checkpoint cannot save it; "
            "shard by FullyShardedDataParallelPlugin(fsdp_version=2), or write the loop with it, and use "
            "hookcb.watch(model), without the optimizer"
        )
    if kind in STEPS_ITSELF:
        raise ValueError(
            f"an Accelerator of the type {kind} makes the optimizer's steps itself, where no callback sees "
            "them; write the loop with it, and use hookcb.watch(model, optimizer)"
        )
    state, parallel = accelerator.state, getattr(accelerator, "parallelism_config", None)
    compiler = getattr(getattr(state, "dynamo_plugin", None), "backend", None)
    refused = {
        "FSDP of version 1": (
            kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False),
            "Checkpoint cannot save its flat parameters; give the version, "
            "FullyShardedDataParallelPlugin(fsdp_version=2)",
        ),
        "mixed_precision='fp16'": (
            accelerator.scaler is not None,
            "it scales the loss, which callbacks would not know; use 'bf16', or Distributed() and "
            "MixedPrecision('fp16') without engine=",
        ),
        "split_batches=True": (
            accelerator.split_batches,
            "the Learner divides samples by process; leave it out, and give loaders the batch size of one",
        ),
        "dynamo_backend=…": (
            getattr(compiler, "value", "NO") != "NO",
            "it would compile the model before callbacks set their hooks; leave it out, and add Compile()",
        ),
        "parallelism_config=…": (
            any(getattr(parallel, f"{dim}_size", 1) > 1 for dim in ("tp", "cp", "sp")),
            "the Learner would give other samples to processes that need the same; use "
            "Distributed(prepare=…, mesh={'dp': 2, 'tp': 4}) for tensor parallelism",
        ),
    }
    for setting, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"the Accelerator has {setting}, which cannot be used as engine: {why}")
