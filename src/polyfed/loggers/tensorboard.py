"""Live curves for TensorBoard, in the folder ``tensorboard`` of each run: ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping

from polyfed.loggers.tracker import Tracker


class TensorBoard(Tracker):
    """Writes every number of a round's record as a curve, named as in `curves`; on disk when the round is."""

    package = "tensorboard"

    def open(self, known: str, name: str, parameters: Mapping[str, str]) -> tuple[str, int]:
        """See `Tracker`. TensorBoard forgets the rounds of an earlier process that this one does again."""
        from torch.utils.tensorboard import SummaryWriter

        begin = self._begin if known else 1
        self._writer = SummaryWriter(str(self._place), purge_step=begin)
        return self.package, begin - 1

    def log(self, values: Mapping[str, float], number: int) -> None:
        """See `Tracker`."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, number)
        self._writer.flush()

    def close(self, is_done: bool) -> None:
        """See `Tracker`."""
        self._writer.close()
