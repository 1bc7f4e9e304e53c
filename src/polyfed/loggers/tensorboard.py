"""Live curves for TensorBoard, in the folder ``tensorboard`` of each run: ``tensorboard --logdir runs``.

One point per round, on disk when the round is. A resumed run has TensorBoard forget the rounds that it does again.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.loggers.base import check_installed
from polyfed.loggers.curves import Curves

FOLDER = "tensorboard"


class TensorBoard:
    """Writes every number of a round's record as a curve, named as in `Curves`. The step is the round.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        check_installed(FOLDER)
        self._folder: Path | None = None  # where curves go, while a run is shown
        self._writer: Any = None
        self._curves = Curves()

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins; `info["out"]` is its folder, `info["start_round"]` the first round to be done.

        Raises:
            ConfigError: the run has no folder, or nothing can be written there.
        """
        self.end(None)
        if info.get("out") is None:
            raise ConfigError("expected a run folder for live curves, got a run without one")
        self._curves = Curves(int(info.get("bytes_up") or 0), int(info.get("bytes_down") or 0))
        self._begin = int(info.get("start_round") or 1)
        folder = Path(info["out"]) / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write live curves to {folder}: {error.strerror or error}") from None
        self._folder = folder

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is complete: its numbers, to the disk. Where that is full the curves end, not the run."""
        if self._folder is None:
            return
        try:
            # Not in `start`: it has a thread, and workers are forked in the first round. One forked later, for one that
            # was killed, never uses it, and ends without closing its file.
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=self._begin)
            for tag, value in self._curves.of(record).items():
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
