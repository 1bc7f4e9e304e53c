"""What the server makes of uploads under `[robust_aggregation]`, and what hostile clients send: against NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method, TrainingResult
from polyfed.core.server import Server
from polyfed.plugins import adversaries
from polyfed.plugins.adversaries import AdversarialClients, Kind, assign_attacks
from polyfed.plugins.robust_aggregation import DefenseLog, apply_rule, rejection_reason
from polyfed.plugins.settings import Adversaries, RobustAggregation

NOWHERE = cast(Server, None)


class Sends(Method):
    """A method that has sent what it is told."""

    delta_entries = ("model",)
    aligned_entries = ("scores",)

    def __init__(self, down: Mapping[int, Message]) -> None:
        self.down = down

    def broadcast(self, server: Server, client_id: int) -> Message:
        return self.down.get(client_id, {})

    def upload(self, client: Any, trained: TrainingResult) -> Message:
        return {}


def held(rule: str, uploads: Mapping[int, Message], down: Mapping[int, Message] | None = None, **more: Any) -> Any:
    """What the method gets, and the watch's record."""
    watch = DefenseLog()
    found = apply_rule(RobustAggregation(aggregator=rule, **more), Sends(down or {}), NOWHERE, uploads, watch)  # type: ignore[arg-type]
    return found, {**vars(watch), "left_out": sorted(watch.left_out)}


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def models(count: int, base: Mapping[str, Tensor]) -> dict[int, Message]:
    return {
        i: {
            "model": {name: t + noise(*t.shape, seed=10 * i + len(name)) for name, t in base.items()},
            "n": torch.tensor(9 + i),
        }
        for i in range(count)
    }


BASE = {"w": noise(3, 2, seed=1), "bias": noise(2, seed=2)}


def _all_sent(count: int) -> dict[int, Message]:
    return {i: {"model": BASE} for i in range(count)}


def test_the_median_takes_every_place_and_counts_stay() -> None:
    uploads = models(5, BASE)
    found, record = held("median", uploads, _all_sent(5))
    for name in BASE:
        expected = np.median([cast(Any, m["model"])[name].numpy() for m in uploads.values()], axis=0)
        for message in found.values():
            np.testing.assert_array_equal(message["model"][name], expected)
    assert [int(message["n"]) for message in found.values()] == [9, 10, 11, 12, 13]
    assert record == {"left_out": [], "shortened": 0, "few": 0}


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "geometric_median", "multi_krum", "norm_clipping"])
@pytest.mark.parametrize("far", [1e6, -1e6])
def test_one_hostile_client_does_not_lead_the_mean_out_of_the_honest_ones(rule: str, far: float) -> None:
    uploads = models(6, BASE)
    honest = torch.stack([cast(Any, uploads[i]["model"])["w"] for i in range(5)])
    uploads[5] = {"model": {name: t + far for name, t in BASE.items()}, "n": torch.tensor(10**9)}
    found, record = held(rule, uploads, _all_sent(6))
    mean = torch.stack([m["model"]["w"] for m in found.values()]).mean(0)
    if rule in ("median", "trimmed_mean", "multi_krum"):
        assert bool(((mean >= honest.min(0).values) & (mean <= honest.max(0).values)).all())
    assert float((mean - BASE["w"]).norm()) < float((honest - BASE["w"]).flatten(1).norm(dim=1).max())
    assert (5 in record["left_out"], len(record["left_out"])) == (
        rule == "multi_krum",
        2 if rule == "multi_krum" else 0,
    )
    shuffled = {i: uploads[i] for i in (3, 5, 0, 1, 4, 2)}
    again, _ = held(rule, shuffled, _all_sent(6))
    assert again.keys() == found.keys()
    for i, message in found.items():
        for name, t in flatten(message).items():
            torch.testing.assert_close(flatten(again[i])[name], t, rtol=1e-5, atol=1e-6)


