"""The current batch of a loop that hookcb does not run, to run it again."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.batch import parts
from hookcb.core.restore import preserve_modes
from hookcb.diagnosis.reader import Way


class ExternalBatch:
    """Current batch of an external loop, with the interface of a Learner that a replay uses.

    The loss function is unknown; the mean of the model's outputs is used instead.
    """

    loss_func = None
    loss: Any = None

    def __init__(self, loop: Any) -> None:
        self.model: nn.Module = loop.model
        self.way: Way = loop.way
        self.xb, self.yb, self.pred = loop.xb, (), loop.pred
        self.epoch, self.iter = loop.epoch, loop.iter

    def predict(self) -> Any:
        """The model's output."""
        return self.model(*self.xb) if isinstance(self.xb, tuple) else self.model(**self.xb)

    def get_loss(self) -> Tensor:
        """Mean of the model's float outputs, which replaces the loss."""
        outputs = [x for _, x in parts(self.pred) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.float().mean() for x in outputs]).sum()

    def restored(self) -> AbstractContextManager[None]:
        """Restores the train or eval mode of all modules after the block."""
        return preserve_modes(self.model)
