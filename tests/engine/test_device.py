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


@pytest.mark.parametrize("name", ["gpu", "GPU", "CUDA:0", "nvidia"])
def test_a_gpu_by_another_name(name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("2.13.0+cu130", "13.0", gpus=1)
    said = refusal(name, monkeypatch)
    assert said == f"expected a device that is here ('cpu', 'cuda'), got '{name}'; did you mean 'cuda'?"


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:1"])
def test_a_pytorch_for_the_cpu_says_which_to_install(
    name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    said = refusal(name, monkeypatch, "Torch not compiled with CUDA enabled" if name != "gpu" else None)
    assert said.startswith(f"expected a device that is here ('cpu'), got '{name}'; ")
    assert "this PyTorch (2.13.0+cpu) is built for the CPU alone: install one that is built for CUDA" in said
    assert ("did you mean 'cuda'?" in said) == (name == "gpu")


def test_a_gpu_that_is_not_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("2.13.0+cu130", "13.0", gpus=0)
    said = refusal("cuda", monkeypatch, "Found no NVIDIA driver on your system.")
    assert "('cpu'), got 'cuda'; this PyTorch (2.13.0+cu130) finds no NVIDIA GPU: see whether nvidia-smi" in said


@pytest.mark.parametrize(
    ("gpus", "here", "told"), [(1, "'cpu', 'cuda'", "is 1"), (2, "'cpu', 'cuda', 'cuda:1'", "are 2")]
)
def test_a_gpu_too_many(gpus: int, here: str, told: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is of those that are here."""
    machine("2.13.0+cu130", "13.0", gpus=gpus)
    said = refusal("cuda:7", monkeypatch, "CUDA error: invalid device ordinal\nCUDA kernel errors might be ...")
    assert said == f"expected a device that is here ({here}), got 'cuda:7'; there {told}, counted from 0"


def test_a_gpu_that_fails_otherwise_says_how(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("2.13.0+cu130", "13.0", gpus=1)
    assert refusal("cuda", monkeypatch, "CUDA error: out of memory\nmore").endswith("; CUDA error: out of memory")


def test_apples_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(mps=True)
    assert refusal("metal", monkeypatch).endswith("('cpu', 'mps'), got 'metal'; did you mean 'mps'?")
    machine()
    said = refusal("mps", monkeypatch, "x" * 1000)
    assert said.endswith("('cpu'), got 'mps'; PyTorch finds no GPU of Apple's here, which macOS alone has")


@pytest.mark.parametrize(
    ("name", "says"),
    [("abacus", "PyTorch does not know it"), ("meta", "Cannot copy out of meta tensor"), ("hpu:0", "torch.hpu")],
)
def test_others(name: str, says: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    assert says in refusal(name, monkeypatch)


def test_what_pytorch_says_at_length_is_cut(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    assert refusal("hip", monkeypatch, "Could not run " * 100).endswith(" ...")


def test_a_result_names_the_device_unless_it_is_a_cpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "device" not in environment_versions(torch.device("cpu"))
    assert environment_versions(torch.device("mps"))["device"] == "mps"
    machine(version="2.13.0+cu130", cuda="13.0", gpus=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
    assert device_name(torch.device("cuda:1")) == "Card 1"
