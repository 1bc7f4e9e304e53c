"""Who is drawn to be hostile, and what such clients train on and send."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.method import Method, MethodCard
from polyfed.errors import ConfigError
from polyfed.plugins import adversaries
from polyfed.plugins.adversaries import AdversarialClients, Kind, assign_attacks, collude
from polyfed.plugins.settings import Adversaries


class Sends(Method):
    card = MethodCard(delta_entries=("model",))


def client() -> Client:
    made = Client(
        nn.Linear(2, 4), (torch.zeros(5, 2), torch.tensor([0, 1, 3, 3, 2])), (torch.zeros(2, 2), torch.tensor([0, 1]))
    )
    made.classes, made.bound = 4, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return made


def enlisted(made: Client, kind: Kind, **settings: Any) -> AdversarialClients:
    """A plugin whose only hostile client is this one."""

    class Setup:
        clients, seed, unscored, held_out = [made], 0, set[int](), frozenset[int]()

    plugin = AdversarialClients(Adversaries(**settings))
    made.id = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adversaries, "assign_attacks", lambda *_: {0: kind})
        plugin.validate(Setup())  # type: ignore[arg-type]
    return plugin


def test_shares_are_rounded_up_and_kinds_do_not_overlap() -> None:
    found = assign_attacks(Adversaries(label_flip_fraction=0.2, sign_flip_fraction=0.25), 10, 0)
    assert sorted(found.values()) == ["label_flip"] * 2 + ["sign_flip"] * 3
    assert list(found) == sorted(found)
    assert len(assign_attacks(Adversaries(sign_flip_fraction=0.01), 10, 0)) == 1
    assert assign_attacks(Adversaries(), 10, 0) == {}


def test_they_are_drawn_by_the_seed() -> None:
    settings = Adversaries(label_flip_fraction=0.3)
    assert assign_attacks(settings, 20, 1) == assign_attacks(settings, 20, 1)
    assert len({tuple(assign_attacks(settings, 20, seed)) for seed in range(8)}) > 4
    assert list(assign_attacks(settings, 20, 1)) == list(assign_attacks(Adversaries(sign_flip_fraction=0.3), 20, 1)), (
        "the same ones, whatever they do"
    )


def test_somebody_is_honest() -> None:
    with pytest.raises(ConfigError, match="at least one of the 3 clients to be honest, got 2 with label_flip and 1"):
        assign_attacks(Adversaries(label_flip_fraction=0.4, sign_flip_fraction=0.1), 3, 0)


def test_training_labels_are_turned_round_and_no_others() -> None:
    made = client()
    message = {"model": {"w": torch.ones(2)}}
    plugin = enlisted(made, "label_flip", label_flip_fraction=0.1)
    assert made.data.train.y.tolist() == [3, 2, 0, 0, 1]
    assert made.data.test.y.tolist() == [0, 1]
    assert plugin.encode(message, made, Sends(), {}) is message


def test_an_honest_client_sends_what_it_has() -> None:
    message = {"model": {"w": torch.ones(2)}}
    assert AdversarialClients(Adversaries(sign_flip_fraction=0.1)).encode(message, client(), Sends(), {}) is message


def test_changes_are_negated_and_scaled_and_other_floats_negated() -> None:
    start = torch.tensor([1.0, -2.0])
    message = {
        "kernel": {"values": torch.tensor([[3, -4]], dtype=torch.int8), "scale": torch.tensor([0.5, 1.0])},
        "model": {
            "0.weight": torch.tensor([1.5, -3.0]),
            "new": torch.tensor([2.0]),
            "1.running_var": torch.tensor([4.0]),
        },
        "means": torch.tensor([[1.0, -1.0]]),
        "labels": torch.tensor([3]),
        "n": torch.tensor(7),
        "a": torch.tensor(0.5),
    }
    received = {"model": {"0.weight": start, "1.running_var": torch.tensor([1.0])}}
    made = client()
    plugin = enlisted(made, "sign_flip", sign_flip_fraction=0.5, attack_scale=3.0)
    found = cast(Any, plugin.encode(message, made, Sends(), received))
    assert found["model"]["0.weight"].tolist() == [1.0 - 1.5, -2.0 + 3.0]
    assert found["model"]["new"].tolist() == [-2.0], "nothing came down under this name"
    assert found["model"]["1.running_var"].tolist() == [4.0], "a negative variance would betray it"
    assert found["means"].tolist() == [[-1.0, 1.0]]
    assert found["kernel"]["values"].tolist() == [[-3, 4]], "of packed matrices, whose scales are never negative"
    assert found["kernel"]["scale"].tolist() == [0.5, 1.0]
    assert (found["labels"].tolist(), int(found["n"]), float(found["a"])) == ([3], 7, 0.5)
    assert cast(Any, message)["model"]["0.weight"].tolist() == [1.5, -3.0]


def test_all_kinds_are_drawn_apart() -> None:
    found = assign_attacks(
        Adversaries(label_flip_fraction=0.2, sign_flip_fraction=0.1, inner_product_fraction=0.3, alie_fraction=0.1),
        10,
        4,
    )
    assert sorted(found.values()) == sorted(["label_flip"] * 2 + ["sign_flip"] + ["inner_product"] * 3 + ["alie"])
    assert len(found) == 7
    made = client()
    enlisted(made, "alie", alie_fraction=0.1)
    assert made.data.train.y.tolist() == [0, 1, 3, 3, 2], "these train as everybody does"


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["inner_product", "alie"])
def test_who_knows_the_others_sends_what_numpy_makes_of_them(kind: Kind) -> None:
    start = noise(3, 2, seed=99)
    sent: dict[int, Any] = {i: {"model": {"w": start, "bn.running_var": torch.ones(2)}} for i in range(5)}
    labels = {0: [0, 1], 1: [1, 2], 2: [0, 1], 3: [1, 2], 4: [0, 3]}
    uploads: dict[int, Any] = {
        i: {
            "model": {"w": start + noise(3, 2, seed=i), "bn.running_var": torch.full((2,), 1.0 + i)},
            "labels": torch.tensor(labels[i]),
            "means": noise(2, 4, seed=10 + i),
            "n": torch.tensor(5),
        }
        for i in range(5)
    }
    liars: dict[int, Kind] = {3: "sign_flip", 4: kind}

    def lie(*honest: torch.Tensor) -> Any:
        vectors = np.stack([h.numpy().astype(np.float64) for h in honest])
        return -0.5 * vectors.mean(0) if kind == "inner_product" else vectors.mean(0) - 0.5 * vectors.std(0)

    found: Any = collude(liars, 0.5, Sends(), uploads, sent)
    change = lie(*(uploads[i]["model"]["w"] - start for i in (0, 1, 2)))
    np.testing.assert_allclose(found[4]["model"]["w"] - start, change, atol=1e-6)
    np.testing.assert_allclose(found[4]["means"][0], lie(uploads[0]["means"][0], uploads[2]["means"][0]), atol=1e-6)
    assert torch.equal(found[4]["means"][1], uploads[4]["means"][1]), "no honest client has class 3"
    assert torch.equal(found[4]["model"]["bn.running_var"], uploads[4]["model"]["bn.running_var"])
    assert all(found[i] is uploads[i] for i in range(4))
    assert not torch.equal(found[4]["means"][0], uploads[4]["means"][0]), "and what came is not written into"
    assert collude({3: "sign_flip"}, 0.5, Sends(), uploads, sent) is uploads
