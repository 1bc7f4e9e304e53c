"""A method with every client alone, personalized, or with adapters in frozen networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import testing
from polyfed.config.recipe import Recipe
from polyfed.core.adapters import adapted_layers, add_adapters
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.settings import AdapterSettings, Evaluation, Personalization, Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.engine.method_wrappers import adapted, alone, personalized
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FD, MOON, ClosedForm, FedAvg, FedGH, FedMRL, FedProto, FedTGP, Local
from polyfed.models.adapt import split
from polyfed.plugins.settings import Devices, RobustAggregation
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import LABELS, SHORT, SIZES, draw
from polyfed.testing.kit import ConformanceKit
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow
from tests.helpers.toys import clients, federation, moved, net

THREE = SHORT.model_copy(update={"rounds": 3, "client_fraction": 0.7})


def outcome(federation: Federation) -> dict[str, Tensor]:
    """All that a run leaves behind but what was sent."""
    return worlds.state(federation) | worlds.predictions(federation)


def same(a: Federation, b: Federation) -> bool:
    return worlds.difference(outcome(a), outcome(b)) is None


def test_it_is_the_method_with_another_half_of_the_server() -> None:
    method = alone(FedGH(header_lr=0.3))
    assert isinstance(method, FedGH)
    assert method.header_lr == 0.3
    assert (method.is_alone, FedGH.is_alone, method.upload_form) == (True, False, FedGH.upload_form)
    assert (method.name, method.evaluation_stage) == ("fedgh", FedGH().evaluation_stage)
    assert repr(method) == "alone(FedGH(header_lr=0.3))"
    assert type(method).upload is FedGH.upload
    with pytest.raises(ValueError, match="alone already"):
        alone(method)


# what it equals -------------------------------------------------------------------------------------------------------


def test_local_alone_is_local() -> None:
    kit = ConformanceKit(method=Local())
    assert same(kit.run(training=THREE), kit.run(alone(Local()), THREE))


@pytest.mark.parametrize("method", [FedGH(), FedProto()], ids=repr)
def test_one_client_alone_is_the_method(method: Method) -> None:
    tiny = ConformanceKit(method=method).world(one=True, sizes=(24,), labels=((0, 1),))
    assert same(tiny.run(method, THREE), tiny.run(alone(method), THREE))


# executors, resume ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", others_slow([FedTGP(), FedProto()], quick=[FedProto()]), ids=repr)
def test_processes_do_as_one_after_the_other(method: Method) -> None:
    kit = ConformanceKit(method=method)
    assert same(kit.run(alone(method)), kit.run(alone(method), executor="processes", workers=2))


@pytest.mark.parametrize("method", others_slow([FD(), FedTGP()], quick=[FD()]), ids=repr)
def test_resumed_as_if_never_stopped(method: Method, tmp_path: Path) -> None:
    kit = ConformanceKit(method=method)
    four = SHORT.model_copy(update={"rounds": 4})

    with pytest.raises((RunInterrupted, KeyboardInterrupt)):
        kit.usual.federation(alone(method), four, out=tmp_path, checkpoint_every=1, loggers=[Interrupt(2)]).run()
    resumed = kit.usual.federation(alone(method), four, out=tmp_path, checkpoint_every=1)
    resumed.run(resume=True)
    assert len(resumed.history) == 4
    assert same(resumed, kit.run(alone(method), four))


# refused before round 1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"robust_aggregation": RobustAggregation(aggregator="median")}, r"expected no \[robust_aggregation\]"),
        ({"devices": Devices(profiles=["phone-mid"], round_timeout=3.0)}, "expected no devices.round_timeout"),
    ],
)
def test_what_needs_others_is_refused(settings: dict[str, Any], said: str) -> None:
    kit = ConformanceKit(method=FedAvg(aggregation="same-shape"))
    with pytest.raises(ConfigError, match=f"fedavg, alone: .*{said}"):
        kit.usual.federation(alone(kit.method), **settings)


# nobody knows of the others -----------------------------------------------------------------------------------------


def of_client_1(method: Method, among: int) -> dict[str, Tensor]:
    """All of client 1 after a run in which each is alone. among: 0 or 10, which data the other clients have."""
    data = [draw(size + among, own, place + among) for place, (size, own) in enumerate(zip(SIZES, LABELS, strict=True))]
    data[1] = draw(SIZES[1], LABELS[1], 1)
    kit = ConformanceKit(method=method)
    run = kit.runs(kit.world(data=data), alone(method))
    assert not any(record["bytes_up"] + record["bytes_down"] for record in run.history)
    marks = ("client 1: ", "to client 1: ", "server: client 1: ")
    return {name: t for name, t in (outcome(run) | worlds.sent(run)).items() if name.startswith(marks)}


ALONE = {kind.__name__: kind for kind in (FedProto, FedGH, FD, FedMRL, FedTGP, ClosedForm, MOON)}


@pytest.mark.parametrize("name", others_slow(ALONE, quick=("FedProto", "FedGH")))
def test_a_client_alone_does_not_depend_on_the_others(name: str) -> None:
    found = of_client_1(ALONE[name](), 0)
    assert found
    assert worlds.difference(found, of_client_1(ALONE[name](), 10)) is None


def test_a_server_that_hears_of_another_client_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: what client 0 sent reaches client 1's server, too."""
    honest: Callable[[Server, int], Server] = Server.of_one

    def leaky(self: Server, client_id: int) -> Server:
        own = honest(self, client_id)
        if client_id == 1:
            own.state |= honest(self, 0).state
        return own

    monkeypatch.setattr(Server, "of_one", leaky)
    assert worlds.difference(of_client_1(FedProto(), 0), of_client_1(FedProto(), 10)) is not None


