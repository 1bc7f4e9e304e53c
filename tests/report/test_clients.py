"""Accuracies client by client: the numbers by hand, and that these are what is drawn."""

from collections.abc import Sequence
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.clients import architectures, by_architecture, client_scores, clients, ranked, sizes
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import load_runs
from tests.helpers.readable import unreadable


def table(
    *accuracies: float | None, names: Sequence[str] = "aabb", samples: tuple[int, ...] = (10, 20, 30, 400)
) -> list[Any]:
    return [
        {"id": n, "architecture": name, "samples": size, "accuracy": accuracy}
        for n, (accuracy, name, size) in enumerate(zip(accuracies, names, samples, strict=True))
    ]


@pytest.fixture
def runs(make: Any) -> Any:
    make("local-0", "local", 0, clients_table=table(0.5, 0.1, 0.4, 0.2))
    make("fedgh-0", "fedgh", 0, clients_table=table(0.4, 0.3, 0.2, 0.1))
    make("fedgh-1", "fedgh", 1, clients_table=table(0.5, 0.8, None, 0.6))
    return load_runs(make.root)


def test_numbers_by_hand(runs: Any) -> None:
    (group,), _ = group_runs(runs)
    scores = client_scores(group)
    assert len(scores) == 11
    assert (scores[0].name, scores[0].seed, scores[0].client, scores[0].samples) == ("local", 0, 0, 10)
    local, fedgh = ranked(scores)
    assert (local.mean, local.low, local.seeds) == ((0.1, 0.2, 0.4, 0.5), (0.1, 0.2, 0.4, 0.5), 1)
    assert fedgh.mean == pytest.approx((0.3, 0.4, 0.55)), "as many ranks as both seeds have"
    assert (fedgh.low, fedgh.high) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.8))
    found = {(one.name, one.architecture): one for one in by_architecture(scores)}
    assert found["fedgh", "a"].mean == pytest.approx(0.5)
    assert (found["fedgh", "a"].low, found["fedgh", "a"].high, found["fedgh", "a"].n) == (0.3, 0.8, 4)
    assert found["fedgh", "b"].mean == pytest.approx(0.3)
    assert found["local", "b"].n == 2


def test_what_is_drawn_is_what_was_found(runs: Any) -> None:
    (drawing,) = clients(runs)
    local, fedgh = drawing.figure.axes[0].lines
    assert list(local.get_ydata()) == pytest.approx([10, 20, 40, 50])
    assert list(fedgh.get_ydata()) == pytest.approx([30, 40, 55])
    assert [row["mean"] for row in drawing.rows if row["name"] == "fedgh"] == pytest.approx([0.3, 0.4, 0.55])
    assert "seeds 0, 1" in drawing.data["about"]
    (drawing,) = sizes(runs)
    axes = drawing.figure.axes[0]
    assert axes.get_xscale() == "log", "10 and 400 samples"
    assert list(axes.lines[1].get_xdata()) == [10, 20, 30, 400, 10, 20, 400]
    (drawing,) = architectures(runs)
    axes = drawing.figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    marks = [line for line in axes.lines if line.get_marker() in ("x", "o")]
    assert [list(mark.get_ydata()) for mark in marks] == [pytest.approx([30, 30]), pytest.approx([50, 30])]
    assert drawing.figure.legends[0].get_texts()[1].get_text() == "fedgh"


def test_a_figure_for_each_experiment_and_what_is_not_recorded(make: Any) -> None:
    make("a")
    make("b", data={"dataset": "cifar10"})
    runs = load_runs(make.root)
    assert [drawing.stem for drawing in clients(runs)] == ["accuracy-per-client-1", "accuracy-per-client-2"]
    with pytest.raises(ConfigError, match="architectures"):
        architectures(runs)
    with pytest.raises(ConfigError, match="how many samples"):
        sizes(runs)


@pytest.mark.slow
def test_many_networks_and_methods_with_long_names_can_be_read(make: Any) -> None:
    names = [f"timm:some_network_{n}_with_a_long_name.in1k" for n in range(20)]
    for number in range(10):
        rows = table(*(0.02 * n for n in range(20)), names=names, samples=tuple(range(1, 21)))
        label = f"fedgh-with-a-header-trained-for-a-hundred-epochs-{number}"
        make(str(number), "fedgh", 0, clients_table=rows, label=label, accuracy_per_client=[0.1] * 20)
    found = load_runs(make.root)
    for drawing in (*clients(found), *architectures(found), *sizes(found)):
        assert unreadable(drawing.figure) == [], drawing.stem


def test_ranks_are_whole_numbers(runs: Any) -> None:
    axes = clients(runs)[0].figure.axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
