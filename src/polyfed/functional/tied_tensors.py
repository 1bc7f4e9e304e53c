"""Networks in which a tensor, or a whole layer, has several names: tied weights, an encoder used twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def first_names(module: nn.Module) -> dict[str, str]:
    """Every name of each parameter and buffer -> the first name of that tensor.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> first_names(nn.Sequential(layer, nn.ReLU(), layer))
    {'0.weight': '0.weight', '2.weight': '0.weight'}
    """
    return _names(module)[0]


def tensor_places(module: nn.Module) -> dict[str, str]:
    """As `first_names`, with one name for each place: a layer that has several is there once."""
    return _names(module)[1]


def _names(module: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """All names, and those of places, in one pass over the layers, as a small network's step takes hardly longer."""
    names: dict[str, str] = {}
    places: dict[str, str] = {}
    first: dict[int, str] = {}
    seen: set[nn.Module] = set()
    for prefix, layer in module.named_modules(remove_duplicate=False):
        for held in (layer._parameters, layer._buffers):
            own = {f"{prefix}.{key}" if prefix else key: tensor for key, tensor in held.items() if tensor is not None}
            found = {name: first.setdefault(id(tensor), name) for name, tensor in own.items()}
            names |= found
            if layer not in seen:
                places |= found
        seen.add(layer)
    return names, places


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: Any) -> Any:
    """What the module gives with these tensors in the places of its own, each under any of its names.

    `torch.func.functional_call` leaves such tensors behind in a layer that has two names.

    Raises:
        KeyError: the module has no tensor of a name.
    """
    first, places = _names(module)
    given = {first[name]: tensor for name, tensor in tensors.items()}
    placed = {place: given[name] for place, name in places.items() if name in given}
    return torch.func.functional_call(module, placed, args, tie_weights=False)


def find_ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tensors that are an earlier one -> that one's name.

    >>> weight = torch.zeros(2)
    >>> find_ties({"a": weight, "b": weight.detach(), "c": weight[:1]})
    {'b': 'a'}
    """
    known: dict[object, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.data_ptr() else name
        first = known.setdefault(place, name)
        if first != name:
            ties[name] = first
    return ties


def without_ties(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name, each once, under its first name."""
    ties = find_ties(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in ties}
