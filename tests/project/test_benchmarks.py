"""Every command of benchmarks/README.md runs, with sizes cut down."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.settings import Training
from polyfed.data.transforms import Prepare
from polyfed.engine.federation import Federation
from polyfed.methods import Local
from polyfed.models import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
]

TINY = {  # what to tell them to be through in a second
    "alignment.py": "--rows 40 --square-rows 20 --width 4 --rank 5 --repeats 1",
    "reference_job.py": "--methods local,fedavg,fedgh,fedproto,fedhenn,fedin --rounds 2 --repeats 1 --batch-size 5 "
    "--model fedgh-cnn5 --set data.num_clients=2 --set data.max_train_per_client=5 --set data.max_test_per_client=5 "
    "--set data.limit_train=1200",
    "gpu.py": "--device cpu --methods fedavg --jobs lenet:2 --samples 4 --rounds 2 --parts methods,precision",
    "commands.py": "--commands=--help --repeats 1 --runs 1 --clients 2 --rounds 2",
    "overhead.py": "--clients 4 --rounds 3 --workers 0",
    "scaling.py": "--data digits --start-clients 20 --start-model digits-cnn1 --round-model digits-cnn2 --clients 4,8 "
    "--participating 2 --rounds 3 --repeats 1",
    "memory.py": f"'{ROOT}/recipes/quickstart.toml' --rounds 2 --set data.max_train_per_client=20 "
    "--methods fedavg,local",
}


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has PyTorch already."""
    path = ROOT / "benchmarks" / words[0]
    monkeypatch.syspath_prepend(str(path.parent))  # as where it is run by itself
    monkeypatch.setattr(sys, "argv", [str(path), *words[1:]])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], list[Any]]:
    """Runs a benchmark with sizes cut down; gives its lines of JSON."""

    def rows(name: str) -> list[Any]:
        run([name, *shlex.split(TINY[name])], monkeypatch)
        lines = capsys.readouterr().out.splitlines()
        assert any(line and not line.startswith("{") for line in lines), "a table for people"
        return [json.loads(line) for line in lines if line.startswith("{")]

    return rows


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_knows_its_options(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, path, *words = command
    assert python == "python"
    with pytest.raises(SystemExit) as end:
        run([path.removeprefix("benchmarks/"), "--help"], monkeypatch)
    assert end.value.code == 0
    usage = capsys.readouterr().out
    assert all(word in usage for word in words if word.startswith("--"))


def test_the_alignment_is_compared_twice(measured: Callable[[str], list[Any]]) -> None:
    product, square = measured("alignment.py")
    assert (product["rows"], square["rows"]) == (40, 20)
    for row in (product, square):
        assert row["ratio"] == pytest.approx(row["ms"] / row["ms_of_other"])


def test_a_gpu_is_compared_with_the_cpu(measured: Callable[[str], list[Any]]) -> None:
    serial, vectorized, timed = measured("gpu.py")
    assert (serial["difference"], vectorized["difference"]) == (0.0, 0.0)
    assert timed["peak_bytes"] is None


@pytest.mark.slow
def test_a_sitting_at_a_gpu_goes_on(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "gpu.py",
        "--device",
        "cpu",
        "--methods",
        "fedavg",
        "--jobs",
        "lenet:2",
        "--samples",
        "12",
        "--rounds",
        "2",
    ]
    fewer = ("training.rounds=2", "training.local_epochs=1", "data.max_train_per_client=4")
    words += [word for setting in fewer for word in ("--set", setting)]
    words += ["--data", str(data_root), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "gpu.json")]
    for parts in ({"methods", "steps", "precision", "table3"}, {"table3"}):  # what is in the file is there already
        run(words, monkeypatch)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        assert {line["part"] for line in lines} == parts
        assert lines[-1]["rounds"] == 2


def test_overhead_of_the_engine(measured: Callable[[str], list[Any]]) -> None:
    rows = measured("overhead.py")
    assert [(row["kind"], row["executor"]) for row in rows] == [(k, "serial") for k in ("asked", "kept", "changed")]
    assert all(0 < row["cpu_ms"] < 1000 for row in rows)


@pytest.mark.slow
def test_short_commands_and_reports(measured: Callable[[str], list[Any]]) -> None:
    short, reference, report = measured("commands.py")
    assert short["over_import"] < reference["over_import"] == 1.0
    assert report["report_of"] == 1
    assert report["peak_mib"] > 0


def test_scaling_of_a_federation(measured: Callable[[str], list[Any]]) -> None:
    start, few, more = measured("scaling.py")
    assert start["clients"] == 20
    assert start["seconds_to_start"] > 0
    assert [(few["clients"], few["growth"]), more["clients"]] == [(4, 1.0), 8]
    assert more["growth"] == pytest.approx(more["seconds_per_round"] / few["seconds_per_round"])


