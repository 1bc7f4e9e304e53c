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

from torch import Tensor

from polyfed.core.message import Group, Message
from polyfed.core.method import follows_device, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.cross_layer import correct_updates, shallow_references
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg


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
