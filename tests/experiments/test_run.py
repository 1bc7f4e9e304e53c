"""The Python way in: `pf.run` and its choices about folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
BRIEF = ("training.rounds=1", "data.num_clients=5", "data.max_train_per_client=40")


def test_without_a_folder_nothing_is_written_and_it_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = pf.run(QUICKSTART, method="local", overrides=BRIEF)
    seen: list[object] = []
    again = pf.run(QUICKSTART, method="local", overrides=BRIEF, loggers=[seen.append])
    assert seen == again.history
    assert first.path is None
    assert not list(tmp_path.iterdir())
    assert first.result["accuracy_per_client"] == again.result["accuracy_per_client"]
    with pytest.raises(ConfigError, match="expected a run folder to resume from"):
        pf.run(QUICKSTART, method="local", overrides=BRIEF, resume=True)


def test_a_deal_in_python_is_that_of_a_recipe() -> None:
    made: dict[str, Any] = {"dirichlet_alpha": 0.4, "max_train_per_client": 50, "holdout": 7}
    data = {"dataset": "digits", "num_clients": 4, "partition": "dirichlet", **made}
    settings = {"data": data, "models": {"architectures": ["digits-cnn1"]}, "method": {"name": "local"}}
    recipe = pf.Recipe.from_dict({**settings, "run": {"seed": 3}})
    asked = DataCache().federated(recipe)
    dealt = pf.federate(pf.load_dataset("digits"), 4, "dirichlet", seed=3, **made)
    for one, other in zip(asked.clients, dealt.clients, strict=True):
        assert torch.equal(one.train.x, other.train.x)
        assert torch.equal(one.test.y, other.test.y)
    assert torch.equal(asked.holdout.x, dealt.holdout.x)
    elsewhere = pf.federate(pf.load_dataset("digits"), 4, "dirichlet", **made)
    assert not torch.equal(elsewhere.holdout.x, dealt.holdout.x), "the seed counts"
    with pytest.raises(ConfigError, match="expected seed to be a whole number >= 0, got 'x'"):
        pf.federate(pf.load_dataset("digits"), seed="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"recipe": 3}, "recipe: expected a recipe's file or a Recipe, got 3"),
        ({"recipe": {"data": {}}}, r"got a dict; write polyfed.Recipe.from_dict\(...\)"),
        ({"method": pf.methods.FedGH()}, "method: expected a method's name, such as 'fedgh', got a FedGH"),
        ({"overrides": "training.rounds=1"}, r"overrides: expected a list, got 'training.rounds=1'; put it into \[ \]"),
        ({"overrides": {"training.rounds": 1}}, "overrides: expected a list, got a dict"),
        ({"overrides": [3]}, "overrides: expected texts such as 'data.num_clients=20', got 3"),
    ],
)
def test_wrong_kinds_of_arguments_are_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        pf.run(**{"recipe": QUICKSTART, **given})
    if "method" not in given:
        with pytest.raises(ConfigError, match=line):
            pf.compare(**{"recipe": QUICKSTART, **given})
