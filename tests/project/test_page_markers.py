"""What pages show in the place of their markers; every marker of every page stands for something."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from polyfed.registry import DATASETS, METHODS

ROOT = Path(__file__).resolve().parents[2]
runpy.run_path(str(ROOT / "scripts" / "documentation.py"))
MARKERS: Any = sys.modules["page_markers"]


def shown(text: str, page: str = "index") -> str:
    found: str = MARKERS.expanded(text, ROOT / "docs" / f"{page}.md")
    return found


def test_every_marker_of_every_page_stands_for_something() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        MARKERS.expanded(page.read_text(encoding="utf-8"), page)


def test_numbers_are_those_of_the_stored_results() -> None:
    one = MARKERS.settings("worth")["digits"]
    gains = [one.scores["closed-form"][seed] - one.scores["local"][seed] for seed in one.seeds]
    mean = 100 * sum(gains) / len(gains)
    assert shown("It gains {{ value worth/digits closed-form gain }} points.") == f"It gains {mean:.1f} points."
    assert shown("{{ value worth/digits closed-form over local }}") == f"{mean:.1f}"
    alone = float(shown("{{ value worth/digits closed-form alone }}"))
    federated = float(shown("{{value worth/digits closed-form federated}}"))
    assert alone + federated == pytest.approx(mean, abs=0.11)
    assert shown("{{ value worth closed-form settings }}, {{ value worth closed-form above }}") == "3, 1"
    name, measured = next(iter(MARKERS.measurements().items()))
    row, cell, *_ = measured.tables[0].rows[1]
    assert shown(f"{{{{ value tables/{name} {row} accuracy }}}}") == f"{float(cell.strip('*').split()[0]):.1f}"


def test_a_table_has_all_rows() -> None:
    name, measured = next(iter(MARKERS.measurements().items()))
    assert shown(f"{{{{ table tables/{name} }}}}") == measured.tables[0].to_markdown()
    lines = shown("{{ table methods }}").splitlines()
    rows = {line.split("](")[0].removeprefix("| ["): line.split(" | ") for line in lines[2:]}
    assert rows["closed-form"][2] == "6 of 7"
    assert rows["fedavg"][-1] == "1.1 |", "as long as Local"
    assert "fd-uniform" not in rows, "controls have no row"


def test_every_data_set_has_a_line() -> None:
    _, _, *lines = shown("{{ datasets }}").splitlines()
    assert {line.split("`")[1] for line in lines if ":" not in line.split("`")[1]} == {
        n for n in DATASETS if ":" not in n
    }
    assert all(len(line.split(" | ")[1]) > 10 for line in lines)


def test_accuracies_stand_beside_what_their_rows_need() -> None:
    _, _, *lines = shown("{{ accuracies local,ditto,pooled rows/digits-40 rows/rows-400 }}").splitlines()
    local, ditto, pooled = (line.strip("| ").split(" | ") for line in lines)
    assert [local[1], ditto[1], pooled[1]] == ["nobody", "the others", "all rows in one place"]
    assert local[2:] == [shown(f"{{{{ value rows/{name} local accuracy }}}}") for name in ("digits-40", "rows-400")]
    assert ditto[3] == "-", "not among the rows of the setting"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_table_and_its_line(method: str) -> None:
    table = shown("{{ hyperparameters }}", f"methods/{method}")
    assert table == "None." or table.startswith("| hyperparameter | values | default | description |\n")
    line = shown("{{ results }}", f"methods/{method}")
    assert table in shown("{{ details }}", f"methods/{method}")
    assert line.endswith(".")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("method", "told"),
    {
        "local": "Nothing is uploaded. `max_grad_norm` clips per-sample gradients (sample level).",
        "ditto": "`upload_clip_norm` clips [each entry](../uploads.md) of an upload (client level). "
        "`max_grad_norm` is not supported.",
        "fedin": "`max_grad_norm` clips per-sample gradients (sample level), only with `mu = 0`.",
        "fedfomo": "`upload_clip_norm` is not supported, as an upload has whole weights, which others weigh up. "
        "`max_grad_norm` clips per-sample gradients (sample level).",
    }.items(),
)
def test_what_clipping_does_to_a_method(method: str, told: str) -> None:
    assert shown("{{ privacy }}", f"methods/{method}").endswith(f" {told}")


@pytest.mark.parametrize(
    "marker",
    [
        "{{ no }}",
        "{{ results }}",
        "{{ hyperparameters }}",
        "{{ value }}",
        "{{ value worth/digits nobody gain }}",
        "{{ value worth/digits closed-form luck }}",
        "{{ value worth closed-form luck }}",
        "{{ value worth/nowhere closed-form gain }}",
        "{{ value nothing/digits closed-form gain }}",
        "{{ value tables/worth-few fedgh luck }}",
        "{{ table tables/nothing }}",
        "{{ table worth }}",
        "{{ accuracies nobody worth/digits }}",
    ],
)
def test_an_unknown_marker_is_an_error(marker: str) -> None:
    with pytest.raises(ValueError, match=r"index.md: expected a marker of scripts/page_markers.py, got \{\{"):
        shown(f"text {marker} text")


def test_code_is_left_as_it_is() -> None:
    code = "`{{ results }}` and\n\n```text\n{{ results }}\n```\n"
    assert shown(code) == code
