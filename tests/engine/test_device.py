"""Devices by name: which are here, and what to do where one is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyfed.engine import device as room
from polyfed.engine.device import device_name, parse_device
from polyfed.engine.run import environment_versions
from polyfed.errors import ConfigError

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


def refusal(name: str, monkeypatch: pytest.MonkeyPatch, error: str | None = None) -> str:
    """What is said where PyTorch refuses the device, in these words or its own."""
    if error is not None:

        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError(error)

        monkeypatch.setattr(room.torch, "zeros", refuse)
    with pytest.raises(ConfigError) as refused:
        parse_device(name)
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) < 400
    return said


def test_the_cpu_is_here() -> None:
    assert parse_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "here", "error", "says"),
    [
        ("GPU", {"cuda": "13.0", "gpus": 1}, None, "here ('cpu', 'cuda'), got 'GPU'; did you mean 'cuda'?"),
        ("gpu", {}, None, "did you mean 'cuda'? this PyTorch (2.13.0+cpu) is built for the CPU alone"),
        ("cuda", {}, "Torch not compiled with CUDA enabled", "(2.13.0+cpu) is built for the CPU alone: install one"),
        ("cuda", {"cuda": "13.0"}, "Found no NVIDIA driver", "this PyTorch (2.13.0+cpu) finds no NVIDIA GPU: see"),
        ("cuda:7", {"cuda": "13.0", "gpus": 2}, "invalid device ordinal\nmore", "'cuda:1'), got 'cuda:7'; invalid"),
        ("metal", {"mps": True}, None, "here ('cpu', 'mps'), got 'metal'; did you mean 'mps'?"),
        ("abacus", {}, None, "PyTorch does not know it"),
        ("meta", {}, None, "Cannot copy out of meta tensor"),
    ],
)
def test_a_device_that_is_not_here(
    name: str, here: dict[str, Any], error: str | None, says: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(**here)
    assert says in refusal(name, monkeypatch, error)


def test_a_result_names_the_device_unless_it_is_a_cpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "device" not in environment_versions(torch.device("cpu"))
    assert environment_versions(torch.device("mps"))["device"] == "mps"
    machine(version="2.13.0+cu130", cuda="13.0", gpus=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
    assert device_name(torch.device("cuda:1")) == "Card 1"
