"""The networks that a method's clients and server use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.model_factory import Builder, ModelFactory, Precision


def build_model_factory(
    method: Method,
    builders: Mapping[str, Builder],
    seed: int,
    device: torch.device,
    *,
    others: Mapping[str, Builder] | None = None,
    auxiliary: str | None = None,
    precision: Precision = "float32",
) -> ModelFactory:
    """The networks that a method's clients and server use.

    Args:
        builders: of the clients' architectures, in order of first use; of these are the smallest and the largest.
        others: builders that only the auxiliary model may use. auxiliary: its network's name, where already known.
        precision: what networks train in.
    """
    wanted = method.auxiliary_model
    if wanted is not None and auxiliary is not None:
        wanted = replace(wanted, network=auxiliary)
    alone = getattr(method.join_models, "__func__", None) is Method.join_models  # clients train nothing but their own
    beside = None if alone else method.join_models
    return ModelFactory(
        builders,
        method.build,
        seed,
        device,
        wanted,
        beside,
        others,
        method.card.ignores_initial_weights,
        precision=precision,
        common=method.card.common_start,
    )


def trained_counts(model_factory: ModelFactory, clients: Sequence[Client]) -> dict[str, int]:
    """How many numbers of clients' own networks are trained: architecture -> count."""
    networks = {name: model_factory.build_raw(name) for name in first_by_architecture(clients)}
    return {name: sum(p.numel() for p in one.parameters() if p.requires_grad) for name, one in networks.items()}


def first_by_architecture(clients: Sequence[Client]) -> dict[str, Client]:
    """The first client of each architecture."""
    return {client.architecture: client for client in reversed(clients)}