# personalized ---------------------------------------------------------------------------------------------------------

AVERAGED = FedAvg(aggregation="same-shape")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tuned", "shares"])
def test_a_personalized_method_conforms(how: Personalization) -> None:
    assert testing.violations(personalized(AVERAGED, how)) == {}


def test_what_is_tuned_is_scored_after_local_training() -> None:
    tuned = personalized(AVERAGED, "tuned")
    assert (tuned.evaluation_stage, tuned.personalize, repr(tuned)[:12]) == ("personal", "tuned", "personalized")
    kit = ConformanceKit(method=AVERAGED)
    one, other = (kit.run(method, evaluation=Evaluation(extra_stages=["personal"])) for method in (tuned, AVERAGED))
    assert worlds.difference(worlds.state(one), worlds.state(other)) is None
    assert one.history[-1]["accuracy"]["personal"] == other.history[-1]["accuracy"]["personal"]


def labeled(*labels: int) -> Client:
    """A client with these training labels, and rows of all classes to be tested on."""
    draws = torch.Generator().manual_seed(len(labels))
    x = torch.randn(len(labels), 4, generator=draws)
    torch.manual_seed(0)
    return Client(net(), (x, torch.tensor(labels)), (torch.randn(9, 4, generator=draws), torch.arange(9) % 3))


def averaged(method: Method, *clients: Client, rounds: int = 2) -> Federation:
    found = Federation(clients, method, Training(rounds=rounds, batch_size=2, lr=0.1))
    found.run()
    return found


def test_shares_by_hand() -> None:
    """Client 0 has 3, 1 and 0 rows of three classes; all have 4, 2 and 2."""
    both = [lambda: labeled(0, 0, 0, 1), lambda: labeled(0, 1, 2, 2)]
    shared = averaged(personalized(AVERAGED, "shares"), *(make() for make in both))
    plain = averaged(AVERAGED, *(make() for make in both))
    mine, theirs = worlds.predictions(shared), worlds.predictions(plain)
    shift = torch.tensor([math.log((3 / 4) / (4 / 8)), math.log((1 / 4) / (2 / 8)), -1e4])
    assert torch.allclose(mine["client 0: scores"], theirs["client 0: scores"] + shift)
    assert worlds.difference(worlds.weights(shared), worlds.weights(plain)) is None
    assert all(not client.state for client in shared.clients), "what has trained has no shift"
    # three counts of four bytes: up with each upload, down as soon as there are any
    assert [record["bytes_up"] for record in shared.history] == [r["bytes_up"] + 2 * 12 for r in plain.history]
    assert [record["bytes_down"] for record in shared.history] == [
        plain.history[0]["bytes_down"],
        plain.history[1]["bytes_down"] + 24,
    ]


