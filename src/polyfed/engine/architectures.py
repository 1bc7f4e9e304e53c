"""The networks that a method's clients and server use: by name, as given, and how many numbers they train."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from polyfed.core.client import Client, to_float
from polyfed.core.method import Method
from polyfed.core.model_factory import Builder, ModelFactory, with_classes
from polyfed.core.modules import copy_network
from polyfed.data.text import Vocabulary
from polyfed.engine.compatibility import check_parameters
from polyfed.engine.network_checks import compute_alike
from polyfed.errors import ConfigError, suggest
from polyfed.functional.tied_tensors import find_ties
from polyfed.models.split import check_plain
from polyfed.models.third_party import pretrained_normalization
from polyfed.models.zoo import build
from polyfed.registry import MODELS


def build_model_factory(
    method: Method,
    builders: Mapping[str, Builder],
    seed: int,
    device: torch.device,
    *,
    others: Mapping[str, Builder] | None = None,
    auxiliary: str | None = None,
) -> ModelFactory:
    """The networks that a method's clients and server use.

    Args:
        builders: of the clients' architectures, in order of first use; of these are the smallest and the largest.
        others: builders that only the auxiliary model may use. auxiliary: its network's name, where already known.
    """
    wanted = method.auxiliary_model
    if wanted is not None and auxiliary is not None:
        wanted = replace(wanted, network=auxiliary)
    alone = getattr(method.join_models, "__func__", None) is Method.join_models  # clients train nothing but their own
    beside = None if alone else method.join_models
    builders, others = ({n: functools.partial(_built, b) for n, b in some.items()} for some in (builders, others or {}))
    return ModelFactory(
        builders,
        method.build,
        seed,
        device,
        wanted,
        beside,
        others,
        method.ignores_initial_weights,
        common=method.common_start,
    )


def _built(builder: Builder) -> nn.Module:
    network = builder()
    check_plain(network)
    return network


def builders_by_name(
    clients: Sequence[Client], own: Mapping[str, Builder], classes: int, vocabulary: Vocabulary | None
) -> dict[str, Builder]:
    """What makes the networks that clients name and that the user's `own` functions do not make: as a recipe does.

    Args:
        clients: with their data. classes: of the task; 0: one output. vocabulary: of texts.

    Raises:
        ConfigError: a name that nobody knows, or inputs that are not as the network's weights want them.
    """
    found: dict[str, Builder] = {}
    for client in clients:
        name = client.architecture
        if client.given is not None or name in own:
            continue
        _check_named(client, own)
        words = None if vocabulary is None else vocabulary.network_ids
        shape = tuple(client.data.train.x.shape[1:])
        outputs = classes or 1
        if client.class_names:
            outputs = len(client.class_names)
            client.architecture = with_classes(name, outputs)
        found.setdefault(client.architecture, functools.partial(build, name, shape, outputs, words=words))
    return found


def map_builder(
    method: Method, first: Client, own: Collection[str], classes: int, vocabulary: Vocabulary | None
) -> dict[str, Builder]:
    """What makes the network that nobody trains, where a method names one and the user's `own` functions make none.

    Args:
        first: a client, as all have inputs alike. Others: see `builders_by_name`.
    """
    wanted = method.auxiliary_model
    if wanted is None or not wanted.frozen or wanted.network in own or wanted.architecture in own:
        return {}
    _check_normalized(first, wanted.network)
    words = None if vocabulary is None else vocabulary.network_ids
    shape = tuple(first.data.train.x.shape[1:])
    made = functools.partial(
        build, wanted.network, shape, classes or 1, words=words, categories=first.categories, frozen=True
    )
    return {wanted.architecture: made}


def _check_named(client: Client, own: Collection[str]) -> None:
    """Whether a named network is known, and takes the client's inputs as they are prepared."""
    name = client.architecture
    if ":" not in name and re.split("[?#]", name)[0] not in MODELS:
        raise ConfigError(
            f"{client.title}: expected a network, a name in builders or that of a registered model, got '{name}'"
            f"{suggest(name, [*MODELS, *own])}"
        )
    _check_normalized(client, name)


def _check_normalized(client: Client, name: str) -> None:
    if client.prepare is not to_float or client.data.train.x.dtype != torch.uint8:
        return
    if (wanted := pretrained_normalization(name)) is not None:
        raise ConfigError(
            f"'{name}' wants images normalized with mean {wanted[0]} and std {wanted[1]}; write "
            "Client(..., prepare=polyfed.data.transforms.Prepare(mean, std))"
        )


def name_architectures(clients: Sequence[Client], builders: dict[str, Builder]) -> dict[str, Builder]:
    """Name the architectures of clients that were given a network.

    Networks are of one architecture where class, tensors and ties are the same, and what they give with equal tensors.
    """
    known: dict[object, list[tuple[str, str, nn.Module]]] = {}  # by kind: name, whose it is first, its network
    named: dict[str, Builder] = {}
    for number, client in enumerate(clients):
        if client.given is None:
            named[client.architecture] = builders[client.architecture]
            continue
        module = client.given
        check_plain(module, f"client {number}: ")
        who = f"client {number} ('{type(module).__name__}')"
        check_parameters(module, who)
        shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in module.state_dict().items())
        kind = (type(module), repr(module), shapes, tuple(find_ties(module.state_dict()).items()))
        alike = known.setdefault(kind, [])
        name = next((name for name, _, other in alike if compute_alike(other, module, client, who)), None)
        if name is None:
            base = getattr(module, "architecture", "") or type(module).__name__
            taken = set(named) | set(builders)
            names = [base, *(f"{base}-{i}" for i in range(2, len(clients) + 2))]
            name = next(one for one in names if one not in taken)
            named[name] = functools.partial(copy_network, module, who)
            if alike:
                warnings.warn(
                    f"{who}: its network gives other outputs than that of {alike[0][1]} with the same weights, and "
                    f"counts as another architecture, '{name}'",
                    stacklevel=2,
                )
            alike.append((name, who, module))
        client.architecture = name
    return named
