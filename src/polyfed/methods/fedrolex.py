"""FedRolex: clients train a window that rolls over one network (Alam et al., NeurIPS 2022, arXiv:2212.01548).

Rates as in HeteroFL: levels a to e keep ceil(r K) of every group of K channels, r = 1, 1/2, 1/4, 1/8, 1/16. In round
j = 0, 1, ... the window of a group starts at channel j mod K and goes around its end (eq. 2), alike for all of a rate.
Client i:  w_i <- w[window];  E epochs on CE of the logits, those of absent classes set to 0;  in training, BatchNorm
           normalizes by the batch.
Server:    every entry of w <- mean over the clients that hold it, all alike or by their samples; a class's row over
           those that have the class.
Deviations from the paper: (1) ceil(r K) channels, not floor, so that round 0 is HeteroFL's and none is left without.
(2) Rates are drawn anew in every round, as in the authors' code and FedIN's comparison; the paper's client n has one
capacity ("fix_..."). (3) All tensors of a residual stream roll together. (4) Masks and BatchNorm's statistics are
HeteroFL's, and there is no scaler; statistics of a rate are kept channel by channel. (5) Scored is every client's
sub-model, the window that was trained last; there the large network.
From the authors' code: it rolls backwards, this goes forwards, as the paper says; in the means of BatchNorm and of the
last layer an entry counts as often as it has been trained before; it scores with statistics of the test batch, and
clips gradients at norm 1 (`max_grad_norm = 1.0`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.errors import ConfigError
from polyfed.functional.channel_slices import rolling_channels
from polyfed.methods.heterofl import HeteroFL


@hyperparameters
class FedRolex(HeteroFL):
    """Sub-models of one network, whose channels change from round to round."""

    card = replace(HeteroFL.card, name="fedrolex", paper="Alam et al., NeurIPS 2022")

    step: Annotated[int, Field(ge=0)] = 1  # channels by which the window moves per round; 0: HeteroFL

    def init_server(self, server: Server) -> None:
        if self.step and server.training.keep_optimizer_state:
            raise ConfigError(
                "fedrolex: expected training.keep_optimizer_state = false, as a client trains other channels in every "
                "round; or set method.step = 0"
            )
        super().init_server(server)

    def window(self, server: Server, size: int, rate: float) -> Tensor:
        return rolling_channels(size, rate, self.step * max(server.round - 1, 0))
