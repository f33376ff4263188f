"""ChannelsLast: a model and its inputs with the channels innermost in memory."""

from itertools import chain

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hookcb.core import orders
from hookcb.core.batch import map_tensors
from hookcb.core.callback import Callback


class ChannelsLast(Callback):
    """Lays out a convolutional model and its inputs as `torch.channels_last`.

    Convolutions are faster on GPUs with tensor cores, mostly under `MixedPrecision`, and on many CPUs;
    measure it on your model. Only strides change, of 4-d weights, buffers and inputs of floating dtypes,
    `(N, C, H, W)`, and of the optimizer's state for these weights, as fused optimizers iterate over both in
    memory order.

    The model keeps this layout after the fit. Inputs are laid out in training, validation and `get_preds`.

    Args:
        name: name of the callback in the learner.

    Source: PyTorch tutorial "Channels Last Memory Format".

    >>> import torch
    >>> from torch import nn
    >>> from hookcb import ChannelsLast, Learner
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1))
    >>> learn = Learner([(torch.randn(4, 3, 8, 8), torch.randn(4, 1))], model, nn.functional.mse_loss)
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=ChannelsLast())
    >>> model[0].weight.is_contiguous(memory_format=torch.channels_last)
    True
    """

    order = orders.CHANNELS_LAST
    run_lr_find = False  # lr_find restores everything

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)

    def before_fit(self) -> None:
        # not model.to(memory_format=…), which raises if a weight has five dimensions
        for tensor in chain(self.model.parameters(), self.model.buffers()):
            if not is_lazy(tensor):
                tensor.data = channels_last(tensor.data)
                if tensor.grad is not None:
                    tensor.grad = channels_last(tensor.grad)
        for p, state in self.opt.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == getattr(p, "shape", None):
                    state[key] = channels_last(value)

    def before_batch(self) -> None:
        self.learn.xb = map_tensors(channels_last, self.xb)


def channels_last(x: Tensor) -> Tensor:
    """Lays out `x` with its channels innermost if it is a dense `(N, C, H, W)` of a floating dtype."""
    if x.layout != torch.strided or x.ndim != 4 or not x.is_floating_point():
        return x
    return x.to(memory_format=torch.channels_last)  # not contiguous(…), which does nothing for one channel
