"""MLflowLogger: numbers as metrics of an MLflow run."""

import re
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from hookcb.loggers.base import import_extra

MAX_VALUES = 1_000  # that MLflow accepts at once
INVALID = re.compile(r"[^\w. /-]")  # characters that MLflow does not accept in names on every system


class MLflowLogger:
    """Writes numbers as metrics of an MLflow run, to the store set by `mlflow.set_tracking_uri`.

    Characters that MLflow does not accept in names become "-": `lstm[0]` is `lstm-0-`. How an infinity is
    stored depends on the store: a database has the largest number in its place.

    Args:
        run: the run, by its id or as returned by `mlflow.start_run`; it is not ended here. By default the
            active run.
        experiment: name of an experiment, in place of `run`; created if it is missing. A run in it is started
            at the first log, and ended by `close`.

    Attributes:
        run_id: id of the run; None before it is started.

    Raises:
        ModuleNotFoundError: If mlflow is not installed.
        RuntimeError: If neither is given and no run is active.
        ValueError: If both are given.

    >>> from hookcb.loggers import Log, MLflowLogger
    >>> log = Log(MLflowLogger(experiment="digits"))  # doctest: +SKIP
    """

    def __init__(self, run: Any = None, *, experiment: str | None = None) -> None:
        if run is not None and experiment is not None:
            raise ValueError(f"run is {run!r:.80} and experiment is {experiment!r}; give one of them")
        mlflow = _mlflow()
        if run is None and experiment is None:
            run = mlflow.active_run()
            if run is None:
                raise RuntimeError(
                    "no run is active; give run= or experiment=, or start one with mlflow.start_run()"
                )
        self.experiment = experiment
        self.run_id: str | None = run if run is None or isinstance(run, str) else run.info.run_id
        self._client: Any = None
        self._is_running = False  # whether a run that was started here is running

    @property
    def is_open(self) -> bool:
        """Whether a run that was started here is running."""
        return self._is_running

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Writes metrics."""
        now = int(time.time() * 1_000)
        client, metric = self._opened(), _mlflow().entities.Metric
        metrics = (metric(INVALID.sub("-", name), float(x), now, int(step)) for name, x in values.items())
        while some := list(islice(metrics, MAX_VALUES)):
            client.log_batch(self.run_id, metrics=some)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Writes a text as an artifact, `verdict.txt`, and its first line as a tag."""
        client, safe = self._opened(), INVALID.sub("-", name)
        client.log_text(self.run_id, text, f"{safe}.txt")
        client.set_tag(self.run_id, safe, text.partition("\n")[0])

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Writes a figure of matplotlib as an artifact, `figures/run.png`."""
        self._opened().log_figure(self.run_id, figure, f"{INVALID.sub('-', name)}.png")

    def close(self) -> None:
        """Ends a run that was started here; a later log continues it."""
        if self._is_running:
            self._is_running = False
            self._client.set_terminated(self.run_id)

    def _opened(self) -> Any:
        if self._client is None:
            self._client = _mlflow().MlflowClient()
        if self.experiment is not None and not self._is_running:
            if self.run_id is None:
                self.run_id = self._client.create_run(self._experiment_id(self.experiment)).info.run_id
            else:
                self._client.update_run(self.run_id, status="RUNNING")
            self._is_running = True
        return self._client

    def _experiment_id(self, name: str) -> Any:
        experiment = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if experiment is None else experiment.experiment_id

    def __repr__(self) -> str:
        target = f"experiment={self.experiment!r}" if self.experiment is not None else f"{self.run_id!r}"
        return f"MLflowLogger({target})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None, "_is_running": False}  # a copy ends no run


def _mlflow() -> Any:
    return import_extra("mlflow", "MLflow", "mlflow")
