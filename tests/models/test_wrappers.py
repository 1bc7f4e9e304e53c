"""Networks in torch.compile, DataParallel and their like are refused: polyfed takes the network itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import polyfed as pf
from polyfed.errors import ConfigError
from polyfed.models import build

X, Y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


class FSDPModule(nn.Linear):
    """As torch.distributed.fsdp.fully_shard makes a layer's class."""


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "torch.compile": lambda: torch.compile(plain(), backend="eager"),  # type: ignore[return-value]
    "DataParallel": lambda: nn.Sequential(nn.DataParallel(plain())),
    "AveragedModel": lambda: AveragedModel(plain()),
    "TorchScript": lambda: torch.jit.script(plain()),
    "FSDP": lambda: nn.Sequential(FSDPModule(8, 3)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_network_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"client 0: expected a network in Python.* got one in {name}"):
        pf.Federation([pf.Client(WRAPPED[name](), (X, Y))], pf.methods.Local(), pf.Training(rounds=1))
    with pytest.raises(ConfigError, match=f"got one in {name}"):
        pf.split(WRAPPED[name](), head="2", extractor=None)


def test_parametrizations_are_layers_of_their_own() -> None:
    network = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 3)))
    pf.Federation([pf.Client(network, (X, Y), (X, Y))], pf.methods.Local(), pf.Training(rounds=1))


def own(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.DataParallel(nn.Linear(in_shape[0], classes))


def test_a_builder_of_ones_own_that_wraps_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=f"model '{__name__}:own': expected a network in Python"):
        build(f"{__name__}:own", (8,), 3)
