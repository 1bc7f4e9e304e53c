"""What is averaged with whom: told before the first round, and refused where it is nothing but a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.core.method import Method
from polyfed.errors import ConfigError
from polyfed.experiments.estimate import estimate_costs
from polyfed.methods import FedAvg, FedProx, FedRep, LGFedAvg, Local
from polyfed.models.split import SequentialSplit
from tests.helpers.flat_options import grouped

X, Y = torch.randn(20, 6), torch.arange(20) % 4


class Low(SequentialSplit):
    """Tensors of its own before a common head."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 5), torch.nn.Identity(), torch.nn.Linear(5, 4))


class High(SequentialSplit):
    """The same number of features by other tensors: none of `Low`'s names but the head's."""

    def __init__(self) -> None:
        extractor = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(6, 5))
        super().__init__(extractor, torch.nn.Identity(), torch.nn.Linear(5, 4))


def federation(method: Method, *kinds: Any, **how: Any) -> pf.Federation:
    clients = [pf.Client(kind(), (X, Y), (X, Y)) for kind in kinds]
    return pf.Federation(clients, method, pf.Training(rounds=2), **grouped(**how))


@pytest.mark.parametrize("method", [FedAvg(), FedProx()])
def test_a_head_alone_is_refused(method: Method) -> None:
    with pytest.raises(ConfigError) as refused:
        federation(method, Low, High, Low)
    said = str(refused.value)
    assert "would average nothing but the head (head.weight, head.bias (24 weights)) of client 0" in said
    assert "use method.aggregation = 'same-shape', or 'by-name' if that is meant" in said
    assert "\n" not in said


def test_it_is_averaged_where_that_is_asked_for() -> None:
    asked = federation(FedAvg(aggregation="by-name"), Low, High, Low)
    assert "head.weight, head.bias (24 weights) across all 3" in asked.averaged
    told: list[str] = []

    class Watcher:
        def message(self, text: str) -> None:
            told.append(text)

    federation(FedAvg(aggregation="by-name"), Low, High, loggers=[Watcher()]).run()
    assert [text for text in told if text.startswith("averaged: ")]
    check = estimate_costs(federation(FedAvg(aggregation="by-name"), Low, High))
    assert check.averaged in " ".join(str(check).split("\n"))


def test_others_are_not_refused() -> None:
    assert "across" not in federation(FedAvg(aggregation="same-shape"), Low, High).averaged
    assert "nothing across architectures" in federation(FedRep(), Low, High).averaged
    assert federation(LGFedAvg(), Low, High).averaged == federation(Local(), Low, High).averaged == ""
    assert federation(FedAvg(), Low, Low).averaged.startswith("averaged: 2 clients of ")
