"""What PyTorch can put around a network is refused in one line, wherever it is given."""

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
from polyfed.models.split import check_plain

X, Y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def compiled(network: nn.Module) -> nn.Module:
    return torch.compile(network, backend="eager")  # type: ignore[return-value]


class FSDPModule(nn.Linear):
    """As torch.distributed.fsdp.fully_shard makes a layer's class."""


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "in torch.compile": lambda: compiled(plain()),
    "in DataParallel": lambda: nn.Sequential(nn.DataParallel(plain())),
    "in AveragedModel": lambda: AveragedModel(plain()),
    "that FSDP has sharded": lambda: nn.Sequential(FSDPModule(8, 3)),
    "that is a program of TorchScript": lambda: torch.jit.trace(plain(), X[:1]),
}


@pytest.mark.parametrize("found", WRAPPED)
def test_a_network_that_is_not_plain_is_refused(found: str) -> None:
    line = rf"expected a plain network in Python, got one {found}; give the network itself"
    with pytest.raises(ConfigError, match=f"^client 0: {line}"):
        pf.Federation([pf.Client(WRAPPED[found](), (X, Y))], pf.methods.Local(), pf.Training(rounds=1))
    with pytest.raises(ConfigError, match=f"^{line}"):
        pf.split(WRAPPED[found](), head="0", extractor=None)


def test_a_plain_network_is_taken() -> None:
    check_plain(plain())
    check_plain(nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 3))))


def own(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), compiled(nn.Linear(64, classes)))


def test_a_recipe_may_name_none_either() -> None:
    with pytest.raises(ConfigError, match=r"got one in torch\.compile"):
        build(f"{__name__}:own", (1, 8, 8), 10)
