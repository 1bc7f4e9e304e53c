"""FIARSE: clients train the weights that are largest in magnitude, as many as they can carry (Wu et al., NeurIPS 2024).

server:    theta_k: magnitude of the last of the share r_k of all weights ("global")
           or of a layer's ("layer");  M_k = [|w| >= theta_k]
client k:  has one of the shares, in turn;  w_k <- w where M_k, else 0
           E epochs of SGD on CE(f(x; w_k * M), y),  M = [|w_k| >= theta_k] in every step, along
           grad * M * (1 + 2 |w_k| theta_k / (|w_k| + theta_k)^2)
server:    every entry of w <- mean of w_k over the clients with the entry in M_k
           others are unchanged
The gradient and the shares are those of the authors' code, not verified against the paper's text.
Sent: down K_k, entries of the client's sub-model (plus P / 32 where K_k < P); up K_k. Kept: server: w.
Deviations from the paper (arXiv:2407.19389): (1) A client with the whole network has no threshold; in the authors' code
it is the smallest magnitude. (2) An entry is averaged over all clients that received it; in the authors' code, over
those where it has changed. (3) BatchNorm's running statistics are averaged like weights; the authors' code keeps none.
(4) Each client's sub-model is evaluated on its own test rows; the paper also has one test set. (5) A layer is one
module's weight and bias; the authors' code takes each stage of a ResNet as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group
from polyfed.core.method import Batch, Context, Method, Requirements, TrainingResult, hyperparameters, loads_message
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.settings import Shares, in_turn
from polyfed.core.upload_forms import as_sent
from polyfed.functional import masks
from polyfed.functional.device_copies import move_group
from polyfed.functional.losses import task_loss
from polyfed.functional.tied_tensors import call_with

_NORMALIZATION = (_NormBase, nn.GroupNorm, nn.LayerNorm)


@hyperparameters
class FIARSE(Method):
    """Sub-models of the weights that are largest in magnitude."""

    shares: Shares = "1 0.25 0.0625 0.015625"  # shares of the weights, from 1 down, given to clients in turn
    threshold: Literal["global", "layer"] = "global"  # the largest of all weights are kept; "layer": of each layer

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        initial = server.initial_state(server.architectures[0])
        server.state["model"] = {name: initial[name] for name in float_state(_network(server))}

    def broadcast(self, server: Server, client_id: int) -> Message:
        left_out = self._left_out(server, in_turn(self.shares, client_id))
        model = masks.select_shared(get_group(server.state, "model"), left_out)
        if not left_out:
            return {"model": model}
        return {"model": model, "mask": {name: masks.pack_bits(mask) for name, mask in left_out.items()}}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not uploads:
            return
        w = get_group(server.state, "model")
        shares = {i: in_turn(self.shares, i) for i in uploads}
        by_share = {share: self._left_out(server, share) for share in set(shares.values())}
        left_out = [by_share[shares[i]] for i in uploads]
        models = [
            masks.fill_personal(get_group(m, "model"), out, w)
            for m, out in zip(uploads.values(), left_out, strict=True)
        ]
        weights = [server.share(i, "uniform") for i in uploads]
        server.state["model"] = masks.entry_wise_mean(models, weights, left_out, w)

    def _left_out(self, server: Server, share: str) -> dict[str, Tensor]:
        """Masks of what a share of the weights leaves out; none where it leaves nothing out."""
        if float(share) == 1:
            return {}
        w = get_group(server.state, "model")
        found: dict[str, Tensor] = {}
        for names in self._groups(_network(server)):
            theta = magnitude_threshold([w[name] for name in names], float(share))
            found |= {name: w[name].abs() < theta for name in names}
        return found

    def _groups(self, network: nn.Module) -> list[list[str]]:
        """Names of the weights that have a threshold in common."""
        own = dict(network.named_parameters())  # a tensor that layers share belongs to the first
        layers = [
            [name for name, _ in layer.named_parameters(prefix, recurse=False) if name in own]
            for prefix, layer in network.named_modules()
            if not isinstance(layer, _NORMALIZATION)
        ]
        layers = [names for names in layers if names]
        return layers if self.threshold == "layer" else [[name for names in layers for name in names]]

    # client ------------------------------------------------------------------------------------------------
    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        values = get_group(message, "model")
        own = float_state(client.model)
        bits = get_group(message, "mask") if "mask" in message else {}
        left_out = {name: masks.unpack_bits(packed, own[name].shape) for name, packed in bits.items()}
        nothing = {name: torch.zeros_like(t, device="cpu") for name, t in own.items()}
        load_state(client.model, masks.fill_personal(values, left_out, nothing))
        if not left_out:
            return {}
        return {"left out": left_out, "thresholds": self._thresholds(client, values)}

    def _thresholds(self, client: Client, values: Group) -> dict[str, Tensor]:
        """Every weight tensor's threshold: the smallest magnitude of what was sent."""
        found: dict[str, Tensor] = {}
        for names in self._groups(client.model):
            sent = torch.cat([values[name].flatten() for name in names])
            theta = sent.abs().amin().to(next(client.model.parameters()).device)
            found |= dict.fromkeys(names, theta)
        return found

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        if "thresholds" not in context:
            return task_loss(model(batch.x), batch.y, batch.w)
        thresholds = context["thresholds"]
        weights = {name: keep_large(p, thresholds[name]) for name, p in model.named_parameters() if name in thresholds}
        return task_loss(call_with(model, weights, (batch.x,)), batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        left_out = get_group(client.context, "left out") if "left out" in client.context else {}
        return {"model": masks.select_shared(float_state(client.model), move_group(left_out, "cpu"))}

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(same_architecture=True, shared_outputs="it averages heads")
    evaluation_stage = "received"
    upload_form = {"model": as_sent}
    delta_entries = ("model",)
    ignores_initial_weights = True


def _network(server: Server) -> nn.Module:
    return server.model(server.architectures[0], {})


def magnitude_threshold(tensors: Sequence[Tensor], share: float) -> Tensor:
    """The magnitude of the k-th largest entry of all tensors together, 0-d; k = floor(share * entries), at least 1."""
    count = sum(tensor.numel() for tensor in tensors)
    kept = max(1, int(share * count + 1e-9))  # 0.29 * 100 is a little less than 29
    magnitudes = torch.cat([tensor.detach().abs().flatten() for tensor in tensors])
    return magnitudes.kthvalue(count - kept + 1).values


def keep_large(tensor: Tensor, theta: Tensor) -> Tensor:
    """The entries of at least `theta` in magnitude, the others 0, with a gradient that knows of the threshold.

    The gradient is that of tensor * M, where M = [|x| >= theta] has the derivative 2 theta / (|x| + theta)^2 in |x|:
    M * (1 + 2 |x| theta / (|x| + theta)^2).

    theta is 0-d and not negative; 0 leaves nothing out, with the plain gradient.
    """
    x = tensor.detach()
    magnitude = x.abs()
    mask = (magnitude >= theta).to(x.dtype)
    bias = 2 * magnitude * theta / (magnitude + theta).square()  # NaN where both are 0
    slope = mask * (1 + bias.nan_to_num(0.0))
    return x * mask + (tensor - x) * slope
