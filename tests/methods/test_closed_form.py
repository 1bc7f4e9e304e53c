"""ClosedForm: sums sent once, one solution for all, and whose class shares count."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.message import State, from_bytes, get_group, nbytes, to_bytes
from polyfed.core.method import TrainingResult
from polyfed.core.releases import Release
from polyfed.core.settings import Privacy
from polyfed.data.samples import LabeledSamples, TableColumns
from polyfed.data.text import Vocabulary
from polyfed.engine.privacy_ledger import compute_epsilon
from polyfed.engine.task import Task
from polyfed.errors import ConfigError
from polyfed.functional.class_statistics import add, from_class_means, sum_rows
from polyfed.functional.closed_forms import discriminant
from polyfed.functional.feature_maps.feature_map import FeatureMap, draw_map
from polyfed.methods import ClosedForm, Local
from polyfed.plugins.privacy import UploadPrivacy
from tests.helpers import oracles, regression
from tests.helpers.toys import CLASSES, Round, Watch, federation, rounds, samples, worker

SMALL = ClosedForm(features=20, shrinkage=0.3)
MEANS = replace(SMALL, second_moments="clients")
RIDGE = replace(SMALL, classifier="ridge")
OWNED = ((0, 1), (1, 2), (0, 1, 2), (0,))
MIXED = ["bn", "broad", "wide", "shallow"]
UPLOAD = 8 * (CLASSES + CLASSES * 20 + 20 * 21 // 2 + 1)
SOLUTION = 8 * (CLASSES * 20 + 2 * CLASSES + 1)


def rows() -> list[LabeledSamples]:
    return [samples(9 + i, i, own) for i, own in enumerate(OWNED)]


def members(train: Sequence[LabeledSamples] | None = None) -> list[Client]:
    return [Client(MIXED[i % 4], one, samples(30, 50 + i)) for i, one in enumerate(train or rows())]


def solved(round: Round) -> tuple[Tensor, Tensor]:
    return round.after["solution"]["weight"], round.after["solution"]["bias"]


def by_hand(round: Round, parts: Sequence[LabeledSamples]) -> tuple[Tensor, Tensor]:
    """W and b of all rows in one place."""
    x, y = (torch.cat([getattr(part, name) for part in parts]) for name in "xy")
    return discriminant(sum_rows(FeatureMap(round.states[0]["map"])(x), y, CLASSES), SMALL.shrinkage)


def close(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_sums_go_up_once_and_the_solution_comes_down_when_it_changes() -> None:
    first, second, third = rounds(SMALL, members(), rounds=3)
    for i in range(4):
        assert [nbytes(round.down[i]) for round in (first, second, third)] == [0, 1 + SOLUTION, 1]
        assert [nbytes(round.up[i]) for round in (first, second, third)] == [UPLOAD, 8, 8]
    close(solved(first), by_hand(first, rows()))
    close(solved(third), solved(first))
    drawn = first.states[0]["map"]
    assert all(torch.equal(state["map"][name], drawn[name]) for state in first.states.values() for name in drawn)


@pytest.mark.parametrize(
    ("shape", "features", "told"),
    [
        ((1, 8, 8), 2000, "at most 1024 features"),
        ((1, 2, 2), 4, "at least 3 x 3 pixels"),
        ((4, 9), 20, "expected inputs"),
    ],
    ids=str,
)
def test_photographs_need_images(shape: tuple[int, ...], features: int, told: str) -> None:
    x, y = torch.randn(6, *shape), torch.arange(6) % CLASSES
    clients = [Client(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), CLASSES)), (x, y), (x, y))]
    with pytest.raises(ConfigError, match=told):
        pf.Federation(clients, ClosedForm(map="photographs", features=features), pf.Training(rounds=1)).run()


def test_a_row_counts_with_the_mean_over_its_views() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (12, 1, 8, 8), generator=g, dtype=torch.uint8)
    y = torch.arange(12) % CLASSES
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    training = pf.Training(rounds=1, augmentation="crop-flip")

    def run(method: ClosedForm) -> State:
        fed = pf.Federation([Client(network, (x, y), (x, y))], method, training)
        fed.run()
        return fed.server.state

    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    crops = [padded[:, :, a : a + 8, b : b + 8] for a, b in ((1, 1), (0, 0), (0, 2), (2, 0), (2, 2))]
    rows = torch.cat([*crops, *(crop.flip(3) for crop in crops)])
    phi = draw_map(rows[:1].float(), 20, torch.Generator(), photographs=True)
    expected = sum_rows(phi(rows / 255), y.repeat(10), CLASSES)
    sums = get_group(run(SMALL), "sums")
    assert torch.equal(sums["counts"], y.bincount())
    torch.testing.assert_close(sums["sums"], expected["sums"] / 10, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sums["products"], expected["products"] / 10, rtol=1e-9, atol=1e-9)
    assert not torch.equal(get_group(run(replace(SMALL, views=False)), "sums")["sums"], sums["sums"])


def test_class_means_alone_are_solved_by_how_they_vary_over_clients() -> None:
    first, second = rounds(MEANS, members(), rounds=2)
    assert [nbytes(first.up[i]) for i in range(4)] == [8 * (CLASSES + CLASSES * 20 + 1)] * 4
    phi = FeatureMap(first.states[0]["map"])
    of_each = [from_class_means(sum_rows(phi(own.x), own.y, CLASSES, products=False)) for own in rows()]
    close(solved(second), discriminant(functools.reduce(add, of_each), MEANS.shrinkage))
    assert not torch.equal(solved(second)[0], by_hand(first, rows())[0])


def test_who_is_alone_sends_nothing_and_has_products_of_rows() -> None:
    for one, other in zip(
        *(rounds(pf.alone(m), members(), rounds=2)[-1].states.values() for m in (SMALL, MEANS)), strict=True
    ):
        assert torch.equal(one["solution"]["weight"], other["solution"]["weight"])


def test_class_means_alone_are_of_classes_and_not_of_texts() -> None:
    with pytest.raises(ConfigError, match=r"closed-form needs.*means are of classes"):
        pf.Federation(regression.clients(), MEANS, pf.Training(rounds=1)).run()
    y = torch.arange(12) % 2
    network = _Floats(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 2)))
    with pytest.raises(ConfigError, match="second_moments = 'clients' does nothing for ids of words"):
        pf.Federation([Client(network, (TEXTS, y), (TEXTS, y))], MEANS, pf.Training(rounds=1)).run()


def test_ridge_regression_chooses_among_own_classes_by_scores_as_they_are() -> None:
    fed, watch = federation(RIDGE, members(), rounds=2)
    fed.run()
    at = worker(fed, 1)
    RIDGE.receive(at, RIDGE.broadcast(fed.server, 1))
    x = samples(30, 7).x
    scores = FeatureMap(at.state["map"])(x).double() @ solved(watch.rounds[-1])[0]
    own = scores[:, list(OWNED[1])].log_softmax(dim=1)
    torch.testing.assert_close(RIDGE.predict(at.model, x, at.state)[:, list(OWNED[1])], own)
    stranger = {**at.state, "own shares": torch.zeros_like(at.state["own shares"])}  # of classes nobody else has
    for method, state in ((replace(RIDGE, prior="federation"), at.state), (RIDGE, stranger)):
        torch.testing.assert_close(method.predict(at.model, x, state), scores.log_softmax(dim=1))
    with pytest.raises(ConfigError, match="classifier = 'ridge' does nothing for numbers"):
        pf.Federation(regression.clients(), RIDGE, pf.Training(rounds=1)).run()


@pytest.mark.parametrize(
    ("method", "chosen"), [(SMALL, True), (replace(SMALL, temperature=0.3), False), (RIDGE, False)]
)
def test_a_temperature_is_chosen_where_scores_are_multiplied_by_it(method: ClosedForm, chosen: bool) -> None:
    clients = [Client(MIXED[i], own, validation=samples(20, 70 + i)) for i, own in enumerate(rows())]
    last = rounds(method, clients, rounds=2)[-1]
    assert ["temperature" in last.states[i] for i in range(4)] == [chosen] * 4


def test_who_was_not_heard_sends_again_and_everybody_gets_the_new_solution() -> None:
    history = rounds(SMALL, members(), rounds=4, lose=lambda round, i: i == 3 and round < 3)
    close(solved(history[0]), by_hand(history[2], rows()[:3]))
    assert [nbytes(round.up[3]) for round in history] == [UPLOAD, UPLOAD, UPLOAD, 8]
    close(solved(history[2]), by_hand(history[2], rows()))
    assert [nbytes(round.down[0]) for round in history] == [0, 1 + SOLUTION, 1, 1 + SOLUTION]
    assert [nbytes(round.down[3]) for round in history] == [0, SOLUTION, SOLUTION, 1 + SOLUTION]


def test_sums_that_no_rows_can_have_are_left_out() -> None:
    (first,) = rounds(SMALL, members(), rounds=1)
    server = federation(SMALL, members(), rounds=1)[0].server
    sums = {**first.up[0]["sums"], "products": torch.zeros(210, dtype=torch.float64)}
    uploads = {**first.up, 0: {**first.up[0], "sums": sums}}
    SMALL.aggregate(server, {0: uploads[0]})
    assert "solution" not in server.state
    assert server.log["sums_left_out"] == 1
    SMALL.aggregate(server, uploads)
    (others,) = rounds(SMALL, members(), rounds=1, lose=lambda _, i: i == 0)
    close((server.state["solution"]["weight"], server.state["solution"]["bias"]), solved(others))
    assert "heard" in SMALL.broadcast(server, 0), "so that they are not sent again"


@pytest.mark.parametrize(("scale", "offset"), [(1e30, 0.0), (1.0, 1e4)])
@pytest.mark.parametrize("shape", [(8,), (1, 32)], ids=["numbers", "series"])
def test_inputs_of_any_size_are_solved(shape: tuple[int, ...], scale: float, offset: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(120, *shape, generator=g)
    y = (x.flatten(1)[:, :4].sum(dim=1) > 0).long() if len(shape) == 1 else (x.flatten(1).std(dim=1) > 1).long()
    x = scale * x + offset
    made = [
        pf.Client(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 2)), (x[k::3], y[k::3]), (x, y)) for k in range(3)
    ]
    run = pf.Federation(made, ClosedForm(features=64), pf.Training(rounds=2)).run()
    assert run.result["refused"] == 0
    assert run.result["accuracy"] > 0.8


@pytest.mark.parametrize("gone", range(4))
@pytest.mark.parametrize("method", [SMALL, MEANS], ids=["rows", "means"])
def test_to_forget_is_exact_in_whatever_order_sums_came(gone: int, method: ClosedForm) -> None:
    """Also where a checkpoint has sorted their names."""
    kept = replace(method, keep_sums=True)
    order = [2, 0, 3, 1]

    def heard(who: Sequence[int]) -> State:
        return rounds(kept, members(), rounds=4, lose=lambda at, i: i not in who or order[at - 1] != i)[-1].after

    state = kept.forget(from_bytes(to_bytes(heard(order))), gone)
    without = heard([i for i in order if i != gone])
    for name in ("sums", "solution"):
        torch.testing.assert_close(state[name], without[name], rtol=0, atol=0)
    assert kept.forget(state, gone) is state
    assert sorted(kept.remembered(state)) == sorted({*order} - {gone})


def with_forgotten(train: Sequence[LabeledSamples], after: Mapping[int, int]) -> list[Round]:
    """Four rounds, after some of which a client is forgotten."""
    kept = replace(SMALL, keep_sums=True)

    class Forgets(Watch):
        def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
            super().round(record, remaining_seconds)
            if record["round"] in after:
                server = self.federation.server
                server.state = kept.forget(server.state, after[record["round"]])

    return rounds(kept, members(train), rounds=4, watch=Forgets)


def test_who_is_forgotten_sends_nothing_more_and_receives_the_new_solution() -> None:
    history = with_forgotten(rows(), {2: 3, 3: 0})
    assert [nbytes(round.up[3]) for round in history] == [UPLOAD, 8, 8, 8]
    close(solved(history[2]), by_hand(history[2], rows()[:3]))
    close(solved(history[3]), by_hand(history[3], rows()[1:3]))
    for i in range(4):
        assert [nbytes(round.down[i]) for round in history] == [0, *[1 + SOLUTION] * 3]
        assert torch.equal(history[3].states[i]["solution"]["weight"], solved(history[3])[0])


def test_what_cannot_be_forgotten_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^expected method\.keep_sums = true, so that .* got false$"):
        SMALL.remembered({})
    with pytest.raises(ConfigError, match=r"^expected a method that can .*, such as closed-form, got 'local'$"):
        Local().remembered({})


def test_nothing_is_taken_from_who_was_forgotten_before_it_was_heard() -> None:
    kept = replace(SMALL, keep_sums=True)
    (round,) = rounds(kept, members(), rounds=1)
    fed, _ = federation(kept, members(), rounds=1)
    fed.server.state = kept.forget(fed.server.state, 2)
    kept.aggregate(fed.server, round.up)
    assert sorted(kept.remembered(fed.server.state)) == [0, 1, 3]
    assert "heard" in kept.broadcast(fed.server, 2)


def predicted(method: ClosedForm) -> list[set[int]]:
    """The classes that each client predicts on rows of all classes."""
    fed, _ = federation(method, members(), rounds=2)
    fed.run()
    found = []
    for client in fed.clients:
        assert (client.state["own shares"] * client.n).round().tolist() == (
            client.data.train.y.bincount(minlength=CLASSES).tolist()
        )
        found.append({*method.predict(None, client.data.test.x, client.state).argmax(dim=1).tolist()})
    return found


def test_classes_that_a_client_lacks_are_predicted_by_the_federations_shares_alone() -> None:
    assert all(found <= {*own} for found, own in zip(predicted(SMALL), OWNED, strict=True))
    other = SMALL.alternative_predictors["federation"]
    assert isinstance(other, ClosedForm)
    assert predicted(other) == [{0, 1, 2}] * 4
    assert other.alternative_predictors == {"own": SMALL}


def test_numbers_are_predicted_by_ridge_regression() -> None:
    run = pf.Federation(regression.clients(), ClosedForm(shrinkage=0.01), pf.Training(rounds=1)).run()
    assert run.result["rmse"] < 0.6  # their spread is 2.3


BOUNDED = ClosedForm(features=20, shrinkage=0.3, unit_features=True)


def private(**settings: Any) -> list[Any]:
    return [UploadPrivacy(Privacy(**settings))]


def test_bounded_sums_are_those_of_unit_features() -> None:
    (round,) = rounds(BOUNDED, members(), rounds=1)
    close(solved(round), by_hand(round, rows()))
    norms = FeatureMap(round.states[0]["map"])(rows()[0].x).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(len(norms)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("second_moments", ["rows", "clients"])
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_bounded_sums_that_so_many_rows_cannot_have_are_left_out(
    noise: float, second_moments: Literal["rows", "clients"]
) -> None:
    method = replace(BOUNDED, second_moments=second_moments)
    plugins = private(noise_multiplier=noise) if noise else []
    (round,) = rounds(method, members(), rounds=1, plugins=plugins)
    last = max(round.up)
    sums = dict(round.up[last]["sums"])
    beyond = {last: {**round.up[last], "sums": {**sums, "sums": torch.full_like(sums["sums"], 9e5)}}}
    found = []
    for up in ({**round.up, **beyond}, {i: up for i, up in round.up.items() if i != last}):
        fed, _ = federation(method, members(), rounds=1, plugins=plugins)
        method.aggregate(fed.server, up)
        found.append((fed.server.state["solution"]["weight"], fed.server.log.get("sums_left_out")))
    assert torch.equal(found[0][0], found[1][0])
    assert [left for _, left in found] == [1, None]
    assert not torch.equal(found[0][0], solved(round)[0])


@pytest.mark.parametrize("method", [SMALL, BOUNDED])
def test_one_row_with_a_huge_value_counts_as_zeros(method: ClosedForm) -> None:
    own = rows()
    own[0].x[0] = -3.4e38
    (round,) = rounds(method, members(own), rounds=1)
    assert not round.record["refused"]
    assert FeatureMap(round.states[0]["map"])(own[0].x)[0].tolist() == [0] * 20


def test_sums_with_noise_are_the_same_whenever_they_are_sent_and_count_once() -> None:
    history = rounds(
        BOUNDED, members(), rounds=4, plugins=private(noise_multiplier=2.0), lose=lambda round, i: i == 3 and round < 3
    )
    first, again = (history[i].up[3]["sums"] for i in (0, 2))
    plain = rounds(BOUNDED, members(), rounds=1)[0].up[3]["sums"]
    for name in plain:
        assert torch.equal(first[name], again[name])
        assert first[name].dtype == torch.float64
        assert not (first[name] == plain[name]).any()
    epsilon = compute_epsilon([Release("sums", "sample", 2.0)], 1e-5)
    assert [round.record["epsilon"] for round in history] == [{"sample": pytest.approx(epsilon)}] * 4


def test_noise_by_a_secret_is_a_function_of_all_that_is_sent() -> None:
    (round,) = rounds(BOUNDED, members(), rounds=1)

    def sent(secret: int, noise: float, number: int, method: ClosedForm = BOUNDED) -> Tensor:
        fed, _ = federation(method, members(), rounds=1)
        at = worker(fed, number)
        at.secret = bytes([secret]) * 32
        at.privacy = Privacy(noise_multiplier=noise)
        at.context = method.receive(at, {})
        sums = get_group(method.upload(at, TrainingResult()), "sums")["sums"]
        exact = get_group(round.up[number], "sums")["sums"]
        return (sums - exact) / noise

    first = sent(1, 2.0, 0)
    assert torch.equal(first, sent(1, 2.0, 0))
    means = sent(1, 2.0, 0, replace(BOUNDED, second_moments="clients")) * (0.95 / 0.7) ** 0.5
    for other in (sent(2, 2.0, 0), sent(1, 3.0, 0), sent(1, 2.0, 1), means):
        assert not torch.allclose(other, first, atol=1e-3)


def test_unit_features_are_of_classes_and_of_inputs_that_are_floats() -> None:
    with pytest.raises(ConfigError, match=r"closed-form needs.*unit_features bound no number to predict"):
        pf.Federation(regression.clients(), BOUNDED, pf.Training(rounds=1)).run()
    y = torch.arange(12) % 2
    network = _Floats(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 2)))
    with pytest.raises(ConfigError, match="closed-form: expected inputs of floats with unit_features, got ids"):
        pf.Federation([Client(network, (TEXTS, y), (TEXTS, y))], BOUNDED, pf.Training(rounds=1)).run()


TEXTS = torch.randint(6, (12, 5), generator=torch.Generator().manual_seed(0))
TABLE = torch.stack([torch.randn(12), torch.randint(3, (12,)).float()], dim=1)


@pytest.mark.parametrize(
    ("x", "about", "name", "width"),
    [
        (TEXTS, {"vocabulary": Vocabulary(tuple("abcd"), 5)}, "sums", 6),
        (TABLE, {"columns": TableColumns(((), ("a", "b")))}, "projection", 4),
    ],
    ids=["words", "categories"],
)
def test_maps_know_the_tasks_words_and_categories(x: Tensor, about: dict[str, Any], name: str, width: int) -> None:
    y = torch.arange(12) % 2
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x.shape[1], 2))
    fed = pf.Federation([Client(_Floats(network), (x, y), (x, y))], SMALL, pf.Training(rounds=1), task=Task(2, **about))
    fed.run()
    if name == "sums":
        assert fed.server.state["sums"][name].shape == (2, width)
        assert "products" not in fed.server.state["sums"]
        return
    worker = fed.clients[0]
    assert worker.state["map"][name].shape == (width, 20)


class _Floats(torch.nn.Module):
    """A network that takes whole numbers, too."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.inner(x.float())
        return scores


test_conformance = testing.conformance(
    methods.ClosedForm(features=12),
    # in round 2 W, b, counts and their number, and that the sums have come; the number comes back
    expected_bytes=lambda *_: (8 * (3 * 12 + 3 + 3 + 1) + 1, 8),
    counted="statistics",
    changed_values={"map": "random"},
    no_effect={"keep_sums": "only the server keeps more", "views": "nothing is augmented here"},
    skip={"missing_upload_is_not_zero": oracles.FEWER_VARY},
)
