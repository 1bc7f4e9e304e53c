"""The simulated device refuses what a GPU refuses, and computes what the CPU computes."""

from __future__ import annotations

import copy
from typing import Any

import gpu
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyfed.core.modules import load_state
from polyfed.functional.device_copies import copy_once, move_group

FIRST, SECOND = torch.device("cuda"), torch.device("cuda:1")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: torch.ones(2, device=FIRST) + torch.ones(2), "same device"),
        (lambda: torch.ones(2, device=FIRST) + torch.ones(2, device=SECOND), "same device"),
        (lambda: torch.ones(2, 2, device=FIRST) @ torch.ones(2, 2), "same device"),
        (lambda: torch.tensor(3.0).add_(torch.ones((), device=FIRST)), "same device"),
        (lambda: torch.cat([torch.ones(2, device=FIRST), torch.ones(2)]), "same device"),
        (lambda: torch.arange(5)[torch.tensor([1], device=FIRST)], "indices should be"),
        (lambda: torch.randperm(4, generator=torch.Generator(), device=FIRST), "'cuda' device type for generator"),
        (lambda: torch.ones(2, device=FIRST).numpy(), "can't convert cuda"),
        (lambda: torch.ones(2, device="cuda:7"), "invalid device ordinal"),
        (lambda: torch.ones(2, 2, device=FIRST).long() @ torch.ones(2, 2, device=FIRST).long(), "not implemented"),
        (lambda: F.cross_entropy(torch.ones(1, 3, device=FIRST), torch.tensor([7], device=FIRST)), "assert"),
    ],
)
def test_what_a_gpu_refuses(what: Any, said: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=said):
        what()


def test_what_a_gpu_takes() -> None:
    x = torch.arange(6.0, device=FIRST)
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4, 5, 6]
    assert x[torch.tensor([1, 2])].tolist() == [1, 2]
    assert torch.where(x > 2, x, torch.tensor(0.0)).tolist() == [0, 0, 0, 3, 4, 5]


def test_training_comes_to_the_same() -> None:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3)]
    network = nn.Sequential(*layers, nn.Linear(36, 3))

    def trained(device: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        model = copy.deepcopy(network).to(device)
        x = torch.ones(5, 1, 8, 8).cumsum(3).to(device)
        y = torch.arange(5).remainder(3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return {name: t.cpu() for name, t in model.state_dict().items()}

    expected = trained("cpu")
    for device in (FIRST, SECOND):
        assert all(torch.equal(t, expected[name]) for name, t in trained(device).items())


def test_recurrent_layers_take_no_gradient_in_eval_mode() -> None:
    layer = nn.LSTM(5, 6).to(FIRST)
    x = torch.ones(3, 4, 5, device=FIRST)
    torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))
    with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
        torch.autograd.grad(layer.eval()(x)[0].sum(), list(layer.parameters()))


def test_copies_in_place_are_seen() -> None:
    """As changes of the tensors, so that they are copied anew."""
    network = nn.Linear(2, 1, bias=False).cuda()
    with copy_once():
        for weight in (1.0, 2.0):
            load_state(network, {"weight": torch.full((1, 2), weight, device="cuda")})
            assert move_group(network.state_dict(), "cpu")["weight"].tolist() == [[weight, weight]]


def test_memory_ends_and_waits_are_counted() -> None:
    with gpu.memory(1000), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.ones(1000, device=FIRST)
    with gpu.counting() as done:
        torch.ones(3).to(FIRST).sum().item()
    assert (done["h2d"], done["syncs"], done["kernels"]) == (1, 1, 1)
    assert gpu.by_name()["h2d copy"] == 1
    with gpu.without_float64(), pytest.raises(TypeError, match="float64"):
        torch.ones(3, device=FIRST).double()
