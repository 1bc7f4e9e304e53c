"""What is tried and refused before round 1: rows, heads, label spaces, hidden state; who is averaged with whom."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.method import Method, Requirements
from polyfed.engine.network_checks import check_state
from polyfed.engine.remarks import averaging
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import predict
from polyfed.methods import FedAvg, FedProx, FedRep, LGFedAvg, Local
from polyfed.models.split import SequentialSplit
from polyfed.testing.fixtures import grouped, plain_model, tiny_model, world
from tests.helpers import regression
from tests.helpers.refusals import refusal

X = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(21) % 3


def federation(make: Callable[[], nn.Module], batch_size: int = 10, **sides: Any) -> pf.Federation:
    clients = [pf.Client(make(), **{"train": (X, Y), **sides}) for _ in range(2)]
    return pf.Federation(clients, pf.methods.FedAvg(), pf.Training(rounds=1, batch_size=batch_size))


class Counts(nn.Module):
    """Counts rows in a buffer, and draws random numbers, in training mode."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.most = most
        self.layer = nn.Linear(4, 3)
        self.features: Tensor | None = None
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.features = x + self.layer.weight.sum()
        if self.training:
            assert len(x) > 1, "one row"
            self.rows += len(x)
            x = x + torch.randn(4)
        scores: Tensor = self.layer(x)
        return scores


@pytest.mark.parametrize("side", ["test", "validation"])
def test_rows_of_every_side_are_tried(side: str) -> None:
    with pytest.raises(ConfigError, match=rf"client 0 \('Linear'\) cannot take {side} inputs of shape \(5,\)"):
        federation(lambda: nn.Linear(4, 3), **{side: (torch.ones(3, 5), Y[:3])})


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda x: x - torch.zeros(4), r"prepare cannot take test inputs of shape \(5,\): The size of tensor"),
        (lambda x: x if x.shape[1] == 4 else None, "prepare should return a tensor, got none for test inputs"),
    ],
)
def test_the_users_preparation_is_tried(prepare: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^client 0 \('Linear'\): {told}"):
        federation(lambda: nn.Linear(4, 3), test=(torch.ones(3, 5), Y[:3]), prepare=prepare)


def test_the_largest_id_of_any_side_is_tried() -> None:
    ids = torch.tensor([[1, 2], [9, 2], [3, 3]])
    with pytest.raises(ConfigError, match=r"cannot take test inputs .*index out of range"):
        federation(
            lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)),
            train=(ids.clamp(max=8), Y[:3]),
            test=(ids, Y[:3]),
        )


def test_the_smallest_batch_is_tried_in_training_mode() -> None:
    with pytest.raises(ConfigError, match=r"'Counts'\), in training mode, cannot take a batch of 1 input .*one row"):
        federation(Counts)
    assert federation(Counts, batch_size=9)  # 21 rows are 9, 9 and 3


def test_no_batch_of_one_row_with_batchnorm() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    with pytest.raises(ConfigError, match=r"BatchNorm, .* expected training.batch_size of at least 2, got 1"):
        federation(make, batch_size=1)
    assert federation(make)  # the last batch, of one row, is left out


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"client 0 \('Sequential'\): .* lazy layer .* call it once"),
        (nn.Identity, r"client 0 \('Identity'\): expected a network with parameters"),
    ],
)
def test_networks_that_cannot_be_trained(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        federation(make)


def test_a_network_that_cannot_be_copied_is_refused_by_what_cannot() -> None:
    def make() -> nn.Module:
        network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        network[1].lock = threading.Lock()  # type: ignore[assignment]
        return network

    with pytest.raises(ConfigError, match=r"client [01] \('Sequential'\): .*lock.*keep that out"):
        federation(make)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (nn.Softmax(1), "probabilities (they are not negative, and each row sums to one)"),
        (nn.ReLU(), ""),
        (nn.LogSoftmax(1), ""),
        (nn.Identity(), ""),
    ],
    ids=str,
)
def test_what_is_no_logit_is_told_once_for_each_architecture(end: nn.Module, told: str) -> None:
    networks = [nn.Sequential(nn.Linear(4, 3), end), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), end)]
    clients = [pf.Client(networks[k % 2], (X, Y)) for k in range(4)]
    whose = ["client 0 ('Sequential')", "client 1 ('Sequential-2')"]
    expected = [f"{who} gives {told}" for who in whose] if told else []
    assert [said.partition(", which")[0] for said in warned(clients)] == expected


