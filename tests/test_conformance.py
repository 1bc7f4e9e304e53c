"""Every registered method passes the conformance kit; what each reduces to, what it sends, which knobs need which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed import testing
from polyfed.core.message import flatten
from polyfed.core.networks import floats
from polyfed.methods import FedAvg, FedGH, FedHeNN, FedIN, Local
from polyfed.registry import METHODS
from polyfed.testing import Bite, Reduction
from polyfed.testing.world import SHORT, SIZES, tiny

ORDER = "pairs are taken one after the other (eq. 4), or drawn by their place"


def cross_entropy(model: Any, batch: Any, context: Any) -> float:
    """In float64 and numpy, from the logits."""
    logits = model(batch.x).detach().double().numpy()
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(-log_p[np.arange(len(batch.y)), batch.y.numpy()].mean())


def alignment(model: Any, batch: Any, context: Any) -> float:
    """CE + eta (1 - CKA), the kernels as L x L matrices in float64."""
    task = cross_entropy(model, batch, context)
    if "rad_x" not in context:
        return task
    a = model.represent(context["rad_x"]).detach().double().numpy()
    f = context["rad_target"].double().numpy()
    h = np.eye(len(a)) - 1 / len(a)
    k, m = h @ (a @ a.T) @ h, h @ (f @ f.T) @ h
    return task + float(context["eta"]) * (1 - (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


def proximal(model: Any, batch: Any, context: Any) -> float:
    """CE + (mu/2) ||w - w_received||^2 in float64; the squared norm."""
    pairs = [
        (p.detach().double().numpy(), context["reference"][n].double().numpy()) for n, p in model.named_parameters()
    ]
    return cross_entropy(model, batch, context) + 0.35 / 2 * sum(float(((w - w0) ** 2).sum()) for w, w0 in pairs)


def numbers(server: Any, client_id: int) -> int:
    """Floats of a client's network."""
    weights = server.initial(server.clients[client_id].architecture)
    return sum(t.numel() for t in weights.values() if t.is_floating_point())


def nothing(server: Any, client_id: int) -> tuple[int, int]:
    return 0, 0


def averaging_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P floats each way; the count of samples goes up as int64."""
    p = numbers(server, client_id)
    return 4 * p, 4 * p + 8


def fedgh_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down 4 (D C + C), up 4 (S + S D): D = 6, C = 3."""
    present = (2, 2, 3, 1, 2, 3)[client_id]
    return 4 * (6 * 3 + 3), 4 * (present + present * 6)


