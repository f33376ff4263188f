"""WarmupCosine: the learning rate rises linearly, then falls along half a cosine, over the whole fit."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hookcb.core.arguments import check_number
from hookcb.training.schedules.base import SteppedRate


class WarmupCosine(SteppedRate):
    """Raises the learning rate linearly to the optimizer's own, then lowers it along half a cosine.

    The usual way to train transformers. Batch `i` of `n`, of which `w` warm up, has the rate
    `lr * (i + 1) / w` while `i < w`, then `lr_min + (lr - lr_min) * (1 + cos(π (i - w) / (n - w))) / 2`: the
    first rate is above 0, and `lr_min` would be that of the batch after the last.

    Args:
        warmup: share of the batches that warm up, a float 0..1 (rounded to whole batches), or their number,
            an int; 0 for no warm-up.
        lr_min: the rate at the end, for all parameter groups.
        name: name of the callback in the learner.

    Attributes:
        scheduler: the torch scheduler during a fit; else None.

    Raises:
        ValueError: When the fit begins, if an argument does not suit its length or the optimizer's rate, or
            if the training loader has no length.

    Source: I. Loshchilov, F. Hutter, "SGDR", arxiv.org/abs/1608.03983, eq. 5, with a warm-up before it.

    >>> from hookcb import WarmupCosine, synth_learner
    >>> learn = synth_learner(n_train=6, lr=0.1)
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=WarmupCosine(warmup=2))
    >>> [round(lr, 4) for lr in learn.recorder.lrs]
    [0.05, 0.1, 0.1, 0.0854, 0.05, 0.0146]
    """

    def __init__(self, warmup: float = 0.1, lr_min: float = 0.0, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if isinstance(warmup, int):
            check_number("warmup", warmup, closed=True)
        else:
            check_number("warmup", warmup, 0, 1, closed=True)
        check_number("lr_min", lr_min, closed=True)
        self.warmup, self.lr_min = warmup, lr_min

    def make(self, opt: Optimizer) -> LRScheduler:
        n = self.count_steps()
        w = self.warmup if isinstance(self.warmup, int) else round(self.warmup * n)
        if w > n and self.n_epoch:
            raise ValueError(
                f"warmup is {w} batches, but the fit has {n}; give fewer, or a share such as 0.1"
            )
        shares = [self._share_min(float(group.get("initial_lr", group["lr"]))) for group in opt.param_groups]
        return LambdaLR(opt, [_rise_and_fall(n, int(w), share) for share in shares])

    def _share_min(self, lr: float) -> float:
        if self.lr_min > lr:
            raise ValueError(f"lr_min is {self.lr_min}, but the optimizer's rate is {lr:g}; give a lower one")
        return self.lr_min / lr if lr else 0.0


def _rise_and_fall(n: int, w: int, share_min: float) -> Callable[[int], float]:
    """Returns the factor for the rate at batch `i` of `n`, of which `w` warm up."""

    def share(i: int) -> float:
        if i < w:
            return (i + 1) / w
        return share_min + (1 - share_min) * (1 + math.cos(math.pi * (i - w) / max(1, n - w))) / 2

    return share
