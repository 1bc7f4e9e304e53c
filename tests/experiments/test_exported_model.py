"""A personal model as one file: what PyTorch, or ONNX Runtime, makes of it without polyfed is what polyfed predicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.cli import app as cli
from polyfed.core.client import Client, to_float
from polyfed.core.message import get_group
from polyfed.data import inference_inputs
from polyfed.data.text import Vocabulary
from polyfed.data.transforms import Prepare
from polyfed.engine.federation import Run
from polyfed.engine.task import Task
from polyfed.errors import ConfigError
from polyfed.experiments import exported_model, prediction
from polyfed.experiments.exported_model import export_model
from polyfed.methods import ClosedForm, FedProto, OwnPlusCommon
from tests.helpers.quick import others_slow
from tests.helpers.refusals import refusal

DRAWS = torch.Generator().manual_seed(0)
Y = torch.arange(40) % 3
IMAGES = torch.randint(256, (40, 1, 8, 8), generator=DRAWS, dtype=torch.uint8)
SERIES = torch.randn(40, 3, 40, generator=DRAWS)
TEXTS = torch.randint(8, (40, 6), generator=DRAWS)
ROWS = [f"{place * 7 % 10},{place % 4 - 1.5},{'abc'[place % 5 % 3]},{'xyz'[place % 3]}" for place in range(60)]
# inputs, network, preparation, what the task says of inputs
KINDS: dict[str, tuple[Tensor, str, Any, dict[str, Any]]] = {
    "images": (IMAGES, "digits-cnn1", Prepare((0.4,), (0.3,)), {}),
    "series": (SERIES, "cnn1d-16", to_float, {}),
    "texts": (TEXTS, "fasttext", to_float, {"vocabulary": Vocabulary(tuple("abcdef"), 6, most=6)}),
}


def finished(folder: Path, kind: str, method: ClosedForm | FedProto | None = None) -> Run:
    """A run of two clients, the second of which has two of three classes."""
    x, network, prepare, about = KINDS[kind]
    few = Y < 2
    clients = [Client(network, (x, Y), (x, Y), prepare=prepare), Client(network, (x[few], Y[few]), prepare=prepare)]
    training = pf.Training(rounds=2)
    return pf.Federation(
        clients, method or OwnPlusCommon(features=20), training, task=Task(3, **about), out=folder
    ).run()


def of_a_table(folder: Path) -> Tensor:
    """A run on rows with numbers and categories of the same kind of clients; its inputs."""
    file = folder.with_name("rows.csv")
    file.write_text("\n".join(["one,two,three,label", *ROWS]) + "\n")
    data = {"dataset": f"csv:{file}", "num_clients": 2, "partition": "by_class", "classes_per_client": 2}
    data["category_columns"] = ["three"]
    method = {"name": "own-plus-common", "features": 20}
    recipe = {"data": data, "models": {"architectures": ["mlp-16-32"]}, "method": method, "training": {"rounds": 2}}
    pf.run(pf.Recipe.from_dict(recipe), out=folder)
    model = prediction.load(folder, 1)
    assert "category" in get_group(model.state, "map")
    return inference_inputs.read(file, model.form).x


@pytest.fixture(scope="module", params=[*KINDS, "tables"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """The folder of a run, inputs, and what the second client's model says of them."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    if request.param == "tables":
        x = of_a_table(folder)
    else:
        finished(folder, request.param)
        x = KINDS[request.param][0]
    return folder, x, prediction.predict(folder, 1, x).scores


