"""A client's personal model as one network: its own network, and what its method predicts by beside it."""

from __future__ import annotations

import re

from torch import Tensor, nn

from polyfed.core.client import Prepare
from polyfed.core.frozen_network import FrozenNetwork, frozen_beside, refer_to
from polyfed.core.message import Message, flatten, unflatten
from polyfed.core.method import Method
from polyfed.core.modules import copy_network


class PersonalPredictor(nn.Module):
    """From inputs to scores, as the method predicts.

    A copy of the map (`core.frozen_network`) that the client's network refers to is a part of it. What the client keeps
    beside networks are buffers. So they go where the module goes, and are in its state and in what is exported of it.
    Single numbers are none: what `predict` does may depend on them, and then they are constants of what is exported.

    Args:
        method: whose `predict` gives the scores. network: the client's own. state: what it keeps beside it.
        prepare: stored inputs to the network's; None: inputs are prepared.
    """

    def __init__(self, method: Method, network: nn.Module, state: Message, prepare: Prepare | None = None) -> None:
        super().__init__()
        beside = frozen_beside(network)
        if beside is not None:
            self.map = copy_network(beside.network)  # before the network: whoever copies both copies the map first
            refer_to(network, FrozenNetwork(self.map, beside.name))
        self.network = network
        self._predict = method.predict
        self._prepare = prepare
        flat = flatten(state)
        self._numbers = {name: tensor for name, tensor in flat.items() if not tensor.dim()}
        self._buffers_of: dict[str, str] = {}
        for name, tensor in flat.items():
            if tensor.dim():
                self._buffers_of[name] = f"kept_{re.sub('[^0-9a-zA-Z]', '_', name)}"
                self.register_buffer(self._buffers_of[name], tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, C) of inputs (N, ...), (N, 1) where numbers are predicted."""
        kept = {name: self.get_buffer(buffer) for name, buffer in self._buffers_of.items()}
        prepared = x if self._prepare is None else self._prepare(x)
        return self._predict(self.network, prepared, unflatten({**kept, **self._numbers}))
