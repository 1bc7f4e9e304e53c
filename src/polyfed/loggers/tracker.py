"""What loggers with curves have in common; TensorBoard, MLflow and Weights & Biases differ in their calls alone.

A tracker's run has the recipe as parameters, a point of every curve per round, and in the end the result. It is a
courtesy: where a tracker fails, a note says so, and the run goes on without it. What it has missed it is given once it
is there again: as the run ends, or goes on.
"""

from __future__ import annotations

import abc
import contextlib
import math
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from polyfed.errors import ConfigError
from polyfed.escaping import one_line
from polyfed.records.main_score import main_score_of
from polyfed.records.read import flat_table, unseal
from polyfed.registry import is_installed

PROJECT = "polyfed"  # what runs are filed under, unless the tracker's own environment variable says otherwise
_ID = re.compile(r"[\w.-]*", re.ASCII)  # the id of a tracker's run; another one in a run folder is not the tracker's
_LONGEST = 500  # characters of a parameter's value
_SCORES = ("", "_std", "_bottom_decile", "_best_by_validation")  # what a result has behind the main score's name
_OTHERS = ("validation", "bytes_up", "bytes_down", "seconds")


class Tracker(abc.ABC):
    """Shows a run in a tracker; `package` names its package, its logger and its folder in the run folder.

    Raises:
        ConfigError: the package is not installed.
    """

    package: ClassVar[str]

    def __init__(self) -> None:
        if not is_installed(self.package):  # it is imported later
            raise ConfigError(
                f"run.loggers: expected the package {self.package}, which is not installed; add it with: "
                f"pip install 'polyfed[{self.package}]'"
            )

    @abc.abstractmethod
    def open(self, known: str, name: str, parameters: Mapping[str, str]) -> tuple[str, int]:
        """Begin the tracker's run, or go on with the one whose id is known; its id, and the last round that it has."""

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], number: int) -> None:
        """Add a point to curves, at a round."""

    @abc.abstractmethod
    def close(self, is_done: bool) -> None:
        """End the tracker's run; not `is_done`: the run failed or was interrupted."""

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins; nothing is written yet.

        Raises:
            ConfigError: it has no folder.
        """
        if info.get("out") is None:
            raise ConfigError(f"expected a run folder for {self.package}, got a run without one")
        self._out = Path(info["out"])
        swept = self._out.parent.name  # a sweep calls its folders after its settings
        settings = f" {swept}" if "=" in swept else ""
        self._name = f"{info.get('label') or info.get('method')}{settings} seed {info.get('seed')}"
        self._begin = int(info.get("start_round") or 1)
        self._is_open = self._has_failed = False

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is complete, and its record is in the run folder."""
        if self._has_failed:
            return
        with self._surviving():
            # Not in `start`: trackers have threads, and workers are forked in the first round.
            if self._is_open:
                self._add(record)
            else:
                self._open()

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over; a tracker that had failed is asked once more if it is done."""
        with self._surviving():
            if result is not None:
                if not self._is_open:
                    self._open()
                score = main_score_of(result).name
                numbers = {key: result.get(key) for key in (*(f"{score}{kind}" for kind in _SCORES), *_OTHERS)}
                metrics = result["metrics"].get(result["evaluation"]["stage"], {})
                numbers |= {name: summary["mean"] for name, summary in metrics.items()}
                final = {f"result/{key}": float(value) for key, value in numbers.items() if value is not None}
                self.log(final, self._last)
            if self._is_open:
                self.close(result is not None)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Within the block, errors end what is tracked, not the run."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                why = one_line(str(error))[:_LONGEST] or type(error).__name__
                warnings.warn(f"{self.package} has failed, the run goes on without it: {why}", stacklevel=2)
            if self._is_open:
                with contextlib.suppress(Exception):
                    self.close(False)
            self._has_failed = True
            self._is_open = False

    def _open(self) -> None:
        """Begin or go on, and add the rounds that are missing."""
        self._place = self._out / self.package
        self._place.mkdir(exist_ok=True)
        kept = self._place / "run_id"
        written = kept.read_text() if kept.exists() else ""
        known = written if _ID.fullmatch(written) else ""
        recipe = tomllib.loads((self._out / "recipe.toml").read_text(encoding="utf-8"))
        parameters = {key: str(value)[:_LONGEST] for key, value in flat_table(recipe).items()}
        identity, self._last = self.open(known, self._name, parameters)
        kept.write_text(identity)
        for line in (self._out / "rounds.jsonl").read_bytes().splitlines():
            self._add(unseal(line))
        self._is_open = True

    def _add(self, record: Mapping[str, Any]) -> None:
        if record["round"] > self._last:
            self.log(curves(record), record["round"])
            self._last = record["round"]


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Name -> value: each finite number is named after its place in the record.

    Lists, and what is told client by client, have no curves.

    >>> curves({"round": 1, "train_loss": 0.5, "accuracy": {"personal": {"mean": 0.25}}, "clients": [0, 2]})
    {'train_loss': 0.5, 'accuracy/personal/mean': 0.25}
    """
    shown = {key: value for key, value in record.items() if key != "round" and "_client" not in key}
    return {
        name: float(value)
        for name, value in flat_table(shown, "/").items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
