"""A sweep's table read again, and drawn: the map's cells by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.round_figures import RoundFigures
from polyfed.report.run_records import RunRecord
from polyfed.report.sweep_figures import figure_of, sensitivity
from polyfed.report.sweeps import SweepCell, build_table, is_sweep, read_sweep, write
from polyfed.results.schema import RunResult
from tests.helpers.readable import unreadable

LR, EPOCHS = "training.lr", "training.local_epochs"


def record(accuracy: float, validation: float, seed: int = 0) -> RunRecord:
    result = {
        "method": "fedgh", "dataset": "digits", "clients": 2, "rounds": 1, "seed": seed, "accuracy": accuracy,
        "validation": validation, "evaluation": {"stage": "personal", "weighting": "clients", "test": "client"},
    }  # fmt: skip
    line = RoundFigures(round=1, evaluated=True, validation=validation)
    return RunRecord(Path("run"), RunResult(**result), [line])


def swept(folder: Path, values: dict[tuple[Any, Any], float], keys: tuple[str, str] = (LR, EPOCHS)) -> Path:
    cells = [
        SweepCell(dict(zip(keys, at, strict=True)), [record(accuracy, accuracy / 2)], words=("--set", "x"))
        for at, accuracy in values.items()
    ]
    table = build_table(keys, cells)
    assert table is not None
    write(table, folder)
    return folder


def test_the_map_by_hand(tmp_path: Path) -> None:
    folder = swept(tmp_path, {(0.1, 5): 0.5, (0.1, 1): 0.3, (0.01, 1): 0.2, (1.0, 5): 0.7})
    assert is_sweep(folder)
    table = read_sweep(folder)
    assert [row.test for row in table.rows] == [0.5, 0.3, 0.2, 0.7]
    curve, drawing = sensitivity(folder)
    assert (curve.stem, drawing.stem) == ("sensitivity", "sensitivity-map")
    axes = drawing.figure.axes[0]
    assert {text.get_text(): text.get_position() for text in axes.texts} == {
        "20.0": (0, 0), "30.0": (1, 0), "50.0": (1, 1), "70.0": (2, 1),
    }  # fmt: skip
    frames = [(round(p.get_x() + p.get_width() / 2), round(p.get_y() + p.get_height() / 2)) for p in axes.patches]
    assert set(frames) == {(2, 1)}, "chosen by validation"
    assert curve.figure.axes[0].get_xscale() == "log"
    assert [row["test"] for row in curve.rows] == [0.5, 0.3, 0.2, 0.7]
    assert len(curve.data["rows"]) == 4


@pytest.mark.parametrize(("settings", "bands"), [(3, 3), (4, 0)])
def test_bands_of_up_to_six_lines(settings: int, bands: int) -> None:
    """Validation and test are two lines each."""
    at = [{LR: lr, EPOCHS: epochs} for epochs in range(settings) for lr in (0.1, 0.2)]
    table = build_table(
        (LR, EPOCHS), [SweepCell(one, [record(0.4, 0.2), record(0.5, 0.3, 1)], words=("x",)) for one in at]
    )
    assert table is not None
    figure = figure_of(table)
    assert figure is not None
    assert len(figure.axes[0].collections) == bands
    assert any("band" in text.get_text() for text in figure.texts) is bool(bands)


@pytest.mark.slow
def test_a_map_of_many_values_has_room_for_their_numbers(tmp_path: Path) -> None:
    values = [0.00123 * 2**n for n in range(14)]
    folder = swept(tmp_path, {(lr, epochs): 0.5 for lr in values for epochs in range(1, 9)})
    assert unreadable(sensitivity(folder)[1].figure) == []


def test_words_have_no_map_and_nothing_no_figure(tmp_path: Path) -> None:
    folder = swept(tmp_path / "a", {("all", 1): 0.5, ("all", 2): 0.4, ("none", 1): 0.3}, ("method.share", EPOCHS))
    assert [drawing.stem for drawing in sensitivity(folder)] == ["sensitivity"]
    folder = swept(tmp_path / "b", {("all", "x"): 0.5, ("none", "x"): 0.3}, ("method.share", "data.partition"))
    with pytest.raises(ConfigError, match=r"a number among them, got method\.share, data\.partition"):
        sensitivity(folder)


def test_what_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder of a sweep"):
        read_sweep(tmp_path)
    for content in ("{", "[]", json.dumps({"keys": [], "rows": [{"a": 1}], "caption": "", "notes": []})):
        (tmp_path / "sweep.json").write_text(content)
        with pytest.raises(ConfigError, match="as `polyfed sweep` writes it"):
            read_sweep(tmp_path)
