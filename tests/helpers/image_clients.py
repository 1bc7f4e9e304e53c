"""Clients with small images and networks of one feature width, for methods that mix images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.testing.fixtures import CLASSES, draw, tiny_model
from tests.helpers.toys import Round, rounds

NETS: Mapping[str, Callable[[], nn.Module]] = {
    "small": lambda: tiny_model(0, 3, 6),
    "deep": lambda: tiny_model(1, 4, 6),
    "wide": lambda: tiny_model(0, 5, 6),
    "narrow": lambda: tiny_model(0, 3, 5),
}
SOME = ((0, 1), (1, 2), (0, 1, 2))  # classes of three clients


def members(kinds: tuple[str, ...] = ("deep", "wide", "small"), test: int = 0) -> list[Client]:
    """One client per network, with 9, 10, 11 images."""
    held = [draw(test, own, 50 + i) if test else None for i, own in enumerate(SOME)]
    return [Client(kind, draw(9 + i, SOME[i], i), held[i]) for i, kind in enumerate(kinds)]


def image_rounds(method: Method, people: list[Client] | None = None, **options: Any) -> list[Round]:
    """Two rounds of such a federation, or as asked for."""
    return rounds(method, people or members(), NETS, classes=CLASSES, **options)


def part(weights: Mapping[str, Tensor] | None, name: str) -> dict[str, Tensor]:
    """One of a client's networks: "own" or "auxiliary_model"."""
    return {key.removeprefix(f"{name}."): t for key, t in (weights or {}).items() if key.startswith(f"{name}.")}


def pair(kind: str, weights: Mapping[str, Tensor]) -> list[Any]:
    """Both networks of a client of this architecture with these weights."""
    nets: list[Any] = [NETS[kind](), NETS["small"]()]
    for net, name in zip(nets, ("own", "auxiliary_model"), strict=True):
        net.load_state_dict(part(weights, name))
    return nets


def check_pair(weights: Mapping[str, Tensor] | None, nets: list[Any], atol: float) -> None:
    """Whether a client has come to these networks."""
    for name, net in zip(("own", "auxiliary_model"), nets, strict=True):
        torch.testing.assert_close(part(weights, name), dict(net.state_dict()), atol=atol, rtol=1e-3)


def kl(teacher: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """T^2 KL of softmax(teacher / T) and softmax(scores / T), the teacher a constant; a mean over rows."""
    p = torch.softmax(teacher.detach() / temperature, 1)
    q = torch.log_softmax(scores / temperature, 1)
    return temperature**2 * (p * (p.log() - q)).sum(1).mean()
