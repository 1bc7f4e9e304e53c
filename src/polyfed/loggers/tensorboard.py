"""Live curves for TensorBoard, in the folder ``tensorboard`` of each run: ``tensorboard --logdir runs``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError, kind_and_line
from polyfed.registry import is_installed
from polyfed.results.read import flat_table, unseal


class TensorBoard:
    """Draws the numbers of each round's record, which are on disk when the round is.

    A curve is named after its number's place in the record: ``train_loss``, ``bytes_up``, ``accuracy/personal/mean``,
    ``sums/cosine``. Lists, and what is told client by client, have no curves. A resumed run writes the curves of all
    its rounds anew. Where the disk is full, the run goes on without curves.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self) -> None:
        if not is_installed("tensorboard"):
            raise ConfigError(
                "run.loggers: expected the package tensorboard, which is not installed; add it with: "
                "pip install 'polyfed[tensorboard]'"
            )

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins.

        Raises:
            ConfigError: it has no folder.
        """
        if info.get("out") is None:
            raise ConfigError("expected a run folder for tensorboard, got a run without one")
        self._out = Path(info["out"])
        self._writer: Any = None
        self._has_failed = False

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is complete, and its record is in the run folder."""
        if self._has_failed:
            return
        try:
            if self._writer is None:
                self._open()
            else:
                self._write(record)
        except Exception as error:
            warnings.warn(f"tensorboard has failed, the run goes on without it: {kind_and_line(error)}", stacklevel=2)
            self._has_failed = True

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over."""
        if self._writer is not None and not self._has_failed:
            self._writer.close()

    def _open(self) -> None:
        """Begin the curves; not in `start`, as TensorBoard has threads, and workers are forked in the first round."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._out / "tensorboard"), purge_step=1)
        for line in (self._out / "rounds.jsonl").read_bytes().splitlines():
            self._write(unseal(line))

    def _write(self, record: Mapping[str, Any]) -> None:
        shown = {key: value for key, value in record.items() if key != "round" and "_client" not in key}
        for name, value in flat_table(shown, "/").items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()
