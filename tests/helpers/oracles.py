"""Losses and bytes by independent means that the conformance tests of several methods take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.method import Method
from polyfed.testing import Reduction
from polyfed.testing.fixtures import tiny_model

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


def drawn_to(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.7 mean_d (z - P[y])^2 in float64, a mean over all rows of the batch."""
    z, p = (t.detach().double().numpy() for t in (model.represent(batch.x), context["prototypes"]))
    known, y = context["known"].numpy(), batch.y.numpy()
    squares = [((row - p[c]) ** 2).mean() if known[c] else 0.0 for row, c in zip(z, y, strict=True)]
    return cross_entropy(model, batch, context) + 0.7 * float(np.mean(squares))


FIXED = {"size": 16, "batch": 8, "fixed": True}


NUMBERED = {"client_order_invariant": "what a client is sent, or its rate, goes by its number"}


WIDE = [lambda: tiny_model(1, 8, 12)]


PLAIN = {"rates": "fix_a1", "masked": False}


FEWER_VARY = "the less the rows vary, the larger the weights"


TRAINED_AT_THE_SERVER = {
    "client_order_invariant": "the server's batches are drawn by place",
    "missing_upload_is_not_zero": "the more comes, the more steps its prototypes are trained for",
}


NORMED = {
    "degenerate_clients": "BatchNorm takes no single row",
    "learns": "BatchNorm takes away what a bias before it adds",
    "loss_is_pure": "in training mode BatchNorm writes into its statistics",
}


def is_fedavg(method: Method | Mapping[str, Any], weighting: Literal["samples", "uniform"] = "samples") -> Reduction:
    """Among clients who share a network, these hyperparameters make the method FedAvg."""
    return Reduction(method, methods.FedAvg(weighting=weighting), "received", same_architecture=True)


def other_settings(*cases: tuple[Any, dict[str, Any]]) -> Callable[..., None]:
    """A test of further settings of a method: all but whether hyperparameters matter, which the plain form is asked."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("method", "options"), cases)
    def test(method: Any, options: dict[str, Any]) -> None:
        skip = {"hyperparameters_matter": "asked of the plain form", **options.get("skip", {})}
        testing.check(method, **{**options, "skip": skip})

    return test
