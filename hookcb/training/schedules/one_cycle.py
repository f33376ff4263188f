"""OneCycle: the learning rate rises to a peak and falls to almost 0, once over the whole fit."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hookcb.core.arguments import check_number
from hookcb.core.optim import Rates, check_rates, rates_of
from hookcb.training.schedules.base import SteppedRate


class OneCycle(SteppedRate):
    """Raises the learning rate to a peak and anneals it to almost 0, in one cycle over the whole fit.

    The usual way to train well in few epochs: warm up, explore at a high rate, settle. Momentum, or the first
    beta, moves in the opposite direction; both rise and fall along half a cosine.

    Shape and defaults are as in fastai's `fit_one_cycle`, with these differences:

    - fastai sets batch i of n to the point i / n of the cycle. Here, as in torch's `OneCycleLR`, the peak
      comes one batch earlier, at batch `pct_start * n - 1`, and the last batch has exactly
      `lr_max / div_final`, which fastai's never reaches.
    - `moms` is the momentum at both ends and at the peak; fastai takes three numbers, start, peak and end.
    - Groups are the optimizer's parameter groups: `lr_max` may be a list of one rate for each, or
      `slice(lowest, highest)`, which is spread over them.
    - Only the rate and the momentum are set. Weight decay, fastai's `wd`, is left to the optimizer; fastai's
      own Adam also has a weight decay of 0.01 and an eps of 1e-5, torch's does not.

    Args:
        lr_max: the peak, for all parameter groups or one for each; by default the optimizer's rate.
        div: the first batch has the rate `lr_max / div`.
        div_final: the last batch has the rate `lr_max / div_final`.
        pct_start: share of the batches in which the rate rises, between 0 and 1; at least one batch.
        moms: momentum at the start and the end, and at the peak. None leaves it unchanged; ignored if the
            optimizer has no momentum.
        name: name of the callback in the learner.

    Attributes:
        scheduler: the torch scheduler during a fit; else None.

    Raises:
        ValueError: When the fit begins, if the training loader has no length.

    Source: L. Smith, N. Topin, "Super-Convergence", arxiv.org/abs/1708.07120, in the form of fastai,
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
        lr_max: Rates | None = None,
        div: float = 25.0,
        div_final: float = 1e5,
        pct_start: float = 0.25,
        moms: tuple[float, float] | None = (0.95, 0.85),
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if lr_max is not None:
            check_rates("lr_max", lr_max)
        check_number("div", div)
        check_number("div_final", div_final)
        check_number("pct_start", pct_start, 0, 1)
        if isinstance(moms, tuple | list) and len(moms) == 3 and moms[0] == moms[2]:
            moms = moms[0], moms[1]  # as in fastai
        _check_moms(moms)
        self.lr_max, self.pct_start, self.moms = lr_max, pct_start, moms
        self.div, self.div_final = div, div_final

    def make(self, opt: Optimizer) -> LRScheduler:
        n = self.count_steps()
        # OneCycleLR begins at lr_max / div only if pct_start * n > 1; at exactly 1 it divides by zero
        pct_start = self.pct_start if n == 1 else max(self.pct_start, (1 + 1e-9) / n)
        groups = opt.param_groups
        peaks = [group["lr"] for group in groups] if self.lr_max is None else self.lr_max
        return OneCycleLR(
            opt,
            max_lr=rates_of(peaks, len(groups), "lr_max"),
            total_steps=n,
            pct_start=pct_start,
            div_factor=self.div,
            final_div_factor=self.div_final / self.div,
            **self._momenta(opt),
        )

    def _momenta(self, opt: Optimizer) -> dict[str, Any]:
        """Arguments of OneCycleLR for momentum; it stays 0 for a group without momentum."""
        has_momentum = ["betas" in opt.defaults or group.get("momentum", 0) > 0 for group in opt.param_groups]
        if self.moms is None or not any(has_momentum):
            return {"cycle_momentum": False}
        high, low = ([mom * has for has in has_momentum] for mom in self.moms)
        return {"max_momentum": high, "base_momentum": low}


def _check_moms(moms: Any) -> None:
    if moms is None:
        return
    if not isinstance(moms, tuple | list) or len(moms) != 2:
        raise ValueError(
            f"moms must be two momenta, at both ends and at the peak, such as (0.95, 0.85), got {moms!r:.80}"
        )
    for i, mom in enumerate(moms):
        check_number(f"moms[{i}]", mom, 0, 1)
