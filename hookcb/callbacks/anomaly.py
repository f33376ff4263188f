"""DetectAnomaly: autograd's search for the operation that made a NaN, on chosen batches."""

from torch.autograd import set_detect_anomaly

from hookcb.callback import Callback


class DetectAnomaly(Callback):
    """Has autograd stop at a backward pass that gives NaN, and name the forward operation it belongs to.

    Turns on `torch.autograd.set_detect_anomaly` for training batches `start` to `stop` of a fit, counted over
    all epochs. Training is several times slower there: give a window around the batch that
    `TerminateOnNaN` has named. Outside a window, in validation and after the fit autograd's mode is what it
    was. `learn.one_batch` is not looked at.

    Args:
        start: index of the first training batch.
        stop: index of the batch to stop before; by default all from `start` on.
        name: what the learner calls it.

    Raises:
        TypeError, ValueError: for a window without a batch.
        RuntimeError: of autograd, in the fit, where backward gives NaN; a warning before it has the traceback
            of the forward operation.

    >>> import warnings
    >>> from hookcb import DetectAnomaly, synth_learner
    >>> learn = synth_learner(loss_func=lambda pred, y: (pred - pred.detach()).sqrt().mean() * 0)
    >>> with learn.no_logging(), warnings.catch_warnings(action="ignore"):
    ...     try:
    ...         learn.fit(1, cbs=DetectAnomaly())
    ...     except RuntimeError as error:
    ...         print(error)
    Function 'SqrtBackward0' returned nan values in its 0th output.
    """

    order = -10
    run_valid = False
    run_lr_find = False  # which ends by itself where the loss is not finite

    def __init__(self, start: int = 0, stop: int | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        for argument, value in (("start", start), ("stop", stop)):
            if (not isinstance(value, int) or isinstance(value, bool)) and (argument, value) != (
                "stop",
                None,
            ):
                raise TypeError(f"{argument} is {value!r}; give the index of a training batch")
        if start < 0 or (stop is not None and stop <= start):
            raise ValueError(f"start is {start} and stop {stop}; give 0 <= start < stop")
        self.start, self.stop = start, stop
        self._mode: set_detect_anomaly | None = None  # while on; knows what was before

    def before_batch(self) -> None:
        within = self.start <= self.train_iter and (self.stop is None or self.train_iter < self.stop)
        if self.learn.fitting and within:  # outside a fit nothing would turn it off after an error
            self._mode = set_detect_anomaly(True)

    def after_batch(self) -> None:
        if self._mode is not None:
            self._mode.__exit__()
            self._mode = None

    # a cancel of more than the batch, and an error, skip after_batch
    def after_train(self) -> None:
        self.after_batch()

    def after_epoch(self) -> None:
        self.after_batch()

    def after_fit(self) -> None:
        self.after_batch()
