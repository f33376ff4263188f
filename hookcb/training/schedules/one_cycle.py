"""OneCycle: the learning rate up to a peak and down to almost nothing, once over the whole fit."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hookcb.core.arguments import check_number
from hookcb.training.schedules.base import SteppedRate


class OneCycle(SteppedRate):
    """Raises the learning rate to a peak and anneals it to almost nothing, in one cycle over the whole fit.

    The usual way to train well in few epochs: warm up, explore at a high rate, settle. Momentum, or the first
    beta, moves the other way round; both follow half a cosine up and half a cosine down.

    It has the shape and the defaults of fastai's `fit_one_cycle`, and differs in this:

    - fastai sets batch i of n to the point i / n of the cycle. Here, as in torch's `OneCycleLR`, the peak
      comes one batch earlier, at batch `pct_start * n - 1`, and the last batch has exactly
      `lr_max / div_final`, which fastai's never reaches.
    - `moms` is the momentum at both ends and at the peak; fastai takes three numbers, one for each end.
    - `lr_max` is one number or a list; `slice(lo, hi)`, which fastai spreads over layer groups, is refused.
    - Only the rate and the momentum are set. Weight decay, which fastai takes as `wd`, is the optimizer's;
      fastai's own Adam also has a weight decay of 0.01 and an eps of 1e-5, and torch's has not.

    Args:
        lr_max: the peak, a number or one for each parameter group; by default the optimizer's rate.
        div: the first batch has the rate `lr_max / div`.
        div_final: the last batch has the rate `lr_max / div_final`.
        pct_start: share of the batches in which the rate rises, between 0 and 1; one batch at least.
        moms: momentum at the start and the end, and at the peak. None leaves it alone, and so does an
            optimizer that has none.
        name: what the learner calls it.

    Attributes:
        scheduler: torch's, while a fit runs; else None.

    Raises:
        TypeError, ValueError: for arguments that cannot be; when the fit begins, where the training loader
            has no length.

    Source: L. Smith, N. Topin, "Super-Convergence", arxiv.org/abs/1708.07120; this form of it is fastai's,
        fastai/callback/schedule.py, `fit_one_cycle`.

    >>> from hookcb import OneCycle, synth_learner
    >>> learn = synth_learner(n_train=8)
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=OneCycle(lr_max=0.1))
    >>> [round(lr, 4) for lr in learn.recorder.lrs]
    [0.004, 0.1, 0.0933, 0.075, 0.05, 0.025, 0.0067, 0.0]
    """

    def __init__(
        self,
        lr_max: float | Sequence[float] | None = None,
        div: float = 25.0,
        div_final: float = 1e5,
        pct_start: float = 0.25,
        moms: tuple[float, float] | None = (0.95, 0.85),
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        _check_lr_max(lr_max)
        check_number("div", div)
        check_number("div_final", div_final)
        check_number("pct_start", pct_start, 0, 1)
        _check_moms(moms)
        self.lr_max, self.div, self.div_final, self.pct_start, self.moms = (
            lr_max,
            div,
            div_final,
            pct_start,
            moms,
        )

    def make(self, opt: Optimizer) -> LRScheduler:
        """Gives torch's OneCycleLR, told in its own terms."""
        n = self.count_steps()
        # its first phase begins at lr_max / div only if it is one batch long; at just that it divides by zero
        pct_start = self.pct_start if n == 1 else max(self.pct_start, (1 + 1e-9) / n)
        lrs = [group["lr"] for group in opt.param_groups] if self.lr_max is None else self.lr_max
        if isinstance(lrs, Sequence) and len(lrs) != len(opt.param_groups):
            raise ValueError(
                f"lr_max has {len(lrs)} rates, and the optimizer {len(opt.param_groups)} parameter groups; "
                "give one for each, or one for all"
            )
        return OneCycleLR(
            opt,
            max_lr=list(lrs) if isinstance(lrs, Sequence) else lrs,
            total_steps=n,
            pct_start=pct_start,
            div_factor=self.div,
            final_div_factor=self.div_final / self.div,
            **self._momenta(opt),
        )

    def _momenta(self, opt: Optimizer) -> dict[str, Any]:
        """What of OneCycleLR's arguments is about momentum; a group without momentum is left without."""
        has = ["betas" in opt.defaults or group.get("momentum", 0) > 0 for group in opt.param_groups]
        if self.moms is None or not any(has):
            return {"cycle_momentum": False}
        high, low = ([mom * own for own in has] for mom in self.moms)
        return {"max_momentum": high, "base_momentum": low}


def _check_lr_max(lr_max: Any) -> None:
    if isinstance(lr_max, list | tuple):
        for i, lr in enumerate(lr_max):
            check_number(f"lr_max[{i}]", lr)
    elif lr_max is not None:
        if isinstance(lr_max, slice):
            raise TypeError(f"lr_max is {lr_max}; give a number, or a list of one for each parameter group")
        check_number("lr_max", lr_max)


def _check_moms(moms: Any) -> None:
    if moms is None:
        return
    if not isinstance(moms, tuple | list) or len(moms) != 2:
        raise ValueError(
            f"moms is {moms!r:.80}; give two, (0.95, 0.85): momentum at start and end, and at the peak"
        )
    for i, mom in enumerate(moms):
        check_number(f"moms[{i}]", mom, 0, 1)
