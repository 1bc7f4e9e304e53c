"""HeteroFL: clients train the first channels of one network (Diao et al., ICLR 2021, arXiv:2010.01264).

Rates r: levels a to e keep the first ceil(r K) of every group of K channels, r = 1, 1/2, 1/4, 1/8, 1/16; all inputs
and classes.
Client i:  w_i <- w[first channels];  E epochs on CE of the logits, those of absent classes set to 0 (section 3);
           in training, BatchNorm normalizes by the batch.
Server:    every entry of w <- mean over the clients that hold it (eq. 3 to 6), all alike or by their samples, a class's
           row over those that have the class; what nobody holds stays. Then clients report BatchNorm's statistics of
           the new sub-models.
Sent per round, P floats of weights of the sub-model, S of its BatchNorm's statistics (from the second round on), C
classes: down 4 (P + S), up 4 P + C (which classes, one byte each); where there is BatchNorm, for the statistics of the
new sub-model down 4 P, up 4 S + 8 (and how many batches, int64).
Deviations from the paper: (1) statistics are taken rate by rate, from the clients that have the rate, and weighted by
batches; the authors take them for the large network, from all data. (2) No scaler: dividing what enters BatchNorm by r
in training changes nothing behind it; in a network without BatchNorm it would make a narrow network that is scored
another than the one that was trained. (3) Which classes a client has is sent with its weights; in the authors' code the
server knows. (4) Scored is every client's sub-model, not the large network alone.
From the authors' code: it clips gradients at norm 1 (`clip = 1.0`), which slows down networks without BatchNorm.
"""

from __future__ import annotations

from typing import ClassVar

from polyfed.core.method import hyperparameters
from polyfed.methods.building_blocks import width_slicing


@hyperparameters
class HeteroFL(width_slicing.Narrowing):
    """Narrower copies of one network, averaged where they overlap."""

    name: ClassVar[str] = "heterofl"
    paper: ClassVar[str] = "Diao et al., ICLR 2021"
