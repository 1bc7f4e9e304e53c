"""The clients' weights: what is kept, where, who may write, and what a checkpoint makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.model_factory import ModelFactory
from polyfed.core.settings import Training
from polyfed.engine import checkpoint
from polyfed.engine.snapshot import Snapshot, take_snapshot
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import RunError
from polyfed.methods import FedAvg
from polyfed.testing import ConformanceKit
from tests.helpers import toys
from tests.helpers.refusals import refusal


class Tied(nn.Module):
    """Two layers that share a matrix, a convolution, BatchNorm with its counter, and half-precision numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(5)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.register_buffer("short", torch.randn(3).half())
        self.register_buffer("empty", torch.empty(0))


BUILDERS: dict[str, Callable[[], nn.Module]] = {"tied": Tied, "plain": lambda: nn.Linear(4, 3)}


def networks() -> ModelFactory:
    return ModelFactory(BUILDERS, lambda model, variant: model, 0, torch.device("cpu"))


def made() -> WeightStore:
    return WeightStore(networks(), ["tied", "plain", "tied", "plain"])


def drawn(architecture: str, seed: int) -> dict[str, Tensor]:
    return networks().initial_state(architecture, owner=seed)


def alike(row: Any, tensors: dict[str, Tensor]) -> bool:
    return [*row] == [*tensors] and all(
        row[name].dtype == t.dtype and torch.equal(row[name], t) for name, t in tensors.items()
    )


def test_what_is_kept_are_copies_of_the_very_numbers() -> None:
    weights = drawn("tied", 3)
    weights["norm.running_mean"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 2.0])
    kept = made().restore(0, "tied", "", weights)
    assert all(torch.equal(kept[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in weights.items())
    bits = kept["norm.running_mean"].view(torch.int32)
    assert torch.equal(bits, weights["norm.running_mean"].view(torch.int32))
    assert kept["conv.weight"].is_contiguous()
    assert kept["short"] is kept["short"], "a score is known by its tensors"
    assert kept.is_intact
    kept["short"].zero_()
    assert not kept.is_intact
    assert weights["short"].any()


def test_only_the_networks_own_tensors_are_kept() -> None:
    store, weights = made(), drawn("plain", 1)
    with pytest.raises(ValueError, match="expected the tensors of 'plain', but only one side has 'bias'"):
        store.keep("plain", "", {"weight": weights["weight"]})
    with pytest.raises(ValueError, match=r"expected shape \(3,\) for 'bias', got \(1,\)"):
        store.keep("plain", "", {**weights, "bias": torch.ones(1)})
    with pytest.raises(ValueError, match=r"expected torch.float32 for 'bias', got torch.float64"):
        store.keep("plain", "", {**weights, "bias": weights["bias"].double()})
    with pytest.raises(ValueError, match="expected weights of clients 0 to 3, got client 4's"):
        store.restore(4, "plain", "", weights)
    with pytest.raises(ValueError, match="expected 'tied' as client 2's network, got 'plain'"):
        store.restore(2, "plain", "", weights)


@pytest.mark.parametrize(("times", "stays"), [(10, True), (9, False)])
def test_weights_lie_on_a_gpu_that_has_ten_times_their_room(
    times: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = networks()
    store = WeightStore(factory, ["tied", "plain"])
    free = times * store.nbytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    factory.device = torch.device("cuda")
    assert store.on_device is stays


# in a run ---------------------------------------------------------------------------------------------------------


def test_weights_are_replaced_and_never_written_into() -> None:
    held: list[tuple[Any, dict[str, Tensor]]] = []

    class Keeps(toys.Watch):
        def round(self, record: Any, remaining_seconds: float) -> None:
            held.extend((c.weights, {n: t.clone() for n, t in c.weights.items()}) for c in fed.clients if c.weights)

    fed = ConformanceKit(method=FedAvg()).usual.federation(FedAvg(), Training(rounds=4, batch_size=8))
    fed.loggers = [Keeps(fed)]
    fed.run()
    assert len(held) == 24
    assert all(alike(row, before) for row, before in held)


def test_who_is_given_other_weights_is_told() -> None:
    fed = ConformanceKit(method=FedAvg()).usual.federation(FedAvg(), Training(rounds=1, batch_size=8))
    fed.clients[2].weights = {}
    with pytest.raises(RunError, match="expected weights of the store as client 2's, got dict"):
        take_snapshot(fed)


# checkpoints ------------------------------------------------------------------------------------------------------


def snapshot(store: WeightStore, number: int = 1) -> Snapshot:
    names = ["tied", "plain", "tied", "plain"]
    weights = {i: store.restore(i, name, "", drawn(name, i)) for i, name in enumerate(names) if i != 3}
    return Snapshot(number, {}, {**weights, 3: None}, {i: {} for i in range(4)})


@pytest.mark.parametrize(
    ("owners", "builders", "said"),
    [
        (["tied", "plain"], {}, "expected weights of clients 0 to 1, got client 2's"),
        (["tied", "plain", "tied"], {"plain": lambda: nn.Linear(4, 2)}, r"expected shape \(2, 4\) for 'weight'"),
    ],
)
def test_a_checkpoint_of_other_networks_is_refused(
    tmp_path: Path, owners: list[str], builders: dict[str, Any], said: str
) -> None:
    nobody = checkpoint.forgetting(FedAvg(), ())
    checkpoint.write(tmp_path, snapshot(made()), {}, lambda number: None, nobody)
    other = ModelFactory({**BUILDERS, **builders}, lambda model, variant: model, 0, torch.device("cpu"))
    told = refusal(lambda: checkpoint.read(tmp_path / "round-000001", len(owners), WeightStore(other, owners), nobody))
    assert re.search(f"round-000001 does not fit this federation: .*{said}.*--overwrite", told)
