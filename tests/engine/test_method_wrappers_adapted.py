"""Methods whose clients train adapters and heads of frozen networks, which may differ."""

from __future__ import annotations

import pytest
import torch

from polyfed.config.recipe import Recipe
from polyfed.core.settings import AdapterSettings
from polyfed.engine.method_wrappers import adapted
from polyfed.errors import ConfigError
from polyfed.methods import FD, MOON, DepthFL, FedAvg, FedGH, FedMRL, FedProto, FedSA, Local
from tests.helpers.toys import clients, federation, moved

TWO = AdapterSettings(ranks="1 2", alpha=4.0)


@pytest.mark.parametrize("method", [Local(), FedGH(), FedProto(), FedSA(), FD()], ids=lambda method: method.name)
def test_only_adapters_and_heads_change_in_networks_that_differ(method):
    members = clients(["shallow", "deep", "wide"], [8, 12, 10])
    fed, watch = federation(adapted(method, TWO), members, rounds=2)
    plain, other = federation(method, clients(["shallow", "deep", "wide"], [8, 12, 10]), rounds=2)
    starts = [fed.model_factory.initial_state(c.architecture, str(1 + c.id % 2), c.id) for c in fed.clients]
    fed.run()
    plain.run()
    for client, start in zip(fed.clients, starts, strict=True):
        weights = client.weights or {}
        trained = {name for name in start if not torch.equal(start[name], weights[name])}
        assert trained
        assert all(name.startswith("head") or name.rpartition(".")[2] in ("lora_a", "lora_b") for name in trained)
        assert any(name.endswith("lora_b") for name in trained)
        assert {len(t) for name, t in weights.items() if name.endswith("lora_a")} == {1 + client.id % 2}
    for mine, theirs in zip(watch.rounds, other.rounds, strict=True):  # what crosses is the method's own
        assert {i: m.keys() for i, m in mine.up.items()} == {i: m.keys() for i, m in theirs.up.items()}
        assert mine.record["bytes_up"] == theirs.record["bytes_up"]


def test_local_with_adapters_is_local_training_of_them():
    """Two steps by hand."""
    members = clients(["shallow"], [4])
    fed, watch = federation(adapted(Local(), AdapterSettings(ranks="2", alpha=4.0)), members, rounds=1, batch_size=4)
    start = fed.model_factory.initial_state("shallow", "2", 0)
    fed.run()
    model = fed.model_factory.module("shallow", "2")
    model.load_state_dict(start)
    model.train()
    data = members[0].data.train
    torch.nn.functional.cross_entropy(model(data.x), data.y).backward()
    for name, p in model.named_parameters():
        start[name] = start[name] if p.grad is None else start[name] - 0.1 * p.grad
    assert moved(start, watch.rounds[0].trained[0]) < 1e-6


def test_methods_that_send_or_make_networks_are_refused():
    for method in (FedAvg(), MOON(), DepthFL(), FedMRL()):
        with pytest.raises(ConfigError, match=r"neither sends nor makes networks.*fedlora averages adapters"):
            adapted(method, TWO)


def test_a_recipe_has_them_as_a_table():
    settings = {
        "data": {"dataset": "digits", "num_clients": 3},
        "models": {"architectures": ["digits-cnn1"]},
        "method": {"name": "local"},
        "methods": {"local-lora": {"name": "local", "adapters": {"ranks": "2 4"}}},
    }
    recipe = Recipe.from_dict(settings)
    assert recipe.chosen_method.card.adapters is None
    chosen = recipe.choose("local-lora")
    assert chosen.chosen_method.card.adapters == AdapterSettings(ranks="2 4")
    assert chosen.to_dict()["method"]["adapters"] == {"ranks": "2 4", "alpha": 16.0, "layers": ""}
    again = Recipe.from_dict(chosen.to_dict())
    assert again.chosen_method.card.adapters == AdapterSettings(ranks="2 4")
    settings["method"] = {"name": "fedavg", "adapters": {"ranks": "2"}}
    with pytest.raises(ConfigError, match=r"method\.adapters: expected a method that neither sends"):
        Recipe.from_dict(settings)
    settings["method"] = {"name": "local", "adapters": {"ranks": "two"}}
    with pytest.raises(ConfigError, match="expected ranks of at least 1, as in '2 4 8'; got 'two'"):
        Recipe.from_dict(settings)
