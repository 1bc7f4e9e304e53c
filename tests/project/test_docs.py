"""The README's example and the tutorials print what they show; the examples run."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli.app import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
executed = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))["executed"]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_the_example_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes exactly, accuracies nearly (processors round differently), seconds not; the picture has those of one."""
    (example, shown), *_ = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    differs = re.compile(r" +\d+\.\d+(?= [±%])|^\d+ s$", re.MULTILINE)
    assert differs.sub("#", printed) == differs.sub("#", shown)
    assert numbers(printed)[:-1] == pytest.approx(numbers(shown)[:-1], abs=5)
    *_, up, down = numbers(next(line for line in shown.splitlines() if "fedgh" in line))
    picture = (ROOT / "docs" / "assets" / "federation.svg").read_text(encoding="utf-8")
    assert f">{1000 * up / 60:,.0f} bytes<" in picture, "6 clients, 10 rounds"
    assert f">{1000 * down / 60:,.0f} bytes<" in picture


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_prints_what_it_keeps(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words exactly, its figures nearly; at its end it shows a figure or a table."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    kept = [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    again = [cell for cell in executed(file, tmp_path).cells if cell["cell_type"] == "code"]
    assert "".join(kept[0]["source"]) == "%pip install -q polyfed"
    decimal = r"[+-]?\d+\.\d+"
    for before, after in zip(map(printed_by, kept), map(printed_by, again), strict=True):
        assert re.sub(decimal, "#", after).split() == re.sub(decimal, "#", before).split()
        for one, other in zip(re.findall(decimal, after), re.findall(decimal, before), strict=True):
            nearly = 0.05 if re.fullmatch(r"[01]\.\d{4}", other) else 0.5  # an accuracy; losses, percentage points
            assert float(one) == pytest.approx(float(other), abs=nearly)
    for cell in (kept[-1], again[-1]):
        assert re.search("<img |<table ", "".join(cell["outputs"][-1]["data"]["text/html"]))


def printed_by(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One round of the quickstart: a folder for the examples that read one."""
    folder = tmp_path_factory.mktemp("examples") / "run"
    words = ["run", str(ROOT / "recipes" / "quickstart.toml"), "--method", "local", "--set", "training.rounds=1"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(folder)])
    assert end.value.code == 0
    return folder


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example with these words after its name, in this process; gives what it printed."""

    def run(name: str, *words: str) -> str:
        path = ROOT / "examples" / name
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_examples_that_read_a_run_folder_run(finished_run: Path, example: Callable[..., str]) -> None:
    printed = example("client_similarity.py", "--images", "100", str(finished_run))
    everybody, alike, others = (float(word) for word in printed.splitlines()[1].split()[-3:])
    assert 0 < min(everybody, alike, others) <= max(everybody, alike, others) < 1
    rows = json.loads(
        example("kernel_messages.py", str(finished_run), "--images", "300", "--ranks", "4", "16", "--json")
    )
    assert [row["bytes"] for row in rows] == [4 * 300 * 4, 4 * 300 * 16]
    for row in rows:
        assert 0 < row["error"] <= row["bound"]
    assert rows[1]["error"] < rows[0]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["table3", "table3-slices"])
def test_parameters_sent_are_those_of_the_fedin_papers_table_3(recipe: str, example: Callable[..., str]) -> None:
    paper = {"fedavg": 12.28, "scaffold": 24.56, "moon": 12.28, "inclusivefl": 12.28, "incoavg": 12.28, "fedin": 12.35}
    paper |= {"heterofl": 16.29, "fedrolex": 16.29, "scalefl": 20.65}
    for row in json.loads(example("overheads.py", str(ROOT / "recipes" / "fedin" / f"{recipe}.toml"), "--json")):
        assert abs(row["up"] / 1e6 - paper[row["method"]]) < 0.01, "the paper cuts off after two digits"
