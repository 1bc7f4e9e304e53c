"""What a client's model says of new inputs: classes with probabilities, or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyfed.data.samples import TargetScale
from polyfed.errors import ConfigError
from polyfed.escaping import csv_text
from polyfed.functional import metrics

__all__ = ["Predictions"]


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says.

    names: of the inputs, a row's number or a file's name. scores: (N, C). labels: (N,) int64, where they are known.
    class_names: one per class. scale: where numbers are predicted, what they were standardized with; scores are then
    (N, 1), labels floats, and there are no classes. unknown: names of the texts of which the run knew no word, so that
    nothing but their length speaks in their scores. client, client_name: whose model; "" for a client without a name.
    """

    names: tuple[str, ...]
    scores: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    scale: TargetScale | None = None
    client: int | None = None
    client_name: str = ""

    def __repr__(self) -> str:
        if self.scale is not None:
            error = "" if self.rmse is None else f", RMSE {self.rmse:.4g}"
            return f"Predictions({len(self.names)} inputs, numbers{error})"
        right = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        return f"Predictions({len(self.names)} inputs, {self.scores.shape[1]} classes{right})"

    @property
    def classes(self) -> Tensor:
        """The predicted classes, (N,) int64."""
        return self.scores.argmax(dim=1)

    @property
    def probabilities(self) -> Tensor:
        """(N, C): the softmax of the scores."""
        return self.scores.float().softmax(dim=1)

    @property
    def accuracy(self) -> float | None:
        """The share that is right; None without labels, or where numbers are predicted."""
        if self.labels is None or self.scale is not None:
            return None
        return float((self.classes == self.labels).double().mean())

    @property
    def values(self) -> Tensor:
        """The predicted numbers, (N,) float64, in their own unit.

        Raises:
            ConfigError: classes are predicted.
        """
        if self.scale is None:
            raise ConfigError("expected a model that predicts numbers, got one of classes; see `classes`")
        return self.scale.restored(self.scores[:, 0])

    @property
    def rmse(self) -> float | None:
        """The RMSE of the predicted numbers; None without labels, or where classes are predicted."""
        return None if self.labels is None or self.scale is None else metrics.rmse(self.values, self.labels)

    def rows(self, probabilities: bool = False) -> list[dict[str, Any]]:
        """One per input: name, class, class_name, probability; on request ``probability_<class>`` of all classes.

        Where numbers are predicted: name, prediction.
        """
        if self.scale is not None:
            pairs = zip(self.names, self.values.tolist(), strict=True)
            return [{"name": name, "prediction": value} for name, value in pairs]
        rows = []
        for name, label, shares in zip(self.names, self.classes.tolist(), self.probabilities.tolist(), strict=True):
            called = self.class_names[label] if label < len(self.class_names) else str(label)
            row = {"name": name, "class": label, "class_name": called, "probability": shares[label]}
            every = {f"probability_{number}": share for number, share in enumerate(shares)}
            rows.append({**row, **(every if probabilities else {})})
        return rows

    def to_csv(self, probabilities: bool = False) -> str:
        """`rows` under a heading; probabilities with six decimals."""
        rows = self.rows(probabilities)
        lines = [{k: f"{v:.6f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        return csv_text(list(rows[0]), lines)