def test_the_server_keeps_the_newest_counts_of_each() -> None:
    shared = averaged(personalized(AVERAGED, "shares"), labeled(0, 0, 1), labeled(2, 2), rounds=1)
    upload: Message = {"n": torch.tensor(2), "model": {}, "class counts": torch.tensor([0, 2, 0], dtype=torch.int32)}
    shared.method.aggregate(shared.server, {})
    assert get_tensor(shared.server.state, "class counts").tolist() == [2, 1, 2]
    shared.method.aggregate(shared.server, {1: upload})
    assert get_tensor(shared.server.state, "class counts").tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("method", "how", "said"),
    [
        (FedGH(), "tuned", "expected a method that scores what clients receive.* got 'fedgh', which scores"),
        (
            ClosedForm(),
            "shares",
            "expected a method that predicts by the network's output.* got 'closed-form'",
        ),
    ],
)
def test_what_cannot_be_personalized_is_refused(method: Method, how: Personalization, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^personalize: {said}"):
        personalized(method, how)


@pytest.mark.parametrize("privacy", [Privacy(max_grad_norm=1.0), Privacy(upload_clip_norm=1.0)])
def test_counts_are_not_sent_where_noise_hides_rows(privacy: Privacy) -> None:
    with pytest.raises(ConfigError, match="fedavg"):
        ConformanceKit(method=AVERAGED).usual.federation(personalized(AVERAGED, "shares"), privacy=privacy)


def test_a_recipe_personalizes_a_method_and_tells_it_by_the_name() -> None:
    settings: dict[str, Any] = {
        "data": {"dataset": "digits", "num_clients": 3},
        "models": {"architectures": ["digits-cnn1"]},
        "method": {"name": "fedavg", "personalize": "tuned"},
        "methods": {"mine": {"name": "fedprox", "personalize": "shares"}},
    }
    recipe = Recipe.from_dict(settings)
    assert (recipe.name, recipe.chosen_method.evaluation_stage) == ("fedavg-tuned", "personal")
    assert recipe.choose_alone("fedavg").name == "fedavg-tuned-alone"
    again = Recipe.from_dict(recipe.to_dict())
    assert (again.name, again.chosen_method.personalize) == ("fedavg-tuned", "tuned")
    assert recipe.choose("mine").name == "mine"
    assert recipe.choose("mine").to_dict()["method"]["personalize"] == "shares"


# adapters -------------------------------------------------------------------------------------------------------------

TWO = AdapterSettings(ranks="1 2", alpha=4.0)


@pytest.mark.parametrize("method", [Local(), FedGH(), FedProto(), FD()], ids=lambda method: method.name)
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
    for method in (FedAvg(), MOON(), FedMRL()):
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
    assert recipe.chosen_method.adapters is None
    chosen = recipe.choose("local-lora")
    assert chosen.chosen_method.adapters == AdapterSettings(ranks="2 4")
    assert chosen.to_dict()["method"]["adapters"] == {"ranks": "2 4", "alpha": 16.0, "layers": ""}
    again = Recipe.from_dict(chosen.to_dict())
    assert again.chosen_method.adapters == AdapterSettings(ranks="2 4")


def drawn(model: nn.Module) -> nn.Module:
    """With a B other than zero."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=draws))
    return model


def test_networks_of_transformers_have_adapters_in_their_attention():
    """Made of a configuration; nothing is downloaded."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    base = transformers.ViTForImageClassification(config).eval()
    x = torch.randn(2, 3, 8, 8)
    before = base(x).logits
    linear = {name.rpartition(".")[2] for name, part in base.named_modules() if isinstance(part, nn.Linear)}
    names = linear & {"query", "value", "q_proj", "v_proj"}  # versions of transformers differ
    model = add_adapters(split(copy.deepcopy(base), head="classifier", extractor=None), 2, 6.0, " ".join(sorted(names)))
    assert torch.allclose(model.eval()(x), before, atol=1e-6)
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == names
    assert len(names) == 2
    drawn(model)
    assert not torch.allclose(model(x), before, atol=1e-3)