def warned(clients: Sequence[Client]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pf.Federation(clients, pf.methods.Local(), pf.Training(rounds=1))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("place", ["forward", "1.forward"])
def test_a_forward_that_stays_with_the_original_is_refused(place: str) -> None:
    """Its copies would be trained in vain."""
    network = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    layer, _, _ = place.rpartition(".")
    own = network.get_submodule(layer).forward
    network.get_submodule(layer).forward = lambda x: 2 * own(x)
    with pytest.raises(ConfigError, match=r"client 0 \('Sequential'\): expected .* its own parameters.*in its class"):
        pf.Federation([pf.Client(network, (X, Y))], pf.methods.Local(), pf.Training(rounds=1))


X_6, Y_6 = torch.randn(20, 6), torch.arange(20) % 4


class Low(SequentialSplit):
    """Tensors of its own before a common head."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 5), torch.nn.Identity(), torch.nn.Linear(5, 4))


class High(SequentialSplit):
    """The same number of features by other tensors: none of `Low`'s names but the head's."""

    def __init__(self) -> None:
        extractor = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(6, 5))
        super().__init__(extractor, torch.nn.Identity(), torch.nn.Linear(5, 4))


def federation_averaging(method: Method, *kinds: Any, **how: Any) -> pf.Federation:
    clients = [pf.Client(kind(), (X_6, Y_6), (X_6, Y_6)) for kind in kinds]
    return pf.Federation(clients, method, pf.Training(rounds=2), **grouped(**how))


@pytest.mark.parametrize("method", [FedAvg(), FedProx()])
def test_a_head_alone_is_refused(method: Method) -> None:
    said = refusal(lambda: federation_averaging(method, Low, High, Low))
    assert "would average nothing but the head (head.weight, head.bias (24 weights)) of client 0" in said
    assert "use method.aggregation = 'same-shape'" in said


def test_others_are_not_refused() -> None:
    same_shape = averaging(federation_averaging(FedAvg(aggregation="same-shape"), Low, High))
    assert "across" not in same_shape
    assert "nothing across architectures" in averaging(federation_averaging(FedRep(), Low, High))
    assert not any(averaging(federation_averaging(method, Low, High)) for method in (LGFedAvg(), Local()))
    assert averaging(federation_averaging(FedAvg(), Low, Low)).startswith("averaged: 2 clients of ")


RECIPE = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "partition": "by_class",
        "classes_per_client": 3,
        "label_space": "own",
        "split": "6:2:2",
        "max_train_per_client": 30,
    },
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "fedrep", "aggregation": "same-shape"},
    "training": {"rounds": 1, "batch_size": 10, "lr": 0.05},
    "run": {"executor": "serial"},
}


def client(classes: int, names: tuple[str, ...]) -> Client:
    x, y = regression.rows(12, classes)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, classes))
    network = pf.split(layers, head="2", extractor="0")
    labels = (y > y.median()).long() + (y > y.max() - 0.5).long() * (classes > 2)
    return Client(network, (x, labels), (x, labels), class_names=names)


def clients() -> list[Client]:
    return [client(2, ("cat", "dog")), client(3, ("bird", "owl", "jay"))]


def run(method: pf.Method, made: list[Client] | None = None, **more: object) -> object:
    return pf.Federation(made or clients(), method, pf.Training(rounds=1, batch_size=6), **more).run()  # type: ignore[arg-type]


def test_a_recipe_numbers_each_clients_classes(tmp_path: Path) -> None:
    found = pf.run(Recipe.from_dict(RECIPE), out=tmp_path / "run")
    rows = found.result["clients_table"]
    assert [row["class_names"] for row in rows] == [["0", "1", "2"], ["1", "2", "3"], ["2", "3", "4"]]
    assert all(set(row["labels"]) == {"0", "1", "2"} for row in rows)
    assert [row["architecture"] for row in rows] == [f"digits-cnn{n}, 3 classes" for n in (1, 2, 1)]
    made = predict(tmp_path / "run", 1, torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert made.model.form.class_names == ("1", "2", "3")
    assert made.scores.shape == (2, 3)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (pf.methods.FedGH(), "the server trains the header on means of classes"),
        (pf.methods.FedAvg(aggregation="same-shape"), "it averages heads"),
        (pf.methods.FD(), "it averages outputs by class"),
        (pf.methods.FML(), "all clients train one auxiliary model, head included"),
    ],
)
def test_methods_that_share_classes_refuse_before_round_1(method: pf.Method, reason: str) -> None:
    same_size = [client(2, ("cat", "dog")), client(2, ("car", "bus"))]  # heads of one size, of another meaning
    with pytest.raises(ConfigError, match=f"needs the same classes at all clients, as {reason}; client 1 has car, bus"):
        run(method, same_size)


X_12, Y_12 = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
NORMS = [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm]  # the last is older


def federation_parametrized(method: Method, norm: object) -> pf.Federation:
    assert callable(norm)
    networks = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), norm(nn.Linear(6, 2))) for _ in range(2)]
    clients = [pf.Client(pf.split(network, head="2", extractor=None), (X_12, Y_12)) for network in networks]
    return pf.Federation(clients, method, pf.Training(rounds=1))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("method", "said"),
    [
        (pf.methods.FedGH(), r"a weight and a bias; client 0 \('Sequential'\).*bias, .*weight.*"),
        (pf.methods.HeteroFL(), r"Sequential cannot be cut.*'original\.2' has a parametrization"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_methods_that_read_or_cut_heads_refuse_them(method: Method, said: str, norm: object) -> None:
    with pytest.raises(ConfigError, match=said):
        federation_parametrized(method, norm)


X_STATE, Y_STATE = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)) + 1, torch.arange(12) % 2


class Kept(nn.Module):
    """A layer that keeps what `keep` makes of it and its inputs, and gives what `give` makes of both."""

    def __init__(self, start: Any, keep: Callable[[Any, Tensor], Any], give: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept, self.keep, self.give = start, keep, give

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = self.keep(self.kept, x)
        return self.give(self.kept, x)


def zeros() -> Tensor:
    return torch.zeros(4)


def blend(mean: Tensor, x: Tensor) -> Tensor:
    return 0.9 * mean + 0.1 * x.mean(0).detach()


class Draws(nn.Module):
    """Draws from all global generators, and from one of its own where it has one."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.kept = torch.Generator().manual_seed(0) if own else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return F.dropout(x + torch.randn(x.shape, generator=self.kept), 0.5) * random.random()


def federation_state(layer: nn.Module, **options: Any) -> pf.Federation:
    network = nn.Sequential(layer, nn.Linear(4, 2))
    return pf.Federation([pf.Client(network, (X_STATE, Y_STATE))], pf.methods.Local(), pf.Training(rounds=1), **options)


def half_later(steps: Any, x: Tensor) -> Tensor:
    """Half as much from the sixth batch on."""
    return x * (0.5 if steps > 5 else 1.0)


def at_last(kept: Sequence[Any], x: Tensor) -> Tensor:
    """What the oldest of six batches has to do with it."""
    return x + kept[0] if len(kept) == 6 else x


DEPENDS = {
    "mean": lambda: Kept(zeros(), blend, lambda mean, x: x - mean),
    "mapping": lambda: Kept({"mean": zeros()}, lambda k, x: {"mean": blend(k["mean"], x)}, lambda k, x: x - k["mean"]),
    "ramp": lambda: Kept(0, lambda steps, x: steps + 1, lambda steps, x: x * min(steps, 5)),
    "tensor, later": lambda: Kept(torch.tensor(0), lambda steps, x: steps + 1, half_later),
    "last batches": lambda: Kept([], lambda kept, x: [*kept, x.mean(0)][-6:], at_last),
    "last batch": lambda: Kept(None, lambda kept, x: x, lambda kept, x: x if kept is None else x + kept.mean()),
    "generator": lambda: Draws(own=True),
}


@pytest.mark.parametrize("kind", DEPENDS)
def test_what_depends_on_earlier_batches_beside_the_state_dict_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"client 0 \('Sequential'\): .* earlier batches .*register_buffer"):
        federation_state(DEPENDS[kind]())


