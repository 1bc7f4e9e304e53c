"""The map of gains, of figures made by hand."""

from __future__ import annotations

from polyfed.report.benchmark_figures import gains_figure
from polyfed.report.benchmark_gains import gains_of
from tests.report.test_benchmark_page import setting


def test_cells_are_the_settings_gains() -> None:
    gains = gains_of(setting("one", "accuracy"))
    figure = gains_figure({"one": gains, "two": gains}, ["below", "above", "local"])
    assert figure is not None
    assert [(row["setting"], row["method"], row["part"], round(row["mean"], 9)) for row in figure.rows[:4]] == [
        ("one", "below", "gain", -0.1),
        ("one", "below", "federated", 0.0),
        ("one", "above", "gain", 0.12),
        ("one", "above", "federated", 0.09),
    ]
    over_local, federated = figure.figure.axes[:2]
    assert [label.get_text() for label in over_local.get_yticklabels()] == ["below", "above"]
    assert [label.get_text() for label in federated.get_xticklabels()] == ["one", "two"]
    said = {(text.get_position(), text.get_text(), text.get_fontweight()) for text in federated.texts}
    assert ((0, 0), "+0.0", "normal") in said, "its interval includes zero"
    assert ((0, 1), "+9.0", "bold") in said


def test_without_gains_there_is_no_figure() -> None:
    assert gains_figure({}, ["above"]) is None
    assert gains_figure({"one": {}}, ["above"]) is None
