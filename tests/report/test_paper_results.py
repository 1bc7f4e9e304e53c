"""Ours beside the papers': which column, which row, how far apart; footnotes; the shipped files."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from polyfed.records import paper_tables
from polyfed.report import paper_results
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import to_markdown, to_text
from polyfed.report.run_records import load_runs

NUMBERS = """\
paper,table,setting,dataset,method,quantity,mean,spread,unit,footnote,stage
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,local,accuracy,50,1.0,%,,personal
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,fedgh,accuracy,62,1.0,%,first,personal
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,fedgh,rounds to 60 %,2,,rounds,second first,
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,local,rounds to 60 %,0,,rounds,,
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,fedgh,bytes to 60 %,3,,KiB,,
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,fedgh,bytes per client and round,1.25,0.1,KiB,,
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,fedgh,parameters sent,0.000128,,million,,
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,fedgh,memory,1,,MiB,,
p,table1,"num_clients=2, dirichlet_alpha=0.5",digits,fedavg,accuracy,-1,,%,third,
p,table1,"num_clients=3, dirichlet_alpha=0.5",digits,fedgh,accuracy,99,1.0,%,third,
p,table1,"num_clients=2, dirichlet_alpha=0.5",cifar10,fedgh,accuracy,98,1.0,%,third,
p,table2,,,fedgh,accuracy,40,,%,,received
"""
FOOTNOTES = """\
footnote,text
first,Printed twice.
second,"A ""slip"", 50 % of it."
third,Of a row that is not here.
"""
RUN = {"paper_tables": ["p/table1"]}


@pytest.fixture(autouse=True)
def numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A paper of our own, except for the tests of the shipped files."""
    if "shipped" not in request.node.name:
        (tmp_path / "published.csv").write_text(NUMBERS)
        (tmp_path / "published-footnotes.csv").write_text(FOOTNOTES)
        monkeypatch.setattr(paper_tables, "SOURCE", tmp_path)


def sixty(make: Any, **run: Any) -> Path:
    """FedGH with 0.60 and 0.64 after three rounds, Local with 0.50 and 0.52, which sends nothing."""
    nothing = {"bytes_up": 0, "bytes_down": 0}
    for seed, (mine, local) in enumerate([(0.60, 0.50), (0.64, 0.52)]):
        make(f"fedgh-{seed}", "fedgh", seed, (0.3, 0.61, mine), run=RUN | run)
        folder = make(f"local-{seed}", "local", seed, (0.3, 0.4, local), run=RUN | run, **nothing)
        lines = [json.loads(line) | nothing for line in (folder / "rounds.jsonl").read_text().splitlines()]
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Path(make.root)


def published(folder: Path) -> pd.DataFrame:
    (section,) = compare_runs(load_runs(folder)).sections
    return section.published.set_index(["name", "quantity"])


def by_quantity(make: Any, name: str, **run: Any) -> pd.DataFrame:
    return published(sixty(make, **run)).loc[name]


def test_ours_beside_theirs(make: Any) -> None:
    found = by_quantity(make, "fedgh")
    accuracy = found.loc["accuracy"]
    assert (accuracy["place"], accuracy["setting"]) == ("p/table1", "num_clients=2, dirichlet_alpha=0.5")
    assert (accuracy["stage"], accuracy["seeds"], accuracy["footnotes"]) == ("personal", "0 1", ("first",))
    assert list(accuracy[["ours", "paper", "difference"]]) == pytest.approx([62.0, 62.0, 0.0])
    assert accuracy["ours_std"] == pytest.approx(4 / math.sqrt(2))
    assert accuracy["mark"] == paper_results.WITHIN
    rounds, sent, each = (found.loc[key] for key in ("rounds to 60 %", "bytes to 60 %", "bytes per client and round"))
    assert list(rounds[["ours", "paper", "mark"]]) == [2, 2, paper_results.NO_SPREAD]
    assert list(sent[["ours", "paper", "difference"]]) == [6, 3, 3]  # two rounds of 1 + 2 KiB
    assert list(each[["ours", "difference"]]) == pytest.approx([1.5, 0.25])  # 3 KiB for two clients
    assert found.loc["parameters sent", "ours"] == pytest.approx(128e-6)  # 1 KiB up, two clients, four bytes each
    assert "memory" not in found.index


