"""A comparison's columns of epsilon, of runs with noise of two kinds."""

from __future__ import annotations

from pathlib import Path

from polyfed.core.settings import Privacy, Training
from polyfed.methods import FedAvg, FedIN
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import to_text
from polyfed.report.run_records import load_runs
from polyfed.testing import ConformanceKit


def test_tables_have_a_column_for_each_unit(tmp_path: Path) -> None:
    for name, method, privacy in (
        ("uploads", FedAvg(), Privacy(upload_clip_norm=1.0, upload_noise_multiplier=2.0)),
        ("pairs", FedIN(num_pairs=100, feature_clip=1.0, noise_std=6.0), Privacy()),
    ):
        training = Training(rounds=1, batch_size=64, lr=0.1)
        ConformanceKit(method=method).world().federation(method, training, privacy=privacy, out=tmp_path / name).run()
    table = compare_runs(load_runs([tmp_path]))
    assert "epsilon client: of the bounded entries" in to_text(table, width=160)
    section = table.sections[0]
    assert sorted(section.keys_of("epsilon")) == ["client", "sample"]
    epsilon = section.rows.set_index("method").loc["fedin", ["epsilon_client", "epsilon_sample"]]
    assert [value is None for value in epsilon] == [True, False]
