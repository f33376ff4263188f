"""GradientHealth: gradients and weights around each step of the optimizer, and what can be read of them."""

from collections.abc import Iterable
from typing import Any

from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.events import CancelStepException
from hookcb.gradients.readings import GradientReadings
from hookcb.gradients.recorder import GradientRecorder
from hookcb.hooks.params import Which, check_which


class GradientHealth(Callback, GradientReadings):
    """Records gradients, weights and updates of each parameter at each step: are they alive, do they move.

    Gradients are read whole, unscaled and before clipping, then as the optimizer gets them; weights after the
    step. Nothing waits for a GPU, but for sparse gradients, which are coalesced.

    Args:
        every: look at steps 0, every, 2·every … of the optimizer; by default at each.
        params: a glob on names ("blocks.*.weight"), a predicate (name, parameter) -> bool, or several of
            these; by default all parameters.
        activations: also the gradients with respect to the outputs of all leaves with parameters.
        on_nonfinite: at a NaN or infinite gradient of any parameter: "record"; "skip" leaves the step out and
            drops the gradients; "raise" ends the fit with weights and optimizer as they were before the step.
            The last two wait for the device at each step. Overflows under a GradScaler are left to it, until
            its scale has come down to 1.
        keep: number of records that stay; of more every second, fourth … is kept, and the newest.
        name: what the learner calls it.

    Attributes:
        stats: `stats[record][parameter]` is a dict of `norm` (L2), `clipped_norm` (NaN where the step was
            skipped), `rms`, `abs_max` (of finite elements), `nonfinite` (number), `zero_rows` (share, 0..1;
            NaN of one dimension), `weight_norm`, `weight_mean`, `weight_std`, `update_ratio` (‖Δw‖/‖w‖ of
            this step) and `drift` (the same since the fit began), these two of 1,024 elements at most.
            Gradients are of all elements, weights up to 65,536, above that of 1,024: their norm is off by 2 %
            as a rule.
        skipped: number of steps without an update, in all of the fit.

    Raises:
        FloatingPointError: with `on_nonfinite="raise"`; it names the first bad parameter, and the batch.
        LookupError: when a fit begins, where `params` selects nothing.
        TypeError, ValueError: for arguments that cannot be.

    >>> from hookcb import GradientHealth, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=GradientHealth())
    >>> learn.gradient_health.names, len(learn.gradient_health.stats)
    (['0.weight', '0.bias', '2.weight', '2.bias'], 10)
    >>> list(learn.gradient_health.check())
    []
    """

    run_lr_find = False  # which looks for a rate that is too high on purpose

    def __init__(
        self,
        every: int | None = None,
        params: Which | Iterable[Which] | None = None,
        activations: bool = False,
        *,
        on_nonfinite: str = "record",
        keep: int = 5_000,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if on_nonfinite not in ("record", "skip", "raise"):
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}; give 'record', 'skip' or 'raise'")
        check_count("keep", keep, "records", least=2)
        self.params = None if params is None else check_which(params)
        self._set_up(
            check_count("every", 1 if every is None else every, "steps"), activations, on_nonfinite, keep
        )
        self._recorder: GradientRecorder | None = None  # while a fit runs

    def before_fit(self) -> None:
        self.clear()
        self._recorder = GradientRecorder(self, self.learn.model, self.params)
        self._recorder.refresh(self.opt)

    def before_train(self) -> None:
        if self._recorder:
            self._recorder.refresh(self.opt)

    def before_batch(self) -> None:
        if self._recorder and self.training:
            self._recorder.begin_batch()

    def before_backward(self) -> None:
        if self._recorder:
            self._recorder.note_scale(self.learn.scaler)

    after_pred = before_backward  # in a loop that is not ours the first gradient may be there before

    def after_cancel_batch(self) -> None:
        if self._recorder and self.training:
            self._recorder.drop_batch()

    def after_batch(self) -> None:
        if self._recorder and self.training:
            self._recorder.end_batch(self.epoch, self.train_iter)

    def before_step(self) -> None:
        if self._recorder is None:  # outside a fit
            return
        self._recorder.begin_step(self.opt, self.learn.scaler)
        if self.on_nonfinite == "record" or (found := self._recorder.nonfinite(self.learn.scaler)) is None:
            return
        if self.on_nonfinite == "skip":
            self._recorder.drop_gradients(self.opt)
            raise CancelStepException
        self._recorder.end_step(self.epoch, self.train_iter, is_cancelled=True)
        raise FloatingPointError(
            f"{found} at {', '.join(self.learn.position('before_step'))}; "
            "weights and optimizer are as they were before this step"
        )

    def after_cancel_step(self) -> None:
        self.phase_state["cancelled"] = True

    def after_step(self) -> None:
        is_cancelled = self.phase_state.pop("cancelled", False)
        if self._recorder:
            has_scaler = self.learn.scaler is not None
            self._recorder.end_step(self.epoch, self.train_iter, is_cancelled, has_scaler)

    def after_epoch(self) -> None:
        self.flush()

    def after_fit(self) -> None:
        if self._recorder:
            self._recorder.close()
        self.flush()
        self._recorder = None

    def state_dict(self) -> dict[str, Any]:
        return {"recorded": self._saved()} | (self._recorder.state() if self._recorder else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restore(state["recorded"])
        if self._recorder:
            self._recorder.load_state(state)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return super().__getstate__() | {"_recorder": None}
