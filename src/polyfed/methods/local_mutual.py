"""LocalMutual: two networks per client that teach each other, without communication; a control.

A client's second network begins alike everywhere and stays with the client. Both learn from labels and from each other,
on plain and on patch-mixed images: the local stage of FedKWAZ (`building_blocks.mutual_learning`). So it says how much
of what a method with two networks per client gains needs the other clients. Nothing is sent.
Deviations from the paper of FedKWAZ, as far as they concern this stage: (1) teachers are constants. (2) Gradients are
not clipped. (3) One optimizer takes both networks' steps. The candidates of the search for mixtures are the paper's.
"""

from __future__ import annotations

from dataclasses import replace

from polyfed.core.method import hyperparameters
from polyfed.methods.building_blocks.mutual_learning import MutualLearning


@hyperparameters
class LocalMutual(MutualLearning):
    """Local training of two networks that teach each other, without communication."""

    card = replace(
        MutualLearning.card,
        name="local-mutual",
        paper="none: the local stage of FedKWAZ, NeurIPS 2025",
        states="client: both networks, mixtures",
        form={},
    )
