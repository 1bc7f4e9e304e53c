"""InCoAvg: deep layers' updates steered by shallow ones (InCo Aggregation: Chan et al., ICLR 2024, arXiv:2308.11464).

g_k is the update of a convolution in any block of a stage but the first. g_0 is the update of the
first block's last convolution of the same shape, in ResNets conv2.
client k:  w_k <- w;  E epochs of  w_k <- w_k - eta grad CE(f(x; w_k), y)
server:    g   =  mean of w_k - w over the clients that have the tensor
           alpha = <g_0, g_0>,  beta = <g_0, g_k>,  kernel by kernel
           theta = min(|beta| / (alpha + 1e-7), 5)
           g_k' = clamp( (g_k / ||g_k|| + theta g_0 / ||g_0||) (||g_k|| + ||g_0||) / 2,  -0.1, 0.1 )
           w  <- w + g'
Sent: down P; up P + 1. Kept: server: w.
Deviations from the paper: (1) The correction is that of the authors' code, which produced the published figures. The
paper's theorem has g_k + max(0, -beta / alpha) g_0. (2) Clients send weights, not differences, since the server knows
what it sent. Tensors that are not corrected are thus plain means, and a running variance never becomes negative. (3) A
layer that no client sent, or a kernel that did not change, is neither corrected nor used as reference. (4) Only
convolutions larger than 1 x 1 are corrected. In transformers the paper corrects norm layers; here these are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.core.message import Group, Message
from polyfed.core.method import follows_device, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.network_blocks import blocks
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg

_EPSILON = 1e-7  # these three constants are those of the authors' code
THETA_MAX = 5.0
UPDATE_MAX = 0.1  # largest entry of a corrected update


@hyperparameters
class InCoAvg(FedAvg):
    """Averaging, with updates of deep layers corrected by those of shallow ones."""

    weighting: weight_averaging.Weighting = "uniform"  # clients count equally; "samples": by their samples

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        before = weight_averaging.all_weights(server)
        super().aggregate(server, uploads)
        for name, mean in weight_averaging.all_weights(server).items():
            server.state[name] = {**mean, **self._corrected(before[name], mean)}

    def _corrected(self, w: Group, mean: Group) -> dict[str, Tensor]:
        """Convolutions whose update is corrected."""
        moved: dict[str, Tensor] = {}
        for name, reference in shallow_references(w).items():
            g_k = mean[name] - w[name]
            g_0 = mean[reference] - w[reference]
            if g_k.any() and g_0.any():
                moved[name] = w[name] + correct_updates(g_k, g_0)
        return moved


def shallow_references(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Which convolution is corrected by which: name -> name of its reference.

    Corrected are the convolutions (larger than 1 x 1) of all blocks of a stage but its first. The reference is the
    first block's last convolution of the same shape: in a basic block conv2, as its conv1 may have another input
    width. Without one of that shape a convolution is left out.
    """
    found: dict[str, str] = {}
    kernels = [name for name, t in weights.items() if t.dim() == 4 and t.shape[2:].numel() > 1]
    for members in blocks(kernels).values():
        first, *deeper = members.values()
        for name in (name for block in deeper for name in block.values()):
            alike = [other for other in first.values() if weights[other].shape == weights[name].shape]
            found |= {name: alike[-1]} if alike else {}
    return found


def correct_updates(g_k: Tensor, g_0: Tensor) -> Tensor:
    """The update g_k (O, I, K, K), channels and kernel, of a deep convolution, turned by that of a shallow one, g_0.

    For every kernel by itself, (g_k / ||g_k|| + theta g_0 / ||g_0||) (||g_k|| + ||g_0||) / 2 with
    theta = min(|<g_0, g_k>| / (<g_0, g_0> + 1e-7), 5).

    Where g_k or g_0 is zero, g_k stays as it is; entries of the result are at most 0.1 in size.
    """
    deep = g_k.double().flatten(2)
    shallow = g_0.double().flatten(2)
    alpha = (shallow * shallow).sum(-1, keepdim=True)
    beta = (shallow * deep).sum(-1, keepdim=True)
    deep_norm = deep.norm(dim=-1, keepdim=True)
    shallow_norm = shallow.norm(dim=-1, keepdim=True)
    theta = (beta.abs() / (alpha + _EPSILON)).clamp(max=THETA_MAX)
    turned = (deep / deep_norm + theta * shallow / shallow_norm) * (deep_norm + shallow_norm) / 2
    turned = torch.where((deep_norm > 0) & (shallow_norm > 0), turned, deep)
    return turned.clamp(-UPDATE_MAX, UPDATE_MAX).reshape(g_k.shape).to(g_k.dtype)
