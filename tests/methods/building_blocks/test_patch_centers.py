"""Filters of all clients' patches: k-means by loops, how rows lie among clients, who is there, settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed import testing
from polyfed.core.client import Client
from polyfed.core.message import State, get_group
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.jobs import JobResult
from polyfed.errors import ConfigError
from polyfed.functional.feature_maps.feature_map import FeatureMap
from polyfed.methods import ClosedForm, OwnPlusCommon
from tests.helpers import oracles
from tests.helpers.toys import CLASSES, Watch, federation, normal, rounds, same

METHOD = ClosedForm(map="patches", features=320, shrinkage=0.3)
FILTERS, WIDTH, SIDE = 80, 18, 3  # of images with a side of 8 pixels or less; four cells
PATCHES = 9  # of an image


def rows(count: int, seed: int) -> LabeledSamples:
    return LabeledSamples(normal(count, 2, 8, 7, seed=seed), torch.arange(count) % CLASSES)


def members(parts: Sequence[LabeledSamples]) -> list[Client]:
    return [Client(nn.Sequential(nn.Flatten(), nn.Linear(112, CLASSES)), part, rows(9, 50)) for part in parts]


PARTS = [rows(3, 1), rows(4, 2), rows(3, 3)]


def patches_by_hand(x: Tensor) -> np.ndarray:
    found = []
    for image in x.double().numpy():
        for top, left in np.ndindex(3, 3):
            patch = image[:, 2 * top : 2 * top + SIDE, 2 * left : 2 * left + SIDE].ravel()
            found.append((patch - patch.mean()) / (patch.std() + 0.3))
    return np.array(found)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def kmeans_by_hand(patches: np.ndarray, draw: Callable[[int], Tensor]) -> tuple[np.ndarray, int]:
    """Directions, and how often a center had no patches."""
    values, vectors = np.linalg.eigh(np.cov(patches.T, bias=True))
    matrix = vectors @ np.diag((values + 0.03) ** -0.5) @ vectors.T
    whitened = (patches - patches.mean(0)) @ matrix
    centers = unit(draw(0).numpy())
    empty = 0
    for move in range(1, 5):
        nearest = (unit(whitened) @ centers.T).argmax(1)
        fresh = unit(draw(move).numpy())
        sums = [whitened[nearest == k].sum(0) if (nearest == k).any() else fresh[k] for k in range(FILTERS)]
        empty += FILTERS - len({*nearest})
        centers = unit(np.array(sums))
    directions = centers @ matrix
    return directions - directions.mean(1, keepdims=True), empty


def test_filters_are_centers_of_all_patches_in_one_place() -> None:
    fed, _ = federation(METHOD, members(PARTS), rounds=1)
    fed.run()

    def draw(move: int) -> Tensor:
        return torch.randn(FILTERS, WIDTH, generator=fed.server.generator("centers", move), dtype=torch.float64)

    patches = np.concatenate([patches_by_hand(part.x) for part in PARTS])
    expected, empty = kmeans_by_hand(patches, draw)
    found = get_group(fed.server.state, "map")["directions"].flatten(1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert empty > 0, "so that drawing anew is tested, too"
    for client in fed.clients:
        assert torch.equal(
            get_group(client.state, "map")["directions"], get_group(fed.server.state, "map")["directions"]
        )
    assert "whitening" not in fed.server.state


def test_it_does_not_matter_how_rows_lie_among_clients() -> None:
    def all_in(parts: Sequence[LabeledSamples]) -> State:
        fed, _ = federation(METHOD, members(parts), rounds=1)
        fed.run()
        return fed.server.state

    together = LabeledSamples(torch.cat([part.x for part in PARTS]), torch.cat([part.y for part in PARTS]))
    one, other = all_in([together]), all_in(PARTS)
    for name in ("map", "solution"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-4)


def test_patches_cross_in_round_1_and_filters_once_more_to_who_was_not_heard() -> None:
    history = rounds(METHOD, members(PARTS), rounds=3, lose=lambda round, i: i == 2 and round == 1)
    filters = 4 * FILTERS * (WIDTH + 1)
    sums = 8 * (CLASSES + CLASSES * 320 + 320 * 321 // 2 + 1)
    moments, moves = 8 * (1 + WIDTH + WIDTH * (WIDTH + 1) // 2), 4 * 8 * FILTERS * (WIDTH + 1)
    by_client = [round.record["bytes_by_client"] for round in history]
    assert by_client[0]["0"] == {"down": 5 * filters, "up": moments + moves + sums}
    assert [by_client[1][i]["up"] for i in "012"] == [8, 8, sums]
    assert by_client[1]["2"]["down"] - by_client[1]["0"]["down"] == filters - 1
    assert by_client[2]["2"]["down"] == by_client[2]["0"]["down"]
    (without,) = rounds(METHOD, members(PARTS[:2]), rounds=1)
    for name, tensor in without.after["map"].items():
        assert torch.equal(history[2].states[2]["map"][name], tensor), "of those who were heard in round 1"


def test_without_patches_filters_are_as_they_were_drawn() -> None:
    _, second = rounds(METHOD, members(PARTS), rounds=2, lose=lambda round, _: round == 1)
    drawn = second.after["map"]
    assert drawn["directions"].shape == (FILTERS, 2, SIDE, SIDE)
    assert not drawn["offsets"].unique().numel() > 1
    assert FeatureMap(drawn)(PARTS[0].x).std() > 0
    assert "solution" in second.after


@pytest.mark.parametrize(
    ("exchange", "name", "factor", "more"),
    [
        ("patches", "counts", 1, -1),
        ("patches", "products", -1, 0),
        ("patches", "products", 1000, 0),
        ("centers 3", "counts", 1, 1),
        ("centers 3", "sums", 1000, 0),
    ],
)
def test_sums_that_no_patches_can_have_are_left_out(exchange: str, name: str, factor: int, more: int) -> None:
    class Spoils(Watch):
        """Client 1's upload of the exchange is another one, or is missing."""

        change: Callable[[Tensor], Tensor] | None = None

        def run(self, jobs: Any, done: Any) -> list[JobResult]:
            outcomes = super().run(jobs, done)
            if self.federation.server.exchange != exchange:
                return outcomes
            sums: Any = outcomes[1].message["patches"]
            message = {"patches": {**sums, name: self.change(sums[name])}} if self.change else {}
            return [outcomes[0], replace(outcomes[1], message=message), outcomes[2]]

    class Changes(Spoils):
        @staticmethod
        def change(tensor: Tensor) -> Tensor:
            return tensor * factor + more

    missing, changed, honest = (
        rounds(METHOD, members(PARTS), rounds=1, watch=watch)[0] for watch in (Spoils, Changes, Watch)
    )
    assert same(changed.after["map"], missing.after["map"])
    assert not same(changed.after["map"], honest.after["map"])
    assert changed.record["server"]["patches_left_out"] == 1


