"""MLflowLogger: numbers for a run of MLflow."""

import re
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from hookcb.loggers.base import import_extra

MOST_VALUES = 1_000  # that MLflow takes at once
FOREIGN = re.compile(r"[^\w. /-]")  # characters that it does not take in a name on every system


class MLflowLogger:
    """Writes numbers as metrics of a run of MLflow, wherever `mlflow.set_tracking_uri` says.

    A name has "-" for characters that MLflow refuses: `lstm[0]` becomes `lstm-0-`. What an infinity becomes
    is up to the store: a database has the largest number for it.

    Args:
        run: to write to: its id, or what `mlflow.start_run` gives; whoever started it ends it.
        experiment: name of the one in which a run is begun when something is first logged, and ended by
            `close`; made where it is missing. With neither it is the active run.

    Attributes:
        run_id: of the run; None before it is begun.

    Raises:
        ModuleNotFoundError: without mlflow.
        RuntimeError: with neither, where no run is active.
        ValueError: for both.

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
                    "no run is active; give run= or experiment=, or begin one with mlflow.start_run()"
                )
        self.experiment = experiment
        self.run_id: str | None = run if run is None or isinstance(run, str) else run.info.run_id
        self._client: Any = None
        self._is_running = False  # a run that was begun here

    @property
    def is_open(self) -> bool:
        """Whether a run that was begun here is running."""
        return self._is_running

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Writes metrics."""
        now = int(time.time() * 1_000)
        client, metric = self._opened(), _mlflow().entities.Metric
        metrics = (metric(FOREIGN.sub("-", name), float(x), now, int(step)) for name, x in values.items())
        while some := list(islice(metrics, MOST_VALUES)):
            client.log_batch(self.run_id, metrics=some)

    def close(self) -> None:
        """Ends a run that was begun here; what is logged later goes on with it."""
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
        there = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if there is None else there.experiment_id

    def __repr__(self) -> str:
        what = f"experiment={self.experiment!r}" if self.experiment is not None else f"{self.run_id!r}"
        return f"MLflowLogger({what})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None, "_is_running": False}  # a copy ends no run


def _mlflow() -> Any:
    return import_extra("mlflow", "MLflow", "mlflow")