@pytest.mark.parametrize(
    ("layer", "prepare"),
    [
        (lambda x: F.dropout(x), None),
        (lambda x: x * random.random(), None),
        (lambda x: x, lambda x: x + torch.randn(x.shape)),
    ],
)
def test_what_draws_in_eval_mode_is_refused(layer: Callable[[Tensor], Tensor], prepare: Any) -> None:
    own = {} if prepare is None else {"prepare": prepare}
    client = pf.Client(Scaled(layer), (X_STATE, Y_STATE), **own)
    with pytest.raises(ConfigError, match=r"client 0 \('Scaled'\): .*training=self.training"):
        pf.Federation([client], pf.methods.Local(), pf.Training(rounds=1))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Kept(None, lambda kept, x: x.mean(0), lambda kept, x: x),  # features for somebody else
        lambda: Kept({}, lambda kept, x: {**kept, len(x): torch.ones(len(x), 1)}, lambda kept, x: x),  # by size
        lambda: Kept(0, lambda steps, x: steps + 1, lambda steps, x: x),  # a counter that nothing depends on
        lambda: Draws(own=False),
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()),
    ],
    ids=["features", "cache", "counter", "draws", "PyTorch's own"],
)
def test_what_no_later_batch_depends_on_is_not(layer: Callable[[], nn.Module]) -> None:
    warnings.simplefilter("error")
    assert federation_state(layer()).run().result["rounds"] == 1


