"""Sums of rows of a client: how they are made, their noise, and the form in which an upload holds them."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, get_group, members, to_bytes
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, Members, UploadContext, UpTo
from polyfed.data.augmentation import augmentation
from polyfed.errors import ConfigError
from polyfed.functional import class_statistics
from polyfed.functional.class_statistics import add
from polyfed.functional.clipping import Normals
from polyfed.functional.feature_maps.feature_map import count_features
from polyfed.functional.noise import KeyedGaussian
from polyfed.methods.building_blocks import network_map

_MOST_WORDS = 2**20
_AT_ONCE = 4096  # rows that are prepared at the same time
_EXACT = (torch.float64,)


def form(known: UploadContext, name: str) -> Members:
    """As wide as the map of such inputs makes them; of words as wide as those that have come before."""
    server = known.server
    method: Any = known.method
    has_network = method.auxiliary_model is not None
    features = (
        network_map.count_features(server)
        if has_network
        else count_features(server.prepare(server.input_example), method.features, method.uses_photographs)
    )
    held = members(server.state, "sums")
    width: int | UpTo = UpTo("D", _MOST_WORDS)
    if held:
        width = held["sums"].shape[1]
    elif features is not None:
        width = features if server.classes else features + 1
    rows = server.classes or 1  # where numbers are predicted all rows are one class
    counts = Entry((rows,), _EXACT) if method.unit_features else Entry((rows,), (torch.int64,), 0, "N")
    entries = {"counts": counts, "sums": Entry((rows, width), _EXACT)}
    if not method.sends_means and (features is not None or not server.classes):
        triangle = UpTo("D (D + 1) / 2", _MOST_WORDS**2) if isinstance(width, UpTo) else width * (width + 1) // 2
        entries["products"] = Entry((triangle,), _EXACT)
    return Members({key: (entry,) for key, entry in entries.items()})


def check_photographs(server: Server, method: str, features: int, only_images: bool) -> None:
    """Whether the filters of photographs give so many features of images. only_images: other inputs are refused."""
    x = server.prepare(server.input_example)
    if only_images and (x.dim() != 4 or not x.is_floating_point()):
        raise ConfigError(
            f"{method}: expected inputs (C, H, W) of floats with map = 'photographs', got {tuple(x.shape[1:])} of "
            f"{x.dtype}"
        )
    try:
        count_features(x, features, photographs=True)
    except ValueError as problem:
        raise ConfigError(f"{method}: {problem}") from None


def sum_rows(client: Client, phi: Callable[[Tensor], Tensor], use_views: bool, products: bool) -> dict[str, Tensor]:
    """n_k, M_k and S_k of a client's training rows.

    Args:
        phi: prepared inputs to features (N, D). use_views: whether phi(x) and phi(x) phi(x)' of a row are means over
            the views of `training.augmentation`. products: whether S_k is wanted.
    """
    views = _views(client) if use_views else [_as_it_is]
    total: dict[str, Tensor] = {}
    for view in views:
        sums = _sum_view(client, phi, view, products)
        total = add(total, sums) if total else sums
    rows = {"counts": sums["counts"]}  # not of views
    return {**times(total, 1 / len(views)), **rows}


def _views(client: Client) -> list[Callable[[Tensor], Tensor]]:
    augment = augmentation(client.training.augmentation)
    return [_as_it_is] if augment is None else augment.views(client.data.train.x.shape[1:])


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _sum_view(
    client: Client, phi: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor], products: bool
) -> dict[str, Tensor]:
    train = client.data.train
    phi_ND = inference.map_batches(phi, client.model, train, lambda x: client.prepare(view(x))).cpu()
    return class_statistics.sum_rows(phi_ND, train.y, client.classes, products)


def times(sums: Group, factor: float) -> dict[str, Tensor]:
    """Sums of as many times the rows, but for their counts."""
    return {name: tensor if name == "counts" else tensor * factor for name, tensor in sums.items()}


def normals(client: Client, noise: float, use_views: bool, names: Sequence[str]) -> Normals:
    """What a client's noise is made of: the same for the same rows and features, whenever and wherever they are summed.

    It comes from the run's seed, or from the client's secret and all that the sums are of: of two releases with the
    same draws the difference would show the rows.

    Args:
        use_views: as in `sum_rows`. names: of the sums.
    """
    if client.secret is None:
        draws = generator(client.seed, "noise on sums", client.id)
        return lambda shape: torch.randn(shape, generator=draws, dtype=torch.float64)
    train = client.data.train
    views = client.training.augmentation if use_views else "none"
    facts = json.dumps([client.id, noise, client.classes, views, names]).encode()
    rows = (to_bytes({"x": client.prepare(x)}) for x in train.x.split(_AT_ONCE))
    parts = (facts, to_bytes({"map": get_group(client.state, "map"), "y": train.y}), *rows)
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return KeyedGaussian(hmac.digest(client.secret, b"sums" + digests, "sha256"))
