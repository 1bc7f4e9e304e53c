"""What finished runs have cost, told by the command line."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from polyfed.cli.app import status
from polyfed.core.releases import Release
from polyfed.core.settings import Privacy, Training
from polyfed.engine.privacy_ledger import compute_epsilon
from polyfed.errors import ConfigError
from polyfed.experiments.privacy_report import privacy_costs
from polyfed.methods import FedAvg, FedIN
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import to_text
from polyfed.report.run_records import load_runs
from polyfed.testing import ConformanceKit

THREE = Training(rounds=3, batch_size=64, lr=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uploads with noise, pairs of all rows with noise, and nothing with noise."""
    folder = tmp_path_factory.mktemp("runs")
    pairs = FedIN(num_pairs=100, feature_clip=1.0, noise_std=6.0)
    for name, method, privacy in (
        ("uploads", FedAvg(), Privacy(upload_clip_norm=1.0, upload_noise_multiplier=2.0)),
        ("pairs", pairs, Privacy()),
        ("plain", FedAvg(), Privacy()),
    ):
        ConformanceKit(method=method).world().federation(method, THREE, privacy=privacy, out=folder / name).run()
    return folder


def test_lines_are_those_of_the_records(runs: Path) -> None:
    found = {one.run.partition(" ")[0]: one for one in privacy_costs([runs])}
    assert len(found) == 2
    uploads, pairs = found["fedavg"], found["fedin"]
    assert (uploads.unit, uploads.what, uploads.releases, uploads.noise) == ("client", ("upload",), 3, 2.0)
    assert uploads.epsilon == pytest.approx(compute_epsilon([Release("upload", "client", 2 / math.sqrt(3))], 1e-5))
    assert (pairs.unit, pairs.what, pairs.noise, pairs.drawn) == ("sample", ("features",), 3.0, 1.0)
    recorded = [json.loads(line) for line in (runs / "pairs" / "rounds.jsonl").read_text().splitlines()]
    assert pairs.epsilon == recorded[-1]["epsilon"]["sample"]
    (other,) = [one for one in privacy_costs([runs], delta=1e-3) if one.unit == "client"]
    assert other.epsilon < uploads.epsilon


def test_the_command(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["audit", "epsilon", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "features: for given weights, which were trained without noise and go up as they are" in shown
    assert status(["audit", "epsilon", str(runs), "--json"]) == 0
    assert [one["unit"] for one in json.loads(capsys.readouterr().out)] == [one.unit for one in privacy_costs([runs])]


@pytest.mark.parametrize(
    ("words", "said"), [("{}/plain", "expected runs with noise on what clients send"), ("{} --delta 2", "--delta")]
)
def test_what_cannot_be_told(runs: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert status(["audit", "epsilon", *shlex.split(words.format(runs))]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(ConfigError):
        privacy_costs([runs / "plain"])


def test_tables_have_a_column_for_each_unit(runs: Path) -> None:
    table = compare_runs(load_runs([runs]))
    shown = to_text(table, width=160)
    assert "epsilon client: of the bounded entries" in shown
    section = table.sections[0]
    assert sorted(section.keys_of("epsilon")) == ["client", "sample"]
    epsilon = section.rows.set_index("method").loc["fedin", ["epsilon_client", "epsilon_sample"]]
    assert [value is None for value in epsilon] == [True, False]
