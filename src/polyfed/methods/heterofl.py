"""HeteroFL: sub-models of the first channels of one network (Diao et al., ICLR 2021, arXiv:2010.01264).

rates:     a, b, c, d, e = 1, 1/2, 1/4, 1/8, 1/16;  "dynamic_a1-b1-c1-d1-e1": each client draws a level each round,
           with these proportions;  "fix_a1-b3": the first quarter of the clients has a, the others b
client i:  w_i <- w[first channels];  E epochs of  w_i <- w_i - eta grad CE(masked f(x; w_i), y), with `max_grad_norm`
server:    w[k] <- mean of w_i[k] over the clients that hold entry k, equal ("uniform") or by n_i ("samples");
           entries that nobody holds are unchanged

Deviations from the paper: (1) Statistics are computed per rate, from the clients of the rate, weighted by batches.
The authors compute them for the whole network over all data and do not count this communication. (2) There is no
scaler (which divides inputs of normalization layers by r in training): BatchNorm cancels it, and without BatchNorm
the trained and the evaluated network would differ. (3) A client's classes are sent with its weights, one byte each;
in the authors' code the server knows them. (4) All clients' sub-models are evaluated, not only the whole network.
The authors' code clips gradients at norm 1, which slows networks without BatchNorm (below); `max_grad_norm = 1.0` does
so, and the recipe of FedIN's table 1 sets it. It slices layers by name and does not handle the third convolution of a
bottleneck block, so ResNet152 cannot have run with it unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from polyfed.core.method import hyperparameters
from polyfed.methods.building_blocks import width_slicing


@hyperparameters
class HeteroFL(width_slicing.WidthSlicing):
    """Narrower sub-models of one network, averaged over the clients that hold a weight."""

    card = replace(width_slicing.WidthSlicing.card, name="heterofl", paper="Diao et al., ICLR 2021")
