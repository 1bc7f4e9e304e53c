"""What networks give place by place, against the networks themselves; which clients are looked at."""

import shutil
from pathlib import Path

import pytest
import torch

from polyfed.analysis.layer_outputs import (
    ClientRef,
    clients_of,
    common_layers,
    layer_outputs,
    layers_of,
    subsample_clients,
)
from polyfed.analysis.probe_inputs import common_inputs
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import load_model
from polyfed.models.zoo import build
from polyfed.report.run_records import RunRecord


def test_the_places_of_a_resnet() -> None:
    torch.manual_seed(0)
    model = build("resnet14-half", (1, 8, 8), 3).eval()
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        found = layers_of(model, x)
        names = ["extractor", "stage1", "stage2", "stage3", "stage4", "representation", "logits"]
        assert list(found) == names
        inside = model.extract(x)
        assert torch.equal(found["extractor"], inside)
        for name in names[1:5]:
            inside = model.get_submodule(f"intermediate.{name}")(inside)
            assert torch.equal(found[name], inside)
        assert torch.equal(found["representation"], inside.mean(dim=(2, 3)))
        assert torch.equal(found["logits"], model(x))
    assert not any(module._forward_hooks for module in model.modules())
    other = build("digits-cnn3", (1, 8, 8), 3).eval()
    shared = common_layers([found, layers_of(other, x)])
    assert shared == ["extractor", "representation", "logits"]


def test_a_plain_module_has_logits_only() -> None:
    assert list(layers_of(torch.nn.Flatten(), torch.zeros(2, 1, 3))) == ["logits"]


def test_clients_of_one_architecture_stand_side_by_side(runs: list[RunRecord]) -> None:
    one, three = "digits-cnn1", "digits-cnn3"
    found = clients_of(runs[0].path)
    assert found == [ClientRef(0, one), ClientRef(2, one), ClientRef(1, three), ClientRef(3, three)]
    assert subsample_clients(found, 10) == found
    assert subsample_clients(found, 3) == [ClientRef(0, one), ClientRef(2, one), ClientRef(1, three)]
    assert subsample_clients([ClientRef(n, "a") for n in range(5)] + [ClientRef(9, "b")], 3) == [
        ClientRef(0, "a"),
        ClientRef(1, "a"),
        ClientRef(9, "b"),
    ]


def test_each_client_s_own_network_is_asked(runs: list[RunRecord]) -> None:
    inputs = common_inputs(runs[0], 300)
    clients = clients_of(runs[0].path)
    seen = layer_outputs(runs[0].path, clients, inputs.x, lambda place, a_LD: a_LD)
    for who, found in zip(clients, seen, strict=True):
        scores = load_model(runs[0].path, who.client).scores(inputs.x)
        torch.testing.assert_close(found["logits"], scores)
        assert found["extractor"].shape == (len(inputs.x), 16 * 4 * 4)


def test_no_models_and_damaged_ones(runs: list[RunRecord], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no clients' models"):
        clients_of(tmp_path)
    copy = tmp_path / "run"
    shutil.copytree(runs[0].path, copy)
    (copy / "models" / "index.json").write_text("[1]")
    with pytest.raises(ConfigError, match="got nothing readable"):
        clients_of(copy)


def test_outputs_that_are_not_finite(runs: list[RunRecord]) -> None:
    inputs = common_inputs(runs[0], 4)
    broken = torch.full(inputs.x.shape, float("nan"))
    with pytest.raises(ConfigError, match="client 0's network gives at 'extractor' is not finite"):
        layer_outputs(runs[0].path, clients_of(runs[0].path), broken, lambda place, a_LD: None)
