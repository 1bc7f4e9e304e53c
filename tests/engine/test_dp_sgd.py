"""Gradients bounded row by row: against those of single rows by autograd, and against plain training; accounted for."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.method import Method, Phase
from polyfed.core.releases import Release
from polyfed.core.settings import Privacy, Training
from polyfed.data.samples import LabeledSamples, TargetScale
from polyfed.engine import dp_sgd
from polyfed.engine.dp_sgd import releases
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import train
from polyfed.engine.privacy_ledger import compute_epsilon
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FedAvg, FedGH, FedIN, FedProx, FedSelect, Local
from polyfed.models import build
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, records
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow

TWO = Training(rounds=2, batch_size=8, lr=0.1)
NOISY: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}


def federation(method: Any = None, *, executor: str = "serial", out: Path | None = None, **settings: Any) -> Federation:
    method = method or FedAvg()
    world = ConformanceKit(method=method).world()
    return world.federation(method, TWO, privacy=Privacy(**settings), executor=executor, out=out)


def ran(method: Any = None, **options: Any) -> Federation:
    made = federation(method, **options)
    made.run()
    return made


# draws by a secret ---------------------------------------------------------------------------------------------------


def trained(secret: int | None, settings: Privacy, **options: Any) -> dict[str, torch.Tensor]:
    """The weights of a client after one training by its secret."""
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) + options.get("shift", 0.0)
    client = Client(nn.Linear(3, 2), (rows, torch.arange(40) % 2))
    client.id, client.classes, client.seed, client.round = 0, 2, 5, options.get("round", 1)
    client.privacy, client.training = settings, Training(batch_size=10)
    client.secret = None if secret is None else secret.to_bytes(32, "little")
    network = nn.Linear(3, 2)
    nn.init.constant_(network.weight, options.get("start", 0.1))
    nn.init.zeros_(network.bias)
    client.bound = network
    train(client, FedAvg(), {})
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def test_noise_and_batches_are_the_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one secret the same once more; with another, in another round, from other weights or rows, none of it."""
    seen: list[Any] = []
    plain = dp_sgd.clip_and_noise
    monkeypatch.setattr(
        dp_sgd, "clip_and_noise", lambda update, *rest: seen.append((update, plain(update, *rest))) or seen[-1][1]
    )

    def drawn(secret: int, **options: Any) -> torch.Tensor:
        """The noise of the first steps."""
        seen.clear()
        trained(secret, Privacy(**NOISY), **options)
        return torch.cat([(after["weight"] - before["weight"]).flatten() for before, after in seen])

    first = drawn(1)
    assert torch.equal(first, drawn(1))
    assert float(first.std()) == pytest.approx(1.0, rel=0.5)
    for other in (drawn(2), drawn(1, round=2), drawn(1, start=0.2), drawn(1, shift=1e-3)):
        assert not torch.equal(first, other)
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.6


def test_batches_made_by_chance_are_the_secrets() -> None:
    """Without noise, and a bound that nothing reaches, it is the rows in the batches alone that differ."""
    settings = Privacy(max_grad_norm=1e6)
    one, again, other, seeded = (trained(secret, settings)["weight"] for secret in (1, 1, 2, None))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, seeded)


# what is counted, and what is refused -----------------------------------------------------------------------------


