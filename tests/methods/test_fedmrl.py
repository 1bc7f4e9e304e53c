"""FedMRL: what is fused, what is kept, what is shared, and what a client takes away."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.torch
import torch

import polyfed as pf
from polyfed import methods, testing
from polyfed.core.modules import export_state
from polyfed.data.transforms import Prepare
from polyfed.experiments.prediction import load
from polyfed.methods import FedMRL
from polyfed.models import zoo
from tests.helpers import oracles
from tests.helpers.toys import clients, federation, moved, same


def test_each_client_draws_its_projection_for_itself_and_trains_it_on() -> None:
    fed, watch = federation(FedMRL(), clients(["wide", "shallow"], test=9), rounds=3)
    initial = {i: fed.server.client_weights(i)["projection.weight"].clone() for i in (0, 1)}
    assert moved({"": initial[0]}, {"": initial[1]}) > 1e-2
    done = fed.run()
    for number in (0, 1):
        kept = [round.weights[number]["projection.weight"] for round in watch.rounds]
        steps = [moved({"": a}, {"": b}) for a, b in zip([initial[number], *kept], kept, strict=False)]
        assert min(steps) > 1e-4
        assert torch.equal(done.models[number].projection.weight, kept[-1])


def test_exported_are_the_own_networks_names_as_they_are_and_predict_knows_the_rest(tmp_path: Any) -> None:
    settings: dict[str, Any] = {
        "data": {"dataset": "digits", "num_clients": 2, "max_train_per_client": 30, "max_test_per_client": 20},
        "models": {"architectures": ["digits-cnn2", "digits-cnn1"]},
        "method": {"name": "fedmrl", "feature_dim": 16, "shared": "digits-cnn3"},
        "training": {"rounds": 2, "batch_size": 10, "lr": 0.05},
    }
    done = pf.run(pf.Recipe.from_dict(settings), out=tmp_path / "run")
    stored = safetensors.torch.load_file(tmp_path / "run" / "models" / "personal-000.safetensors")
    own = zoo.build("digits-cnn2", (1, 8, 8), 10)
    assert {name for name in stored if not name.startswith("beside.")} == own.export().keys()
    assert {name.split(".")[1] for name in stored if name.startswith("beside.")} == {"auxiliary_model", "projection"}
    own.load_state_dict({name: stored[name] for name in own.state_dict()})
    assert same(own.state_dict(), done.models[0].own.state_dict())
    model = load(tmp_path / "run", 0)
    x = torch.randint(0, 17, (5, 1, 8, 8), dtype=torch.uint8)
    assert same(export_state(model.network), export_state(done.models[0]))
    with torch.inference_mode():
        assert torch.equal(model.scores(x), done.models[0](model.prepare(x)))
    assert isinstance(model.prepare, Prepare)


def nested(model: Any, batch: Any, context: Any) -> float:
    """CE(h(r)) + CE(h_s(r[:4])), r = P [phi_s, phi], in float64."""
    z = [net.represent(batch.x).detach().double().numpy() for net in (model.auxiliary_model, model.own)]
    weights = [layer.state_dict() for layer in (model.projection, model.own.head, model.auxiliary_model.head)]
    (p, b), own, common = ([t.double().numpy() for t in layer.values()] for layer in weights)
    r = np.concatenate(z, axis=1) @ p.T + b
    outputs = [inputs @ w.T + bias for inputs, (w, bias) in ((r, own), (r[:, :4], common))]
    return sum(oracles.of_labels(oracles.log_softmax(logits), batch.y) for logits in outputs)


test_conformance = testing.conformance(
    methods.FedMRL(feature_dim=4),
    reference_loss=nested,
    expected_bytes=oracles.auxiliary_bytes,
    changed_values={"shared": "largest", "feature_dim": 3},
)