def test_where_architectures_differ_it_is_tensor_by_tensor_among_those_who_have_it() -> None:
    deep = {**BASE, "more": noise(4, seed=3)}
    down: dict[int, Message] = {i: {"model": deep if i < 3 else BASE} for i in range(7)}
    uploads = {i: models(7, cast(Any, down[i]["model"]))[i] for i in range(7)}
    found, record = held("median", uploads, down)
    for name, who in (("w", range(7)), ("more", range(3))):
        expected = np.median([cast(Any, uploads[i]["model"])[name].numpy() for i in who], axis=0)
        for i in who:
            np.testing.assert_array_equal(found[i]["model"][name], expected)
    assert record["few"] == 0
    del uploads[0], uploads[1]
    found, record = held("median", uploads, down)
    assert torch.equal(found[2]["model"]["more"], cast(Any, uploads[2]["model"])["more"]), "alone: as it is"
    assert record["few"] == 1


def test_who_began_elsewhere_or_has_another_shape_is_not_mixed_in() -> None:
    """Architectures that are averaged apart, also where they have a tensor of one name, shape and value; slices."""
    ones = {"scale": torch.ones(2)}
    first, second = {**BASE, **ones}, {"w": noise(3, 2, seed=8), **ones}
    down: dict[int, Message] = {
        i: {"model": first if i < 3 else second if i < 6 else {"w": BASE["w"][:2]}} for i in range(9)
    }
    uploads = {i: models(9, cast(Any, down[i]["model"]))[i] for i in range(9)}
    found, _ = held("median", uploads, down)
    for who in (range(3), range(3, 6), range(6, 9)):
        for name in cast(Any, uploads[who[0]]["model"]):
            expected = np.median([cast(Any, uploads[i]["model"])[name].numpy() for i in who], axis=0)
            assert all(np.array_equal(found[i]["model"][name], expected) for i in who)


def test_a_wider_type_is_no_way_round() -> None:
    uploads = models(3, BASE)
    uploads[2] = {"model": {name: t.double() + 1e9 for name, t in BASE.items()}, "n": torch.tensor(1)}
    found, record = held("median", uploads, _all_sent(3))
    assert float(found[2]["model"]["w"].abs().max()) < 10
    assert found[2]["model"]["w"].dtype == torch.float64
    assert record["few"] == 0


def test_lengths_of_changes_come_down_to_their_median_and_the_others_stay_bit_for_bit() -> None:
    uploads = models(5, BASE)
    uploads[4] = {"model": {name: t - 30.0 for name, t in BASE.items()}, "n": torch.tensor(1)}
    found, record = held("norm_clipping", uploads, _all_sent(5))

    def lengths(messages: Mapping[int, Message]) -> Any:
        changes = [[cast(Any, m["model"])[n] - t for n, t in BASE.items()] for m in messages.values()]
        return np.array([np.linalg.norm(np.concatenate([c.flatten().numpy() for c in each])) for each in changes])

    before, after = lengths(uploads), lengths(found)
    np.testing.assert_allclose(after, np.minimum(before, np.median(before)), rtol=1e-5)
    for i in np.flatnonzero(before <= np.median(before)):
        assert all(torch.equal(found[i]["model"][n], cast(Any, uploads[i]["model"])[n]) for n in BASE)
    assert record["shortened"] == 2


def rows(labels: list[int], seed: int) -> Message:
    return {
        "labels": torch.tensor(labels).int(),
        "lars": noise(len(labels), 4, seed=seed),
        "counts": torch.ones(len(labels)),
    }


def test_class_means_are_held_to_those_of_their_class() -> None:
    labels = {0: [0, 1, 2], 1: [0, 2], 2: [0, 1, 2], 3: [2, 0]}
    uploads = {i: rows(own, i) for i, own in labels.items()}
    uploads[3] = {**uploads[3], "lars": cast(Tensor, uploads[3]["lars"]) * 1e6}
    found, record = held("median", uploads)
    for label in range(3):
        who = [i for i, own in labels.items() if label in own]
        came = [cast(Tensor, uploads[i]["lars"])[labels[i].index(label)].numpy().astype(np.float64) for i in who]
        expected = np.median(came, axis=0).astype(np.float32)
        for i in who:
            np.testing.assert_array_equal(found[i]["lars"][labels[i].index(label)], expected)
    assert record["few"] == 2, "class 1: two clients, of class means and of counts"
    assert cast(Tensor, uploads[0]["lars"]).equal(noise(3, 4, seed=0)), "what came is not written into"
    assert held("multi_krum", uploads)[1]["left_out"] == [3]


