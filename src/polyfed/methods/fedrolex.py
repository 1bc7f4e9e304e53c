"""FedRolex: clients train a window that rolls over one network (Alam et al., NeurIPS 2022, arXiv:2212.01548).

Rates as in HeteroFL: levels a to e keep ceil(r K) of every group of K channels, r = 1, 1/2, 1/4, 1/8, 1/16. In round
j = 0, 1, ... the window of a group starts at channel j mod K and goes around its end (eq. 2), alike for all of a rate.
Client i:  w_i <- w[window];  E epochs on CE of the logits, those of absent classes set to 0;  in training, activations
           divided by r before BatchNorm, which normalises by the batch; gradients clipped.
Server:    every entry of w <- plain mean over the clients that hold it; a class's row over those that have the class.
Sent per round, P floats of weights of the sub-model, S of its BatchNorm's statistics (from the second round on), C
classes: down 4 (P + S), up 4 P + C (which classes, one byte each); where there is BatchNorm, for the statistics of the
new sub-model down 4 P, up 4 S + 8 (and how many batches, int64).
Deviations from the paper: (1) ceil(r K) channels, not floor, so that round 0 is HeteroFL's and none is left without.
(2) The authors' code rolls backwards; this goes forwards, as the paper says. (3) All tensors of a residual stream roll
together. (4) Scaler, masks, clipping and BatchNorm's statistics are HeteroFL's; statistics of a rate are kept channel
by channel, and scores are those of the window that was trained last.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyfed.core import submodels
from polyfed.core.method import knobs
from polyfed.core.server import Server
from polyfed.functional.submodels import rolling


@knobs
class FedRolex(submodels.Narrowing):
    """Narrower copies of one network, of channels that change from round to round."""

    name: ClassVar[str] = "fedrolex"
    paper: ClassVar[str] = "Alam et al., NeurIPS 2022"

    step: Annotated[int, Field(ge=0)] = 1  # channels that the window moves on by in a round; 0 is HeteroFL

    def window(self, server: Server, size: int, rate: float) -> Tensor:
        return rolling(size, rate, self.step * max(server.round - 1, 0))
