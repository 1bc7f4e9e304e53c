"""``--preset`` from the command line and from Python: what is run, what is said of it, what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from polyfed.cli.app import status

pytestmark = pytest.mark.usefixtures("unrendered")

TEXT = """
[data]
dataset = "digits"
num_clients = 2
limit_train = 120

[models]
architectures = ["digits-cnn3"]

[method]
name = "fedavg"

[training]
rounds = 3

[presets.small]
note = "scaled down: one round of 3"

[presets.small.training]
rounds = 1

[presets.three.data]
num_clients = 3
"""
SAID = "reset small: scaled down: one round of 3"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(TEXT)
    return "mine.toml"


def test_run_lays_the_preset_over_and_says_so(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", recipe, "--preset", "small", "-q"]) == 0
    assert SAID in capsys.readouterr().out
    kept = tomllib.loads(Path("runs/mine-small-fedavg-seed0/recipe.toml").read_text())
    assert (kept["training"]["rounds"], kept["run"]["preset"]) == (1, "small")
    assert kept["run"]["preset_note"] == "scaled down: one round of 3"
    assert status(["check", recipe, "--preset", "three"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fedavg on digits: 3 clients, 3 rounds")
    assert out.splitlines()[-1] == "preset three"
