"""What leaves a client in place of its upload, and what arrives: against NumPy, with changes of both signs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, first_nonfinite, flatten, nbytes
from polyfed.core.method import Method
from polyfed.core.settings import Privacy
from polyfed.errors import ConfigError
from polyfed.methods import FedAvg, FedProx
from polyfed.plugins.frozen_parameters import FrozenParameters
from polyfed.plugins.privacy import UploadPrivacy
from tests.helpers.toys import NETS, Round, clients, federation, numpy_mean, rounds, shared


class Sends(Method):
    """A method whose weights go up as "model"."""

    delta_entries = ("model",)


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


NETWORK = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))  # its tensors: 0.weight, 0.bias, 1.weight, ...
DOWN: Message = {"model": {"0.weight": drawn(30, 40), "0.bias": drawn(30)}, "round": torch.tensor(2)}
CHANGE = {"0.weight": drawn(30, 40, seed=5, scale=0.1), "0.bias": drawn(30, seed=5, scale=0.3)}
UP: Message = {
    "model": {name: t + CHANGE[name] for name, t in DOWN["model"].items()},  # type: ignore[union-attr]
    "means": drawn(3, 16, scale=20.0),
    "labels": torch.arange(3, dtype=torch.int32),
    "bits": {"0.weight": torch.tensor([3, 4], dtype=torch.uint8), "0.bias": torch.tensor(True)},
    "strength": torch.tensor(0.25),
}


def client(round: int = 1, number: int = 0, network: nn.Module = NETWORK, **settings: Any) -> Client:
    made = Client(network, train=(torch.zeros(1, 40), torch.zeros(1, dtype=torch.int64)))
    made.id, made.round, made.bound, made.seed = number, round, network, 3
    made.privacy = Privacy(**settings)
    made.plugins = [UploadPrivacy(made.privacy)]
    return made


def through(at: Client, message: Message = UP, received: Message = DOWN) -> Message:
    """What leaves the client."""
    for plugin in at.plugins:
        message = plugin.encode(message, at, Sends(), received)
    return message


def numbers(group: Any) -> np.ndarray:
    tensors = group.values() if isinstance(group, Mapping) else [group]
    return np.concatenate([t.double().numpy().ravel() for t in tensors])


def change(message: Message) -> np.ndarray:
    return numbers(message["model"]) - numbers(DOWN["model"])


def same(a: Message, b: Message, *names: str) -> None:
    first, second = flatten({n: a[n] for n in names}), flatten({n: b[n] for n in names})
    assert first.keys() == second.keys()
    assert all(torch.equal(t, second[name]) and t.dtype == second[name].dtype for name, t in first.items())


def test_nothing_asked_for_is_the_very_same() -> None:
    assert through(client()) is UP


# bounds and noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.5, 2.0, 1e6])
def test_every_entry_is_clipped_on_its_own_and_weights_by_their_change(clip: float) -> None:
    found = through(client(upload_clip_norm=clip))
    whole = np.concatenate([CHANGE[name].double().numpy().ravel() for name in ("0.weight", "0.bias")])
    norm = np.linalg.norm(whole)
    np.testing.assert_allclose(change(found), whole * min(1, clip / norm), atol=1e-6)
    means = numbers(UP["means"])
    np.testing.assert_allclose(numbers(found["means"]), means * min(1, clip / np.linalg.norm(means)), rtol=1e-5)
    same(found, UP, "labels", "bits", "strength")
    assert list(found) == list(UP)


def test_noise_is_a_multiple_of_the_bound_on_every_number() -> None:
    at = [
        client(round=r, upload_clip_norm=0.5, upload_noise_multiplier=n)
        for r, n in ((1, 0.0), (1, 2.0), (1, 4.0), (2, 2.0))
    ]
    plain, noisy, twice, later = (through(each) for each in at)
    other = through(client(number=1, upload_clip_norm=0.5, upload_noise_multiplier=2.0))
    z = change(noisy) - change(plain)
    assert z.std() == pytest.approx(1.0, rel=0.1)
    assert abs(z.mean()) < 4 / math.sqrt(len(z))
    np.testing.assert_allclose(change(twice) - change(plain), 2 * z, atol=1e-5)
    means = numbers(noisy["means"]) - numbers(plain["means"])
    assert means.std() == pytest.approx(1.0, rel=0.35)
    for unlike in (later, other):  # streams of their own
        assert abs(np.corrcoef(z, change(unlike) - change(plain))[0, 1]) < 0.15
    assert abs(np.corrcoef(z[: len(means)], means)[0, 1]) < 0.4
    again = through(client(upload_clip_norm=0.5, upload_noise_multiplier=2.0))
    same(noisy, again, "model", "means")
    same(noisy, UP, "labels", "bits", "strength")


@pytest.mark.parametrize(
    ("up", "down", "what"),
    [
        ({"model": UP["model"]}, {}, "got whole weights, 'model/0.weight'"),
        ({"model": {"0.bias": drawn(30)}}, {"model": {"0.bias": drawn(31)}}, "got whole weights, 'model/0.bias'"),
        ({"model": {"1.running_var": drawn(30)}}, {"model": {"1.running_var": drawn(30)}}, "sends '1.running_var'"),
    ],
)
def test_weights_that_cannot_be_bounded_are_refused(up: Message, down: Message, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        through(client(upload_clip_norm=1.0), up, down)


def test_finite_stays_finite() -> None:
    up = {"model": {"0.bias": drawn(30, scale=1e30)}, "means": drawn(3, 16, scale=1e-30)}
    assert first_nonfinite(through(client(upload_clip_norm=1.0, upload_noise_multiplier=1.0), up)) is None


# noise by a secret --------------------------------------------------------------------------------------------------


def keyed(secret: int | None = 1, **options: Any) -> Client:
    made = client(upload_clip_norm=1.0, upload_noise_multiplier=0.5, network=NETWORK[0], **options)
    made.secret = None if secret is None else secret.to_bytes(32, "little")
    return made


def bare(message: Message, noisy: Message) -> np.ndarray:
    """What was added to the change of the weights, in units of its standard deviation."""
    calm = dict(through(client(upload_clip_norm=1.0, network=NETWORK[0]), message))
    return (numbers(noisy["model"]) - numbers(calm["model"])) / 0.5


def test_who_knows_the_seed_cannot_take_the_noise_of_a_secret_away() -> None:
    seeded, secret = through(keyed(None)), through(keyed(1))
    known = bare(UP, seeded)
    assert np.allclose(
        numbers(seeded["model"]) - 0.5 * known, numbers(secret["model"]) - 0.5 * bare(UP, secret), atol=1e-5
    )
    assert not np.allclose(known, bare(UP, secret), atol=0.1)
    assert abs(np.corrcoef(known, bare(UP, secret))[0, 1]) < 0.1
    assert bare(UP, secret).std() == pytest.approx(1, rel=0.1)
    assert not np.allclose(numbers(through(keyed(2))["model"]), numbers(secret["model"]), atol=0.1)


def test_the_same_upload_has_the_same_noise_and_no_other_has_it() -> None:
    first = bare(UP, through(keyed()))
    assert np.array_equal(first, bare(UP, through(keyed())))
    moved: Message = {**UP, "means": UP["means"] + 1e-3}  # type: ignore[operator]
    other_down = through(keyed(), received={**DOWN, "round": torch.tensor(3)})
    for noise in (
        bare(UP, through(keyed(round=2))),
        bare(UP, through(keyed(number=1))),
        bare(moved, through(keyed(), moved)),
        bare(UP, other_down),
    ):
        assert abs(np.corrcoef(first, noise)[0, 1]) < 0.1


FROZEN = ("extractor.linear.weight", "extractor.linear.bias")


def frozen() -> nn.Module:
    network = NETS["deep"]()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    return network


BUILDERS = {"frozen": frozen, "deep": NETS["deep"]}


def ran(method: Any, architectures: list[str], **options: Any) -> list[Round]:
    return rounds(method, clients(architectures, [8, 12, 10][: len(architectures)]), BUILDERS, **options)


@pytest.mark.parametrize("method", [FedAvg(), FedProx(), FedAvg(aggregation="same-shape")])
def test_they_stay_with_the_client_and_the_mean_is_of_all(method: Any) -> None:
    for round in ran(method, ["frozen"] * 3):
        before, after = shared(round.before), shared(round.after)
        assert before.keys() == after.keys()
        for i, message in round.up.items():
            assert set(before) - set(message["model"]) == set(FROZEN)
            assert nbytes(message) == 4 * sum(t.numel() for n, t in before.items() if n not in FROZEN) + 8
            assert set(round.down[i]["model"]) == set(before)
        assert round.record["bytes_up"] == sum(nbytes(message) for message in round.up.values())
        for name in after:
            expected = numpy_mean([round.trained[i] for i in range(3)], [8, 12, 10], name)
            np.testing.assert_allclose(after[name].numpy(), expected, atol=1e-6)


def test_they_are_not_noised() -> None:
    noise = Privacy(upload_clip_norm=1.0, upload_noise_multiplier=0.5)
    for round in ran(FedAvg(), ["frozen"] * 2, plugins=[noise]):
        sent = [name for entry in round.up[0].values() if not isinstance(entry, torch.Tensor) for name in entry]
        assert not set(FROZEN) & set(sent)
        assert all(torch.allclose(shared(round.before)[name], shared(round.after)[name], atol=1e-6) for name in FROZEN)


def test_only_frozen_ones_may_be_missing() -> None:
    """An upload that lacks another tensor is read as it came."""
    made, _ = federation(FedAvg(), clients(["frozen"]), BUILDERS)
    plugin = made.plugin("frozen parameters")
    assert isinstance(plugin, FrozenParameters)
    job: Any = type("Job", (), {"client": made.clients[0], "message": {"model": dict(frozen().state_dict())}})()
    read = plugin.decode({"model": {}}, job, FedAvg())
    assert set(read["model"]) == set(FROZEN)
    assert "model" not in plugin.decode({}, job, FedAvg())
