"""Every registered method passes the conformance kit; what each reduces to, what it sends, which hyperparameters need
which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed import methods, testing
from polyfed.models.split import SequentialSplit
from polyfed.registry import METHODS
from polyfed.testing import ChangedValue, Reduction
from polyfed.testing.fixtures import SIZES, tiny_model

IN_ORDER = dict.fromkeys(
    ("order_of_uploads", "client_order_invariant"),
    "pairs are taken one after the other (eq. 4), or drawn by their place",
)


def log_softmax(scores: Any) -> Any:
    """Of a tensor or an array, in float64 and numpy."""
    scores = scores.detach().double().numpy() if isinstance(scores, torch.Tensor) else scores
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def of_labels(log_p: Any, y: Any) -> float:
    """Cross-entropy of log probabilities."""
    return float(-log_p[np.arange(len(y)), y.numpy()].mean())


def divergence(log_p: Any, log_q: Any) -> float:
    """KL(p || q), summed over classes."""
    return float((np.exp(log_p) * (log_p - log_q)).sum(1).mean())


def cross_entropy(model: Any, batch: Any, context: Any) -> float:
    return of_labels(log_softmax(model(batch.x)), batch.y)


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
        (p.detach().double().numpy(), context["received"][n].double().numpy()) for n, p in model.named_parameters()
    ]
    return cross_entropy(model, batch, context) + 0.35 / 2 * sum(float(((w - w0) ** 2).sum()) for w, w0 in pairs)


def generated(model: Any, batch: Any, context: Any) -> float:
    """CE + a CE(h(G(z', y')), y') + b KL(softmax h(G(z, y)) || softmax f(x)) in float64; G written out."""
    g = {name: t.double().numpy() for name, t in context["generator"].items()}
    head = {name: p.detach().double().numpy() for name, p in model.head.named_parameters()}
    norm = g["norm.weight"] / np.sqrt(g["norm.running_var"] + 1e-5)

    def made(z: Any, y: Any) -> Any:
        given = np.concatenate([z.double().numpy(), np.eye(3)[y.numpy()]], axis=1)
        hidden = given @ g["hidden.weight"].T + g["hidden.bias"]
        hidden = (hidden - g["norm.running_mean"]) * norm + g["norm.bias"]
        features = np.maximum(hidden, 0) @ g["output.weight"].T + g["output.bias"]
        return log_softmax(features @ head["weight"].T + head["bias"])

    drawn = of_labels(made(context["z_y"], context["y"]), context["y"])
    kl = divergence(made(context["z"][: len(batch.y)], batch.y), log_softmax(model(batch.x)))
    return cross_entropy(model, batch, context) + 0.98 * (0.2 * drawn + 0.1 * kl)  # of round 2


PRESENT = (2, 2, 3, 1, 2, 3)  # classes of each client
Bytes = Callable[[Any, int], tuple[int, int]]


def numbers(server: Any, client_id: int) -> int:
    """Floats of a client's network."""
    weights = server.initial_state(server.clients[client_id].architecture)
    return sum(t.numel() for t in weights.values() if t.is_floating_point())


def of_weights(down: int = 0, up: int = 0, times: int = 1) -> Bytes:
    """So many times the client's P floats each way, and these bytes."""

    def formula(server: Any, client_id: int) -> tuple[int, int]:
        p = 4 * times * numbers(server, client_id)
        return p + down, p + up

    return formula


def of_classes(down: int, up: int, down_each: int = 0) -> Bytes:
    """Bytes down, and more for each class of the client's, and bytes up for each; C = 3 classes, D = 6 features."""
    return lambda server, client_id: (down + down_each * PRESENT[client_id], up * PRESENT[client_id])


averaging_bytes = of_weights(up=8)  # the count of samples goes up as int64
CLASS_ROWS = of_classes(4 * (3 * 6 + 3), 4 * (6 + 1))  # down 4 (C D + C), up 4 (S D + S)


def shared_numbers(server: Any) -> int:
    """Floats of the auxiliary model."""
    return sum(t.numel() for t in server.initial_state(server.auxiliary_model).values() if t.is_floating_point())


def auxiliary_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P_m floats each way; the count of samples goes up as int64."""
    p = shared_numbers(server)
    return 4 * p, 4 * p + 8


def fedhenn_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down L s + 4 L r, up 4 P: L = 16 rows of 36 floats; r = 2 (6 + 5 + 7), the widths of all six clients."""
    return 16 * 36 * 4 + 4 * 16 * 36, 4 * numbers(server, client_id)


def fedin_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Up 4 (P + B q), down 4 (P + B q) from round 2 on: q = 4*3*3 + 6, B = 8 or all that a client has."""
    p = numbers(server, client_id)
    return 4 * (p + 8 * 42), 4 * (p + min(8, SIZES[client_id]) * 42)


def contrastive(model: Any, batch: Any, context: Any) -> float:
    """CE - 1.5 log[e(near) / (e(near) + e(far))], cosines in float64, T = 0.4."""

    def e(reference: Any) -> Any:
        a, b = (net.represent(batch.x).detach().double().numpy() for net in (model, reference))
        return np.exp((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1)) / 0.4)

    near, far = e(context["received"]), e(context["previous"])
    return cross_entropy(model, batch, context) - 1.5 * float(np.log(near / (near + far)).mean())


def fedselect_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down still all; up without a quarter of every matrix, and a bit for each of its entries."""
    weights = server.initial_state(server.clients[client_id].architecture).values()
    matrices = [t.numel() for t in weights if t.dim() > 1]
    p = numbers(server, client_id)
    return 4 * p, 4 * (p - sum(round(n / 4) for n in matrices)) + sum(-(-n // 8) for n in matrices)


def fedfomo_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down of all five others what is also the client's; up its model and five numbers."""
    held = {
        i: {name: t.numel() for name, t in server.initial_state(member.architecture).items() if t.is_floating_point()}
        for i, member in server.clients.items()
    }
    mine = held.pop(client_id)
    return 4 * sum(n for w in held.values() for name, n in w.items() if name in mine), 4 * (sum(mine.values()) + 5)


def pulled(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.4 / 2 ||w - w_received||^2, or + 0.3 / 2 (||w - w_received|| - 0.5)^2, in float64."""
    gaps = [p.detach().double().numpy() - context["w"][n].double().numpy() for n, p in model.named_parameters()]
    squared = sum(float((gap**2).sum()) for gap in gaps)
    pull = 0.2 * squared if context["personal turn"] else 0.15 * (np.sqrt(squared) - 0.5) ** 2
    return cross_entropy(model, batch, context) + pull


def mutual(model: Any, batch: Any, context: Any) -> float:
    """0.3 CE(w) + 0.7 KL(m || w) + 0.6 CE(m) + 0.4 KL(w || m) in float64."""
    own, other = log_softmax(model.own(batch.x)), log_softmax(model.auxiliary_model(batch.x))
    task = 0.3 * of_labels(own, batch.y) + 0.6 * of_labels(other, batch.y)
    return task + 0.7 * divergence(other, own) + 0.4 * divergence(own, other)


def mentored(model: Any, batch: Any, context: Any) -> float:
    """CE(w) + CE(m) = s, + [1.5 (KL(m || w) + KL(w || m)) + 0.5 * 2 MSE(H_w, W H_m)] / s, in float64."""
    own, other = log_softmax(model.own(batch.x)), log_softmax(model.auxiliary_model(batch.x))
    s = of_labels(own, batch.y) + of_labels(other, batch.y)
    kl = divergence(other, own) + divergence(own, other)
    h_w, h_m = (net.represent(batch.x).detach().double().numpy() for net in (model.own, model.auxiliary_model))
    gap = h_w - h_m @ model.projector.weight.detach().double().numpy().T
    return s + (1.5 * kl + float((gap**2).mean())) / s


def nested(model: Any, batch: Any, context: Any) -> float:
    """CE(h(r)) + CE(h_s(r[:4])), r = P [phi_s, phi], in float64."""
    z = [net.represent(batch.x).detach().double().numpy() for net in (model.auxiliary_model, model.own)]
    weights = [layer.state_dict() for layer in (model.projection, model.own.head, model.auxiliary_model.head)]
    (p, b), own, common = ([t.double().numpy() for t in layer.values()] for layer in weights)
    r = np.concatenate(z, axis=1) @ p.T + b
    outputs = [inputs @ w.T + bias for inputs, (w, bias) in ((r, own), (r[:, :4], common))]
    return sum(of_labels(log_softmax(logits), batch.y) for logits in outputs)


def fedin_normed_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Float parameters and BatchNorm's statistics, 20 pairs."""
    p = numbers(server, client_id)
    return 4 * p + 4 * 20 * 42, 4 * p + 4 * min(20, SIZES[client_id]) * 42


def fedin_projected_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """As `fedin_bytes`, but q = (1 + 2*2) * 3 + 512, whatever the network."""
    p, q = numbers(server, client_id), 5 * 3 + 512
    return 4 * (p + 8 * q), 4 * (p + min(8, SIZES[client_id]) * q)


def masked(model: Any, batch: Any, context: Any) -> float:
    """CE in float64, the logits of absent classes being 0."""
    return of_labels(log_softmax(model(batch.x) * context["classes"]), batch.y)


def of_width(w: int, f: int) -> int:
    """Numbers of a convolution, a block of `w` channels, one of `f`, and the head."""
    return (9 * w + w) + (9 * w * w + w) + (9 * w * f + f) + (f * 3 + 3)


def sliced_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of the whole network for the first three clients, of its half for the others; three classes, a byte each."""
    p = of_width(*((8, 12), (4, 6))[client_id // 3])
    return 4 * p, 4 * p + 3


def fjord_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of a third, two thirds and all of 8 and 12 channels."""
    p = of_width(*((3, 4), (6, 8), (8, 12))[client_id // 2])
    return 4 * p, 4 * p


def ordered_dropout(model: Any, batch: Any, context: Any) -> float:
    """CE of the widest and, where a narrower width was drawn, KL(widest || narrower); the narrower one made by hand."""
    task = cross_entropy(model, batch, context)
    widest = {3: 0, 6: 1, 8: 2}[len(model.extractor.conv.bias)]
    if context["width"] == widest:
        return task
    w, f = ((3, 4), (6, 8))[context["width"]]
    inner = tiny_model(1, w, f)
    for (_, small), (_, large) in zip(inner.named_parameters(), model.named_parameters(), strict=True):
        small.data = large.detach()[tuple(slice(0, n) for n in small.shape)]
    return task + divergence(log_softmax(model(batch.x)), log_softmax(inner(batch.x)))


def scalefl_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of the stem, the block and its exit at half the width, or of all, 8 and 12 channels."""
    whole = int(server.state["levels"][client_id]) == 2
    w, f = (8, 12) if whole else (4, 6)
    p = (9 * w + w) + (9 * w * w + w) + (w * 3 + 3) + whole * ((9 * w * f + f) + (f * 3 + 3))
    return 4 * p, 4 * p


def exits(model: Any, batch: Any, context: Any) -> float:
    """(L_1 + 2 L_2) / 3 with L_1 = CE + 0.3 3^2 KL(softmax(o_2 / 3) || softmax(o_1 / 3)), or CE of the only exit."""
    outputs = model(batch.x)
    *early, own = [cross_entropy(lambda x, out=out: out, batch, context) for out in outputs]
    if not early:
        return own
    q, p = (log_softmax(out.double() / 3) for out in outputs)
    return (early[0] + 0.3 * 9 * divergence(p, q) + 2 * own) / 3


def depthfl_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of the stem, the block and its classifier, or of all, with 8 channels and 12 features."""
    p = (9 * 8 + 8) + (9 * 8 * 8 + 8) + (8 * 3 + 3) + (client_id % 2 == 0) * ((9 * 8 * 12 + 12) + (12 * 3 + 3))
    return 4 * p, 4 * p


def mutual_exits(model: Any, batch: Any, context: Any) -> float:
    """CE of both, and 0.6 exp(-5 (1 - 1 / 4)^2) (KL(o_1 || o_2) + KL(o_2 || o_1)) in round 2; or CE of the only one."""
    outputs = model(batch.x)
    total = sum(cross_entropy(lambda x, out=out: out, batch, context) for out in outputs)
    if len(outputs) == 1:
        return total
    p, q = map(log_softmax, outputs)
    return total + 0.6 * float(np.exp(-5 * 0.75**2)) * (divergence(p, q) + divergence(q, p))


def fiarse_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of the whole network, or a quarter of it and a bit for each entry of its eight tensors."""
    sizes = [t.numel() for t in server.initial_state("net0").values()]
    if client_id % 2 == 0:
        return 4 * sum(sizes), 4 * sum(sizes)
    up = 4 * (sum(sizes) // 4)
    return up + sum(-(-size // 8) for size in sizes), up


def pruned(model: Any, batch: Any, context: Any) -> float:
    """CE of a network whose weights below the threshold are 0, made by hand."""
    if "thresholds" not in context:
        return cross_entropy(model, batch, context)
    inner = tiny_model(1, 8, 12)
    for (name, small), (_, large) in zip(inner.named_parameters(), model.named_parameters(), strict=True):
        small.data = large.detach().clone()
        small.data[small.data.abs() < context["thresholds"][name]] = 0.0
    return cross_entropy(inner, batch, context)


def guided(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.8 mean (f(x) - g_y)^2, over samples and logits."""
    logits, g = model(batch.x).detach().double().numpy(), context["guides"].double().numpy()
    return cross_entropy(model, batch, context) + 0.8 * float(((logits - g[batch.y.numpy()]) ** 2).mean())


def digesting(model: Any, batch: Any, context: Any) -> float:
    """Mean |f(x) - s(x)| on public rows, CE on one's own."""
    if not context["digests"]:
        return cross_entropy(model, batch, context)
    scores, target = (t.detach().double().numpy() for t in (model(batch.x), context["targets"]))
    return float(np.abs(scores - target[batch.rows.numpy()]).mean())


def drawn_to(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.7 mean_d (z - P[y])^2 in float64, a mean over all rows of the batch."""
    z, p = (t.detach().double().numpy() for t in (model.represent(batch.x), context["prototypes"]))
    known, y = context["known"].numpy(), batch.y.numpy()
    squares = [((row - p[c]) ** 2).mean() if known[c] else 0.0 for row, c in zip(z, y, strict=True)]
    return cross_entropy(model, batch, context) + 0.7 * float(np.mean(squares))


def taught(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.6 soft CE to the class's target, in float64, a mean over all rows of the batch."""
    log_p, targets = log_softmax(model(batch.x)), context["targets"].double().numpy()
    rows = [-(targets[c] * p).sum() * bool(context["known"][c]) for p, c in zip(log_p, batch.y.numpy(), strict=True)]
    return cross_entropy(model, batch, context) + 0.6 * float(np.mean(rows))


def anchored(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.7 mean_d (z - A[y])^2 + 0.4 CE(-(||z - A[c]|| + delta [c = y])) + 0.3 mean_c CE(h(A[c]), c), float64."""
    z, a = (t.detach().double().numpy() for t in (model.represent(batch.x), context["anchors"]))
    y, delta = batch.y.numpy(), float(context["margin"])
    pulled = ((z - a[y]) ** 2).mean()
    away = np.sqrt(((z[:, None] - a) ** 2).sum(axis=2)) + delta * np.eye(3)[y]
    contrasted = of_labels(log_softmax(-away), batch.y)
    calibrated = of_labels(log_softmax(model.head(context["anchors"])), torch.arange(3))
    return cross_entropy(model, batch, context) + 0.7 * pulled + 0.4 * contrasted + 0.3 * calibrated


def turned_to(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.7 (1 - cos(z, P[y])) in float64, a mean over all rows of the batch."""
    z, p = (t.detach().double().numpy() for t in (model.represent(batch.x), context["prototypes"]))
    known, y = context["known"].numpy(), batch.y.numpy()
    rows = [(row, p[c]) for row, c in zip(z, y, strict=True) if known[c]]
    cosines = [(a @ b) / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-8) for a, b in rows]
    return cross_entropy(model, batch, context) + 0.7 * float(sum(1 - one for one in cosines)) / len(y)


def two_outputs(model: Any, x: Any) -> list[Any]:
    """Representation and log probabilities at T = 4 of own network and second network, and those at T = 1."""
    found = []
    for net in (model.own, model.auxiliary_model):
        z = net.represent(x)
        scores = net.head(z)
        found.append((z.detach().double().numpy(), log_softmax(scores / 4), log_softmax(scores)))
    return found


def taught_by_each_other(model: Any, batch: Any, context: Any) -> float:
    """CE of both + 0.7 (plain images) + 0.4 (patch-mixed images), each of distances both ways and 16 KL, in float64."""

    def outputs(number: int) -> list[Any]:
        order, share = context["order"][number][: len(batch.y)].argsort(), context["maps"][number]
        return two_outputs(model, share * batch.x + (1 - share) * batch.x[order])

    (z, p, plain), (z_m, q, plain_m) = two_outputs(model, batch.x)
    task = of_labels(plain, batch.y) + of_labels(plain_m, batch.y)
    both = 2 * float(((z - z_m) ** 2).mean()) + 16 * (divergence(q, p) + divergence(p, q))
    (first, _, _), (first_m, _, _) = outputs(0)
    (_, own, _), (_, teacher, _) = outputs(1)
    (_, taught, _), (_, other, _) = outputs(2)
    mixed = 2 * float(((first - first_m) ** 2).mean()) + 16 * (divergence(teacher, own) + divergence(taught, other))
    return task + 0.7 * both + 0.4 * mixed


def taught_by_means(model: Any, batch: Any, context: Any) -> float:
    """Stage 2 as above; stage 1: CE of both, soft CE to the other's mean scores, distance to its mean features."""
    if not context["global stage"]:
        return taught_by_each_other(model, batch, context)
    total, y = 0.0, batch.y.numpy()
    for (z, _, log_p), teacher in zip(two_outputs(model, batch.x), ("auxiliary", "own"), strict=True):
        total += of_labels(log_p, batch.y)
        if "known" in context:
            f, t = (context[f"{teacher}_{what}"].double().numpy()[y] for what in ("features", "scores"))
            known = context["known"].numpy()[y]
            total += float((known * (((z - f) ** 2).mean(1) - (t * log_p).sum(1))).mean())
    return total


# one line per method: what is tested, with the options of its own

test_local = testing.conformance(methods.Local(), reference_loss=cross_entropy, expected_bytes=lambda *_: (0, 0))

MUTUAL: dict[str, Any] = {"mutual": 0.7, "mixed": 0.4}
ANOTHER: dict[str, Any] = {"shared": "largest"}

test_fedavg = testing.conformance(
    methods.FedAvg(),
    reference_loss=cross_entropy,
    expected_bytes=averaging_bytes,
    counted="updates",
    changed_values={"aggregation": ChangedValue("same-shape")},
    reductions=[
        Reduction(methods.FedAvg(aggregation="same-shape"), methods.FedAvg(), "received", same_architecture=True)
    ],
)

test_fedopt = testing.conformance(
    methods.FedOpt(),
    reference_loss=cross_entropy,
    expected_bytes=averaging_bytes,
    counted="updates",
    changed_values={"aggregation": ChangedValue("same-shape")},
    reductions=[Reduction({"server_optimizer": "none"}, methods.FedAvg(), "received")],
)

test_fedprox = testing.conformance(
    methods.FedProx(mu=0.35),
    reference_loss=proximal,
    expected_bytes=averaging_bytes,
    counted="updates",
    changed_values={"aggregation": ChangedValue("same-shape")},
    reductions=[
        Reduction({"mu": 0.0}, methods.FedAvg(), "received"),
        Reduction({"weighting": "uniform"}, methods.FedIN(exchange_features=False, mu=0.35), "received"),
        Reduction({"aggregation": "same-shape"}, methods.FedProx(mu=0.35), "received", same_architecture=True),
    ],
)

test_fedet = testing.conformance(
    # layer-wise: tests/methods/test_fedet.py
    methods.FedET(server_steps=2, server_batch=8, server_lr=0.05, diversity_weight=0.5),
    reference_loss=cross_entropy,
    expected_bytes=averaging_bytes,
    changed_values={"network": "smallest"},
    reductions=[
        Reduction({"server_steps": 0}, methods.FedAvg(weighting="uniform"), "received", same_architecture=True)
    ],
)

OF_PUBLIC_INPUTS = "the distilled network's statistics move on to those of the public inputs"

test_feddf = testing.conformance(
    methods.FedDF(server_steps=4, server_batch=8, server_lr=0.01),
    reference_loss=cross_entropy,
    expected_bytes=averaging_bytes,
    skip={"batchnorm": OF_PUBLIC_INPUTS},
    reductions=[
        Reduction({"server_steps": 0}, methods.FedAvg(aggregation="same-shape"), "received"),
        Reduction({"server_lr": 0.0}, methods.FedAvg(aggregation="same-shape"), "received"),
    ],
)

test_fedl2g = testing.conformance(
    # the representation: tests/methods/test_fedl2g.py
    methods.FedL2G(guide_weight=0.8, warmup_rounds=0, server_lr=1.0),
    reference_loss=guided,
    expected_bytes=of_classes(4 * 3 * 3, 4 * (3 + 1)),  # down 4 C C; up 4 (S C + S)
    changed_values={"warmup_rounds": 1},
    reductions=[Reduction({"guide_weight": 0.0}, methods.Local())],
)

test_fedmd = testing.conformance(
    # with transfer learning: tests/methods/test_fedmd.py
    methods.FedMD(public_epochs=0, private_epochs=0, public_rows=16),
    reference_loss=digesting,
    # 16 of the 32 public rows: three scores of each, both ways, and their seed in both exchanges down
    expected_bytes=lambda *_: (8 + 8 + 4 * 16 * 3, 4 * 16 * 3),
    changed_values={"public_rows": 8},
    reductions=[Reduction({"digest_epochs": 0}, methods.Local())],
)

MOVES_BY_N = "c moves by 1/N of every answer (eq. 5), so one answer of six moves it by a sixth"

test_scaffold = testing.conformance(
    methods.SCAFFOLD(),
    reference_loss=cross_entropy,
    expected_bytes=of_weights(8, 8, times=2),  # weights, variates and an int64; the kit's networks have no buffers
    skip={"missing_upload_is_not_zero": MOVES_BY_N},
    reductions=[Reduction({"aggregation": "same-shape"}, methods.SCAFFOLD(), "received", same_architecture=True)],
)

test_fednova = testing.conformance(
    methods.FedNova(),
    reference_loss=cross_entropy,
    expected_bytes=of_weights(up=8 + 4),  # FedAvg's, and a_k as float32
    counted="updates",
    reductions=[Reduction({"aggregation": "same-shape"}, methods.FedNova(), "received", same_architecture=True)],
)

test_moon = testing.conformance(
    methods.MOON(mu=1.5, temperature=0.4),
    reference_loss=contrastive,
    expected_bytes=averaging_bytes,
    counted="updates",
    reductions=[
        Reduction({"mu": 0.0}, methods.FedAvg(), "received"),
        Reduction(
            {"aggregation": "same-shape"}, methods.MOON(mu=1.5, temperature=0.4), "received", same_architecture=True
        ),
    ],
)

test_incoavg = testing.conformance(
    methods.InCoAvg(),
    reference_loss=cross_entropy,
    expected_bytes=averaging_bytes,
    reductions=[
        # one block: nothing to correct
        Reduction({}, methods.FedAvg(weighting="uniform"), "received", same_architecture=True),
        Reduction({"weighting": "samples"}, methods.FedAvg(), "received", same_architecture=True),
    ],
)

test_inclusivefl = testing.conformance(
    methods.InclusiveFL(),
    reference_loss=cross_entropy,
    expected_bytes=averaging_bytes,
    reductions=[
        Reduction({"beta": 0.0, "local_last_block": False}, methods.FedAvg(), "received"),
        Reduction({"beta": 0.5}, methods.FedAvg(), "received", same_architecture=True),
    ],
)

test_fedgen = testing.conformance(
    methods.FedGen(alpha=0.2, beta=0.1),
    reference_loss=generated,
    # Z = 32, H = 256, C = 3, D = 6
    expected_bytes=of_weights(4 * ((32 + 3 + 5) * 256 + (256 + 1) * 6 + 3), 4 * 3),
    reductions=[
        Reduction({"alpha": 0.0, "beta": 0.0}, methods.FedAvg(), "received"),
        Reduction({"alpha": 0.0, "beta": 0.0, "weighting": "uniform"}, methods.FedAvg(weighting="uniform"), "received"),
    ],
)

test_fedgh = testing.conformance(
    methods.FedGH(header_lr=0.1), reference_loss=cross_entropy, expected_bytes=CLASS_ROWS, skip=IN_ORDER
)

FIXED = {"size": 16, "batch": 8, "fixed": True}


def constant(kernel: dict[str, Any], **options: Any) -> methods.FedHeNN:
    return methods.FedHeNN(eta0=0.5, eta_schedule="constant", kernel=kernel, **options)


NO_RBF = {"kernel.width": "only RBF kernels have one"}

test_fedhenn = testing.conformance(
    methods.FedHeNN(alignment_data={"size": 16, "batch": 8}, eta0=0.5),
    reference_loss=alignment,
    expected_bytes=fedhenn_bytes,
    reductions=[
        Reduction({"eta0": 0.0}, methods.Local()),
        Reduction(
            constant({}, alignment_data=FIXED, uploads="kernels"), constant({"pool": "seen"}, alignment_data=FIXED)
        ),
    ],
    changed_values={
        "kernel.similarity": "rbf",
        "kernel.width": ChangedValue(2.0, {"kernel.similarity": "rbf"}),
        "alignment_data.fixed": ChangedValue(True, {"eta_schedule": "constant"}),
        "uploads": ChangedValue("kernels", {"alignment_data.fixed": True}),
    },
    no_effect={"kernel.rank": "with few features in all the factor is exact"},
)

test_fedhenn_homogeneous = testing.conformance(
    methods.HomogeneousFedHeNN(alignment_data={"size": 16, "batch": 8}, eta0=0.5),
    reference_loss=alignment,
    expected_bytes=of_weights(16 * 36 * 4, 8),  # FedAvg's, and down L s from round 2 on
    counted="updates",
    reductions=[Reduction({"eta0": 0.0}, methods.FedAvg(), "received", same_architecture=True)],
    changed_values={"alignment_data.fixed": True},
    no_effect=NO_RBF,
)

OF_PAIRS = ("combine", "noise_where", "num_pairs", "feature_clip")
OF_PROJECTIONS = tuple(f"projection{what}" for what in ("", "_channels", "_grid", "_features"))

test_fedin = testing.conformance(
    methods.FedIN(mu=0.35),
    reference_loss=proximal,
    expected_bytes=fedin_bytes,
    skip=IN_ORDER,
    changed_values={
        "weighting": "samples",
        "noise_where": ChangedValue("message", {"noise_std": 0.8}),
        "projection": "fixed",
        "projection_channels": ChangedValue(3, {"projection": "fixed"}),
        "projection_grid": ChangedValue(2, {"projection": "fixed"}),
        "projection_features": ChangedValue(4, {"projection": "fixed"}),
    },
    reductions=[
        Reduction(
            methods.FedIN(exchange_features=False, mu=0.0),
            methods.FedAvg(),
            "received",
            same_architecture=True,
            equal_sizes=True,
        ),
        Reduction(methods.FedIN(exchange_features=False, mu=0.0, weighting="samples"), methods.FedAvg(), "received"),
    ],
)

test_fedin_without_pairs = pytest.mark.slow(
    testing.conformance(
        methods.FedIN(exchange_features=False, mu=0.35, weighting="samples"),
        reference_loss=proximal,
        counted="updates",
        no_effect=dict.fromkeys((*OF_PAIRS, *OF_PROJECTIONS), "there are no pairs"),
    )
)


test_fedrep = testing.conformance(
    methods.FedRep(head_epochs=2), reference_loss=cross_entropy, expected_bytes=of_weights(-4 * 21, -4 * 21)
)

test_fedselect = testing.conformance(
    methods.FedSelect(grow_interval=1),
    reference_loss=cross_entropy,
    expected_bytes=fedselect_bytes,
    changed_values={"max_personal_fraction": 0.1},
    reductions=[
        Reduction({"personal_rate": 0.0}, methods.FedAvg(weighting="uniform"), "received"),
        Reduction({"personal_rate": 0.0, "weighting": "samples"}, methods.FedAvg(), "received"),
        Reduction({"max_personal_fraction": 0.0}, methods.FedAvg(weighting="uniform"), "received"),
    ],
)

NUMBERED = {"client_order_invariant": "what a client is sent, or its rate, goes by its number"}

test_fedfomo = testing.conformance(
    methods.FedFomo(),
    reference_loss=cross_entropy,
    expected_bytes=fedfomo_bytes,
    skip=NUMBERED,
    changed_values={"num_models": 2, "epsilon": ChangedValue(1.0, {"num_models": 2})},
)

test_feddpa = testing.conformance(
    methods.FedDPA(lambda1=0.4, lambda2=0.3),
    reference_loss=pulled,
    expected_bytes=of_weights(),
    reductions=[Reduction({"threshold": 1.0, "lambda2": 0.0}, methods.FedAvg(), "received")],
)

test_fml = testing.conformance(
    methods.FML(alpha=0.3, beta=0.6),
    reference_loss=mutual,
    expected_bytes=auxiliary_bytes,
    counted="updates",
    changed_values={"shared": "largest"},
    reductions=[
        Reduction({"alpha": 1.0}, methods.Local(), part="own."),
        Reduction({"beta": 1.0}, methods.FedAvg(), "received", same_architecture=True, part="auxiliary_model."),
    ],
)

test_fedkwaz = testing.conformance(
    methods.FedKWAZ(**MUTUAL),
    reference_loss=taught_by_means,
    expected_bytes=of_classes(4 * 3 * (12 + 6 + 1), 4 * (12 + 6 + 1)),  # down 4 (2 C D + 2 C C + C), up of S classes
    changed_values=ANOTHER,
    reductions=[
        Reduction({"global_epochs": 0, "mutual": 0.0, "mixed": 0.0}, methods.Local(), part="own."),
    ],
)

test_fedkd = testing.conformance(
    methods.FedKD(distillation_weight=1.5, hidden_weight=0.5),
    reference_loss=mentored,
    changed_values={"shared": "largest"},
    reductions=[Reduction({"distillation_weight": 0.0, "hidden_weight": 0.0}, methods.Local(), part="own.")],
)

test_fedmrl = testing.conformance(
    methods.FedMRL(feature_dim=4),
    reference_loss=nested,
    expected_bytes=auxiliary_bytes,
    changed_values={"shared": "largest", "feature_dim": 3},
)

WIDE = [lambda: tiny_model(1, 8, 12)]
PLAIN = {"rates": "fix_a1", "masked": False}

test_heterofl = testing.conformance(
    methods.HeteroFL(rates="fix_a1-b1"),
    models=WIDE,
    reference_loss=masked,
    expected_bytes=sliced_bytes,
    skip=NUMBERED,
    changed_values={"rates": "dynamic_a1-b1", "max_grad_norm": 0.05},
    reductions=[
        Reduction(methods.HeteroFL(**PLAIN), methods.FedAvg(weighting="uniform"), "received", same_architecture=True),
        Reduction(methods.HeteroFL(**PLAIN, weighting="samples"), methods.FedAvg(), "received", same_architecture=True),
    ],
)

test_fedrolex = testing.conformance(
    methods.FedRolex(rates="fix_a1-b1"),
    models=WIDE,
    reference_loss=masked,
    expected_bytes=sliced_bytes,
    skip=NUMBERED,
    changed_values={"rates": "dynamic_a1-b1", "max_grad_norm": 0.05},
    reductions=[
        Reduction({"step": 0}, methods.HeteroFL(rates="fix_a1-b1"), "received", same_architecture=True),
        Reduction(
            methods.FedRolex(**PLAIN, step=0), methods.FedAvg(weighting="uniform"), "received", same_architecture=True
        ),
    ],
)

test_fjord = testing.conformance(
    methods.FjORD(num_widths=3),
    models=WIDE,
    reference_loss=ordered_dropout,
    expected_bytes=fjord_bytes,
    skip=NUMBERED,
    changed_values={"num_widths": 2},
    reductions=[Reduction({"num_widths": 1}, methods.FedAvg(), "received", same_architecture=True)],
)

test_fedproto = testing.conformance(
    methods.FedProto(prototype_weight=0.7),
    reference_loss=drawn_to,
    expected_bytes=of_classes(4 * (3 * 6 + 3), 4 * (6 + 2)),  # down 4 (C D + C) in two parts, up 4 (S D + 2 S)
    counted="statistics",
    reductions=[Reduction({"prototype_weight": 0.0, "predictor": "head"}, methods.Local())],
)

test_protonorm = testing.conformance(
    methods.ProtoNorm(prototype_weight=0.7, spread_steps=50, scale=1.0),
    reference_loss=drawn_to,
    expected_bytes=of_classes(84, 4 * (6 + 1)),
    reductions=[
        Reduction({"prototype_weight": 0.0, "predictor": "head"}, methods.Local()),
        Reduction({"spread_steps": 0}, methods.FedProto(prototype_weight=0.7, weighting="uniform")),
    ],
)


NOBODY_TRAINS = "nobody trains a network"
FEWER_VARY = "the less the rows vary, the larger the weights"
test_closed_form = testing.conformance(
    methods.ClosedForm(features=12),
    # in round 2 W, b, counts and their number, and that the sums have come; the number comes back
    expected_bytes=lambda *_: (8 * (3 * 12 + 3 + 3 + 1) + 1, 8),
    counted="statistics",
    no_effect={"keep_sums": "only the server keeps more"},
    skip={
        "data_are_shuffled": NOBODY_TRAINS,
        "learns": NOBODY_TRAINS,
        "loss_is_pure": NOBODY_TRAINS,
        "missing_upload_is_not_zero": FEWER_VARY,
        "nan_is_rejected": NOBODY_TRAINS,
        "other_seed_other_result": NOBODY_TRAINS,
        "row_weights_count": NOBODY_TRAINS,
        "unselected_are_left_alone": NOBODY_TRAINS,
    },
)

test_own_plus_common = testing.conformance(
    methods.OwnPlusCommon(features=12),
    reference_loss=cross_entropy,
    expected_bytes=lambda server, client_id: (1, 8),  # in the last round both know what the other has
    counted="statistics",
    no_effect={"keep_sums": "only the server keeps more"},
    skip={
        "missing_upload_is_not_zero": FEWER_VARY,
        "nan_is_rejected": "its last exchange trains nobody, and there what is not finite counts as zeros",
    },
    reductions=[Reduction({"weight": 0.0}, methods.Local())],
)

test_lgfedavg = testing.conformance(
    methods.LGFedAvg(),
    reference_loss=cross_entropy,
    expected_bytes=lambda *_: (4 * 21, 4 * 21),  # the head, 6 x 3 weights and 3 biases
    counted="updates",
)

test_fd = testing.conformance(
    methods.FD(distillation_weight=0.6),
    reference_loss=taught,
    expected_bytes=of_classes(0, 4 * (3 + 2), down_each=4 * (3 + 1)),  # down 4 (S C + S), up 4 (S C + 2 S)
    reductions=[Reduction({"distillation_weight": 0.0}, methods.Local())],
)

TRAINED_AT_THE_SERVER = {
    "client_order_invariant": "the server's batches are drawn by place",
    "missing_upload_is_not_zero": "the more comes, the more steps its prototypes are trained for",
}

test_fedtgp = testing.conformance(
    methods.FedTGP(prototype_weight=0.7, server_epochs=10, server_lr=0.1),
    reference_loss=drawn_to,
    expected_bytes=CLASS_ROWS,
    skip=TRAINED_AT_THE_SERVER,
    changed_values={"margin": 0.01},
    reductions=[Reduction({"prototype_weight": 0.0}, methods.Local())],
)

test_fedre = testing.conformance(
    methods.FedRE(header_lr=0.1),
    reference_loss=cross_entropy,
    expected_bytes=lambda *_: (4 * (3 * 6 + 3), 4 * (6 + 3)),  # down 4 (C D + C), up 4 (D + C), whatever classes
    reductions=[
        Reduction({"header_lr": 0.0}, methods.FedGH(header_lr=0.0)),
        Reduction({"header_lr": 0.0}, methods.FedGH(header_lr=0.0), "received"),
    ],
)

test_fedsa = testing.conformance(
    methods.FedSA(anchor_weight=0.7, contrast=0.4, calibration=0.3, momentum=0.8),
    reference_loss=anchored,
    expected_bytes=of_classes(72, 4 * (6 + 1)),  # down 4 C D
    reductions=[Reduction({"anchor_weight": 0.0, "contrast": 0.0, "calibration": 0.0}, methods.Local())],
)

test_fedorgp = testing.conformance(
    methods.FedORGP(prototype_weight=0.7, gamma=0.5, server_epochs=10, server_lr=0.1),
    reference_loss=turned_to,
    expected_bytes=CLASS_ROWS,
    skip=TRAINED_AT_THE_SERVER,
    changed_values={"candidates": ChangedValue("own", {"predictor": "prototype"})},
    reductions=[Reduction({"prototype_weight": 0.0}, methods.Local())],
)


test_scalefl = testing.conformance(
    methods.ScaleFL(levels="0.5@0.5 1@1", gamma=0.3),
    models=WIDE,
    reference_loss=exits,
    expected_bytes=scalefl_bytes,
    skip=NUMBERED,
    changed_values={"levels": "0.5@0.3 1@1"},
    reductions=[Reduction({"levels": "1@1"}, methods.FedAvg(weighting="uniform"), "received", same_architecture=True)],
)

test_depthfl = testing.conformance(
    methods.DepthFL(depths="1 0.5", distillation=0.6, ramp_up=4),
    models=WIDE,
    reference_loss=mutual_exits,
    expected_bytes=depthfl_bytes,
    skip=NUMBERED,
    changed_values={"depths": "1 0.3"},
    reductions=[
        Reduction({"depths": "1"}, methods.FedAvg(weighting="uniform"), "received", same_architecture=True),
    ],
)

test_fiarse = testing.conformance(
    methods.FIARSE(shares="1 0.25"),
    models=WIDE,
    reference_loss=pruned,
    expected_bytes=fiarse_bytes,
    skip=NUMBERED,
    changed_values={"shares": "1 0.5"},
    reductions=[
        Reduction({"shares": "1"}, methods.FedAvg(weighting="uniform"), "received", same_architecture=True),
    ],
)


def two_linear_layers() -> SequentialSplit:
    """Inputs 36, then 24 and 12, and a head of 3."""
    extractor = nn.Sequential(OrderedDict(flat=nn.Flatten(), one=nn.Linear(36, 24), tanh=nn.Tanh()))
    body = nn.Sequential(OrderedDict(two=nn.Linear(24, 12), tanh=nn.Tanh()))
    return SequentialSplit(extractor, body, nn.Linear(12, 3), "linear")


def fedlora_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Ranks 1, 2 and 4 in turn, 14 of six clients; 36 + 24 and 24 + 12 numbers for each; the head has 39."""
    rank = (1, 2, 4)[client_id % 3]
    return 4 * (14 * 96 + 39) + 8, 4 * (rank * 96 + 39) + 8


ADAPTED: dict[str, Any] = {"models": [two_linear_layers], "reference_loss": cross_entropy}
test_fedlora = testing.conformance(
    methods.FedLoRA(ranks="1 2 4", alpha=4.0),
    expected_bytes=fedlora_bytes,
    skip=NUMBERED,
    changed_values={"ranks": "1 3 6", "layers": "one", "aggregation": "slices"},
    **ADAPTED,
)
# other settings of the same methods


NORMED = {
    "degenerate_clients": "BatchNorm takes no single row",
    "learns": "BatchNorm takes away what a bias before it adds",
    "loss_is_pure": "in training mode BatchNorm writes into its statistics",
}
THREE_WIDTHS = [
    lambda kind=kind: tiny_model(*kind, norm=kind[1] != 5)  # type: ignore[misc]
    for kind in ((1, 4, 6), (0, 3, 5), (1, 5, 8))
]


def plain(rule: str) -> methods.FedLoRA:
    return methods.FedLoRA(ranks="1 2 4", alpha=4.0, aggregation=rule)  # type: ignore[arg-type]


OTHER_SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    (methods.FedAvg(aggregation="same-shape"), {"counted": "updates"}),
    (methods.FedNova(mu=0.35, aggregation="same-shape"), {"reference_loss": proximal}),
    (methods.FedGH(header_batch="round", header_epochs=20, header_lr=0.1), {}),
    (methods.FedGH(control="noise", header_lr=0.1), {"skip": IN_ORDER}),
    (methods.FedMD(public_epochs=0, private_epochs=0, public_rows=16, control="pseudo-labels"), {}),
    (
        constant(
            {"similarity": "rbf", "precision": "int8"},
            uploads="kernels",
            alignment_data={**FIXED, "transport": "indices"},
        ),
        {},
    ),
    (constant({"control": "own", "norm": "fro"}, alignment_data={"size": 16, "batch": 8}), {}),
    (constant({"control": "permuted"}, uploads="kernels", alignment_data=FIXED), {}),
    (methods.HomogeneousFedHeNN(kernel={"similarity": "procrustes"}, alignment_data=FIXED, eta0=0.5), {}),
    (methods.FedIN(noise_std=0.8, aggregation="same-shape", combine="project"), {"skip": IN_ORDER}),
    (
        methods.FedIN(projection="fixed", projection_channels=3, projection_grid=2, aggregation="same-shape"),
        {"expected_bytes": fedin_projected_bytes, "skip": IN_ORDER},
    ),
    (
        methods.FedIN(num_pairs=20),
        {
            "models": [lambda depth=depth: tiny_model(depth, 4, 6, norm=True) for depth in (1, 2, 0)],
            "expected_bytes": fedin_normed_bytes,
            "skip": IN_ORDER | NORMED,
        },
    ),
    (
        methods.FedSelect(aggregation="same-shape", grow_interval=1, personal_rate=1.0, max_personal_fraction=1.0),
        {},
    ),
    (methods.FedFomo(aggregation="same-shape", num_models=1), {"skip": NUMBERED}),
    (methods.FedDPA(aggregation="same-shape"), {}),
    (
        methods.FedRep(head_epochs=1, aggregation="same-shape", weighting="samples", final_head_epochs=1),
        {"skip": {"batchnorm": "the final heads are trained in training mode, which moves clients' own statistics"}},
    ),
    (methods.FML(weighting="uniform"), {"models": THREE_WIDTHS, "skip": NORMED}),
    (methods.FedKD(energy_start=0.5, energy_end=0.9), {"models": THREE_WIDTHS, "skip": NORMED}),
    (methods.FedMRL(feature_dim=3), {"models": THREE_WIDTHS, "skip": NORMED}),
    (
        methods.FedRolex(rates="dynamic_a1-b1-c1"),
        {
            "models": [lambda: tiny_model(1, 8, 12, norm=True)],
            "skip": {**NORMED, **NUMBERED, "nan_is_rejected": "who sends statistics is refused twice"},
        },
    ),
    (
        methods.FIARSE(shares="1 0.5 0.1", threshold="layer"),
        {"models": WIDE, "reference_loss": pruned, "skip": NUMBERED},
    ),
    *((plain(rule), {**ADAPTED, "skip": NUMBERED}) for rule in ("svd", "slices", "pad", "select-and-fold")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), OTHER_SETTINGS)
def test_other_settings(method: Any, options: dict[str, Any]) -> None:
    """All but whether hyperparameters matter, which the plain form is asked."""
    skip = {"hyperparameters_matter": "asked of the plain form", **options.get("skip", {})}
    testing.check(method, **{**options, "skip": skip})


def test_no_method_is_left_out() -> None:
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {name.replace("-", "_") for name in METHODS} <= here


# the kit itself


def test_what_the_kit_asks_on_the_way_leaves_its_plain_run_as_it_is() -> None:
    """The loss is asked several times: statistics and draws of dropout are those of a run where nobody asks."""

    def build() -> SequentialSplit:
        extractor = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten())
        return SequentialSplit(extractor, nn.Linear(64, 6), nn.Linear(6, 3), "normed")

    asked = ["same_seed_same_result", "scoring_changes_nothing"]
    assert not testing.violations(methods.Local(), asked, models=[build], reference_loss=cross_entropy)


def test_what_is_asked_after_the_plain_run_is_no_part_of_it() -> None:
    kit = testing.ConformanceKit(method=methods.FedGH())
    federation = kit.observed.federation
    assert federation is not None
    before = {client: len(sent) for client, sent in kit.observed.sent.items()}
    federation.method.broadcast(federation.server, 0)
    assert {client: len(sent) for client, sent in kit.observed.sent.items()} == before


def test_a_hyperparameter_said_to_be_inert_must_be() -> None:
    found = testing.violations(methods.FedAvg(), ["hyperparameters_matter"], no_effect={"weighting": "no reason"})
    assert "has `no_effect` (no reason)" in found["hyperparameters_matter"]


def test_check_names_the_property() -> None:
    everything_else = dict.fromkeys(set(testing.PROPERTIES) - {"reductions", "declared"}, "not here")
    with pytest.raises(testing.ConformanceError, match="reductions: local: "):
        testing.check(methods.Local(), reductions=[Reduction(methods.Local(), methods.FedAvg())], skip=everything_else)


def test_the_kit_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state()
    assert not testing.violations(methods.Local(), ["other_seed_other_result", "loss_is_pure", "learns"])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.Generator.__module__ == "torch._C"