@pytest.mark.parametrize("rule", ["median", "multi_krum", "norm_clipping"])
def test_all_else_comes_down_to_the_median_of_sizes(rule: str) -> None:
    """Kernels of any width; features of any number of rows, of which a size is the mean over rows."""
    scale = {0: 1.0, 1: 2.0, 2: 50.0, 3: 0.5, 4: 1.5}
    uploads: dict[int, Message] = {
        i: {"features": {"s": torch.full((4 + i, 3 + i, 2), s)}, "strength": torch.tensor(s)} for i, s in scale.items()
    }
    found, record = held(rule, uploads)
    sizes = {i: s * np.sqrt(2 * (3 + i)) for i, s in scale.items()}
    bound = np.median(list(sizes.values()))
    for i, s in scale.items():
        expected = s * min(1, bound / sizes[i])
        np.testing.assert_allclose(found[i]["features"]["s"], np.full((4 + i, 3 + i, 2), expected), rtol=1e-6)
        assert float(found[i]["strength"]) == s, "single numbers are believed"
    assert record == {"left_out": [], "shortened": sum(size > bound for size in sizes.values()), "few": 0}


def test_the_share_is_that_of_clients_left_out() -> None:
    uploads = models(10, BASE)
    down: dict[int, Message] = _all_sent(10)
    assert [
        len(held("multi_krum", uploads, down, byzantine_fraction=share)[1]["left_out"]) for share in (0.1, 0.2, 0.45)
    ] == [1, 2, 4]
    one, other = (held("trimmed_mean", uploads, down, byzantine_fraction=share)[0] for share in (0.1, 0.4))
    assert not torch.equal(one[0]["model"]["w"], other[0]["model"]["w"])


def test_a_number_above_the_bound_is_an_objection() -> None:
    up = {"model": {"w": torch.full((2, 3), -8.0)}, "n": torch.tensor(10**6), "a": torch.tensor(1e6)}
    for settings in ({}, {"max_magnitude": 8.0}, {"max_magnitude": 0.0}):
        assert rejection_reason(RobustAggregation(**settings), 3, up) is None
    told = rejection_reason(RobustAggregation(max_magnitude=7.5), 3, up)
    assert told == "a number of 'model/w' is 8, above robust_aggregation.max_magnitude = 7.5"


@pytest.mark.parametrize("labels", [[0, 0], [0, 3], [-1, 2]])
def test_labels_that_would_set_rows_apart_are_an_objection(labels: list[int]) -> None:
    told = rejection_reason(RobustAggregation(aggregator="median"), 3, rows(labels, 0))
    assert told == "expected 'labels' that are classes below 3, each once, got others"
    assert rejection_reason(RobustAggregation(aggregator="median"), 3, rows([2, 0], 0)) is None
    assert rejection_reason(RobustAggregation(), 3, rows(labels, 0)) is None


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


def test_they_are_drawn_by_the_seed_shares_are_rounded_up_and_kinds_do_not_overlap() -> None:
    found = assign_attacks(Adversaries(label_flip_fraction=0.2, sign_flip_fraction=0.25), 10, 0)
    assert sorted(found.values()) == ["label_flip"] * 2 + ["sign_flip"] * 3
    assert list(found) == sorted(found)
    assert len(assign_attacks(Adversaries(sign_flip_fraction=0.01), 10, 0)) == 1
    few = Adversaries(label_flip_fraction=0.3)
    assert len({tuple(assign_attacks(few, 20, seed)) for seed in (*range(8), 0)}) > 4
    assert list(assign_attacks(few, 20, 1)) == list(assign_attacks(Adversaries(sign_flip_fraction=0.3), 20, 1)), (
        "the same ones, whatever they do"
    )


def test_changes_are_negated_and_scaled_and_other_floats_negated() -> None:
    start = torch.tensor([1.0, -2.0])
    message = {
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
    found = cast(Any, plugin.encode(message, made, Sends({}), received))
    assert found["model"]["0.weight"].tolist() == [1.0 - 1.5, -2.0 + 3.0]
    assert found["model"]["new"].tolist() == [-2.0], "nothing came down under this name"
    assert found["model"]["1.running_var"].tolist() == [4.0], "a negative variance would betray it"
    assert found["means"].tolist() == [[-1.0, 1.0]]
    assert (found["labels"].tolist(), int(found["n"]), float(found["a"])) == ([3], 7, 0.5)
    assert cast(Any, message)["model"]["0.weight"].tolist() == [1.5, -3.0]
