"""Frozen parameters are not sent up: those of a network that take no gradient (`requires_grad = False`).

Of groups that the method declares as `delta_entries`, trained weights, a frozen parameter that is bit for bit what was
sent down stays with the client, and the server reads what it had sent: the same numbers in fewer bytes. It is left out
before uploads are clipped and noised. Downloads are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import Message, members
from polyfed.core.method import Method
from polyfed.engine.executors.jobs import TrainJob
from polyfed.engine.plugin import Plugin, Setup


class FrozenParameters(Plugin):
    """Leaves out frozen parameters at the client, and puts them in at the server."""

    name = "frozen parameters"
    _frozen: Mapping[str, frozenset[str]] = MappingProxyType({})  # by architecture

    def validate(self, setup: Setup) -> None:
        """Note which parameters of each architecture are frozen: an upload may lack these, and no others."""
        self._frozen = {
            architecture: _frozen(setup.model_factory.module(architecture))
            for architecture in setup.first_of_each_architecture()
        }

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """The upload without what is frozen and as it was sent down."""
        if self._frozen.get(client.architecture) == frozenset():
            return upload
        frozen = _frozen(client.model)
        shorter = {}
        for entry in method.delta_entries:
            base = members(received, entry)
            group = members(upload, entry)
            kept = {
                name: tensor
                for name, tensor in group.items()
                if name not in frozen or name not in base or not torch.equal(tensor, base[name].to(tensor))
            }
            if len(kept) < len(group):
                shorter[entry] = kept
        return {**upload, **shorter}

    def decode(self, upload: Message, job: TrainJob, method: Method) -> Message:
        """The upload with what it lacks of the frozen parameters, as these were sent."""
        frozen = self._frozen.get(job.client.architecture, frozenset())
        if not frozen:
            return upload
        whole = {}
        for entry in method.delta_entries:
            base = members(job.message, entry)
            group = members(upload, entry)
            lacks = [name for name in base if name in frozen and name not in group]
            if lacks and entry in upload:
                whole[entry] = {**group, **{name: base[name] for name in lacks}}
        return {**upload, **whole}


def _frozen(network: nn.Module) -> frozenset[str]:
    """Names of the parameters that take no gradient."""
    return frozenset(name for name, p in network.named_parameters(remove_duplicate=False) if not p.requires_grad)
