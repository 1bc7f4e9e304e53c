"""The figure of a sweep, from tables made by hand."""

from pathlib import Path
from typing import Any

from polyfed.records.schema import RunResult
from polyfed.report.run_lines import to_frame
from polyfed.report.run_records import RunRecord
from polyfed.report.sweep_figures import figure_of
from polyfed.report.sweeps import SweepCell, SweepTable, build_table

LR, EPOCHS = "training.lr", "training.local_epochs"


def record(accuracy: float, validation: float, seed: int = 0) -> RunRecord:
    found = {
        "method": "fedgh", "dataset": "digits", "clients": 2, "rounds": 1, "seed": seed, "accuracy": accuracy,
        "validation": validation, "evaluation": {"stage": "personal", "weighting": "clients", "test": "client"},
    }  # fmt: skip
    result = RunResult(**found)
    return RunRecord(Path("run"), result, to_frame([], result))


def swept(values: dict[tuple[Any, Any], float], keys: tuple[str, str] = (LR, EPOCHS)) -> SweepTable:
    cells = [
        SweepCell(dict(zip(keys, at, strict=True)), [record(accuracy, accuracy / 2)], words=("--set", "x"))
        for at, accuracy in values.items()
    ]
    table = build_table(keys, cells)
    assert table is not None
    return table


def test_a_line_for_each_value_of_the_second_setting() -> None:
    figure = figure_of(swept({(0.1, 5): 0.5, (0.1, 1): 0.3, (0.01, 1): 0.2, (1.0, 5): 0.7}))
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    lines = {str(line.get_label()): [list(map(float, data)) for data in line.get_data()] for line in axes.lines}
    assert lines["test, local_epochs=1"] == [[0.01, 0.1], [20.0, 30.0]]
    assert lines["test, local_epochs=5"] == [[0.1, 1.0], [50.0, 70.0]]
    assert lines["validation, local_epochs=5"] == [[0.1, 1.0], [25.0, 35.0]]
    assert lines["chosen"] == [[1.0], [35.0]]


def test_words_are_lines_and_no_axis() -> None:
    assert figure_of(swept({("all", 1): 0.5, ("all", 2): 0.4, ("none", 1): 0.3}, ("method.share", EPOCHS))) is not None
    assert figure_of(swept({("all", "x"): 0.5, ("none", "x"): 0.3}, ("method.share", "data.partition"))) is None
