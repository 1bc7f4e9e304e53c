"""Live curves for TensorBoard, in the folder ``tensorboard`` of each run: ``tensorboard --logdir runs``.

One point per round, on disk when the round is. A resumed run has TensorBoard forget the rounds that it does again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.results.main_score import main_score_of

FOLDER = "tensorboard"


class TensorBoard:
    """Writes every number of a round's record as a curve.

    Tags: ``train/loss``, ``train/lr``, ``train/samples``, ``train/refused``; ``accuracy/<stage>/mean`` (also std, min,
    max, bottom_decile, n), ``accuracy/validation`` (of regression ``rmse/...``), ``architecture/<name>/mean``;
    ``metrics/<stage>/<metric>/mean``; ``predictor/<stage>/<name>/mean``; ``bytes/up``, ``bytes/down``,
    ``bytes/total_up``, ``bytes/total_down``; ``time/seconds``, ``time/simulated``; the method's own ``method/<name>``
    and ``server/<name>``. The step is the round.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        try:
            import tensorboard  # noqa: F401  (only whether it is there)
        except ImportError:
            raise ConfigError(
                "expected the package tensorboard for live curves, which is not installed; "
                "add it with: pip install 'polyfed[track]'"
            ) from None
        self._folder: Path | None = None  # where curves go, while a run is shown
        self._writer: Any = None
        self._totals = {"up": 0, "down": 0}

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins; `info["out"]` is its folder, `info["start_round"]` the first round to be done.

        Raises:
            ConfigError: the run has no folder, or nothing can be written there.
        """
        self.end(None)
        if info.get("out") is None:
            raise ConfigError("expected a run folder for live curves, got a run without one")
        self._totals = {way: int(info.get(f"bytes_{way}") or 0) for way in self._totals}
        self._begin = int(info.get("start_round") or 1)
        folder = Path(info["out"]) / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write live curves to {folder}: {error.strerror or error}") from None
        self._folder = folder

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is complete: its numbers, to the disk. Where that is full the curves end, not the run."""
        for way in self._totals:
            self._totals[way] += int(record.get(f"bytes_{way}") or 0)
        if self._folder is None:
            return
        try:
            # Not in `start`: it has a thread, and workers are forked in the first round. One forked later, for one that
            # was killed, never uses it, and ends without closing its file.
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=self._begin)
            for tag, value in _curves(record, self._totals):
                self._writer.add_scalar(tag, value, int(record["round"]))
            self._writer.flush()
        except OSError as error:
            warnings.warn(f"live curves end here: {error.strerror or error}", stacklevel=2)
            self._folder = None

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over."""
        if self._writer is not None and self._folder is not None:
            self._writer.close()
        self._writer = self._folder = None


def _curves(record: Mapping[str, Any], totals: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    """Tags and values of one record; what is not a finite number is left out."""
    score = main_score_of(record).name
    train = {"loss": record.get("train_loss"), "refused": len(record.get("refused") or ())}
    tree = {
        "train": {**train, "lr": record.get("lr"), "samples": record.get("samples")},
        score: {**(record.get(score) or {}), "validation": record.get("validation")},
        "architecture": record.get(f"{score}_per_architecture"),
        "predictor": record.get(f"{score}_by_predictor"),
        "classes": record.get("accuracy_by_classes"),
        "held_out": record.get("held_out"),
        "metrics": record.get("metrics"),
        "bytes": {
            **{way: record.get(f"bytes_{way}") for way in totals},
            **{f"total_{way}": total for way, total in totals.items()},
        },
        "time": {"seconds": record.get("seconds"), "simulated": record.get("simulated_seconds")},
        "method": record.get("sums"),
        "server": record.get("server"),
    }
    yield from _leaves(tree, "")


def _leaves(entry: Any, tag: str) -> Iterator[tuple[str, float]]:
    if isinstance(entry, Mapping):
        for name, inner in entry.items():
            yield from _leaves(inner, f"{tag}/{name}" if tag else str(name))
    elif isinstance(entry, int | float) and not isinstance(entry, bool) and math.isfinite(entry):
        yield tag, float(entry)
