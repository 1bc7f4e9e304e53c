"""The conformance kit."""

from __future__ import annotations

from polyfed import methods, testing
from tests.helpers import oracles

NO_RBF = {"kernel.width": "only RBF kernels have one"}


test_conformance = testing.conformance(
    methods.HomogeneousFedHeNN(alignment_data={"size": 16, "batch": 8}, eta0=0.5),
    reference_loss=oracles.alignment,
    expected_bytes=oracles.of_weights(16 * 36 * 4, 8),  # FedAvg's, and down L s from round 2 on
    counted="updates",
    reductions=[oracles.is_fedavg({"eta0": 0.0})],
    changed_values={"alignment_data.fixed": True},
    no_effect=NO_RBF,
)


test_other_settings = oracles.other_settings(
    (methods.HomogeneousFedHeNN(kernel={"similarity": "procrustes"}, alignment_data=oracles.FIXED, eta0=0.5), {}),
)