def fedgh_half_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """The same with LARs of two bytes a number: up 4 S + 2 S D."""
    down, up = fedgh_bytes(server, client_id)
    return down, 4 * (up // 28) + 2 * (up // 28) * 6


def fedhenn_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down L s + 4 L r, up 4 P: L = 16 rows of 36 floats; r = 2 (6 + 5 + 7), the widths of all six clients."""
    return 16 * 36 * 4 + 4 * 16 * 36, 4 * numbers(server, client_id)


def fedin_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Up 4 (P + B q), down 4 (P + B q) from round 2 on: q = 4*3*3 + 6, B = 8 or all that a client has."""
    p = numbers(server, client_id)
    return 4 * (p + 8 * 42), 4 * (p + min(8, SIZES[client_id]) * 42)


def fedin_half_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Float parameters without BatchNorm's statistics, 20 pairs in half precision."""
    names = server.initial(server.clients[client_id].architecture).items()
    p = sum(t.numel() for name, t in names if not name.rpartition(".")[2].startswith(("running", "num_batches")))
    return 4 * p + 2 * 20 * 42, 4 * p + 2 * min(20, SIZES[client_id]) * 42


# one line per method: what is tested, with the options of its own

test_local = testing.conformance(Local(), oracle=cross_entropy, expected_bytes=nothing)

test_fedavg = testing.conformance(
    FedAvg(),
    oracle=cross_entropy,
    expected_bytes=averaging_bytes,
    counted="updates",
    bites={"aggregation": Bite("same-shape")},
    reductions=[Reduction(FedAvg(aggregation="same-shape"), FedAvg(), "received", one_architecture=True)],
)

test_fedavg_same_shape = testing.conformance(FedAvg(aggregation="same-shape"), counted="updates")

test_fedgh = testing.conformance(
    FedGH(header_lr=0.1),
    oracle=cross_entropy,
    expected_bytes=fedgh_bytes,
    skip={"order_of_uploads": ORDER, "numbering": ORDER},
    reductions=[Reduction({"share": False}, Local())],
)

test_fedgh_whole_round = testing.conformance(
    FedGH(header_batch="round", header_epochs=20, header_lr=0.1), skip={"knobs_bite": "asked of the plain form"}
)

test_fedgh_counts = testing.conformance(
    FedGH(header_batch="round", weight="count", header_epochs=5, header_lr=0.1),
    counted="statistics",
    skip={"knobs_bite": "asked of the plain form"},
)

test_fedgh_unit_length = testing.conformance(
    FedGH(normalize="l2", lar_dtype="float16", header_lr=0.1),
    oracle=cross_entropy,
    expected_bytes=fedgh_half_bytes,
    skip={"order_of_uploads": ORDER, "numbering": ORDER, "knobs_bite": "asked of the plain form"},
)

NO_MEAN = "there is no K_bar"
NO_RBF = {"width": "only RBF kernels have one", "landmarks": "only RBF kernels have them"}

test_fedhenn = testing.conformance(
    FedHeNN(rad_size=16, rad_batch=8, eta0=0.5),
    oracle=alignment,
    expected_bytes=fedhenn_bytes,
    reductions=[
        Reduction({"eta0": 0.0}, Local()),
        Reduction(
            FedHeNN(rad_size=16, rad_batch=8, eta0=0.5, eta_schedule="constant", rad_refresh=0, uploads="kernels"),
            FedHeNN(rad_size=16, rad_batch=8, eta0=0.5, eta_schedule="constant", rad_refresh=0, kernel_pool="seen"),
        ),
    ],
    bites={
        "rank": Bite(3, {"exact_rank": 4}),
        "exact_rank": Bite(4, {"rank": 3}),
        "similarity": "rbf",
        "width": Bite(2.0, {"similarity": "rbf"}),
        "landmarks": Bite(3, {"similarity": "rbf"}),
        "rad_source": "noise",
        "rad_refresh": Bite(0, {"eta_schedule": "constant"}),
        "rad_chunk": Bite(3, {"setting": "homogeneous", "eta_schedule": "constant"}),
        "uploads": Bite("kernels", {"rad_refresh": 0}),
        "kernel_weights": "samples",
        "final_average": Bite(True, {"setting": "homogeneous"}),
    },
)

test_fedhenn_homogeneous = testing.conformance(
    FedHeNN(setting="homogeneous", rad_size=16, rad_batch=8, eta0=0.5),
    oracle=alignment,
    counted="updates",
    reductions=[Reduction({"eta0": 0.0}, FedAvg(), "received", one_architecture=True)],
    bites={"rad_source": "noise", "rad_chunk": Bite(3, {"eta_schedule": "constant"}), "rad_refresh": 0},
    inert={
        **dict.fromkeys(
            ("kernel_pool", "kernel_norm", "kernel_weights", "exclude_self", "rank", "exact_rank", "precision"), NO_MEAN
        ),
        **NO_RBF,
        "uploads": "the weights are what is averaged",
    },
)

test_fedhenn_kernel_uploads = testing.conformance(
    FedHeNN(
        rad_size=16,
        rad_batch=8,
        eta0=0.5,
        similarity="rbf",
        landmarks=8,
        uploads="kernels",
        rad_refresh=0,
        rad_transport="indices",
        kernel_weights="capacity",
        precision="int8",
        eta_schedule="constant",
    ),
    skip={"knobs_bite": "asked of the plain form"},
)

test_fedhenn_procrustes = testing.conformance(
    FedHeNN(
        setting="homogeneous",
        similarity="procrustes",
        rad_size=16,
        rad_batch=8,
        eta0=0.5,
        rad_source="train",
        rad_refresh=2,
        rad_chunk=3,
        final_average=True,
        final_finetune_epochs=1,
    ),
    skip={
        "knobs_bite": "asked of the plain form",
        "batchnorm": "after the last average everybody trains once more",
        "unselected_are_left_alone": "in the closing round everybody is asked",
    },
)

test_fedin = testing.conformance(
    FedIN(mu=0.35),
    oracle=proximal,
    expected_bytes=fedin_bytes,
    skip={"order_of_uploads": ORDER, "numbering": ORDER},
    bites={
        "weighting": "samples",
        "noise_where": Bite("message", {"noise": 0.8}),
        "granularity": Bite("block", {"combine": "project"}),
    },
    reductions=[
        Reduction(FedIN(train_in=False, mu=0.0), FedAvg(), "received", one_architecture=True, equal_sizes=True),
        Reduction(FedIN(train_in=False, mu=0.0, weighting="samples"), FedAvg(), "received"),
    ],
)

test_fedin_noise = testing.conformance(
    FedIN(noise=0.8, aggregation="same-shape", combine="project"),
    skip={"order_of_uploads": ORDER, "numbering": ORDER, "knobs_bite": "asked of the plain form"},
)

test_fedin_without_pairs = testing.conformance(
    FedIN(train_in=False, mu=0.35, weighting="samples"),
    oracle=proximal,
    counted="updates",
    inert=dict.fromkeys(
        ("combine", "lambda_", "granularity", "pool", "noise_where", "pairs", "in_every", "feature_dtype"),
        "there are no pairs",
    ),
)


def test_no_method_is_left_out() -> None:
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(METHODS) <= here


# the kit itself


@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_the_oracles_see_a_difference(mu: float) -> None:
    assert ("oracle" in testing.violations(FedIN(mu=mu), ["oracle"], oracle=proximal)) == (mu != 0.35)


def test_fedin_with_more_pairs_and_local_statistics() -> None:
    """What depends on networks with BatchNorm or on state that clients keep."""
    method = FedIN(pairs=20, in_every=2, feature_dtype="float16", bn_buffers="local")
    asked = ["any_subset", "expected_bytes", "nan_is_refused", "nothing_aliased", "nothing_written_in_place"]
    asked += ["same_seed_same_result", "scoring_changes_nothing", "state_is_explicit", "unselected_are_left_alone"]
    networks = [lambda depth=depth: tiny(depth, 4, 6, norm=True) for depth in (1, 2, 0)]
    assert not testing.violations(method, asked, models=networks, expected_bytes=fedin_half_bytes)


def test_a_knob_said_to_be_inert_must_be() -> None:
    found = testing.violations(FedAvg(), ["knobs_bite"], inert={"weighting": "no reason"})
    assert "said to be inert" in found["knobs_bite"]


def test_a_wrong_formula_is_seen() -> None:
    assert testing.violations(Local(), ["expected_bytes"], expected_bytes=averaging_bytes)
    assert not testing.violations(Local(), ["expected_bytes"], expected_bytes=nothing)


def test_a_wrong_reduction_is_seen() -> None:
    assert testing.violations(FedAvg(), ["reductions"], reductions=[Reduction(FedAvg(), Local())])


def test_check_names_the_property() -> None:
    everything_else = dict.fromkeys(set(testing.PROPERTIES) - {"reductions", "declared"}, "not here")
    with pytest.raises(testing.Nonconformance, match="reductions: local: "):
        testing.check(Local(), reductions=[Reduction(Local(), FedAvg())], skip=everything_else)


def test_the_kit_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state()
    assert not testing.violations(Local(), ["other_seed_other_result", "loss_is_pure", "learns"])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.Generator.__module__ == "torch._C"


def test_the_kits_networks_nest_and_are_small() -> None:
    small, large = floats(tiny(0, 4, 6)), floats(tiny(2, 4, 6))
    assert all(large[name].shape == tensor.shape for name, tensor in small.items())
    assert sum(t.numel() for t in flatten({"w": large}).values()) < 1000
    assert SHORT.rounds == 2
