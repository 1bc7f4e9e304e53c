"""What methods make of a frozen network (`core.frozen_network`): a map to features, in the place of a `FeatureMap`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.frozen_network import FrozenNetwork, frozen_beside
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry
from polyfed.errors import RunError
from polyfed.functional.feature_maps.feature_map import bound_rows, common_direction


@dataclass(frozen=True)
class NetworkMap:
    """phi, what a frozen network gives before its head.

    tensors: "digest" of its weights, (32,) uint8; "common", where rows have norm 1 (`feature_map.common_direction`).
    """

    network: FrozenNetwork
    tensors: Mapping[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """The features (N, D) of prepared inputs (N, ...), in float32, where the inputs are; all finite."""
        common = self.tensors.get("common")
        return bound_rows(self.network(x), None if common is None else common.to(x.device))


def map_of(client: Client, unit: bool) -> NetworkMap:
    """The map of a client at work; its state has the tensors as "map". unit: whether rows have norm 1.

    Raises:
        RunError: the network has other weights than when the client began, as where a package has others now.
    """
    network = network_map(client.model, {}).network
    if "map" not in client.state:
        tensors = {"digest": network.digest}
        if unit:
            place = next(client.model.parameters()).device
            shape = client.prepare(client.data.train.x[:1]).shape[1:]
            draws = generator(client.seed, "random features")
            with torch.no_grad():
                tensors["common"] = common_direction(lambda x: network(x.to(place)).cpu(), shape, draws)
        client.state["map"] = tensors
    kept = get_group(client.state, "map")
    if not torch.equal(kept["digest"].cpu(), network.digest):
        raise RunError(f"the map '{network.name}' has other weights than those that the run began with")
    return NetworkMap(network, kept)


def network_map(model: Any, tensors: Mapping[str, Tensor]) -> NetworkMap:
    """The map beside a client's network, with the tensors that it has kept."""
    beside = frozen_beside(model)
    assert beside is not None
    return NetworkMap(beside, tensors)


def count_features(server: Server) -> int:
    """D."""
    example = server.input_example
    row = torch.zeros(1, *example.shape[1:], dtype=example.dtype)
    return server.frozen_network.count_features(server.prepare(row))


def is_ours(server: Server, client_id: int, message: Message) -> bool:
    """Whether an upload says that its features were made with the server's weights; else it says nothing.

    Raises:
        RunError: with others, in a run of this machine: of other machines, `DIGEST` refuses it.
    """
    if "network" not in message:
        return False
    if difference := _difference(server, get_tensor(message, "network")):
        raise RunError(f"client {client_id}: {difference}")
    return True


def _difference(server: Server, digest: Tensor) -> str | None:
    network = server.frozen_network
    if torch.equal(digest, network.digest):
        return None
    given = bytes(digest.tolist()).hex()
    return (
        f"its network '{network.name}' has other weights than the server's: SHA-256 {given:.12}... instead of "
        f"{network.checksum:.12}..."
    )


DIGEST = Entry((32,), (torch.uint8,), check=lambda known, digest: _difference(known.server, digest))