def test_what_training_gives_away() -> None:
    three, phases = Training(batch_size=8), [Phase(2), Phase(1)]
    chance, dealt = Privacy(**NOISY), Privacy(**NOISY, sampling="shuffled")
    assert releases(chance, three, phases, 20) == [Release("training", "sample", 1.0, 8, 20, True, 3 * 3)]
    assert releases(dealt, three, phases, 20) == [Release("training", "sample", 1.0, times=3)]
    assert releases(chance, three, phases, 5) == [Release("training", "sample", 1.0, 5, 5, True, 3)]
    assert releases(Privacy(max_grad_norm=1.0), three, phases, 20) == releases(chance, three, [], 20) == []


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (FedProx(), "whose loss is a mean over rows and of nothing else, got fedprox"),
        (FedIN(mu=0.0), "got fedin, which sends 'features' of a client's rows as it is"),
        (FedGH(), "got fedgh, which sends 'lars'"),
        (FedSelect(), "expected training on all rows of a client, got fedselect"),
    ],
)
def test_other_losses_are_refused_before_anything_is_written(tmp_path: Path, method: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        federation(method, **NOISY, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_opacus_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", None)
    with pytest.raises(ConfigError, match=r"expected the package 'opacus'.*pip install 'polyfed\[privacy\]'"):
        federation(max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**NOISY, "target_epsilon": 1.0}, "target_epsilon: expected no noise beside it"),
        ({"noise_multiplier": 1.0}, "noise_multiplier: expected max_grad_norm above 0 beside it"),
        ({"target_epsilon": 1.0}, "target_epsilon: expected upload_clip_norm or max_grad_norm above 0"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        federation(**settings)


# training, by Opacus ----------------------------------------------------------------------------------------------


class TestTraining:
    @pytest.fixture(autouse=True)
    def _packages(self) -> None:
        pytest.importorskip("opacus")
        pytest.importorskip("dp_accounting")

    @pytest.mark.parametrize(
        "method", others_slow([FedAvg(), Local(), FedIN(mu=0.0)], quick=[FedAvg()]), ids=lambda method: method.name
    )
    def test_without_a_bound_and_noise_it_is_plain_training(self, method: Method) -> None:
        plain = ran(method)
        found = ran(method, max_grad_norm=1e9, sampling="shuffled")
        ours, theirs = all_state(found), all_state(plain)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.allclose(tensor.double(), theirs[name].double(), atol=1e-5), name
        assert "epsilon" not in found.history[-1]

    def test_convolutions_that_lie_channels_last(self) -> None:
        """Opacus takes wrong gradients of these, so that most networks of the zoo were refused."""
        x = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        data = x, torch.arange(12) % 3

        def trained(privacy: Privacy | None = None) -> nn.Module:
            clients = [Client("net", data, data)]
            builders = {"net": lambda: build("digits-cnn4", (1, 8, 8), 3)}
            return Federation(clients, Local(), TWO, plugins=[privacy or Privacy()], builders=builders).run().models[0]

        plain = trained().state_dict()
        bounded = trained(Privacy(max_grad_norm=1e9, sampling="shuffled")).state_dict()
        for name, tensor in plain.items():
            assert torch.allclose(bounded[name], tensor, atol=1e-6), name
            assert bounded[name].stride() == tensor.stride(), name

    def test_a_step_is_the_mean_of_bounded_gradients(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 3))
        x, y = torch.randn(20, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
        one = Training(rounds=1, batch_size=1000, lr=1.0)

        def flat(module: nn.Module) -> torch.Tensor:
            return torch.cat([p.detach().flatten() for p in module.parameters()])

        def moved(**settings: Any) -> torch.Tensor:
            made = Federation([Client(net, (x, y), (x, y))], Local(), one, plugins=[Privacy(**settings)])
            return flat(made.run().models[0]) - flat(net)

        rows = []
        for place in range(len(x)):
            loss = nn.functional.cross_entropy(net(x[place : place + 1]), y[place : place + 1])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
        each = torch.stack(rows)
        bound = float(each.norm(dim=1).median())
        expected = -(each * (bound / each.norm(dim=1).clamp(min=bound))[:, None]).mean(0)
        for sampling in ("shuffled", "poisson"):
            found = moved(max_grad_norm=bound, sampling=sampling)
            assert torch.allclose(found, expected, atol=1e-5), sampling
        noise = (moved(max_grad_norm=bound, noise_multiplier=50.0) - expected) * len(x) / (50.0 * bound)
        assert float(noise.std()) == pytest.approx(1.0, rel=0.1)
        assert float(noise.mean()) == pytest.approx(0.0, abs=4 / len(noise) ** 0.5)

    @pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
    @pytest.mark.parametrize("value", [-3.4e38, 1e25])
    def test_a_row_without_a_finite_gradient_has_none_and_is_not_told(self, value: float, sampling: str) -> None:
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
        x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
        x[0] = value

        def moved(rows: slice, lr: float) -> tuple[torch.Tensor, Any]:
            one = Training(rounds=1, batch_size=1000, lr=lr)
            plugins = [Privacy(max_grad_norm=0.5, sampling=sampling)]
            run = Federation([Client(net, (x[rows], y[rows]), (x, y))], FedAvg(), one, plugins=plugins).run()
            weights = [p.detach().flatten() for p in run.models[0].parameters()]
            return torch.cat(weights) - torch.cat([p.detach().flatten() for p in net.parameters()]), run.history[0]

        found, record = moved(slice(None), 1.0)
        others, _ = moved(slice(1, None), 5 / 6)  # the mean of five is over six
        assert not record["refused"]
        assert torch.allclose(found, others, atol=1e-6) or value == 1e25  # whose gradient has a direction
        assert found.norm() > 0

    @pytest.mark.parametrize("executor", others_slow(["processes", "vectorized"], quick=["processes"]))
    def test_all_executors_agree(self, executor: str) -> None:
        serial, other = ran(**NOISY), ran(**NOISY, executor=executor)
        assert difference(all_state(serial), all_state(other)) is None
        assert records(serial) == records(other)

    def test_a_resumed_run_is_the_uninterrupted_one(self, tmp_path: Path) -> None:
        whole, broken = ran(**NOISY), federation(**NOISY, out=tmp_path / "run")
        broken.loggers.append(Interrupt(1))
        with pytest.raises(RunInterrupted):
            broken.run()
        resumed = federation(**NOISY, out=tmp_path / "run")
        resumed.run(resume=True)
        assert difference(all_state(resumed), all_state(whole)) is None
        assert records(resumed) == records(whole)

    def test_records_tell_what_was_drawn(self) -> None:
        chance, dealt = ran(**NOISY), ran(**NOISY, sampling="shuffled")
        entry = next(e for e in chance.history[0]["releases"] if 0 in e["clients"])
        held = chance.clients[0].n
        assert (entry["drawn"], entry["held"], entry["poisson"]) == (8, held, True)
        assert entry["times"] == math.ceil(held / 8)
        planned = sum(8 * math.ceil(client.n / 8) for client in chance.clients)
        assert chance.history[0]["samples"] == planned, "how many rows were drawn is not told"
        twice = compute_epsilon([Release("training", "sample", 1.0, times=2)], 1e-5)
        assert dealt.history[1]["epsilon"]["sample"] == twice, "a row is in one batch of each epoch"
        assert chance.history[0]["epsilon"]["sample"] < chance.history[1]["epsilon"]["sample"]
        loud = ran(**{**NOISY, "noise_multiplier": 2.0})
        assert loud.history[1]["epsilon"]["sample"] < chance.history[1]["epsilon"]["sample"]

    def test_numbers_that_a_client_standardized_by_its_own_rows_are_refused(self) -> None:
        rows = LabeledSamples(torch.randn(9, 3), torch.randn(9)).standardized(TargetScale(2.0, 3.0))
        with pytest.raises(ConfigError, match=r"noise hides rows.*client 0.*standardized"):
            Federation([Client(nn.Linear(3, 1), rows, rows)], Local(), TWO, plugins=[Privacy(**NOISY)])

    def test_batchnorm_is_refused(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        data = torch.randn(8, 2, 2), torch.arange(8) % 3
        with pytest.raises(ConfigError, match=r"client 0 \('Sequential'\).*BatchNorm mixes them; take a network with"):
            Federation([Client(net, data, data)], FedAvg(), TWO, plugins=[Privacy(**NOISY)])

    def test_rows_that_look_at_others_are_refused(self) -> None:
        class Centered(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(4, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x.flatten(1)
                return self.head(x - x.mean(0))

        data = torch.randn(8, 2, 2), torch.arange(8) % 3
        with pytest.raises(ConfigError, match=r"the gradient of 'head.weight' for a row depends on the others"):
            Federation([Client(Centered(), data, data)], FedAvg(), TWO, plugins=[Privacy(**NOISY)])
