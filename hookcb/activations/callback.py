"""ActivationStats: statistics of every layer's output, batch by batch, and what can be read of them."""

from typing import Any

from torch import Tensor, nn

from hookcb.activations.readings import ActivationReadings
from hookcb.activations.stats import Sample, has_stats, kind_of, take
from hookcb.core.batch import parts
from hookcb.hooks.callback import HookCallback
from hookcb.hooks.hook import detached


class ActivationStats(HookCallback, ActivationReadings):
    """Records statistics of each layer's output: shows the dead, saturated, collapsing and exploding ones.

    Inside the hook a small output is copied and a large one reduced, on its device; the rest is done after
    the batch, for several batches together. No activation is kept and no batch waits for a GPU. A cancelled
    batch leaves nothing.

    Args:
        with_hist: record histograms too.
        eps: magnitude up to which an element counts as near zero, in the output's unit.
        bins: of the histograms.
        hist_range: of the histograms of all layers; by default each layer's own, of the first recorded batch
            and half as much again on both sides.
        sample: `"auto"` looks at every element for mean, std, min, max, abs_max and nonfinite, and for shares
            and histogram at every one up to 65,536, above that at 4,096 (standard error of a share ≤ 0.8 %).
            An int looks at so many elements at most, for all; None at every one for all, for which large
            outputs are copied until the batch ends.
        keep: number of records that stay; of more every second, fourth … is kept, and the newest.
        append: a new fit continues the records of the last.
        on_valid: record validation batches too, in `valid_stats`.
        **options: the arguments of `HookCallback`, `modules`, `every` and `include_paramless` among them.

    Attributes:
        stats: `stats[record][layer]` is a dict of `mean`, `std` (unbiased), `min`, `max`, `abs_max` (of
            finite elements), `near_zero`, `zeros` (shares, 0..1) and `nonfinite` (number); NaN where a layer
            was not called.
        names: of the layers, in the order of their first record. Tensors inside an output are named by their
            path, `lstm[0]`; calls of a layer called several times in a batch by number, `fc#0`, `fc#1`.

    >>> from hookcb import ActivationStats, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=ActivationStats(include_paramless=True))
    >>> learn.activation_stats.names
    ['0', '1', '2']
    >>> len(learn.activation_stats.stats), learn.activation_stats.stats[0]["1"]["min"]
    (10, 0.0)
    """

    def __init__(
        self,
        with_hist: bool = False,
        *,
        eps: float = 0.05,
        bins: int = 40,
        hist_range: tuple[float, float] | None = None,
        sample: Sample = "auto",
        keep: int = 5_000,
        append: bool = False,
        on_valid: bool = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if "hook" in options:
            raise TypeError("ActivationStats has a hook of its own; pass hook= to HookCallback")
        if not isinstance(with_hist, bool):
            raise TypeError(
                f"with_hist is {with_hist!r:.80}; give True or False; layers are chosen by modules="
            )
        super().__init__(**{"detach": False} | options, name=name)
        self._set_up(with_hist, eps, bins, hist_range, sample, keep)
        self.append, self.run_valid = append, on_valid
        self._before = self._now = (0, 0)  # epochs and steps before this fit, and up to now
        self._batch: dict[str, list[Any]] = {}  # what was taken, see `add_record`

    def before_fit(self) -> None:
        if not self.append:
            self.clear()
            self._now = 0, 0
        self._before, self._batch = self._now, {}
        super().before_fit()

    def before_batch(self) -> None:
        super().before_batch()
        if not self.outside_main_phase:
            self._batch = {}

    def hook(self, m: nn.Module, *seen: Any) -> None:
        kind, output = type(m).__name__, seen[-1]
        if id(m) not in self._names:
            self.left_out[f"a copy of {kind}"] = "as nn.DataParallel makes them of the layers"
            return
        name = self.layer_name(m)
        if (self._options["pre"] or not self.is_forward) and len(output) == 1:
            output = output[0]
        # the usual case without a walk
        found = [(name, output)] if type(output) is Tensor else list(parts(output, name)) or [(name, output)]
        for path, x in found:
            taken = (*take(detached(x), self.sample), kind, x.shape) if has_stats(x) else kind_of(x)
            self._batch.setdefault(path, []).append(taken)

    def after_cancel_batch(self) -> None:
        super().after_cancel_batch()
        if not self.outside_main_phase:
            self._batch = {}

    def after_batch(self) -> None:
        super().after_batch()
        if self.outside_main_phase:
            return
        (epochs, steps), phase = self._before, "train" if self.training else "valid"
        epoch, step = epochs + self.epoch, steps + self.train_iter
        if self.training:
            self._now = epoch + 1, step + 1
        batch, self._batch = self._batch, {}
        self.add_record(phase, epoch, step, batch)

    def after_epoch(self) -> None:
        self.flush()

    def after_fit(self) -> None:
        super().after_fit()
        self._batch = {}
        self.after_epoch()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"now": self._now, "before": self._before, "recorded": self._saved()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.clear()
        self._now, self._before = state["now"], state["before"]
        self._restore(state["recorded"])
