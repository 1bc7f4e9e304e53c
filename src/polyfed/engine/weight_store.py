"""The clients' weights: copies of a network's tensors, by name, in main memory or on the run's GPU.

Nobody writes into them: new weights are other tensors. Who has no weights of its own has none here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, writes
from polyfed.core.model_factory import ModelFactory
from polyfed.errors import RunError
from polyfed.functional.device_copies import move_together

# of a GPU's free memory that all weights together may need: a round holds those from before and after it
_DEVICE_SHARE = 0.1


class ClientWeights(Mapping[str, Tensor]):
    """A client's weights, by name; those that lie on a GPU are copied to main memory when somebody asks for one.

    Attributes:
        architecture, variant: of the network that they are of. there: all of them, where they lie.
    """

    def __init__(self, architecture: str, variant: str, there: Group) -> None:
        self.architecture = architecture
        self.variant = variant
        self.there = there
        self._here: Group | None = None
        self._writes = writes(there)

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into them, or into an upload that has its tensors."""
        return writes(self.there) == self._writes

    def in_main_memory(self) -> Group:
        """All of them there, copied only where they lie elsewhere."""
        tensors = list(self.there.values())
        return dict(zip(self.there, move_together(tensors, [torch.device("cpu")] * len(tensors)), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        if self._here is None:
            self._here = self.in_main_memory()
        return self._here[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.there)

    def __len__(self) -> int:
        return len(self.there)


class WeightStore:
    """Where the weights of a federation's clients are kept.

    Where the networks compute on an NVIDIA GPU, they lie there if all fit into a tenth of its free memory; else in main
    memory.

    Args:
        owners: the architectures of all clients.
    """

    def __init__(self, model_factory: ModelFactory, owners: Sequence[str]) -> None:
        self._model_factory = model_factory
        self._owners = owners

    @property
    def nbytes(self) -> int:
        """Bytes of all clients' weights."""
        states = {architecture: self._model_factory.state(architecture) for architecture in self._owners}
        sizes = {architecture: sum(t.nbytes for t in state.values()) for architecture, state in states.items()}
        return sum(sizes[architecture] for architecture in self._owners)

    @functools.cached_property
    def on_device(self) -> bool:
        """Whether weights lie on the GPU where the networks compute."""
        device = self._model_factory.device
        return device.type == "cuda" and self.nbytes <= _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]

    def keep(self, architecture: str, variant: str, tensors: Mapping[str, Tensor]) -> ClientWeights:
        """Copies of a network's tensors, from any device, their entries in the plain order.

        Raises:
            ValueError: other names, shapes or types than the network's.
        """
        own = self._model_factory.state(architecture, variant)
        if tensors.keys() != own.keys():
            odd = min(tensors.keys() ^ own.keys())
            raise ValueError(f"expected the tensors of '{architecture}', but only one side has '{odd}'")
        for name, tensor in own.items():
            given = tensors[name]
            if given.shape != tensor.shape:
                raise ValueError(f"expected shape {tuple(tensor.shape)} for '{name}', got {tuple(given.shape)}")
            if given.dtype != tensor.dtype:
                raise ValueError(f"expected {tensor.dtype} for '{name}', got {given.dtype}")
        device = self._model_factory.device if self.on_device else torch.device("cpu")
        there = move_together([tensors[name] for name in own], [device] * len(own))
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in there]
        torch._foreach_copy_(copies, there)  # as one, which a GPU does sooner
        return ClientWeights(architecture, variant, dict(zip(own, copies, strict=True)))

    def restore(self, number: int, architecture: str, variant: str, tensors: Mapping[str, Tensor]) -> ClientWeights:
        """`keep` of what was stored of client `number`.

        Raises:
            ValueError: likewise; or there is no such client, or it has another architecture.
        """
        if not 0 <= number < len(self._owners):
            raise ValueError(f"expected weights of clients 0 to {len(self._owners) - 1}, got client {number}'s")
        if architecture != self._owners[number]:
            raise ValueError(f"expected '{self._owners[number]}' as client {number}'s network, got '{architecture}'")
        return self.keep(architecture, variant, tensors)


def kept_weights(client: Client) -> ClientWeights | None:
    """Those of a federation's client, None where it has none of its own.

    Raises:
        RunError: it was given others than the store's.
    """
    if client.weights is None or isinstance(client.weights, ClientWeights):
        return client.weights
    raise RunError(f"expected weights of the store as {client.title}'s, got {type(client.weights).__name__}")
