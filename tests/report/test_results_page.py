"""The page of results, from folders of runs whose numbers are known."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.results_page import save_command, write_results


@pytest.fixture
def page(make: Any, two_by_two: Path) -> str:
    """Of two folders: FedGH's Table 3 with one seed, by command; and the comparison of conftest."""
    data = {"dataset": "cifar10", "num_clients": 10, "partition": "by_class", "classes_per_client": 2}
    run = {"paper_tables": ["fedgh/table3"]}
    versions = {"polyfed": "1.2.3", "torch": "2.13.0", "python": "3.12.1", "platform": "a machine"}
    make("gh/local", "local", 0, (0.9, 0.9661), data=data, run=run, versions=versions)
    make("gh/fedgh", "fedgh", 0, (0.5, 0.9740), data=data, run=run, versions=versions)
    save_command(make.root / "gh", "polyfed compare recipes/fedgh/table3.toml --seeds 0", ran=True)
    both = make.root / "both"
    both.mkdir()
    for name in ("fedgh-0", "fedgh-1", "local-0", "local-1"):
        (make.root / name).rename(both / name)
    (made := json.loads((make.root / "gh" / "compare.json").read_text()))["date"] = "2026-11-20"
    (make.root / "gh" / "compare.json").write_text(json.dumps(made))
    for file in both.glob("*/result.json"):
        os.utime(file, (1_700_000_000, 1_700_000_000))  # 14 November 2023
    return write_results([make.root / "gh", both], make.root / "results.md", target="95 %").read_text(encoding="utf-8")


def test_what_was_run_with_what_and_how(page: str) -> None:
    first, second = page.split("## ")[1:]
    assert first.startswith("fedgh/table3: cifar10, 10 clients\n")
    assert "cifar10 (by_class, classes_per_client=2), 10 clients, 2 rounds, seed 0. Accuracy: stage personal" in first
    assert "Run on 2026-11-20 with polyfed 1.2.3, python 3.12.1, torch 2.13.0." in first
    assert "\n    polyfed compare recipes/fedgh/table3.toml --seeds 0\n" in first
    assert "a machine" not in page
    assert second.startswith("both: digits, 2 clients\n")
    assert "Run on 2023-11-14.\n" in second
    assert "polyfed compare" not in second


def test_the_numbers(page: str) -> None:
    first, second = page.split("## ")[1:]
    assert "| fedgh | personal | 0 | 97.40 | 97.60 [" in first
    assert " | -0.20 | no spread given |" in first
    assert "| local | personal | 0 | 96.61 | 96.62" in first
    assert "| fedgh | 1 of 1 | 2.0 | 6.0 KiB | 3.0 s |" in first  # 95 % in the second round
    assert "| 10.00 | 52.50 |" not in second  # the lowest client's mean is 55
    assert "| fedgh | 65.00 ± 7.07 | +13.00 ± 4.24 | 10.00 | 55.00 | 55.00 | 45.00 |" in second
    assert "95 % interval" not in second  # of two seeds
    assert "| fedgh | 0 of 2 |\n" in second


def test_footnotes_stand_below_their_table_alone(page: str) -> None:
    first, second = page.split("## ")[1:]
    assert "Standalone sends nothing" in first  # Local's row
    assert "optimizer that should train the header" in first  # FedGH's
    assert "Scored, like all rows, by clients' own models" not in first  # FedProto's, which was not run
    assert "[1]" not in second


def test_two_tables_of_one_folder_are_numbered(make: Any, tmp_path: Path) -> None:
    make("a", accuracies=(0.5,))
    make("b", accuracies=(0.5, 0.6))
    file = write_results([make.root], tmp_path / "results.md")
    text = file.read_text()
    assert "## runs: digits, 2 clients (1)" in text
    assert "## runs: digits, 2 clients (2)" in text


def test_the_day_of_the_last_run_is_kept(tmp_path: Path) -> None:
    save_command(tmp_path, "polyfed compare a.toml", ran=False)
    made = json.loads((tmp_path / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps(made | {"date": "2020-01-01"}))
    save_command(tmp_path, "polyfed compare a.toml", ran=False)
    assert json.loads((tmp_path / "compare.json").read_text())["date"] == "2020-01-01"
    save_command(tmp_path, "polyfed compare a.toml", ran=True)
    assert json.loads((tmp_path / "compare.json").read_text())["date"] != "2020-01-01"


def test_what_cannot_be_met_writes_nothing(make: Any, tmp_path: Path) -> None:
    make("a")
    file = tmp_path / "results.md"
    with pytest.raises(ConfigError, match="target: expected"):
        write_results([make.root], file, target="much")
    with pytest.raises(ConfigError, match="is not there"):
        write_results([tmp_path / "nowhere"], file)
    (make.root / "compare.json").write_text("{")
    with pytest.raises(ConfigError, match=r"compare.json cannot be read"):
        write_results([make.root], file)
    assert not file.exists()
