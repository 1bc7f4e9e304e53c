"""FedRolex: sub-models of rolling channels (Alam et al., NeurIPS 2022, arXiv:2212.01548).

round j:   a group of K channels keeps  {s, s + 1, ..., s + ceil(r K) - 1} mod K,  s = j step mod K
client i:  w_i <- w[window];  E epochs of  w_i <- w_i - eta grad CE(masked f(x; w_i), y), with `clip`
server:    w[k] <- mean of w_i[k] over the clients that hold entry k, equal ("uniform") or by n_i ("samples");
           entries that nobody holds are unchanged

Deviations from the paper: (1) ceil(r K) channels, where the paper has floor(r K): round 0 equals HeteroFL, and no
group is empty. (2) Rates are drawn in every round, as in the authors' code and FedIN's comparison; in the paper a
client has a fixed capacity (`rates = "fix_..."`). (3) Each client's sub-model is evaluated; the paper evaluates the
large network.
The authors' code rolls backwards (K - 1, 0, 1, ...) and can roll each layer separately, which makes residual streams
add different channels. It weights entries of BatchNorm and the last layer by how often they were trained, evaluates
with the statistics of the test batch, and clips gradients at norm 1 (`clip = 1.0`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.functional.channel_slices import rolling
from polyfed.methods.building_blocks import width_slicing


@hyperparameters
class FedRolex(width_slicing.Narrowing):
    """Sub-models of one network, whose channels change from round to round."""

    name: ClassVar[str] = "fedrolex"
    paper: ClassVar[str] = "Alam et al., NeurIPS 2022"

    step: Annotated[int, Field(ge=0)] = 1  # channels by which the window moves per round; 0: HeteroFL

    def window(self, server: Server, size: int, rate: float) -> Tensor:
        return rolling(size, rate, self.step * max(server.round - 1, 0))
