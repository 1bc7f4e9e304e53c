"""The figure by which models, rounds and methods are compared: accuracy, or RMSE where numbers are predicted.

In the files of a run with numbers to predict, all keys that begin with "accuracy" begin with "rmse".
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MainScore:
    """A main score.

    Attributes:
        name: of its keys in the files of a run. title: in tables and sentences.
        lower_is_better: its direction. is_share: whether it is in [0, 1] and shown in percent.
        metrics: what may be recorded beside it by ``[evaluation] metrics``.
    """

    name: str
    title: str
    lower_is_better: bool
    is_share: bool
    metrics: tuple[str, ...]

    def is_better(self, value: float, reference: float, by: float = 0.0) -> bool:
        """Whether `value` is better than `reference` by more than `by`."""
        return value < reference - by if self.lower_is_better else value > reference + by

    def improved(self, value: float, gain: float) -> float:
        """A value that is better by `gain`."""
        return value - gain if self.lower_is_better else value + gain

    def best(self, values: Iterable[float]) -> float:
        """The best of several values."""
        return min(values) if self.lower_is_better else max(values)

    @property
    def nothing(self) -> float:
        """What every value is better than."""
        return math.inf if self.lower_is_better else -math.inf

    @property
    def unit(self) -> str:
        """Behind a value: " %" or nothing, as RMSE has the unit of the numbers that are predicted."""
        return " %" if self.is_share else ""

    @property
    def axis(self) -> str:
        """The label of a figure's axis."""
        return f"test {self.title} [%]" if self.is_share else f"test {self.title}"

    def shown(self, value: float) -> float:
        """A value as it is shown: a share in percent."""
        return 100 * value if self.is_share else value

    def text(self, value: float, sign: str = "") -> str:
        """A value without its unit: a share in percent with two decimals, others with four digits.

        sign: "+" for a difference.

        >>> ACCURACY.text(0.5), RMSE.text(53.468), RMSE.text(1.5, "+")
        ('50.00', '53.47', '+1.500')
        """
        return f"{100 * value:{sign}.2f}" if self.is_share else f"{value:{sign}#.4g}".removesuffix(".")

    def of_it(self, text: str) -> str:
        """A text on the accuracy as one on this score: of the RMSE there are no percents and no points.

        >>> RMSE.of_it("Accuracy of the worst client, in %; mean over seeds.")
        'RMSE of the worst client; mean over seeds.'
        """
        if self.is_share:
            return text
        for words in (", in %", " in %", ", in percentage points", " in percentage points,", " in percentage points"):
            text = text.replace(words, "," if words.endswith(",") else "")
        return text.replace("Accuracy", self.title).replace("accuracy", self.title)


def as_accuracy(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries with those of the RMSE under the keys of the accuracy."""
    rmse, accuracy = RMSE.name, ACCURACY.name
    return {accuracy + key.removeprefix(rmse) if key.startswith(rmse) else key: value for key, value in entries.items()}


ACCURACY = MainScore(
    "accuracy", "accuracy", False, True, ("balanced_accuracy", "f1", "auc", "calibration_error", "confusion")
)
RMSE = MainScore("rmse", "RMSE", True, False, ("mae", "r2"))


def main_score_of(keys: Container[str]) -> MainScore:
    """The main score of a round's record or of a result, by its keys."""
    return RMSE if RMSE.name in keys else ACCURACY