def test_scoring_of_a_federation() -> None:
    scaling = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"))
    asked = argparse.Namespace(round_model="digits-cnn2", method="fedavg", participating=2, rounds=3)
    row = scaling["scored"](asked, 8, 5)
    assert (row["clients"], row["classes"]) == (8, 5)
    assert row["scoring_mib"] >= 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_of_a_run(measured: Callable[[str], list[Any]]) -> None:
    fedavg, local = measured("memory.py")
    assert (fedavg["method"], local["method"]) == ("fedavg", "local")
    assert 50 < local["peak_mib"] < 2000
    assert 0 < local["bytes_per_round"] < 10_000


def test_rivals_have_medians_over_turns_and_a_reason_where_they_are_missing() -> None:
    rivals = runpy.run_path(str(ROOT / "benchmarks" / "rivals.py"))
    named = {framework.name: framework for framework in rivals["FRAMEWORKS"]}
    turns = [
        {"workers": workers, "round_s": [seconds], "ratio": ratio, "moved_ratio": moved, "loss": 2.0}
        for workers, seconds, ratio, moved in ((1, 5.0, 1.25, 1.0), (1, 7.0, 1.75, 1.0), (2, 3.0, 0.6, 0.5))
    ]
    ours = rivals["summary"](named["polyfed"], turns, "")
    assert ours["workers"][1]["seconds_per_round"] == 6.0
    assert "not the same work" in ours["note"]
    missing = rivals["summary"](named["PFLlib"], [], "no such package")
    assert rivals["table"]([ours, missing], [1, 2]).splitlines()[-1].endswith("| no such package |")


def test_the_table_of_methods_says_who_failed_and_compares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = runpy.run_path(str(ROOT / "benchmarks" / "htfllib.py"))
    theirs, alike, own = table["HTFLLIB"], table["ALIKE"], table["OWN"]
    done = {
        who: [{"seconds": seconds, "files": 0.25, "accuracies": [0.5, 0.625]}]
        for who, seconds in ((theirs, 3.0), (alike, 2.0), (own, 1.5))
    }
    runs = {"fedproto": done, "fd": {**done, theirs: [{"failed": "NaN"}]}}
    accuracies = table["accuracy_table"](runs, 2).splitlines()
    assert accuracies[2].endswith("| 50.00 | 62.50 |")
    assert accuracies[5].endswith("| NaN |  |")
    assert table["time_table"](runs).splitlines()[2:] == [
        "| fedproto | 3.000 | 0.250 | 2.000 | 1.50 | 1.500 | 2.00 |",
        "| fd |  |  | 2.000 |  | 1.500 |  |",
    ]


def test_clients_begin_with_an_image_of_each_class_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    arrange = runpy.run_path(str(ROOT / "benchmarks" / "htfllib.py"))["first_seen_in_order"]
    labels = torch.tensor([[7, 7, 3, 3, 7]])
    inputs, arranged = arrange(labels.clone().float(), labels.clone())
    assert arranged.tolist() == [[3, 7, 7, 3, 7]]
    assert inputs.tolist() == arranged.tolist()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("alignment.py --rows 1", "at least 2 rows"),
        ("gpu.py --jobs lenet:1", "numbers of clients from 2 on"),
        ("gpu.py --methods fedavgg", "got fedavgg"),
        ("overhead.py --rounds 2", "error: "),
        ("scaling.py --clients 5,ten", "error: "),
        ("memory.py --rounds x", "error: "),
        ("rivals.py --only flowers", "got 'flowers'"),
        ("rivals.py --workers 2", "begin with 1"),
        ("rivals.py --workers 1,x", "numbers of workers"),
        ("rivals.py --rounds 0", "at least 1"),
        ("htfllib.py /nowhere", "HtFLlib's checkout, with a folder system/flcore"),
    ],
)
def test_a_wrong_word_is_one_line(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(shlex.split(words), monkeypatch)
    assert end.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_reference_job_beside_a_bare_loop(
    data_root: Path, monkeypatch: pytest.MonkeyPatch, measured: Callable[[str], list[Any]]
) -> None:
    monkeypatch.setenv("POLYFED_DATA", str(data_root))
    rows = measured("reference_job.py")
    assert [row["method"] for row in rows] == ["local", "fedavg", "fedgh", "fedproto", "fedhenn", "fedin"]
    for row in rows:
        assert row["workers"] == 1
        assert row["ratio_to_bare_loop"] == row["cpu_ratio"] > 0


def test_the_bare_loop_takes_the_steps_of_the_library() -> None:
    """The same weights, order and rate: its epoch is Local's, so that what is compared is the same work."""
    module = runpy.run_path(str(ROOT / "benchmarks" / "reference_job.py"))
    x, y = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8), torch.arange(12) % 10
    client = Client("fedgh-cnn5", (x, y), (x, y), prepare=Prepare((0.5,) * 3, (0.2,) * 3))
    one = module["One"](client, 10)
    one.begin()
    own = build("fedgh-cnn5", (3, 32, 32), 10)
    own.load_state_dict(one.model.state_dict())
    given = Client(own, (x, y), prepare=client.prepare)
    trained = Federation([given], Local(), Training(rounds=1, batch_size=12, lr=module["LR"])).run().models[0]
    one.epoch(12, None)
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
