"""InclusiveFL: networks of several depths, the small ones' last blocks taught by the larger (Liu et al., KDD 2022).

Architectures are ordered by size. l_g is the last block of architecture g in a stage where the
next larger one, g + 1, has more blocks.
client k:  (of architecture g)  w_k <- w_g;  E epochs of  w_k <- w_k - eta grad CE(f(x; w_k), y)
server:    u_g       =  sum over responding clients of g of p_k w_k - w_g,   p_k = n_k / sum n_j
           u_g[l_g] <-  beta m_g + (1 - beta) u_g[l_g]                    once there is an m_g
           m_g      <-  mean of u_{g+1} over blocks l_g ... of that stage for the next round
           w_g[l_g] <-  w_g[l_g] + u_g[l_g]
           others   <-  layer-wise mean by samples
Sent: down P; up P + 1. Kept: server: w, each architecture's own layers and m.
Deviations from the paper (arXiv:2202.08036): (1) Clients train E epochs and the server adds their mean update; in the
paper they send gradients of one batch, and the server takes an optimizer step. (2) Every ResNet stage has its own last
block. The paper's transformers are a single row of blocks. (3) The classifier is shared, since the FedIN paper states
the same traffic and memory as for FedAvg. (4) Tensors of a last block are distilled only if all corresponding blocks of
the larger network have them in the same shape. (5) m_g is computed before the larger network's own last block is
distilled. (6) BatchNorm's statistics are averaged like weights and not distilled. (7) In the authors' code the momentum
is overwritten instead of summed, so nothing is distilled; here the formula is implemented.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.message import Group, Message, get_group
from polyfed.core.method import Method, Requirements, follows_device, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.network_blocks import blocks
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg

_LAYERS: weight_averaging.Aggregation = "layer-wise"


@hyperparameters
class InclusiveFL(Method):
    """Layer-wise averaging, with momentum distillation into smaller networks."""

    # weight of the larger network's update in a last block's; 0: no distillation
    beta: Annotated[float, Field(ge=0, le=1)] = 0.2
    local_last_block: bool = True  # last blocks stay with their architecture; false: they are averaged layer by layer

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, _LAYERS)
        for architecture in server.architectures:
            w = self._model(server, architecture)
            own = self._own(server, architecture)
            _keep(server, "own", architecture, {name: w[name].clone() for name in w if name in own})

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"model": self._model(server, server.clients[client_id].architecture)}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        models = weight_averaging.client_weights(uploads)
        shares = weight_averaging.client_shares(server, uploads, "samples")
        shared: dict[int, Group] = {}
        by_size = _by_size(server)
        for smaller, architecture in zip([None, *by_size], by_size, strict=False):  # upwards: m is of earlier rounds
            members = [i for i in uploads if server.clients[i].architecture == architecture]
            if not members:
                continue
            w = self._model(server, architecture)
            own = self._own(server, architecture)
            mean = weighted_mean([models[i] for i in members], [shares[i] for i in members])
            update = {name: mean[name] - w[name] for name in w}
            momentum = _kept(server, "momentum", architecture, w)
            shift = {name: self.beta * (m - update[name]) for name, m in momentum.items()}
            shared |= {i: _shifted(models[i], w.keys() - own, shift) for i in members}
            _keep(server, "own", architecture, _shifted(mean, own, shift))
            if smaller is not None and self.beta:
                _keep(server, "momentum", smaller, _lesson(server, smaller, architecture, update))
        weight_averaging.average(server, _LAYERS, shared, shares)

    def _model(self, server: Server, architecture: str) -> Group:
        """An architecture's model: shared layers and its own."""
        w = weight_averaging.weights_for(server, _LAYERS, architecture)
        return {**w, **_kept(server, "own", architecture, w)}

    def _own(self, server: Server, architecture: str) -> set[str]:
        """Names of the tensors that stay with an architecture."""
        by_size = _by_size(server)
        deeper = by_size[by_size.index(architecture) + 1 :]
        if not deeper or not self.local_last_block:
            return set()
        return set(_last_blocks(server, architecture, deeper[0]))

    # client ------------------------------------------------------------------------------------------------
    receive = FedAvg.receive
    upload = FedAvg.upload

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(
        shared_shapes=True,
        same_columns=True,
        shared_outputs=weight_averaging.AVERAGES_HEADS,
        hint="use fedavg with method.aggregation = 'same-shape'",
    )
    evaluation_stage = "received"
    upload_form = {"model": upload_forms.as_sent, "n": upload_forms.SAMPLES}
    delta_entries = ("model",)
    ignores_initial_weights = True


def _by_size(server: Server) -> list[str]:
    models = {a: weight_averaging.weights_for(server, _LAYERS, a) for a in server.architectures}
    return sorted(models, key=lambda a: sum(t.numel() for t in models[a].values()))


def _last_blocks(server: Server, small: str, large: str) -> dict[str, list[str]]:
    return last_blocks(*(weight_averaging.weights_for(server, _LAYERS, a) for a in (small, large)))


def _lesson(server: Server, small: str, large: str, update: Group) -> dict[str, Tensor]:
    """m: mean update of the larger network's blocks that correspond to the smaller one's last block."""
    weights = weight_averaging.parameter_names(server)
    taught = _last_blocks(server, small, large)
    sources = {name: names for name, names in taught.items() if names and name in weights}
    return {name: torch.stack([update[n] for n in names]).mean(0) for name, names in sources.items()}


def _shifted(model: Group, names: Collection[str], shift: Group) -> dict[str, Tensor]:
    return {n: t + shift[n] if n in shift else t for n, t in model.items() if n in names}


def _kept(server: Server, what: str, architecture: str, names: Iterable[str]) -> Group:
    """Stored values of these tensors (see `_keep`)."""
    kept = get_group(server.state, what) if what in server.state else {}
    return {name: kept[f"{architecture} {name}"] for name in names if f"{architecture} {name}" in kept}


def _keep(server: Server, what: str, architecture: str, tensors: Group) -> None:
    kept = get_group(server.state, what) if what in server.state else {}
    if tensors:  # no empty groups in a state
        server.state[what] = {**kept, **{f"{architecture} {name}": t for name, t in tensors.items()}}


def last_blocks(small: Mapping[str, Tensor], large: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """A small network's last blocks, and what they can learn from in a larger one.

    Of every stage in which the larger has more blocks, the tensors of the small network's last block.

    Returns:
        Name in `small` -> names in `large`: that block and all deeper ones of the stage. None where these are not all
        of one shape (in a block that halves its input or changes its width).
    """
    found: dict[str, list[str]] = {}
    deeper = blocks(large)
    for stage, members in blocks(small).items():
        last = max(members)
        others = [layers for number, layers in deeper.get(stage, {}).items() if number >= last]
        if len(others) > 1:
            for layer, name in members[last].items():
                names = [layers[layer] for layers in others if layer in layers]
                alike = len(names) == len(others) and all(large[n].shape == small[name].shape for n in names)
                found[name] = names if alike else []
    return found
