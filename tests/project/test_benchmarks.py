"""Every command of benchmarks/README.md knows its options; the benchmarks run, with sizes cut down."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.settings import Training
from polyfed.data.transforms import Prepare
from polyfed.engine.federation import Federation
from polyfed.methods import Local
from polyfed.models import build
from tests.helpers.quick import others_slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
]
TINY = {  # the options with which a benchmark is through in a second, and the lines of JSON that it prints
    "gpu.py": ("--device cpu --methods fedavg --jobs lenet:2 --samples 4 --rounds 2 --parts methods", 2),
    "overhead.py": ("--clients 4 --rounds 3 --workers 0", 3),
    "scaling.py": (
        "--data digits --start-clients 20 --start-model digits-cnn1 --round-model digits-cnn2 --clients 4,8 "
        "--participating 2 --rounds 3 --repeats 1",
        3,
    ),
    "hostile_server.py": ("--cases closed-form --times 2", 1),
    "feature_maps.py": (
        "--recipe suites/small/digits.toml --maps random,photographs --features 36 --rows 10 --seeds 0 --shrinkage 0.1 "
        "--set data.num_clients=2",
        2,
    ),
    "reference_job.py": (
        "--methods local,fedavg,fedgh,fedproto,fedhenn,fedin --rounds 2 --repeats 1 --batch-size 5 "
        "--model fedgh-cnn5 --set data.num_clients=2 --set data.max_train_per_client=5 "
        "--set data.max_test_per_client=5 --set data.limit_train=1200",
        6,
    ),
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


@pytest.mark.parametrize("name", others_slow(TINY, quick=["overhead.py"]))
def test_the_benchmark_runs(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "reference_job.py":
        monkeypatch.setenv("POLYFED_DATA", str(request.getfixturevalue("data_root")))
    options, lines = TINY[name]
    run([name, *shlex.split(options)], monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert len([json.loads(line) for line in printed if line.startswith("{")]) == lines


def test_the_page_has_what_the_hostile_server_got() -> None:
    page = (ROOT / "docs" / "privacy-limits.md").read_text(encoding="utf-8")
    for one in json.loads((ROOT / "benchmarks" / "hostile-server.json").read_text()):
        figures = [one["train"]["different"], one["of_a_run"], one["bits_a_training_row"], one.get("rows_rebuilt", "-")]
        assert f"| {one['case']} | {' | '.join(map(str, figures))} |" in page
        assert one["beyond"] == {"asked": 16, "answered": 0}
        assert (one["score"]["different"], one["classes_counted"]) == (6, 6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["closed-form", "closed-form, secure sums"])
def test_sums_of_a_closed_form_are_one_answer_whatever_is_asked(case: str) -> None:
    played = runpy.run_path(str(ROOT / "benchmarks" / "hostile_server.py"))["play"](case, 2)
    assert played["train"]["different"] == 1
    assert played["beyond"]["answered"] == 0
    assert played["score"]["different"] <= played["score"]["at_most"]
    assert ("secure" in case) == played.get("own_counts_by_invented_others", False)


def test_the_page_has_what_secure_sums_cost() -> None:
    page = " ".join((ROOT / "docs" / "secure-sums.md").read_text(encoding="utf-8").split())
    plain, whole, *killed = json.loads((ROOT / "benchmarks" / "secure-sums.json").read_text())
    assert f"{sum(whole['bytes'].values()) / sum(plain['bytes'].values()):.2f} times the bytes" in page
    assert [(one["killed_at"], one["killed"], one["summed"]) for one in killed] == [
        *((kind, 3, 17) for kind in ("keys", "shares", "train")),
        ("unmask", 3, 20),
    ]
    assert max(one["difference"] for one in [whole, *killed]) < 1e-8


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
