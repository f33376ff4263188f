"""ActivationStats: records statistics of every layer's output, batch by batch."""

from typing import Any

from torch import Tensor, nn

from hookcb.activations.records import ActivationRecords
from hookcb.activations.stats import Sample
from hookcb.core.batch import parts
from hookcb.hooks.callback import HookCallback
from hookcb.records.forward import forwarded, forwarded_attribute, forwarded_property

NOT_TAKEN = ("hook", "cpu", "gather", "modify")  # options of `HookCallback` that have no use here


class ActivationStats(HookCallback):
    """Records statistics of each layer's output: shows dead, saturated, collapsing and exploding layers.

    Inside the hook a small output is copied and a large one reduced, on its device; the rest is done after
    the batch, for several batches together. No activation is kept and no batch waits for a GPU. A cancelled
    batch leaves nothing.

    Args:
        with_hist: record histograms too.
        eps: magnitude up to which an element counts as near zero, in the output's unit.
        bins: number of histogram bins.
        hist_range: range of the histograms of all layers; by default each layer has its own, that of the
            first recorded batch extended by half on both sides.
        sample: `"auto"` uses every element for mean, std, min, max, abs_max and nonfinite, and for shares
            and histogram every one up to 65,536, above that 4,096 (standard error of a share ≤ 0.8 %).
            An int uses that many elements at most, for all; None uses every one for all, for which large
            outputs are copied until the batch ends.
        keep: maximum number of records; of more every second, fourth … is kept, and the newest.
        append: a new fit continues the records of the last.
        on_valid: record validation batches too, in `valid_stats`.
        name: see `Callback`.
        **options: arguments of `HookCallback`, such as `modules`, `every` and `include_paramless`, but not
            `hook`, `cpu`, `gather` and `modify`.

    Attributes:
        records: the recorded statistics, an `ActivationRecords`; this callback has its methods too.
        stats: `stats[record][layer]` is a dict of `mean`, `std` (unbiased), `min`, `max`, `abs_max` (of
            finite elements), `near_zero`, `zeros` (shares, 0..1) and `nonfinite` (number); NaN if a layer
            was not called.
        names: layer names, in the order of their first record. Tensors inside an output are named by their
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

    columns = ActivationRecords.columns
    load = staticmethod(ActivationRecords.load)
    names = forwarded_property(ActivationRecords.names)
    stats = forwarded_property(ActivationRecords.stats)
    valid_stats = forwarded_property(ActivationRecords.valid_stats)
    series = forwarded(ActivationRecords.series)
    store_of = forwarded(ActivationRecords.store_of)
    table = forwarded(ActivationRecords.table)
    steps = forwarded(ActivationRecords.steps)
    layer_stats = forwarded(ActivationRecords.layer_stats)
    hist = forwarded(ActivationRecords.hist)
    hist_edges = forwarded(ActivationRecords.hist_edges)
    color_dim = forwarded(ActivationRecords.color_dim)
    plot_layer_stats = forwarded(ActivationRecords.plot_layer_stats)
    dead_chart = forwarded(ActivationRecords.dead_chart)
    report = forwarded(ActivationRecords.report)
    save = forwarded(ActivationRecords.save)
    clear = forwarded(ActivationRecords.clear)
    with_hist: bool = forwarded_attribute("with_hist")
    eps: float = forwarded_attribute("eps")
    bins: int = forwarded_attribute("bins")
    hist_range: tuple[float, float] | None = forwarded_attribute("hist_range")
    sample: Sample = forwarded_attribute("sample")
    keep: int = forwarded_attribute("keep")
    outputs: dict[str, tuple[str, tuple[int, ...]]] = forwarded_attribute("outputs")
    left_out: dict[str, str] = forwarded_attribute("left_out")

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
        for option in options:
            if option in NOT_TAKEN:
                raise TypeError(
                    f"ActivationStats takes no {option}=, as its hook keeps only numbers; "
                    f"pass {option}= to HookCallback"
                )
        self.records = ActivationRecords(with_hist, eps, bins, hist_range, sample, keep)
        super().__init__(**{"detach": False} | options, name=name)
        self.append, self.run_valid = append, on_valid
        self._before = self._now = (0, 0)  # epochs and steps before this fit, and up to now

    def before_fit(self) -> None:
        if not self.append:
            self.clear()
            self._now = 0, 0
        self._before = self._now
        self.records.drop_batch()
        super().before_fit()

    def before_batch(self) -> None:
        super().before_batch()
        if not self.outside_main_phase:
            self.records.drop_batch()

    def hook(self, m: nn.Module, *seen: Any) -> None:
        kind, output = type(m).__name__, seen[-1]
        if id(m) not in self._names:
            self.left_out[f"a copy of {kind}"] = "as nn.DataParallel makes them of the layers"
            return
        name = self.layer_name(m)
        if (self._options.get("pre") or not self.is_forward) and len(output) == 1:
            output = output[0]
        if type(output) is Tensor:  # the usual case, without a walk
            self.records.take(name, output, kind)
            return
        for path, x in list(parts(output, name)) or [(name, output)]:
            self.records.take(path, x, kind)

    def after_cancel_batch(self) -> None:
        super().after_cancel_batch()
        if not self.outside_main_phase:
            self.records.drop_batch()

    def after_batch(self) -> None:
        super().after_batch()
        if self.outside_main_phase:
            return
        (epochs, steps), phase = self._before, "train" if self.training else "valid"
        epoch, step = epochs + self.epoch, steps + self.train_iter
        if self.training:
            self._now = epoch + 1, step + 1
        self.records.end_batch(phase, epoch, step)

    def after_epoch(self) -> None:
        self.records.flush()

    def after_fit(self) -> None:
        super().after_fit()
        self.records.drop_batch()
        self.records.flush()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "now": self._now,
            "before": self._before,
            "recorded": self.records.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.records = ActivationRecords.from_state(state["recorded"])
        self._now, self._before = state["now"], state["before"]
