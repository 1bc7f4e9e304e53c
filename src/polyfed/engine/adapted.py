"""A method whose clients train adapters and heads only: their networks, which may differ, are frozen.

What the method sends stays as it is: class means, outputs, headers. Clients that keep their networks to themselves so
need, for each adapted layer, r (I + O) numbers of their own instead of I O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from polyfed.core.adapters import add_adapters, any_parameter, client_rank
from polyfed.core.method import Method, Phase
from polyfed.core.server import Server
from polyfed.core.settings import AdapterSettings, Training
from polyfed.errors import ConfigError

__all__ = ["adapted"]


def adapted(method: Method, adapters: AdapterSettings) -> Method:
    """The same method, with the same hyperparameters, where clients train adapters and heads of frozen networks.

    Its class extends the method's.

    Raises:
        ConfigError: the method sends weights of networks, or makes networks of its own.
    """
    makes = [
        getattr(method, hook).__func__ is not getattr(Method, hook) for hook in ("variant", "build", "join_models")
    ]
    if method.delta_entries or method.auxiliary_model is not None or any(makes):
        raise ConfigError(
            f"adapters: expected a method that neither sends nor makes networks, such as local, fedgh, fedproto, fedsa "
            f"or fd, got '{method.display_name}'; fedlora averages adapters"
        )
    kind = type(method)
    extended = type(kind.__name__, (Adapted, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    frozen: Method = object.__new__(extended)
    vars(frozen).update(vars(method))
    vars(frozen)["adapters"] = adapters
    return frozen


class Adapted(Method):
    """Networks with adapters, for a method that leaves them as they are; stands before the method's own class."""

    adapters: ClassVar[AdapterSettings | None]

    def __repr__(self) -> str:
        return f"adapted({super().__repr__()}, {self.adapters!r})"

    def variant(self, server: Server, client_id: int) -> str:
        """The client's rank."""
        assert self.adapters is not None
        return client_rank(self.adapters.ranks, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        """The network with adapters; without a client, those of the first rank."""
        assert self.adapters is not None
        rank = variant or client_rank(self.adapters.ranks, 0)
        return add_adapters(model, int(rank), self.adapters.alpha, self.adapters.layers)

    def phases(self, training: Training) -> Sequence[Phase]:
        """The method's; frozen layers run in eval mode."""
        return [
            phase if phase.trains is not None else dataclasses.replace(phase, trains=any_parameter)
            for phase in super().phases(training)
        ]
