"""A copy of a client to work with: its weights in the network, itself left as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import shallow_copy
from polyfed.core.model_factory import ModelFactory
from polyfed.engine.weight_store import WeightRow


def working_copy(
    client: Client, variant: str, model_factory: ModelFactory, weights: Mapping[str, Tensor] | None = None
) -> Client:
    """A working copy of the client with its weights in the template; the client itself stays as it is.

    weights: `client_weights`, where they are known.
    """
    worker = copy.copy(client)
    worker.state = shallow_copy(client.state)
    weights = client_weights(client, variant, model_factory) if weights is None else weights
    worker.bound = model_factory.load(client.architecture, variant, weights).train()
    return worker


def has_weights(client: Client, variant: str, model_factory: ModelFactory) -> bool:
    """Whether the client has weights of its own, and of its present network."""
    weights = client.weights
    if weights is None:
        return False
    if isinstance(weights, WeightRow) and (weights.architecture, weights.variant) == (client.architecture, variant):
        return True
    template = model_factory.state(client.architecture, variant)
    return all(name in weights and weights[name].shape == tensor.shape for name, tensor in template.items())


def client_weights(client: Client, variant: str, model_factory: ModelFactory) -> Mapping[str, Tensor]:
    """The client's weights, or those it starts from (again, if its network is now another one)."""
    if client.weights is None or not has_weights(client, variant, model_factory):
        return model_factory.starting_state(client.architecture, variant, client.id, client.given)
    held = client.weights.views if isinstance(client.weights, WeightRow) else client.weights
    return {name: held[name] for name in model_factory.state(client.architecture, variant)}