def test_who_sends_nothing_has_no_rounds(make: Any) -> None:
    found = by_quantity(make, "local")
    assert list(found.loc["rounds to 60 %", ["ours", "paper"]]) == [0, 0]
    assert found.loc["accuracy", "difference"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("seeds", "accuracies", "mark"),
    [
        (1, (0.65,), "within 3 spreads"),  # 3 points off, the paper's spread alone is 1
        (1, (0.5899,), "differs"),
        (1, (0.6501,), "differs"),
        (2, (0.66, 0.70), "within 3 spreads"),  # 6 off, spread 3
        (2, (0.705, 0.715), "differs"),  # 9 off, spread sqrt(1.5)
        (2, (0.525, 0.535), "differs"),
    ],
)
def test_three_spreads_in_both_directions(make: Any, seeds: int, accuracies: tuple[float, ...], mark: str) -> None:
    for seed, accuracy in zip(range(seeds), accuracies, strict=True):
        make(f"fedgh-{seed}", "fedgh", seed, (accuracy,), run=RUN)
    assert published(make.root)["mark"].iloc[0] == mark


@pytest.mark.parametrize(
    ("override", "marks"),
    [("training.rounds=3", {"other settings"}), ("data.num_clients=2", {"within 3 spreads", "no spread given"})],
)
def test_other_settings_than_the_columns_are_said_and_not_marked(make: Any, override: str, marks: set[str]) -> None:
    found = by_quantity(make, "fedgh", overrides=[override])
    assert marks <= set(found["mark"])
    section = compare_runs(load_runs(make.root)).sections[0]
    assert section.caption.endswith(f" Changed by --set: {override}.")
    noted = any(note.startswith("other settings: not the paper's experiment") for note in section.notes)
    assert noted is (marks == {"other settings"})


def test_scaled_down_is_said_and_not_marked(make: Any) -> None:
    small = {"preset": "small", "preset_note": "scaled down: 3 rounds, not 200"}
    assert set(by_quantity(make, "fedgh", **small)["mark"]) == {"scaled down"}
    table = compare_runs(load_runs(make.root))
    section = table.sections[0]
    assert section.caption.endswith(" Preset small: scaled down: 3 rounds, not 200.")
    assert section.facts["preset"] == "small"
    assert any(note.startswith("scaled down: not the paper's experiment") for note in section.notes)
    assert "differs |" not in to_markdown(table)


def test_never_reached_is_said(make: Any) -> None:
    make("fedgh", "fedgh", 0, (0.3, 0.5), run=RUN)
    found = published(make.root).loc["fedgh"]
    assert list(found.loc["rounds to 60 %", ["ours", "mark"]]) == [None, "not reached"]
    assert found.loc["bytes to 60 %", "difference"] is None
    assert "| not reached |" in to_markdown(compare_runs(load_runs(make.root)))


def test_footnotes_are_those_of_the_rows_that_are_shown(make: Any) -> None:
    table = compare_runs(load_runs(sixty(make)))
    (section,) = table.sections
    assert section.footnotes == {"first": 1, "second": 2}
    assert section.notes[-2:] == ("[1] Printed twice.", '[2] A "slip", 50 % of it.')
    text = to_text(table)
    (line,) = [line for line in text.splitlines() if "62.00 ± 1.00" in line]
    assert " ".join(line.split()) == "fedgh personal 0 1 62.00 ± 2.83 62.00 ± 1.00 [1] +0.00 within 3 spreads"
    assert " 2.0 [1, 2] " in text
    for form in (text, to_markdown(table)):
        assert "Printed twice." in form
        assert "Of a row that is not here" not in form
    alone = compare_runs(load_runs([make.root / "local-0", make.root / "local-1"]))
    assert alone.sections[0].footnotes == {}
    assert "Printed twice" not in to_markdown(alone)


def test_other_settings_or_data_have_no_column(make: Any) -> None:
    make("a", "fedgh", data={"dirichlet_alpha": 0.1}, run=RUN)
    make("b", "fedgh", run={})
    other, none = compare_runs(load_runs(make.root)).sections
    assert other.published.empty
    assert none.published.empty
    assert "p/table1 has no column for these data and settings, so that nothing stands beside" in other.notes
    assert not any("paper" in note or "column" in note for note in none.notes)


# the shipped files ----------------------------------------------------------------------------------------------------


def test_the_shipped_fedgh_table_is_found_by_a_recipes_data(make: Any) -> None:
    data = {"dataset": "cifar10", "num_clients": 10, "partition": "by_class", "classes_per_client": 2}
    make("fedgh", "fedgh", 0, (0.5, 0.976), data=data, run={"paper_tables": ["fedgh/table3"]})
    found = published(make.root).loc["fedgh"]
    assert list(found.loc["accuracy", ["paper", "mark"]]) == [97.60, paper_results.NO_SPREAD]
    assert list(found.loc["rounds to 90 %", ["paper", "ours"]]) == [2, 2]
    assert found.loc["bytes per client and round", "paper"] == pytest.approx(23.45, abs=0.01)
