"""The figures of a run's records, a line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from polyfed.records.main_score import ACCURACY, MainScore
from polyfed.records.schema import RoundRecord, RunResult, Summary

if TYPE_CHECKING:
    import pandas as pd

# what did not count, as a record lists it -> in words
LOST = {"refused": "refused", "dropped": "dropped out", "stragglers": "too late"}
_COUNTED = ("clients", *LOST)  # lists in a round's record, of which the length is the figure
_NO_FIGURES = ("round", "seed", "accuracy_std", "accuracy_bottom_decile")  # the last two are in the summary, too
_OF_CLIENT = ("samples", "test_samples", "parameters", "bytes_up", "bytes_down", "simulated_seconds")


class Line(NamedTuple):
    """A line of `polyfed.report.frames.results`, without the columns that are the same in a whole run."""

    metric: str
    value: float | None
    stage: str = ""
    predictor: str = ""
    client: int | None = None
    architecture: str = ""
    round: int | None = None


def to_frame(records: Iterable[RoundRecord], result: RunResult | None) -> pd.DataFrame:
    """The lines of a run, but for what single clients have in single rounds. result: None while it is unfinished."""
    import pandas as pd

    score = ACCURACY if result is None else result.main_score
    lines = [line._replace(round=record.round) for record in records for line in _of_round(record, score)]
    if result is not None:
        lines += _of_result(result)
    frame = pd.DataFrame(lines, columns=Line._fields).dropna(subset="value")
    return frame.astype({"round": "Int32", "client": "Int32", "value": "float64"})


def _of_round(record: RoundRecord, score: MainScore) -> Iterator[Line]:
    yield from _of_both(record, next(iter(record.accuracy), ""), score)
    for stage, summary in record.accuracy.items():
        yield from _of_clients(summary, score, stage)
    yield from (Line(key, len(getattr(record, key) or ())) for key in _COUNTED)
    for kind, found in {"sums": record.sums, "server": record.server}.items():
        yield from (Line(f"{kind}.{name}", value) for name, value in found.items() if isinstance(value, int | float))


def _of_result(result: RunResult) -> Iterator[Line]:
    main, score = result.evaluation.stage, result.main_score
    yield from _of_both(result, main, score)
    for stage, summary in result.accuracy_by_stage.items():
        found = _of_clients(summary, score, stage)
        yield from (line for line in found if line.metric != score.name or stage != main)  # that is `accuracy`
    for row in result.clients_table or ():
        yield Line(score.name, row.accuracy, main, "", row.id, row.architecture)
        yield from (Line(key, getattr(row, key), "", "", row.id, row.architecture) for key in _OF_CLIENT)
    if result.clients_table is None:  # only the scores were recorded
        yield from (Line(score.name, value, main, "", at) for at, value in enumerate(result.accuracy_per_client))


def _of_both(record: RoundRecord | RunResult, main: str, score: MainScore) -> Iterator[Line]:
    """What the record of a round and a result have in common. main: the stage of scores that name none."""
    for key, value in record:
        if isinstance(value, int | float) and key not in _NO_FIGURES:
            is_score = key == "validation" or key.startswith("accuracy")
            yield Line(key.replace("accuracy", score.name, 1), value, main if is_score else "")
    for stage, by_predictor in record.accuracy_by_predictor.items():
        for predictor, summary in by_predictor.items():
            yield from _of_clients(summary, score, stage, predictor)
    for stage, by_classes in record.accuracy_by_classes.items():
        yield from (Line(f"by_classes_{name}", one.mean, stage) for name, one in by_classes.items())
    for stage, metrics in record.metrics.items():
        yield from (Line(f"metric_{name}", one.mean, stage) for name, one in metrics.items())
    yield from (Line("held_out", summary.mean, stage) for stage, summary in record.held_out.items())
    yield from (Line(f"epsilon_{unit}", value) for unit, value in record.epsilon.items())
    for name, summary in record.accuracy_per_architecture.items():
        yield Line("by_architecture", summary.mean, main, architecture=name)


def _of_clients(summary: Summary, score: MainScore, stage: str, predictor: str = "") -> Iterator[Line]:
    """The main score over clients."""
    worst = summary.max if score.lower_is_better else summary.min
    found = {score.name: summary.mean, "std_clients": summary.std, "worst_client": worst}
    found["bottom_decile"] = summary.bottom_decile
    yield from (Line(metric, value, stage, predictor) for metric, value in found.items())