def check(found: Tensor, expected: Tensor) -> None:
    """Also classes that the client lacks: -inf."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert bool(expected.isinf().any())


def test_pytorch_alone_predicts_the_same(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, x, expected = run
    assert cli.status(["export", str(folder), str(tmp_path / "one.pt2"), "--client", "1"]) == 0
    for name in [name for name in sys.modules if name.partition(".")[0] == "polyfed"]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    program = torch.export.load(tmp_path / "one.pt2")
    check(program.module()(x), expected)
    assert {"kept_solution_weight", "kept_solution_bias", "kept_own_shares"} <= {*program.state_dict}
    assert {name.partition(".")[0].partition("_map")[0] for name in program.state_dict} >= {"network", "kept"}


@pytest.mark.parametrize("run", others_slow([*KINDS, "tables"], quick=["texts", "tables"]), indirect=True)
def test_onnx_predicts_the_same(run: Any, tmp_path: Path) -> None:
    folder, x, expected = run
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="the extra 'onnx' is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    export_model(folder, 1, tmp_path / "one.onnx")
    session = runtime.InferenceSession(tmp_path / "one.onnx")
    for rows in (1, len(x)):
        (scores,) = session.run(["scores"], {"x": x[:rows].numpy()})
        check(torch.from_numpy(scores), expected[:rows])
    assert [path.name for path in tmp_path.glob("one.*")] == ["one.onnx"]


def of_gaps(folder: Path, regression: bool) -> None:
    """A run on rows with categories, and with numbers that are missing in some."""
    rows = [
        f"{'' if i % 4 else i},{i % 3 - 1.5},{'abc'[i % 3]},{i * 7 % 11 * 100 if regression else 'xyz'[i % 3]}"
        for i in range(90)
    ]
    file = folder.with_name("gaps.csv")
    file.write_text("\n".join(["one,two,three,y", *rows]) + "\n")
    data = {"dataset": f"csv:{file}", "num_clients": 2, "partition": "iid", "missing_values": "client_mean"}
    data |= {"label_column": "y", "category_columns": ["three"], **({"task": "regression"} if regression else {})}
    recipe = {"data": data, "models": {"architectures": ["mlp-16-32"]}, "training": {"rounds": 1}}
    pf.run(pf.Recipe.from_dict({**recipe, "method": {"name": "own-plus-common", "features": 20}}), out=folder)


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_raw_rows_give_what_predict_says_of_their_file(ending: str, regression: bool, tmp_path: Path) -> None:
    if ending == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason="the extra 'onnx' is not installed")
    of_gaps(tmp_path / "run", regression)
    new = tmp_path / "new.csv"
    new.write_text("two,one,three\n0.5,,a\n-1,30,c\n,,b\n1,7,unknown\n2,8,\n")
    expected = prediction.predict(tmp_path / "run", 1, new)
    file = export_model(tmp_path / "run", 1, tmp_path / f"one.{ending}")
    if ending == "pt2":
        extra = {"polyfed": ""}
        program = torch.export.load(file, extra_files=extra).module()
        facts = json.loads(extra["polyfed"])
    else:
        session = sys.modules["onnxruntime"].InferenceSession(file)
        facts = json.loads(session.get_modelmeta().custom_metadata_map["polyfed"])

        def program(x: Tensor) -> Tensor:
            return torch.from_numpy(session.run([facts["output"]], {"x": x.numpy()})[0])

    assert facts["columns"] == ["one", "two", "three"]
    assert facts["categories"] == {"three": ["a", "b", "c"]}
    assert facts["fill"].keys() == {"one", "two"}
    assert facts["classes"] == ([] if regression else ["x", "y", "z"])
    nan = float("nan")
    x = torch.tensor([[nan, 0.5, 1], [30, -1, 3], [nan, nan, 2], [7, 1, 0], [8, 2, nan]])
    found = program(x)
    assert facts["output"] == ("prediction" if regression else "scores")
    wanted = expected.values[:, None] if regression else expected.scores
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    in_memory = prediction.load(tmp_path / "run", 1).predict(x)
    assert torch.equal(in_memory.scores, expected.scores)
    if regression:
        assert float(found.detach().abs().max()) > 50, "in the users' unit"


def test_prototypes_go_along(tmp_path: Path) -> None:
    done = finished(tmp_path / "run", "images", FedProto())
    export_model(tmp_path / "run", 0, tmp_path / "one.pt2")
    found = torch.export.load(tmp_path / "one.pt2").module()(IMAGES[:5])
    torch.testing.assert_close(found, prediction.predict(tmp_path / "run", 0, IMAGES[:5]).scores)
    assert not torch.equal(found, done.models[0].network(KINDS["images"][2](IMAGES[:5])))


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^expected a file that ends in \.pt2 or \.onnx, got .*one\.pt$"):
        export_model(tmp_path, 0, tmp_path / "one.pt")
    finished(tmp_path / "run", "series", ClosedForm(features=20))

    def branches(model: Any, x: Tensor) -> Tensor:
        return (x if x.sum() > 0 else -x).mean(dim=2)

    monkeypatch.setattr(ClosedForm, "predict", lambda self, model, x, context: branches(model, x))
    said = refusal(lambda: export_model(tmp_path / "run", 0, tmp_path / "one.pt2"))
    assert said.startswith("client 0's model ('cnn1d-16') cannot be exported: ")
    monkeypatch.setattr(exported_model, "_PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"pip install 'polyfed\[onnx\]'"):
        export_model(tmp_path / "run", 0, tmp_path / "one.onnx")
    assert not list(tmp_path.glob("one.*"))
