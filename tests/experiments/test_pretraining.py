"""Networks that begin with weights trained on the hold-out rows."""

from __future__ import annotations

import pytest
import torch

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


def recipe(**changes):
    settings = {
        "data": {"dataset": "digits", "num_clients": 3, "holdout": 300, "max_train_per_client": 20},
        "models": {"architectures": ["digits-cnn1", "digits-cnn3"]},
        "pretraining": {"epochs": 2, "batch_size": 30},
        "method": {"name": "local"},
        "training": {"rounds": 1},
    }
    for section, values in changes.items():
        settings[section] = {} if values is None else {**settings[section], **values}
    return Recipe.from_dict(settings)


def starts(federation):
    return [federation.model_factory.initial_state(c.architecture, "", c.id) for c in federation.clients]


def test_networks_begin_alike_but_for_their_heads_and_have_learnt(cache):
    federation = build_federation(recipe())
    first, _, same = starts(federation)
    body = [name for name in first if not name.startswith("head")]
    assert all(torch.equal(first[name], same[name]) for name in body)
    assert not torch.equal(first["head.weight"], same["head.weight"])
    plain = starts(build_federation(recipe(pretraining=None)))
    assert not any(torch.equal(first[name], plain[0][name]) for name in body if name.endswith("weight"))
    assert torch.equal(first["head.weight"], plain[0]["head.weight"])
    told = federation.facts["pretraining"]
    assert told | {"seconds": 0} == {
        "epochs": 2, "batch_size": 30, "optimizer": "adam", "lr": 0.001, "rows": 300, "seconds": 0
    }  # fmt: skip


def test_a_run_tells_it_and_a_check_does_not_train(cache, tmp_path):
    pf.check(recipe())
    checked = set(cache.glob("*.safetensors"))
    run = pf.run(recipe(), out=tmp_path / "run")
    assert len(set(cache.glob("*.safetensors")) - checked) == 2
    assert run.result["pretraining"]["rows"] == 300
    assert run.result["pretraining"]["seconds"] >= 0


def test_without_rows_it_is_refused():
    with pytest.raises(ConfigError, match=r"expected hold-out rows to train on, got none; set data\.holdout"):
        build_federation(recipe(data={"holdout": 0}))
    with pytest.raises(ConfigError, match=r"lr = 0\.1 does nothing"):
        Recipe.from_dict({**recipe().to_dict(), "pretraining": {"lr": 0.1}})
