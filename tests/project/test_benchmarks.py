"""Every command of benchmarks/README.md runs, with sizes cut down."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
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
    "gpu.py": "--device cpu --methods fedavg --models lenet --clients 2 --samples 4 --rounds 2",
    "ray_rounds.py": "--jobs quickstart --workers 1 --rounds 2 --set training.rounds=2",
    "busy.py": f"'{ROOT}/recipes/quickstart.toml' --method local --max-train 5 --repeats 1 --set data.num_clients=2",
}


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has PyTorch already."""
    path = ROOT / "benchmarks" / words[0]
    monkeypatch.setattr(sys, "argv", [str(path), *words[1:]])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


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


def test_the_alignment_is_compared_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(["alignment.py", *shlex.split(TINY["alignment.py"])], monkeypatch)
    *lines, empty, head, first, second = capsys.readouterr().out.splitlines()
    product, square = map(json.loads, lines)
    assert (product["rows"], square["rows"]) == (40, 20)
    for row in (product, square):
        assert row["ratio"] == pytest.approx(row["ms"] / row["ms_of_other"])
    assert first.startswith(product["measure"])
    assert second.startswith(square["measure"])
    assert empty == ""
    assert head.endswith("goal")


@pytest.mark.slow
def test_rounds_of_ray_are_compared_with_those_of_processes() -> None:
    """In a process of its own, as the executor imports Ray first, and other tests have imported it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra 'ray'")
    program = [sys.executable, str(ROOT / "benchmarks" / "ray_rounds.py"), *shlex.split(TINY["ray_rounds.py"])]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[0])
    assert (row["job"], row["workers"]) == ("quickstart", 1)
    assert row["ratio"] > 0


def test_a_gpu_is_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(["gpu.py", *shlex.split(TINY["gpu.py"])], monkeypatch)
    serial, vectorized, timed, last = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["difference"] for line in (serial, vectorized)] == [0.0, 0.0]
    assert json.loads(timed)["serial"]["peak_bytes"] is None
    assert last == "other than on the CPU: none"


def test_busy_neighbors_are_gone_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Counted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    run(["busy.py", *shlex.split(TINY["busy.py"]), "--workers", "1", "--loops", "1"], monkeypatch)
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert (row["workers"], row["loops"]) == (1, 1)
    assert row["slowdown"] == pytest.approx(row["beside"] / row["alone"])
    loops = [process for process in started if "while True: pass" in process.args]
    assert len(loops) == 1
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("alignment.py --rows 1", "at least 2 rows"),
        ("busy.py --loops 0", "1 loop"),
        ("gpu.py --clients 1", "numbers of clients from 2 on"),
        ("gpu.py --methods fedavgg", "got fedavgg"),
        (f"busy.py {TINY['busy.py']} --workers two", "got 'two'"),
        (f"busy.py {TINY['busy.py']} --workers 0", "got 0"),
        ("overhead.py --rounds 2", "error: "),
        ("scaling.py --clients 5,ten", "error: "),
        ("memory.py --rounds x", "error: "),
        ("endurance_memory.py --rounds 20", "error: "),
        ("rivals.py --only flowers", "got 'flowers'"),
        ("rivals.py --workers 2", "begin with 1"),
        ("rivals.py --workers 1,x", "numbers of workers"),
        ("rivals.py --rounds 0", "at least 1"),
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
    data_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYFED_DATA", str(data_root))
    run(["reference_job.py", *shlex.split(TINY["reference_job.py"])], monkeypatch)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
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
