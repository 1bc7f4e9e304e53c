"""The script that a person with a GPU runs, in a tiny form."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
TINY = "--methods fedavg,fedgh --models lenet --clients 4 --samples 8 --batch-size 4 --rounds 2"


def test_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *TINY.split(), "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    answer = json.loads(out.read_text(encoding="utf-8"))
    assert answer["device"] == "a simulated GPU"
    assert [row["method"] for row in answer["compared"]] == ["fedavg", "fedavg", "fedgh", "fedgh"]
    assert all(row["agrees"] for row in answer["compared"])
    (row,) = answer["timed"]
    assert (row["model"], row["clients"]) == ("lenet", 4)
    assert row["serial"]["steps_per_second"] == pytest.approx(8 / row["serial"]["seconds"])
    assert row["speedup"] == pytest.approx(row["serial"]["seconds"] / row["vectorized"]["seconds"])
    assert row["vectorized"]["peak_bytes"] > row["serial"]["peak_bytes"] > 4 * 62006
    assert capsys.readouterr().out.endswith("other than on the CPU: none\n")
