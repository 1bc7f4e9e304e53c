"""The conformance kit rejects broken methods, each for its own error, and accepts the sound ones behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mutants import broken, sound
from polyfed import testing
from polyfed.core.method import Method
from polyfed.methods import FedAvg, FedGH, Local
from polyfed.testing import Reduction
from test_conformance import averaging_bytes, cross_entropy


def proximal(model: Any, batch: Any, context: Any) -> float:
    """CE + (mu/2) ||w - w_received||^2, mu = 0.5, in float64."""
    pairs = [
        (p.detach().double().numpy(), context["reference"][n].double().numpy()) for n, p in model.named_parameters()
    ]
    return cross_entropy(model, batch, context) + 0.25 * sum(float(((w - w0) ** 2).sum()) for w, w0 in pairs)


def mutual(model: Any, batch: Any, context: Any) -> float:
    """Half of CE and KL for either network; KL summed over classes."""

    def log_softmax(network: Any) -> np.ndarray[Any, Any]:
        logits = network(batch.x).detach().double().numpy()
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    p, m = log_softmax(model.private), log_softmax(model.shared)
    rows = np.arange(len(p)), batch.y.numpy()
    kl = ((np.exp(m) * (m - p)).sum(axis=1) + (np.exp(p) * (p - m)).sum(axis=1)).mean()
    return float(0.5 * (kl - p[rows].mean() - m[rows].mean()))


# what each sound method is asked with; its mutants are asked the same
OPTIONS: dict[type[Method], dict[str, Any]] = {
    Local: {"oracle": cross_entropy},
    FedAvg: {"counted": "updates", "expected_bytes": averaging_bytes},
    FedGH: {"skip": dict.fromkeys(("order_of_uploads", "numbering"), "pair by pair")},
    sound.FedProx: {"oracle": proximal, "reductions": [Reduction({"mu": 0.0}, FedAvg())]},
    sound.FedProto: {
        "counted": "statistics",
        "reductions": [Reduction({"strength": 0.0}, Local())],
    },
    sound.FML: {
        "oracle": mutual,
        "reductions": [Reduction({"alpha": 1.0}, Local(), part="private.")],
    },
    sound.Scaffold: {
        "inert": {"aggregation": "one architecture only"},
        "skip": {"silence_is_not_zero": "the server's control moves by |S| / N (Karimireddy et al., eq. 5)"},
    },
    sound.Drift: {},
}

# the sound ones of this folder; those of the library are in test_conformance.py
test_fedprox = pytest.mark.slow(testing.conformance(sound.FedProx(), **OPTIONS[sound.FedProx]))
test_fedproto = pytest.mark.slow(testing.conformance(sound.FedProto(), **OPTIONS[sound.FedProto]))
test_fml = pytest.mark.slow(testing.conformance(sound.FML(), **OPTIONS[sound.FML]))
test_scaffold = pytest.mark.slow(testing.conformance(sound.Scaffold(), **OPTIONS[sound.Scaffold]))
test_drift = pytest.mark.slow(testing.conformance(sound.Drift(), **OPTIONS[sound.Drift]))

CAUGHT_BY = {
    broken.HeaderInNoOptimiser: "learns",
    broken.HeaderIsClient0s: "nothing_aliased",
    broken.ReceivedIsKept: "nothing_written_in_place",
    broken.PreviousIsLive: "nothing_aliased",
    broken.UnsquaredNorm: "oracle",
    broken.DeadKnob: "knobs_bite",
    broken.HeadsBeginApart: "begins_alike",
    broken.UncountedPrototypes: "counted",
    broken.AbsentClassesAreZero: "silence_is_not_zero",
    broken.UndetachedTeacher: "reductions",
    broken.KLOverElements: "oracle",
    broken.BuffersStayAtHome: "batchnorm",
    broken.BuffersOfTheFirst: "batchnorm",
    broken.SeedInConstructor: "other_seed_other_result",
    broken.SeededDraws: "other_seed_other_result",
    broken.GlobalSeed: "global_generators_untouched",
    broken.DrawsInLoss: "loss_is_pure",
    broken.BranchesOnValues: "loss_is_pure",
    broken.Unshuffled: "data_are_shuffled",
    broken.DropsTheLastBatch: "awkward_data",
    broken.StateInPlace: "nothing_written_in_place",
    broken.HiddenState: "state_is_explicit",
    broken.StateInTheMethod: "state_is_explicit",
    broken.BroadcastCounts: "broadcast_without_side_effects",
    broken.DividesByAll: "silence_is_not_zero",
    broken.CrashesWithoutAnswers: "any_subset",
    broken.LastUploadWins: "order_of_uploads",
    broken.WeightsByPlace: "order_of_uploads",
    broken.FirstClientIsSpecial: "numbering",
    broken.SwallowsNaN: "nan_is_refused",
    broken.SendsTheWholeUnion: "expected_bytes",
    broken.ForgetsWhatNobodySent: "any_subset",
    broken.UnknownStage: "declared",
    broken.NeedsNothing: "any_subset",
}


def options(kind: type[Method]) -> dict[str, Any]:
    """Those of the sound method that it was made from."""
    return next(OPTIONS[parent] for parent in kind.__mro__ if parent in OPTIONS)


@pytest.mark.parametrize("kind", CAUGHT_BY, ids=lambda kind: kind.__name__)
def test_the_mutant_is_rejected(kind: type[Method]) -> None:
    assert kind.__doc__
    name = CAUGHT_BY[kind]
    found = testing.violations(kind(), [name], **options(kind))
    assert name in found, f"{kind.__name__} ({kind.__doc__}) passed '{name}'"


def test_there_are_enough() -> None:
    defined = {k for k in vars(broken).values() if isinstance(k, type) and k.__module__ == broken.__name__}
    assert defined == set(CAUGHT_BY)
    assert len(CAUGHT_BY) >= 15
