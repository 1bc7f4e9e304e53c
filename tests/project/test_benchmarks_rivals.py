"""The table of other frameworks beside polyfed: what is in it, who is missing and why, and that all do the same job."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "rivals.py"
RIVALS = runpy.run_path(str(PROGRAM))
TINY = ["--data", "random", "--clients", "3", "--samples", "12", "--batch-size", "6", "--rounds", "1"]


def measured(workers: int, seconds: list[float], ratio: float, moved: float = 1.0) -> dict[str, Any]:
    return {"workers": workers, "round_s": seconds, "ratio": ratio, "moved_ratio": moved, "loss": 2.0}


def named(name: str) -> Any:
    return next(framework for framework in RIVALS["FRAMEWORKS"] if framework.name == name)


def test_a_row_has_medians_over_turns_and_who_is_missing_a_reason() -> None:
    bare = RIVALS["summary"](named("bare PyTorch loop"), [measured(1, [4.0, 6.0], 1.0)], "")
    runs = [measured(1, [5.0], 1.25), measured(1, [7.0], 1.75), measured(2, [3.0], 0.6)]
    ours = RIVALS["summary"](named("polyfed"), runs, "")
    missing = RIVALS["summary"](named("PFLlib"), [], "no such package")
    assert ours["workers"][1]["seconds_per_round"] == 6.0
    head, line, *rows = RIVALS["table"]([bare, ours, missing], [1, 2]).splitlines()
    assert head.split(" | ")[2:7] == ["1 worker: s per round", "ratio", "2 workers: s per round", "ratio", "moved"]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (line, *rows)]
    assert {len(row) for row in cells} == {8}
    assert cells[1][2:] == ["5", "1.00", "", "", "1.00", ""]
    assert cells[2][2:] == ["6", "1.50", "3", "0.60", "1.00", ""]
    assert cells[3] == ["PFLlib", "", "", "", "", "", "", "no such package"]


def test_other_work_is_said_to_be_other_work() -> None:
    row = RIVALS["summary"](named("polyfed"), [measured(1, [1.0], 1.0), measured(2, [1.0], 0.5, moved=0.5)], "")
    assert "not the same work" in row["note"]


def test_a_framework_for_which_there_is_no_python_says_so(tmp_path: Path) -> None:
    impossible = RIVALS["Framework"]("x", "x.py", packages=("x==1",), least=(3, 19), below=(3, 20))
    with pytest.raises(RIVALS["Failed"], match=r"needs Python 3\.19 or newer, older than 3\.20; none on the path"):
        RIVALS["installed"](impossible, tmp_path)


def test_a_program_that_fails_or_hangs_gives_a_reason() -> None:
    with pytest.raises(RIVALS["Failed"], match="failed: SystemExit: no such thing"):
        RIVALS["done_by"]([sys.executable, "-c", "import sys; sys.exit('SystemExit: no such thing')"], own=True)
    with pytest.raises(RIVALS["Failed"], match="not through after 0 s"):
        RIVALS["done_by"]([sys.executable, "-c", "import time; time.sleep(3600)"], own=True, seconds=0.01)


@pytest.mark.slow
def test_polyfed_and_the_bare_loop_do_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--json", str(tmp_path / "t.json"), "--markdown", str(tmp_path / "t.md")]
    words = ["--only", "polyfed,pfllib", "--workers", "1", "--repeats", "1", *TINY, *places]
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *words])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    runpy.run_path(str(PROGRAM), run_name="__main__")
    bare, ours, *_ = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert ours["steps_per_round"] == 6
    assert ours["moved"] == pytest.approx(bare["moved"], rel=0.02)
    assert ours["loss"] == pytest.approx(bare["loss"], rel=0.02)
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [row["framework"] for row in rows] == ["bare PyTorch loop", "polyfed", "PFLlib"]
    assert rows[1]["workers"]["1"]["ratio"] > 0
    assert "no package" in (tmp_path / "t.md").read_text().splitlines()[-1]


@pytest.mark.slow
def test_flower_does_the_same_work(tmp_path: Path) -> None:
    """With this environment's Flower and Ray; in batches of all images, as which actor draws what order is chance."""
    for package in ("flwr", "ray"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    inputs, labels = RIVALS["random_images"](3, 12)
    torch.save({"inputs": inputs, "labels": labels}, tmp_path / "data.pt")
    words = [str(tmp_path / "data.pt"), "--rounds=2", "--batch-size=12"]
    bare, theirs = (
        RIVALS["done_by"]([sys.executable, str(ROOT / "benchmarks" / "rivals" / name), *words], own=True)
        for name in ("bare_loop.py", "run_flower.py")
    )
    assert theirs["moved"] == pytest.approx(bare["moved"], rel=1e-3)
