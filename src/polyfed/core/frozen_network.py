"""A network that nobody trains, beside the clients' own: its representation is a map of inputs to features.

Its weights follow from its name and the run's seed, and are the same at every client. A process has it once: the
templates of clients' networks refer to it, and have none of its tensors among their own. What a method computes with
it is a `methods.building_blocks.network_map.NetworkMap`.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.errors import ConfigError, described, kind_and_line
from polyfed.models.split import SplitModel

_PLACE = "polyfed_frozen"  # the attribute of a client's network
MOST_FEATURES = 8192  # whose sums have 34 million numbers


class FrozenNetwork:
    """A frozen network in eval mode, and what goes into its head: the output, where it is no `SplitModel`.

    Args:
        network: which is frozen. name: in messages.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
        self.network = network.requires_grad_(False).eval()
        self.name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenNetwork:
        """Copies of a client's network refer to the same one, unless that is copied with them."""
        copied = memo.get(id(self.network))
        return self if copied is None else FrozenNetwork(copied, self.name)

    def __call__(self, x: Tensor) -> Tensor:
        """The features (N, D) of prepared inputs (N, ...), in float32."""
        features = self.network.represent(x) if isinstance(self.network, SplitModel) else self.network(x)
        return features.flatten(1).float()

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of names, shapes, types and bytes of all tensors before the head."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            if isinstance(self.network, SplitModel) and self.network.part_of(name) == "head":
                continue
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.network.state_dict().values())

    @property
    def digest(self) -> Tensor:
        """The same as bytes, (32,) uint8."""
        return torch.tensor(list(bytes.fromhex(self.checksum)), dtype=torch.uint8)

    def count_features(self, x: Tensor) -> int:
        """D, of prepared inputs like `x` (N, ...), of which there is at least one.

        Raises:
            ConfigError: the network cannot take them, gives no features, or too many.
        """
        tensor = next(self.network.parameters(), x)
        try:
            with torch.no_grad():
                features = self(x.to(tensor.device))
        except Exception as error:  # the network may be the user's
            shape = tuple(x.shape[1:])
            raise ConfigError(
                f"the map '{self.name}' cannot take inputs of shape {shape}: {kind_and_line(error)}"
            ) from error
        if features.dim() != 2 or len(features) != len(x):
            raise ConfigError(f"the map '{self.name}': expected features for each input, got {described(features)}")
        if not 1 <= features.shape[1] <= MOST_FEATURES:
            raise ConfigError(
                f"the map '{self.name}': expected at most {MOST_FEATURES} features, whose products are summed, got "
                f"{features.shape[1]}; end it with a pooling layer"
            )
        return features.shape[1]


def refer_to(network: nn.Module, beside: FrozenNetwork) -> None:
    """Have a client's network refer to the map, which is no part of it."""
    vars(network)[_PLACE] = beside


def frozen_beside(network: nn.Module) -> FrozenNetwork | None:
    """The map that a client's network refers to; None: it does not."""
    found: FrozenNetwork | None = vars(network).get(_PLACE)
    return found
