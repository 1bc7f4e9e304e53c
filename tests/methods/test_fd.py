"""FD's own properties against NumPy by hand."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.methods import FD
from polyfed.testing import Reduction
from tests.helpers import few_classes, oracles
from tests.helpers.toys import CLASSES, NETS, batch, federation, model_with, rounds, softmax, worker

# nothing alike but the classes
members = functools.partial(few_classes.members, architectures=("bn", "broad", "wide"))


def outputs(client, weights, method):
    """Class means of the outputs, in float64, in eval mode."""
    f = model_with(NETS[client.architecture], weights)(client.data.train.x).detach().double().numpy()
    f = softmax(f) if method.outputs == "probabilities" else f
    y = client.data.train.y.numpy()
    return {int(c): f[y == c].mean(0) for c in np.unique(y)}


FORMS = [FD(), FD(outputs="logits", weighting="uniform")]


@pytest.mark.parametrize("method", FORMS, ids=["plain", "logits"])
def test_uploads_and_targets_against_numpy(method):
    people = members()
    first, second = rounds(method, people)
    sent = {i: outputs(client, first.trained[i], method) for i, client in enumerate(people)}
    for i, client in enumerate(people):
        counts = torch.bincount(client.data.train.y)
        assert first.up[i]["labels"].tolist() == sorted(sent[i])
        assert first.up[i]["outputs"].numpy() == pytest.approx(np.stack(list(sent[i].values())), abs=1e-6)
        assert ("counts" in first.up[i]) == (method.weighting == "count")
        assert "counts" not in first.up[i] or first.up[i]["counts"].tolist() == counts[counts > 0].tolist()
        for c, row in zip(second.down[i]["labels"].tolist(), second.down[i]["outputs"], strict=True):
            others = [j for j in sent if c in sent[j] and j != i]
            n = [int((people[j].data.train.y == c).sum()) if method.weighting == "count" else 1 for j in others]
            assert row.numpy() == pytest.approx(np.average([sent[j][c] for j in others], axis=0, weights=n), abs=1e-6)
        assert second.down[i]["labels"].tolist() == sorted(sent[i])


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("method", FORMS, ids=["plain", "logits"])
def test_targets_are_distributions_whatever_the_scores(method, scale):
    class Loud(type(method)):  # type: ignore[misc]
        def upload(self, client, trained):
            with torch.no_grad():
                client.model.head.weight.mul_(scale)
            return super().upload(client, trained)

    fed, watch = federation(Loud(**vars(method)), members(), rounds=1)
    fed.run()
    assert (watch.rounds[0].up[0]["outputs"].abs().max() > 10) == (scale > 1 and method.outputs == "logits")
    for i in range(4):
        context = method.receive(worker(fed, i), method.broadcast(fed.server, i))
        known = context["targets"][context["known"]]
        assert (known >= 0).all()
        assert known.sum(1).numpy() == pytest.approx(np.ones(len(known)), abs=1e-6)


@pytest.mark.parametrize("method", FORMS, ids=["plain", "logits"])
def test_the_control_own_sends_a_client_what_it_sent(method):
    first, second = rounds(dataclasses.replace(method, control="own"), members())
    for i in range(4):
        assert second.down[i]["labels"].tolist() == first.up[i]["labels"].tolist()
        assert second.down[i]["outputs"].numpy() == pytest.approx(first.up[i]["outputs"].numpy(), abs=1e-7)
    assert second.record["sums"]["distillation"] > 0


@pytest.mark.parametrize("method", FORMS, ids=["plain", "logits"])
def test_the_control_flat_keeps_a_classs_own_entry_and_spreads_the_rest(method):
    _, plain = rounds(method, members())
    _, flat = rounds(dataclasses.replace(method, control="flat"), members())
    for i in range(4):
        assert flat.down[i]["labels"].tolist() == plain.down[i]["labels"].tolist()
        labels = plain.down[i]["labels"].tolist()
        for label, mean, sent in zip(labels, plain.down[i]["outputs"], flat.down[i]["outputs"], strict=True):
            rest = np.delete(mean.numpy(), label)
            assert sent[label] == mean[label]
            assert np.delete(sent.numpy(), label) == pytest.approx(np.full(CLASSES - 1, rest.mean()), abs=1e-7)
            assert rest.std() > 1e-4, "else nothing is spread"


@pytest.mark.parametrize("method", FORMS, ids=["plain", "logits"])
def test_the_control_uniform_is_label_smoothing(method):
    """(1 - e) of the label and e / C of every class, e = lambda / (1 + lambda), but for the factor 1 + lambda."""
    method = dataclasses.replace(method, control="uniform", distillation_weight=0.25)
    fed, _ = federation(method, members(), rounds=1)
    fed.run()
    at, data = worker(fed, 2), fed.clients[2].data.train
    loss, _ = method.loss(at.model, batch(data), method.receive(at, method.broadcast(fed.server, 2)))
    smoothed = torch.nn.functional.cross_entropy(at.model(data.x)[:, :CLASSES], data.y, label_smoothing=0.2)
    assert float(loss.detach()) == pytest.approx(1.25 * float(smoothed.detach()), rel=1e-5)


def test_a_class_that_nobody_sends_anew_keeps_what_was_sent():
    first, second = rounds(FD(), members(), lose=lambda round, i: round == 2 and i in (0, 2))
    old = first.after["labels"] == 0
    kept = second.after["labels"] == 0
    assert second.after["owners"][kept].tolist() == first.after["owners"][old].tolist() == [0, 2]
    assert torch.equal(second.after["outputs"][kept], first.after["outputs"][old])
    assert second.after["owners"][second.after["labels"] == 1].tolist() == [1]  # sent anew by one, the others' are gone


def taught(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.6 soft CE to the class's target, in float64, a mean over all rows of the batch."""
    log_p, targets = oracles.log_softmax(model(batch.x)), context["targets"].double().numpy()
    rows = [-(targets[c] * p).sum() * bool(context["known"][c]) for p, c in zip(log_p, batch.y.numpy(), strict=True)]
    return oracles.cross_entropy(model, batch, context) + 0.6 * float(np.mean(rows))


test_conformance = testing.conformance(
    methods.FD(distillation_weight=0.6),
    reference_loss=taught,
    expected_bytes=oracles.of_classes(0, 4 * (3 + 2), down_each=4 * (3 + 1)),  # down 4 (S C + S), up 4 (S C + 2 S)
    reductions=[Reduction({"distillation_weight": 0.0}, methods.Local())],
)
