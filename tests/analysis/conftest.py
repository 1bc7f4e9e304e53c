"""One small comparison for all tests of analyses: two architectures, two methods, two seeds, one round."""

from pathlib import Path

import pytest

from polyfed.config.recipe import Recipe
from polyfed.experiments.compare import compare
from polyfed.report.run_records import RunRecord, load_runs

SETTINGS = {
    "data": {
        "dataset": "digits",
        "num_clients": 4,
        "limit_train": 400,
        "max_train_per_client": 20,
        "split": "6:1:3",
    },
    "models": {"architectures": ["digits-cnn1", "digits-cnn3"]},
    "method": {"name": "fedmrl"},
    "training": {"rounds": 1, "lr": 0.1},
    "run": {"executor": "serial"},
}


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their folder. FedMRL's personal network is no split model: it has no extractor of its own."""
    folder = tmp_path_factory.mktemp("analysis") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.experiments.compare.write_report", lambda *_, **__: [])  # tested elsewhere
        assert not compare(Recipe.from_dict(SETTINGS), ["fedmrl"], (0, 1), folder).failures
    return folder


@pytest.fixture
def runs(compared: Path) -> list[RunRecord]:
    """Their records: Local's with seeds 0 and 1, then FedMRL's."""
    return sorted(load_runs(compared), key=lambda run: (run.method != "local", run.seed))
