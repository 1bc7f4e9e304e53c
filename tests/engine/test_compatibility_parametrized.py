"""Heads whose weight is parametrized: methods that read or cut them say so before round 1, all others take them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import polyfed as pf
from polyfed.core.method import Method
from polyfed.errors import ConfigError

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
NORMS = [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm]  # the last is older


def federation(method: Method, norm: object) -> pf.Federation:
    assert callable(norm)
    networks = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), norm(nn.Linear(6, 2))) for _ in range(2)]
    clients = [pf.Client(pf.split(network, head="2", extractor=None), (X, Y)) for network in networks]
    return pf.Federation(clients, method, pf.Training(rounds=1))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("method", "said"),
    [
        (pf.methods.FedGH(), r"a weight and a bias; client 0 \('Sequential'\).*bias, .*weight.*"),
        (pf.methods.FedRE(), r"a weight and a bias; client 0 \('Sequential'\).*bias, .*weight.*"),
        (pf.methods.HeteroFL(), r"Sequential cannot be cut.*'original\.2' has a parametrization"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_methods_that_read_or_cut_heads_refuse_them(method: Method, said: str, norm: object) -> None:
    with pytest.raises(ConfigError, match=said):
        federation(method, norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", [pf.methods.FedAvg(), pf.methods.FedProto()], ids=lambda method: method.name)
def test_others_train_them(method: Method, norm: object) -> None:
    assert federation(method, norm).run().history[0]["refused"] == []
