"""Clients who have some of the classes: four with unlike networks of one feature width, and their class means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.client import Client
from tests.helpers.toys import NETS, model_with, samples

SOME = ((0, 1), (1, 2), (0, 1, 2), (2,))  # classes of four clients
MIXED = ("bn", "deep", "wide")
WITHOUT_NORM = ("deep", "wide", "shallow")  # for steps by hand
SIZES = (12, 8, 16, 12)  # of clients who disagree


def members(
    classes: Sequence[Sequence[int]] = SOME, test: int = 0, architectures: Sequence[str] = MIXED
) -> list[Client]:
    """A client with each of these classes, the networks in turn, and `test` samples of all classes."""
    held = [samples(test, 50 + i) if test else None for i in range(len(classes))]
    return [Client(architectures[i % 3], samples(9 + i, i, own), held[i]) for i, own in enumerate(classes)]


def disagreeing(architectures: Sequence[str]) -> list[Client]:
    """Up to four clients of unlike classes and sizes, so that some disagree."""
    classes = ((0, 1), (0, 1, 2), (2, 0), (0, 1, 2))
    return [Client(a, samples(SIZES[i], i, classes[i])) for i, a in enumerate(architectures)]


def class_means(client: Client, weights: Mapping[str, Tensor]) -> dict[int, np.ndarray[Any, Any]]:
    """Class -> mean of the client's representations, in float64."""
    z = model_with(NETS[client.architecture], weights).represent(client.data.train.x).detach().double().numpy()
    y = client.data.train.y.numpy()
    return {int(c): z[y == c].mean(0) for c in np.unique(y)}


def mean_rows(client: Client, weights: Mapping[str, Tensor]) -> Tensor:
    """The same as the rows of a float32 tensor, by class."""
    return torch.from_numpy(np.stack([*class_means(client, weights).values()])).float()