def test_the_trial_leaves_networks_and_global_generators_alone() -> None:
    network = nn.Sequential(Draws(own=False), nn.BatchNorm1d(4), Kept(None, lambda kept, x: x, lambda kept, x: x))
    before = random.getstate(), torch.get_rng_state(), copy.deepcopy(network.state_dict())
    check_state(pf.Client(network, (X_STATE, Y_STATE)), network, lambda: network)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in network.state_dict().items())


def test_a_network_that_is_split_is_tried_with_its_own_forward() -> None:
    layer = Kept(zeros(), blend, lambda mean, x: x - mean)
    model = pf.split(nn.Sequential(layer, nn.Linear(4, 2)), head="1", extractor=None)
    with pytest.raises(ConfigError, match="depends on earlier batches"):
        pf.Federation([pf.Client(model, (X_STATE, Y_STATE))], pf.methods.Local(), pf.Training(rounds=1))


class Scaled(nn.Module):
    """A layer that computes by what is in none of its tensors."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(4, 2), by

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.by(self.linear(x)) if callable(self.by) else self.linear(x) * self.by
        return scores


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 2.0),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.tanh, torch.sin),
        (F.elu, F.selu),
        (lambda x: x, lambda x: x.exp()),
        (partial(F.elu, alpha=1.0), partial(F.elu, alpha=2.0)),
        (nn.Threshold(0, 1).forward, nn.ELU().forward),
    ],
    ids=["number", "tensor", "PyTorch's", "function", "lambda", "partial", "method"],
)
def test_networks_that_differ_in_an_attribute_are_two_architectures(one: Any, other: Any) -> None:
    torch.manual_seed(0)
    networks = [Scaled(by) for by in (one, one, other)]
    clients = [pf.Client(network, (X_STATE, Y_STATE)) for network in networks]
    with pytest.warns(UserWarning, match=r"client 2 \('Scaled'\).*client 0 \('Scaled'\).*'Scaled-2'"):
        federation = pf.Federation(clients, pf.methods.Local(), pf.Training(rounds=1, lr=1e-30))
    run = federation.run()
    assert [client.architecture for client in federation.clients] == ["Scaled", "Scaled", "Scaled-2"]
    for number, network in enumerate(networks):
        assert torch.equal(run.models[number](X_STATE), network(X_STATE))


@pytest.mark.parametrize("turned", [False, True])
def test_parameters_of_one_memory_that_are_not_one_are_refused(turned: bool) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = nn.Parameter(first.weight.t() if turned else first.weight)
    with pytest.raises(ConfigError, match=r"'0\.0\.weight' and '0\.1\.weight'.*tie them as one"):
        federation_state(nn.Sequential(first, second))


def test_parts_with_a_tensor_in_common_are_refused_where_a_method_needs_parts() -> None:
    body, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = body.weight
    model = pf.models.SequentialSplit(body, nn.ReLU(), head)
    clients = [pf.Client(model, (X_STATE, Y_STATE))]
    with pytest.raises(ConfigError, match=r"'extractor\.weight' and 'head\.weight' are one tensor"):
        pf.Federation(clients, pf.methods.FedRep(), pf.Training(rounds=1))
    pf.Federation(clients, pf.methods.FedAvg(), pf.Training(rounds=1))


# what methods require -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "builds"),
    [
        (Requirements(split_model=True), [plain_model]),
        (Requirements(same_architecture=True), [lambda: tiny_model(1, 4, 6), lambda: tiny_model(2, 4, 6)]),
        (Requirements(same_feature_dim=True), [lambda: tiny_model(1, 4, 6), lambda: tiny_model(1, 4, 7)]),
        (Requirements(split_model=True, same_head=True), [lambda: tiny_model(1, 4, 6), lambda: tiny_model(1, 4, 7)]),
        (Requirements(shared_shapes=True), [lambda: tiny_model(1, 4, 6), lambda: tiny_model(1, 5, 6)]),
        (
            Requirements(split_model=True, same_cut_shapes=True),
            [lambda: tiny_model(1, 4, 6), lambda: tiny_model(1, 5, 6)],
        ),
        (Requirements(public=4), [plain_model]),
    ],
    ids=lambda value: repr(value) if isinstance(value, Requirements) else "",
)
def test_networks_and_data_that_do_not_fit_are_refused(needs: Requirements, builds: Sequence[Any]) -> None:
    kind = type("Needy", (Local,), {"requirements": needs})
    with pytest.raises(ConfigError):
        world(builds, 0).federation(kind())
    assert world([lambda: tiny_model(1, 4, 6)], 4).federation(kind())
