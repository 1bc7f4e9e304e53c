"""What a federation is given in Python: a wrong argument is one line that says what to write; devices by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.client import to_float
from polyfed.data.datasets import load_dataset
from polyfed.engine import device as room
from polyfed.engine.device import parse_device
from polyfed.errors import ConfigError
from polyfed.experiments import prediction
from polyfed.registry import METHODS
from polyfed.testing.fixtures import grouped
from tests.helpers.refusals import refusal

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def network() -> nn.Module:
    return Net()


def client(**changed: Any) -> pf.Client:
    return pf.Client(**{"model": Net(), "train": (X, Y), **changed})


def federation(**changed: Any) -> pf.Federation:
    given = {"clients": [client(), client()], "method": pf.methods.FedAvg(), "training": pf.Training(rounds=1)}
    return pf.Federation(**grouped(**{**given, **changed}))


A_CLIENT = r"polyfed.Client\(model, train=\(x, y\), test=\(x, y\)\)"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"method": "fedgh"}, r"method: .* got 'fedgh'; write polyfed.methods.FedGH\(\)"),
        ({"method": "fedhg"}, r"unknown method 'fedhg'; did you mean 'fedgh'\?"),
        ({"method": pf.methods.FedGH}, r"got the class FedGH; write polyfed.methods.FedGH\(\)"),
        ({"training": 3}, r"training: expected Training\(rounds=..., ...\), got 3"),
        ({"evaluation": pf.Training()}, r"evaluation: expected Evaluation\(stage=..., ...\), got a Training"),
        ({"plugins": [{"drop": 0.1}]}, r"plugins: expected settings \(Availability, .* got a dict"),
        ({"seed": "0"}, r"expected seed to be a whole number >= 0, got '0'"),
        ({"clients": [(X, Y)]}, rf"clients: expected {A_CLIENT} in place 0, got a tuple"),
        ({"clients": client()}, rf"clients: expected a list of {A_CLIENT}, got a Client"),
        ({"test": (X, Y.float())}, r"test: expected whole numbers as labels, as of client 0, train, got floats"),
        ({"loggers": print}, r"loggers: expected a list, got the function print; put it into \[ \]"),
        ({"out": 3}, r"path: expected the path of a folder, got 3"),
    ],
)
def test_a_wrong_kind_of_argument_is_one_line(changed: dict[str, Any], line: str) -> None:
    assert re.search(line, refusal(lambda: federation(**changed)))


def test_a_method_of_ones_own_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(pf.Method):
        pass

    monkeypatch.setitem(METHODS.entries, "mine", Mine)
    with pytest.raises(ConfigError, match=r"got 'mine'; write Mine\(\)$"):
        federation(method="mine")


def test_what_is_meant_alike_is_taken_alike() -> None:
    assert federation(seed=np.int64(3)).seed == 3
    plain = federation(test=(X, Y)).run()
    other = federation(clients=iter([client(), client()]), device=torch.device("cpu"), test=(X.numpy(), Y.tolist()))
    assert len(other.clients) == 2
    assert other.run().result["accuracy"] is not None
    assert plain.result["evaluation"]["test"] == "global"
    assert len(pf.PublicData((X, Y))) == 12


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"model": Net}, r"^model: .* got the class Net; write Net\(...\), which makes one"),
        ({"train": (X, Y[:7])}, r"^train: expected as many labels as inputs, got 7 labels for 12 inputs"),
        ({"train": X}, r"^train: expected a pair \(x, y\) of inputs and labels, got a Tensor alone"),
        ({"train": (X, nn.functional.one_hot(Y))}, r"^train: .* got \(12, 3\); write y.argmax\(1\)"),
        ({"train": (X, list("abcabcabcabc"))}, r"^train: expected labels as a tensor .*; number the classes from 0"),
        (
            {"train": (X, Y * 1j)},
            r"^train: expected labels as whole numbers or floats, got complex ones, torch.complex64",
        ),
        ({"train": {"x": X, "y": Y}}, r"^train: expected \(x, y\), Samples, or a data set .* got dict$"),
        (
            {"train": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y))},
            r"^train: .* got DataLoader; give its .dataset$",
        ),
    ],
)
def test_a_client_of_something_else_is_one_line(changed: dict[str, Any], line: str) -> None:
    assert re.search(line, refusal(lambda: client(**changed)))


def test_a_run_takes_switches_only() -> None:
    made = federation()
    with pytest.raises(ConfigError, match="run: expected resume to be True or False, got 'runs/mine'"):
        made.run("runs/mine")  # type: ignore[arg-type]
    assert made.run(progress=False)


# networks by name


def of_digits(prepare: Any, *names: str) -> list[pf.Client]:
    rows = load_dataset("digits").train
    parts = [rows.select(torch.arange(k, 120, 4)) for k in range(4)]
    return [
        pf.Client(name, train=parts[k], test=parts[-1], **({} if prepare is None else {"prepare": prepare}))
        for k, name in enumerate(names)
    ]


@pytest.mark.parametrize("prepared", [False, True])
def test_registered_networks_are_made_by_name_and_found_again(prepared: bool, tmp_path: Any) -> None:
    prepare = load_dataset("digits").prepare if prepared else None
    clients = of_digits(prepare, "digits-cnn1", "digits-cnn2", "digits-cnn1")
    made = pf.Federation(
        clients, pf.methods.FedGH(), pf.Training(rounds=1, lr=0.1), task=pf.Task(classes=10), out=tmp_path / "run"
    )
    assert [client.architecture for client in made.clients] == ["digits-cnn1", "digits-cnn2", "digits-cnn1"]
    run, x = made.run(), load_dataset("digits").train.x[:30]
    with torch.inference_mode():
        expected = run.models[1]((prepare or to_float)(x))
    assert torch.equal(prediction.predict(tmp_path / "run", 1, x).scores, expected)


def test_names_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"^client 1: .* got 'digits-cnn9'; did you mean 'digits-cnn"):
        pf.Federation(of_digits(None, "digits-cnn1", "digits-cnn9"), pf.methods.Local())
    with pytest.raises(ConfigError, match=r"^client 0: .* got 'smal'; did you mean 'small'"):
        federation(clients=[client(model="smal")], builders={"small": Net})
    assert federation(clients=[client(model="small")], builders={"small": Net}).run()
    with pytest.raises(ConfigError, match=r"needs images \(channels, height, width\), got the shape \(4,\)"):
        federation(clients=[client(model="digits-cnn1")])


def test_inputs_that_trained_weights_want_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "polyfed.engine.architectures.pretrained_normalization"
    monkeypatch.setattr(asked, lambda name: ((0.5,), (0.25,)) if "?" in name else None)
    with pytest.raises(ConfigError, match=r"'timm:resnet10t\?pretrained' wants images normalized with mean \(0.5,\)"):
        pf.Federation(of_digits(None, "timm:resnet10t?pretrained"), pf.methods.Local())


def test_networks_with_other_ties_are_other_architectures() -> None:
    free, tied = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)) for _ in range(2))
    tied[1].weight = tied[0].weight
    made = federation(clients=[client(model=free), client(model=tied)], method=pf.methods.Local())
    assert [client.architecture for client in made.clients] == ["Sequential", "Sequential-2"]
    kept = made.run().models
    assert torch.equal(kept[1][0].weight, kept[1][1].weight)
    assert not torch.equal(kept[0][0].weight, kept[0][1].weight)


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Says what PyTorch was built for, and how many GPUs it finds."""

    def be(version: str = "2.13.0+cpu", cuda: str | None = None, gpus: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return be


@pytest.mark.parametrize(
    ("name", "here", "error", "says"),
    [
        ("cuda", {}, "Torch not compiled with CUDA enabled", "(2.13.0+cpu) is built for the CPU alone"),
        ("cuda", {"cuda": "13.0"}, "Found no NVIDIA driver", "or finds no NVIDIA GPU"),
        ("meta", {}, None, "Cannot copy out of meta tensor"),
    ],
)
def test_a_device_that_is_not_here(
    name: str, here: dict[str, Any], error: str | None, says: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In PyTorch's words, or its own."""
    machine(**here)
    if error is not None:
        monkeypatch.setattr(room.torch, "zeros", Mock(side_effect=RuntimeError(error)))
    said = refusal(lambda: parse_device(name))
    assert says in said
    assert len(said) < 400
