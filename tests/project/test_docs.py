"""Every command and every block of code that the documentation shows is run, or checked as far as it can be here."""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
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
    """Bytes exactly; accuracies nearly, as processors round differently. The picture has the bytes of one message."""
    (example, shown), *_ = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    percent = r" +\d+\.\d+"
    assert re.sub(percent, "#", printed) == re.sub(percent, "#", shown)
    assert numbers(printed) == pytest.approx(numbers(shown), abs=5)
    *_, up, down = numbers(next(line for line in shown.splitlines() if "fedgh" in line))
    picture = (ROOT / "docs" / "assets" / "federation.svg").read_text(encoding="utf-8")
    assert f">{up / 60:,.0f} bytes<" in picture, "6 clients, 10 rounds"
    assert f">{down / 60:,.0f} bytes<" in picture


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_prints_what_it_keeps(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words exactly, its figures nearly; at its end it shows a figure."""
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
        assert "<img " in "".join(cell["outputs"][-1]["data"]["text/html"])


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


@pytest.mark.slow
def test_the_example_of_client_similarity_runs(finished_run: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "client_similarity.py"), "--images", "100", str(finished_run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    everybody, alike, others = (float(word) for word in done.stdout.splitlines()[1].split()[-3:])
    assert 0 < min(everybody, alike, others) <= max(everybody, alike, others) < 1


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
def test_the_example_of_kernel_messages_runs(finished_run: Path, example: Callable[..., str]) -> None:
    words = [str(finished_run), "--images", "300", "--ranks", "4", "16"]
    rows = json.loads(example("kernel_messages.py", *words, "--json"))
    assert [(row["rank"], row["precision"]) for row in rows] == [
        (rank, precision) for rank in (4, 16) for precision in ("float32", "float16", "int8")
    ]
    assert [row["bytes"] for row in rows[:3]] == [4 * 1200, 2 * 1200 + 4, 1200 + 16]
    for row in rows:
        assert 0 < row["error"] <= row["bound"] + row["rounding"]
        assert row["rounding"] <= {"float32": 0, "float16": 1e-4, "int8": 5e-3}[row["precision"]]
    assert rows[3]["tau"] < rows[0]["tau"]
    assert rows[3]["error"] < rows[0]["error"]
    table = example("kernel_messages.py", *words, "--norm", "fro").splitlines()
    assert [line.split()[:3] for line in table[2:4]] == [["4", "float32", "4800"], ["4", "float16", "2404"]]
    assert abs(float(table[2].split()[3]) / rows[0]["tau"] - 1) > 0.01, "the norm bites"


def half_resnet10_parameters(rate: float) -> int:
    """7 x 7 stem, four blocks of two 3 x 3 convolutions, three 1 x 1 shortcuts, head; BatchNorm behind each."""
    widths = [math.ceil(rate * width) for width in (32, 32, 64, 128, 256)]
    stem = 49 * widths[0] + 2 * widths[0]
    blocks = sum(9 * a * b + 9 * b * b + 4 * b for a, b in pairwise(widths))
    shortcuts = sum(a * b + 2 * b for a, b in pairwise(widths[1:]))
    return stem + blocks + shortcuts + 10 * widths[-1] + 10


_FEWER = ('models.architectures=["resnet10-half"]', "data.image_size=8", "data.max_train_per_client=4")
SMALL = [word for setting in _FEWER for word in ("--set", setting)]


@pytest.mark.slow
def test_the_example_of_overheads_weighs_messages_and_memory(example: Callable[..., str]) -> None:
    words = [str(ROOT / "recipes" / "fedin" / "table3.toml"), *SMALL, "--set", "data.num_clients=2"]
    words += ["--set", "training.batch_size=4", "--methods", "fedavg,scaffold,moon,fedin", "--json"]
    rows = json.loads(example("overheads.py", *words))
    count, statistics, counters, pairs = half_resnet10_parameters(1), 2880, 12, 4 * (32 * 2 * 2 + 256)
    assert [row["up"] for row in rows] == [row["down"] for row in rows] == [count, 2 * count, count, count + pairs]
    assert rows[0]["bytes_up"] == 4 * (count + statistics) + 8, "BatchNorm's statistics and the number of samples"
    floats = 4 * (count + statistics)
    sizes = (4 * count, floats, floats + 8 * counters, 4 * pairs)
    parameters, copied, network, received = (2 * size / 2**20 for size in sizes)
    assert [row["networks"] for row in rows] == pytest.approx(4 * [network])
    fedavg, scaffold, moon, fedin = rows
    assert [row["kept"] for row in (fedavg, moon, fedin)] == pytest.approx(3 * [network])
    assert (scaffold["kept"] - network) / parameters == pytest.approx(2, rel=1e-5), "c_k and that before"
    assert fedavg["training"] == pytest.approx(network)
    assert moon["training"] == pytest.approx(network + 2 * copied, rel=1e-5)
    assert fedin["training"] == pytest.approx(network + parameters + received, rel=1e-5)
    assert scaffold["training"] > scaffold["kept"] + parameters, "correction and received weights come on top"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["table3", "table3-slices"])
def test_parameters_sent_are_those_of_the_fedin_papers_table_3(recipe: str, example: Callable[..., str]) -> None:
    paper = {"fedavg": 12.28, "scaffold": 24.56, "moon": 12.28, "inclusivefl": 12.28, "incoavg": 12.28, "fedin": 12.35}
    paper |= {"heterofl": 16.29, "fedrolex": 16.29, "scalefl": 20.65}
    for row in json.loads(example("overheads.py", str(ROOT / "recipes" / "fedin" / f"{recipe}.toml"), "--json")):
        assert abs(row["up"] / 1e6 - paper[row["method"]]) < 0.01, "the paper cuts off after two digits"


@pytest.mark.slow
def test_the_benchmark_of_memory_runs() -> None:
    words = ["--model", "resnet10", "--rows", "12", "--chunks", "5", "12"]
    program = [sys.executable, str(ROOT / "benchmarks" / "alignment_memory.py"), *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    few, all_ = (json.loads(line) for line in done.stdout.splitlines())
    assert (few["chunk"], all_["chunk"]) == (5, 12)
    assert few["norm"] == pytest.approx(all_["norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["client_similarity.py", "kernel_messages.py"])
def test_an_example_without_a_run_folder_says_so(
    name: str, tmp_path: Path, example: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        example(name, str(tmp_path))
    assert end.value.code == 2
    assert "expected the folder of a finished run" in capsys.readouterr().err
