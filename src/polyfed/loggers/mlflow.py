"""Runs in MLflow: in the run folder's own database, or where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from polyfed.loggers.tracker import PROJECT, Tracker
from polyfed.version import __version__

_AT_ONCE = 100  # parameters that MLflow takes in a request
# What MLflow does unasked: it reports its use, and it waits minutes for a server that does not answer.
_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MLflow(Tracker):
    """Shows a run in MLflow; its experiment is MLFLOW_EXPERIMENT_NAME, or "polyfed"."""

    package = "mlflow"

    def open(self, known: str, name: str, parameters: Mapping[str, str]) -> tuple[str, int]:
        """See `Tracker`. Of parameters that it has, MLflow keeps the first value."""
        for variable, value in _DEFAULTS.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        address = os.environ.get("MLFLOW_TRACKING_URI")
        place = self._place.absolute()
        self._client = MlflowClient(address or f"sqlite:///{place / 'mlflow.db'}")
        try:
            there = self._client.get_run(known)
        except MlflowException:  # a run that begins, or one of another address
            found = self._client.get_experiment_by_name(experiment)
            kept = None if address else (place / "artifacts").as_uri()
            number = found.experiment_id if found else self._client.create_experiment(experiment, kept)
            source = {"mlflow.source.name": f"polyfed {__version__}"}
            there = self._client.create_run(number, run_name=name, tags=source)
        self._id = there.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        valid = {_valid(key): value for key, value in parameters.items()}
        wanted = [Param(key, value) for key, value in valid.items() if key not in there.data.params]
        for begin in range(0, len(wanted), _AT_ONCE):
            self._client.log_batch(self._id, params=wanted[begin : begin + _AT_ONCE])
        points = self._client.get_metric_history(self._id, "bytes_up")
        return self._id, max((point.step for point in points), default=0)

    def log(self, values: Mapping[str, float], number: int) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(_valid(name), value, now, number) for name, value in values.items()])

    def close(self, is_done: bool) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._id, "FINISHED" if is_done else "KILLED")


def _valid(name: str) -> str:
    """A name without the characters that MLflow does not take.

    >>> _valid("timm:resnet10t/mean")
    'timm_resnet10t/mean'
    """
    return re.sub(r"[^/\w.\- ]", "_", name)
