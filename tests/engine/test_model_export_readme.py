"""models/README.md of a run folder: its lines load every kind of network as its own class, and make its inputs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.engine.federation import Run
from polyfed.experiments import prediction
from polyfed.models.split import SplitModel

RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 2, "max_train_per_client": 10, "max_test_per_client": 10},
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


class Tied(Net):
    """A layer used twice under two names, and a weight that another layer has, too."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.a, self.b = nn.Sequential(nn.Linear(36, 36), nn.BatchNorm1d(36)), nn.Linear(36, 36)
        self.b.weight = self.a[0].weight
        self.again = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.conv(x).relu().flatten(1)
        return self.fc(self.again(self.b(self.a(z).relu()).relu()))


def tied(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Tied(classes)


def split(in_shape: tuple[int, ...], classes: int) -> SplitModel:
    return pf.split(Net(classes), "fc", "conv")


def parts(run: Run) -> tuple[list[str], list[str]]:
    """The blocks that make networks, and those that make inputs."""
    assert run.path is not None
    text = (run.path / "models" / "README.md").read_text(encoding="utf-8")
    networks, _, inputs = text.partition("\n## Inputs")
    assert inputs
    found = (re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL) for part in (networks, inputs))
    return next(found), next(found)


def blocks(run: Run) -> list[str]:
    return parts(run)[0]


@pytest.mark.parametrize("width", [None, 7])
def test_the_lines_load_what_the_run_trained(
    width: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "our_nets", sys.modules[__name__])
    own = ["module", "module@conv", "split", "tied"]
    names = ["digits-cnn1", *(f"our_nets:{name}" for name in own)]
    models = {"architectures": names, **({} if width is None else {"feature_dim": width})}
    recipe = {**RECIPE, "models": models, "data": {**RECIPE["data"], "num_clients": 6}}
    run = pf.run(pf.Recipe.from_dict(recipe), out=tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run" / "models")
    assert "Clients 0, 5." in Path("README.md").read_text(encoding="utf-8")
    x, kinds = torch.rand(3, 1, 8, 8), []
    for client, lines in enumerate(blocks(run)):
        found: dict[str, Any] = {}
        exec(lines, found)
        kinds.append(type(found["model"]))
        assert not found["model"].training
        assert torch.equal(found["model"](x), run.models[client](x))
        assert ("polyfed" in lines) == (client == 0), "its class is polyfed's own"
        trained = prediction.load_model("..", client, trust=True).network
        assert torch.equal(trained(x), run.models[client](x))
    assert kinds[1:] == [Net, Net, Net, Tied]


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


# inputs: the lines make what `polyfed predict` makes


def asked(run: Run, monkeypatch: pytest.MonkeyPatch, client: int = 0) -> dict[str, Any]:
    """What the lines leave behind: those that make the client's network, and those that make its inputs."""
    networks, inputs = parts(run)
    assert run.path is not None
    monkeypatch.chdir(run.path / "models")
    names: dict[str, Any] = {}
    exec(networks[client] + inputs[-1], names)
    return names


def agrees(names: dict[str, Any], run: Run, data: Path, **options: Any) -> None:
    assert run.path is not None
    said = prediction.predict(run.path, 0, data, **options)
    assert torch.allclose(names["outputs"], said.scores, rtol=1e-5, atol=1e-6)
    assert torch.equal(names["classes"], said.classes)


@pytest.mark.parametrize("prepare", ["normalized", "plain", "own"])
def test_images(prepare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8), torch.arange(24) % 3
    how = {"normalized": {"prepare": pf.from_tensors((x, y)).prepare}, "own": {"prepare": lambda x: x.float() / 7}}
    clients = [pf.Client("digits-cnn1", (x, y), **how.get(prepare, {}))]
    run = pf.Federation(clients, pf.methods.Local(), pf.Training(rounds=1), out=tmp_path / "run").run()
    numpy.save(tmp_path / "run" / "models" / "inputs.npy", x[:3].numpy())
    if prepare == "own":
        assert "the function that the run was given as `prepare`" in parts(run)[1][0]
    else:
        agrees(asked(run, monkeypatch), run, tmp_path / "run" / "models" / "inputs.npy")


def test_rows_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["b,a,kind", *(f"{1000 + n},{n * n % 7},{'yes' if n % 2 else 'no'}" for n in range(30))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    settings = {"data": {"dataset": f"csv:{tmp_path / 'a.csv'}", "num_clients": 2, "label_column": "kind"}}
    settings |= {"models": {"architectures": ["mlp-64-32"]}, "method": {"name": "local"}, "training": {"rounds": 1}}
    run = pf.run(pf.Recipe.from_dict(settings), out=tmp_path / "run")
    (tmp_path / "run" / "models" / "rows.csv").write_text("a,kind,b\n3,no,1003\n5,yes,1017\n")
    agrees(asked(run, monkeypatch), run, tmp_path / "run" / "models" / "rows.csv")
    assert "# 0: no, 1: yes" in parts(run)[1][0]


def test_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"So good! No {n},1\ncan't say,0" for n in range(10)]
    (tmp_path / "a.csv").write_text("\n".join(["said,liked", *rows]))
    data = {"dataset": f"csv:{tmp_path / 'a.csv'}", "num_clients": 2, "label_column": "liked", "text_column": "said"}
    settings = {"data": {**data, "max_length": 5}, "models": {"architectures": ["fedhenn-lstm1"]}}
    made = pf.Recipe.from_dict({**settings, "method": {"name": "local"}, "training": {"rounds": 1}})
    run = pf.run(made, out=tmp_path / "run")
    (tmp_path / "run" / "models" / "texts.txt").write_text("So GOOD! can't I? no, so good\nzebra")
    agrees(asked(run, monkeypatch), run, tmp_path / "run" / "models" / "texts.txt")


def test_arrays_and_clients_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.rand(24, 1, 8, 8), torch.arange(24) % 2
    clients = [pf.Client("digits-cnn1", (x, y)), pf.Client("digits-cnn2", (x.mul(255).to(torch.uint8), y))]
    run = pf.Federation(clients, pf.methods.Local(), pf.Training(rounds=1), out=tmp_path / "run").run()
    monkeypatch.chdir(tmp_path / "run" / "models")
    text = Path("README.md").read_text(encoding="utf-8")
    assert "## Inputs of clients 0\n" in text
    assert "## Inputs of clients 1\n" in text
    numpy.save("inputs.npy", x[:3].numpy())
    networks, inputs = parts(run)
    names: dict[str, Any] = {}
    exec(networks[0] + inputs[0], names)
    assert torch.equal(names["outputs"], run.models[0](x[:3]))
