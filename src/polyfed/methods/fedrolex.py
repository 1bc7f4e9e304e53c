"""FedRolex: clients train a window that rolls over one network (Alam et al., NeurIPS 2022, arXiv:2212.01548).

window:    in round j, rate r keeps the channels {s, s + 1, ..., s + ceil(r K) - 1} mod K of K,
           s = j step mod K
client i:  w_i <- w[window];  E epochs of  w_i <- w_i - eta grad CE(masked f(x; w_i), y)
server:    w[k] <- mean of w_i[k] over the clients that hold entry k,
           equal ("uniform") or by n_i ("samples");  others are unchanged
Rates, channel groups, masks, clipping and BatchNorm's statistics are HeteroFL's.
Sent: down P(r) + S(r), plus P(r) for statistics; up P(r) + C bytes, plus S(r) + 1 for statistics. Kept: server: w,
BatchNorm's statistics by rate.
Deviations from the paper: (1) The window has ceil(r K) channels; the paper has floor(r K). Every group thus keeps a
channel. (2) Rates are drawn anew in every round, as in the authors' code and in FedIN's comparison. In the paper each
client has one capacity (`rates = "fix_..."`). (3) All tensors of a residual stream roll together; the authors' code can
roll every layer separately, so that a stream adds different channels. It rolls backwards. (4) Masks, BatchNorm's
statistics and the missing scaler are HeteroFL's. The authors' code scores with the test batch's statistics. (5) Every
client's sub-model is evaluated; the paper evaluates the large network. (6) Gradients are not clipped; the authors' code
clips them at norm 1 (`max_grad_norm = 1.0`). It weights entries of BatchNorm and the last layer by how often they were
trained.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.functional.channel_slices import first_channels
from polyfed.methods.heterofl import HeteroFL


@hyperparameters
class FedRolex(HeteroFL):
    """Sub-models of one network, whose channels change from round to round."""

    step: Annotated[int, Field(ge=0)] = 1  # channels by which the window moves per round; 0: HeteroFL

    def window(self, server: Server, size: int, rate: float) -> Tensor:
        return (first_channels(size, rate) + self.step * max(server.round - 1, 0)) % size

    ignores_initial_weights = True
    upload_form = HeteroFL.upload_form
