"""What is asked of uploads, whoever asks: whether there are any, their tensors, and where changes of weights began."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polyfed.core.message import Group, Message, members, nbytes
from polyfed.core.method import Method


def has_upload(method: Method) -> bool:
    """Whether anything goes up."""
    return getattr(method.upload, "__func__", None) is not Method.upload


def sent_nbytes(method: Method, message: Message) -> int:
    """Bytes of a message on the wire; 0 where every client is alone with its server, as nothing crosses."""
    return 0 if method.alone else nbytes(message)


def base_tensors(method: Method, name: str, value: Tensor | Group, received: Message) -> Group:
    """What came down of those tensors of a group that go up as changes of it (`Method.delta_entries`)."""
    if isinstance(value, Tensor) or name not in method.delta_entries:
        return {}
    down = members(received, name)
    return {key: t for key, t in down.items() if key in value and value[key].shape == t.shape and t.is_floating_point()}


def batchnorm_buffers(network: nn.Module) -> frozenset[str]:
    """Names of what BatchNorm and its like keep of the data, also within a part of the network."""
    layers = [layer for layer in network.modules() if isinstance(layer, _NormBase)]
    kept_here = {id(buffer) for layer in layers for buffer in layer.buffers()}
    return endings(name for name, buffer in network.named_buffers() if id(buffer) in kept_here)


def endings(names: Iterable[str]) -> frozenset[str]:
    """The names, and what a part of the network calls them: "own.norm.weight" is also "norm.weight" and "weight"."""
    parts = (name.split(".") for name in names)
    return frozenset(".".join(one[begin:]) for one in parts for begin in range(len(one)))


def iter_tensors(message: Message) -> Iterator[tuple[str, str | None, Tensor]]:
    """Name, name within the group (None: it stands alone), tensor."""
    for name, value in message.items():
        if isinstance(value, Tensor):
            yield name, None, value
        else:
            yield from ((name, key, tensor) for key, tensor in value.items())