def test_what_does_not_go_with_patches_is_one_line() -> None:
    def run(**options: Any) -> None:
        federation(ClosedForm(map="patches", features=36, **options), members(PARTS), rounds=1)[0].run()

    with pytest.raises(ConfigError, match=r"^closed-form: expected another map than 'patches' where clients .* \(keep"):
        run(keep_sums=True)
    with pytest.raises(ConfigError, match=r"^closed-form: expected unit_features = false with map = 'patches', whose"):
        run(unit_features=True)
    with pytest.raises(ConfigError, match=r"^expected another map than 'patches' where clients are to be forgotten"):
        METHOD.remembered({})
    flat = LabeledSamples(normal(6, 5), torch.arange(6) % CLASSES)
    with pytest.raises(ConfigError, match=r"^closed-form: expected inputs \(C, H, W\) .* got \(5,\) of torch.float32$"):
        federation(METHOD, [Client(nn.Linear(5, CLASSES), flat, flat)], rounds=1)[0].run()


def test_own_networks_train_beside_it() -> None:
    method = OwnPlusCommon(map="patches", features=36)
    first, _ = rounds(method, members(PARTS), rounds=1)
    assert first.record["samples"] == sum(len(part) for part in PARTS), "in one of the exchanges"
    assert "solution" in first.after


test_conformance = testing.conformance(
    ClosedForm(map="patches", features=16),
    counted="statistics",
    no_effect={"views": "nothing is augmented here"},
    skip={
        "missing_upload_is_not_zero": oracles.FEWER_VARY,
        "hyperparameters_matter": "those of closed-form, of which some do not go with patches",
    },
)
