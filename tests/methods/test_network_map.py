"""Maps of the closed form that are a frozen network: its features, its weights' digest, and who is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.frozen_network import FrozenNetwork
from polyfed.core.upload_forms import UploadContext
from polyfed.engine.uploads import find_mismatch
from polyfed.errors import ConfigError, PolyfedError, RunError
from polyfed.experiments import exported_model, prediction
from polyfed.experiments.estimate import estimate_costs
from polyfed.functional.class_statistics import sum_rows
from polyfed.functional.closed_forms import discriminant
from polyfed.methods import ClosedForm, OwnPlusCommon
from polyfed.methods.building_blocks.network_map import NetworkMap
from tests.helpers.toys import CLASSES, INPUTS, NETS, Round, federation, rounds, samples, worker

MAP = "nets:encoder"
NAMED = ClosedForm(map=MAP, shrinkage=0.3)


def encoder(features: int = 7) -> nn.Module:
    """Drawn weights, dropout and statistics of batches, which an eval mode leaves as they are."""
    body = nn.Sequential(nn.Linear(INPUTS, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.ReLU())
    return nn.Sequential(body, nn.Linear(9, features), nn.Tanh())


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    **NETS,
    MAP: encoder,
    "nets:wide": lambda: nn.Linear(INPUTS, 9000),
    "nets:heavy": lambda: nn.Sequential(nn.Linear(INPUTS, 999), nn.Linear(999, 7)),
}


def members() -> list[Client]:
    return [Client(net, samples(12 + i, i), samples(30, 50 + i)) for i, net in enumerate(("bn", "broad", "wide"))]


def run(method: ClosedForm = NAMED, **settings: Any) -> list[Round]:
    return rounds(method, members(), BUILDERS, **{"rounds": 1, **settings})


def network(seed: int = 0) -> FrozenNetwork:
    return federation(NAMED, members(), BUILDERS, seed=seed)[0].server.frozen_network


def test_sums_are_those_of_the_networks_features() -> None:
    (round,) = run()
    parts = [client.data.train for client in members()]
    body = copy.deepcopy(network().network)
    phi, y = torch.cat([body(part.x) for part in parts]), torch.cat([part.y for part in parts])
    found = round.after["solution"]["weight"], round.after["solution"]["bias"]
    torch.testing.assert_close(found, discriminant(sum_rows(phi, y, CLASSES), 0.3), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(up["network"], network().digest) for up in round.up.values())
    assert not torch.equal(network().digest, network(seed=1).digest)


def test_a_check_counts_the_networks_memory_once() -> None:
    both = [federation(ClosedForm(map=name), members(), BUILDERS)[0] for name in (MAP, "nets:heavy")]
    light, heavy = (fed.server.frozen_network.nbytes for fed in both)
    known = [estimate_costs(fed).memory["weights and states"] for fed in both]
    assert known[1] - known[0] == heavy - light > 10000


@pytest.mark.parametrize("method", [NAMED, OwnPlusCommon(map=MAP, weight=0.5)], ids=["closed-form", "own-plus-common"])
def test_executors_and_resume_give_the_same_bits(method: ClosedForm, tmp_path: Path) -> None:
    def accuracies(executor: str, folder: str, count: int = 3, resume: bool = False) -> list[float]:
        training = pf.Training(rounds=count, batch_size=4)
        fed = pf.Federation(
            members(), method, training, task=pf.Task(CLASSES), executor=executor, out=tmp_path / folder,
            builders=BUILDERS,
        )  # fmt: skip
        return [record["accuracy"] for record in fed.run(resume=resume).history]

    whole = accuracies("serial", "serial")
    assert accuracies("processes", "processes") == whole
    accuracies("serial", "in two", count=2)
    assert accuracies("serial", "in two", resume=True) == whole


def test_unit_features_have_norm_one_and_no_common_direction() -> None:
    (round,) = run(ClosedForm(map=MAP, shrinkage=0.3, unit_features=True))
    phi = NetworkMap(network(), round.states[0]["map"])(samples(20, 3).x)
    torch.testing.assert_close(phi.norm(dim=1), torch.ones(20), rtol=0, atol=1e-5)
    assert float((phi @ round.states[0]["map"]["common"]).abs().max()) < 1e-5


def test_the_digest_is_of_names_and_numbers_before_the_head() -> None:
    model = BUILDERS["bn"]()
    before = FrozenNetwork(model, "").checksum
    with torch.no_grad():
        model.get_submodule("head").weight += 1  # type: ignore[operator]
    assert FrozenNetwork(model, "").checksum == before
    for name in model.state_dict():
        if not name.startswith("head"):
            other = copy.deepcopy(model)
            other.state_dict()[name].add_(1)
            assert FrozenNetwork(other, "").checksum != before, name
    renamed = nn.Sequential(model.get_submodule("extractor"))
    assert FrozenNetwork(renamed, "").checksum != FrozenNetwork(model.get_submodule("extractor"), "").checksum


def test_other_weights_are_refused_by_name() -> None:
    (round,) = run()
    fed, _ = federation(NAMED, members(), BUILDERS)
    other = {**round.up[1], "network": network(seed=1).digest}
    says = r"its network 'nets:encoder' has other weights than the server's: SHA-256 \w{12}\.\.\. instead of \w{12}"
    known = UploadContext(NAMED, fed.server, 1, {})
    assert NAMED.upload_form is not None
    assert find_mismatch(NAMED.upload_form, round.up[1], known) is None
    with pytest.raises(RunError, match=f"^client 1: {says}"):
        NAMED.aggregate(fed.server, {**round.up, 1: other})
    problem = find_mismatch(NAMED.upload_form, other, known)
    with pytest.raises(PolyfedError, match=f"^{says}"):
        raise PolyfedError(str(problem))
    fed, _ = federation(NAMED, members(), BUILDERS)
    del other["network"]
    NAMED.aggregate(fed.server, {**round.up, 1: other})
    (without,) = run(lose=lambda _, i: i == 1)
    assert torch.equal(fed.server.state["solution"]["weight"], without.after["solution"]["weight"])
    assert fed.server.log["sums_left_out"] == 1


def test_a_client_goes_on_with_the_weights_that_it_began_with_alone() -> None:
    fed, _ = federation(NAMED, members(), BUILDERS)
    at = worker(fed, 0)
    at.state["map"] = {"digest": network(seed=1).digest}
    with pytest.raises(RunError, match=r"^the map .* has other weights than those that the run began with"):
        NAMED.receive(at, {})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"map": "radnom"},
            r"map: expected 'default', 'random', 'photographs' or the name of .*, got 'radnom'",
        ),
        ({"map": MAP, "features": 300}, "features = 300 does nothing beside map = 'nets:encoder'"),
        ({"map": f"{MAP}@none"}, "the map 'nets:encoder@none': what stands behind '@' or '#' changes nothing"),
        ({"map": "timm:a#5"}, "the map 'timm:a#5': what stands behind '@' or '#' changes nothing"),
        ({"map": "no_such_package:net"}, "cannot import model 'no_such_package:net'"),
        ({"map": "nets:wide"}, "the map 'nets:wide': expected at most 8192 features, whose products .*, got 9000"),
        ({"map": "nets:images"}, r"the map 'nets:images' cannot take inputs of shape \(4,\): RuntimeError"),
    ],
)
def test_what_cannot_be_a_map_is_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        federation(ClosedForm(**settings), members(), {**BUILDERS, "nets:images": lambda: nn.Conv2d(3, 2, 3)})


MODULE = """
from torch import nn
WIDTH = 6
def encoder(in_shape, classes):
    return nn.Sequential(nn.Conv2d(in_shape[0], WIDTH, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
def classifier(in_shape, classes):
    return nn.Sequential(encoder(in_shape, classes), nn.Linear(4 * WIDTH, classes))
"""


@pytest.mark.parametrize("name", ["encoder", "classifier"])
def test_a_run_folders_models_hold_the_map(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"maps_{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "data": {"dataset": "digits", "num_clients": 2, "limit_train": 100},
        "models": {"architectures": ["digits-cnn1"], "feature_dim": 5},
        "method": {"name": "own-plus-common", "map": f"maps_{name}:{name}"},
        "training": {"rounds": 1},
    }
    done = pf.run(pf.Recipe.from_dict(settings), out=tmp_path / "run")
    x = torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="--trust"):
        prediction.load(tmp_path / "run", 1)
    model = prediction.load(tmp_path / "run", 1, trust=True)
    assert model.state["solution"]["weight"].shape == (24, 10)  # not projected to models.feature_dim
    expected = model.scores(x)
    torch.testing.assert_close(done.models[1](model.prepare(x)), expected, rtol=1e-9, atol=1e-9)
    twin = copy.deepcopy(done.models[1])
    for tensor in twin.map.parameters():  # type: ignore[union-attr]
        tensor.zero_()
    assert not torch.allclose(twin(model.prepare(x)), expected)
    file = exported_model.export_model(tmp_path / "run", 1, tmp_path / "one.pt2", trust=True)
    program = torch.export.load(file)
    torch.testing.assert_close(program.module()(x), expected, rtol=1e-5, atol=1e-5)
    assert any(key.startswith("map.") for key in program.state_dict)
    monkeypatch.setattr(f"maps_{name}.WIDTH", 7)
    with pytest.raises(ConfigError, match=f"^expected the map 'maps_{name}:{name}' as the run had it, got other"):
        prediction.load(tmp_path / "run", 1, trust=True)


class Words(nn.Module):
    """Ids to the mean of their vectors."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(words, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x)
        return found


def test_texts_are_ids_for_networks_that_take_words() -> None:
    x = torch.randint(6, (12, 5), generator=torch.Generator().manual_seed(0))
    y = torch.arange(12) % 2
    own = nn.Sequential(Words(6), nn.Linear(5, 2))
    builders = {"nets:words": lambda: Words(6)}
    fed = pf.Federation(
        [Client(own, (x, y), (x, y))], ClosedForm(map="nets:words"), pf.Training(rounds=1), builders=builders
    )
    fed.run()
    assert fed.server.state["sums"]["products"].shape == (15,)
