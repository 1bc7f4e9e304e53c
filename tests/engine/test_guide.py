"""models/README.md of a run folder: its lines load every kind of network, each as its own class."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.architectures import Architectures
from polyfed.core.networks import exported
from polyfed.engine.federation import Run
from polyfed.engine.guide import Guide
from polyfed.models import build
from polyfed.models.split import SplitModel

RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "clients": 2, "max_train": 10, "max_test": 10},
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "local"},
    "training": {"rounds": 1, "batch_size": 10},
}


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(4 * 3 * 3, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).relu().flatten(1))


def module(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Net(classes)


def split(in_shape: tuple[int, ...], classes: int) -> SplitModel:
    return pf.split(Net(classes), "fc", "conv")


def blocks(run: Run) -> list[str]:
    assert run.path is not None
    text = (run.path / "models" / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("width", [None, 7])
def test_the_lines_load_what_the_run_trained(
    width: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "our_nets", sys.modules[__name__])
    names = ["digits-cnn1", "our_nets:module", "our_nets:module@conv", "our_nets:split"]
    models = {"architectures": names, **({} if width is None else {"feature_dim": width})}
    recipe = {**RECIPE, "models": models, "data": {**RECIPE["data"], "clients": 5}}
    run = pf.run(pf.Recipe.from_dict(recipe), out=tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run" / "models")
    assert "Clients 0, 4." in Path("README.md").read_text(encoding="utf-8")
    x, kinds = torch.rand(3, 1, 8, 8), []
    for client, lines in enumerate(blocks(run)):
        found: dict[str, Any] = {}
        exec(lines, found)
        kinds.append(type(found["model"]))
        assert not found["model"].training
        assert torch.equal(found["model"](x), run.models[client](x))
        assert ("polyfed" in lines) == (client == 0), "its class is polyfed's own"
    assert kinds[1:] == [Net, Net, Net]


def test_networks_that_a_method_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {**RECIPE, "models": {"architectures": ["digits-cnn1"]}}
    recipe["method"] = {"name": "heterofl", "rates": "fix_a1-b1"}
    run = pf.run(pf.Recipe.from_dict(recipe), out=tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run" / "models")
    assert len(blocks(run)) >= 1
    narrow = next(lines for lines in blocks(run) if "load_model(" in lines and "prediction" in lines)
    found: dict[str, Any] = {}
    exec(narrow, found)
    client = int(re.findall(r'load_model\("\.\.", (\d+)\)', narrow)[0])
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(found["model"](x), run.models[client].eval()(x))


def test_modules_that_came_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.rand(24, 1, 8, 8), torch.arange(24) % 2
    models = [pf.split(Net(2), "fc", "conv", architecture="mine") for _ in range(12)]
    clients = [pf.Client(model=m, train=(x[2 * k : 2 * k + 2], y[2 * k : 2 * k + 2])) for k, m in enumerate(models)]
    run = pf.Federation(clients, pf.methods.Local(), pf.Training(rounds=1), out=tmp_path / "run").run()
    monkeypatch.chdir(tmp_path / "run" / "models")
    (lines,) = blocks(run)
    assert "8, 9, ... 11 (12 in all)." in Path("README.md").read_text(encoding="utf-8")
    assert f"from {__name__} import Net" in lines
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Net.__module__])
    found: dict[str, Any] = {}
    exec(lines.replace("Net(...)", "Net(2)"), found)
    assert torch.equal(found["model"](x), run.models[0](x))


class Reader(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(words, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.embedding(ids).mean(1))


def reader(in_shape: tuple[int, ...], classes: int, words: int = 9) -> nn.Module:
    return Reader(words)


@pytest.mark.parametrize("name", ["fedhenn-lstm1", "our_nets:reader"])
@pytest.mark.parametrize("vectors", [None, "words.txt"])
def test_networks_for_texts_get_their_number_of_words(
    name: str, vectors: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "our_nets", sys.modules[__name__])
    network = build(name, (5,), 2, words=32)
    builders = {name: lambda: network}
    guide = Guide(Architectures(builders, lambda model, variant: model, 0, torch.device("cpu")))
    about = {"architecture": name, "zoo": True, "classes": 2, "feature_dim": None, "input": {"shape": [5]}}
    guide.add(3, exported(network), {**about, "vocabulary": 30, "vectors": vectors, "round": 1})
    (lines,) = re.findall(r"```python\n(.*?)```", guide.text(), flags=re.DOTALL)
    assert ("words=32" in lines) == (vectors is None)
    assert ("words up in the vectors of 'words.txt'" in guide.text()) == (vectors is not None)
    if vectors is None:
        found: dict[str, Any] = {}
        exec(re.sub("model.load_state.*", "", lines), found)
        found["model"].load_state_dict(exported(network))
