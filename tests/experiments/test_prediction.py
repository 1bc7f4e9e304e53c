"""A client's model out of a run folder: the same scores bit for bit, every form of inputs, and what is refused."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

import polyfed as pf
from polyfed.cli import app as cli
from polyfed.data.datasets import load_dataset
from polyfed.data.transforms import Prepare
from polyfed.engine.federation import Run
from polyfed.errors import ConfigError
from polyfed.experiments import prediction
from polyfed.experiments.build import build_federation
from polyfed.methods import FedProto
from tests.experiments.test_exported_model import finished
from tests.helpers.hospitals import hospitals

SOURCE = load_dataset("digits")
RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "max_train_per_client": 40, "max_test_per_client": 30},
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "fedgh"},
    "training": {"rounds": 2, "batch_size": 10, "lr": 0.05},
}


def recipe(**sections: Mapping[str, Any]) -> pf.Recipe:
    """The recipe above with other settings in some sections."""
    return pf.Recipe.from_dict({**RECIPE, **{name: {**RECIPE[name], **new} for name, new in sections.items()}})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of FedGH on digits; tests must not write into its folder."""
    return pf.run(recipe(), out=tmp_path_factory.mktemp("runs") / "fedgh")


@pytest.fixture(scope="module")
def of_hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose clients have names."""
    place = tmp_path_factory.mktemp("hospitals")
    return folder(pf.run(pf.Recipe.from_dict(hospitals(place)), out=place / "run"))


@pytest.mark.parametrize(("client", "number"), [("south", 1), ("2", 2), (0, 0)])
def test_a_client_goes_by_number_or_name(of_hospitals: Path, client: int | str, number: int) -> None:
    model = prediction.load(of_hospitals, client)
    assert (model.client, model.name) == (number, ("north", "south", "west")[number])


@pytest.mark.parametrize("client", ["sout", "", "3", 3, "-1", "9" * 5000])
def test_no_such_client_tells_all(of_hospitals: Path, client: int | str) -> None:
    with pytest.raises(ConfigError, match=r"\(0 \('north'\), 1 \('south'\), 2 \('west'\)\), got"):
        prediction.load(of_hospitals, client)


def test_the_command_says_whose_model_it_is(of_hospitals: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = str(of_hospitals.parent / "table.csv")
    assert cli.status(["predict", str(of_hospitals), table, "--client", "west"]) == 0
    assert capfd.readouterr().err.splitlines()[0] == "model of client 2 ('west')"


def folder(done: Run) -> Path:
    assert done.path is not None
    return done.path


def own_scores(done: Run, client: int, x: Tensor) -> Tensor:
    """By the model in memory."""
    with torch.inference_mode():
        scores: Tensor = done.models[client](Prepare(SOURCE.mean, SOURCE.std)(x))
    return scores


# the same model -----------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_model_in_memory_bit_for_bit(done: Run) -> None:
    for client in range(3):
        found = prediction.predict(folder(done), client, SOURCE.train.x[:100])
        expected = own_scores(done, client, SOURCE.train.x[:100])
        assert torch.equal(found.scores, expected)
        assert torch.equal(found.classes, expected.argmax(dim=1))
        assert torch.allclose(found.probabilities.sum(dim=1), torch.ones(100))
        assert torch.allclose(found.probabilities, expected.softmax(dim=1))


@pytest.mark.parametrize(
    "sections",
    [
        {"method": {"name": "fedavg", "aggregation": "same-shape"}},
        {"method": {"name": "fedin", "aggregation": "same-shape", "mu": 0.5}},
        {"models": {"feature_dim": 20}, "training": {"rounds": 1}},
        {"training": {"client_fraction": 0.34, "rounds": 1}},
        {"data": {"image_size": 12}, "training": {"rounds": 1}},
    ],
    ids=["fedavg", "fedin", "projection", "never-took-part", "resized"],
)
def test_every_kind_of_network_comes_back(sections: Any, tmp_path: Path) -> None:
    federation = build_federation(recipe(**sections), out=tmp_path / "run")
    found = federation.run()
    for client in federation.clients:
        test, module = client.data.test, found.models[client.id]
        said = prediction.predict(tmp_path / "run", client.id, test.x)
        with torch.inference_mode():
            assert torch.equal(said.scores, module(client.prepare(test.x)))


# files --------------------------------------------------------------------------------------------------------------

X, Y = SOURCE.train.x[:12], SOURCE.train.y[:12]


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


class Terminal:
    """Gives ``polyfed predict`` in this process."""

    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run, self._capsys = run, capsys

    def __call__(self, data: Path, *words: str, status: int = 0) -> tuple[str, str]:
        self._capsys.readouterr()
        given = words if "--client" in words else ("--client", "1", *words)
        code = cli.status(["predict", str(self.run), str(data), *given])
        said = self._capsys.readouterr()
        assert code == status, said
        assert "Traceback" not in said.err
        return said.out, said.err


@pytest.fixture
def predict(done: Run, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(folder(done), capsys)


def forms(where: Path) -> dict[str, Path]:
    """The same images in every form that is read."""
    np.save(where / "four.npy", X.numpy())
    np.save(where / "three.npy", X[:, 0].numpy())
    pictures = where / "pictures"
    pictures.mkdir()
    for number, x in enumerate(X):
        mode = x[0].numpy() if number % 2 else np.repeat(x[0].numpy()[..., None], 3, axis=2)  # gray, and RGB that is
        (pictures / f"{number:02d}.png").write_bytes(png(mode))
    opaque = np.concatenate([np.repeat(X[0, 0].numpy()[..., None], 3, axis=2), np.full((8, 8, 1), 255, np.uint8)], 2)
    (pictures / "00.png").write_bytes(png(opaque))
    return {
        "four": where / "four.npy",
        "three": where / "three.npy",
        "pictures": pictures,
        "picture": pictures / "03.png",
    }


@pytest.mark.parametrize("form", ["four", "three", "pictures", "picture"])
def test_every_form_gives_the_same_scores(form: str, done: Run, tmp_path: Path) -> None:
    found = prediction.predict(folder(done), 1, forms(tmp_path)[form])
    picked = X[3:4] if form == "picture" else X
    assert torch.equal(found.scores, own_scores(done, 1, picked))
    names = [f"{n:02d}.png" for n in range(12)] if form == "pictures" else [str(n) for n in range(12)]
    assert list(found.names) == (["03.png"] if form == "picture" else names)
    assert found.accuracy is None


def test_the_csv_file(predict: Terminal, done: Run, tmp_path: Path) -> None:
    scores = own_scores(done, 1, X)
    np.save(tmp_path / "a.npy", X.numpy())
    out, error = predict(tmp_path / "a.npy", "--out", str(tmp_path / "said.csv"))
    assert f"wrote {tmp_path / 'said.csv'}" in out
    assert error == ""
    found = rows((tmp_path / "said.csv").read_text())
    assert list(found[0]) == ["name", "class", "class_name", "probability"]
    assert [row["name"] for row in found] == [str(n) for n in range(12)]
    assert [int(row["class"]) for row in found] == scores.argmax(dim=1).tolist()
    shares = scores.softmax(dim=1).max(dim=1).values
    assert [float(row["probability"]) for row in found] == pytest.approx(shares.tolist(), abs=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {"a.npy", "said.csv"}


def test_images_of_another_size_are_refused(predict: Terminal, done: Run, tmp_path: Path) -> None:
    wide = torch.nn.functional.interpolate(X.float(), (24, 16), mode="nearest").to(torch.uint8)
    np.save(tmp_path / "wide.npy", wide.numpy())
    (tmp_path / "wide.png").write_bytes(png(wide[0, 0].numpy()))
    for name in ("wide.npy", "wide.png"):
        _, error = predict(tmp_path / name, status=2)
        assert "expected inputs 1 x 8 x 8 of type uint8" in error
        assert f"got 1 x 24 x 16 in {tmp_path / name}; bring images to this size" in error


# refused ------------------------------------------------------------------------------------------------------------


def wrong_inputs(where: Path) -> dict[str, tuple[Path, str]]:
    """Inputs that cannot be used, with what is said of them."""
    for name, array in {
        "shape": np.zeros((2, 1, 9, 9), np.uint8),
        "objects": np.array([{}, []], dtype=object),
    }.items():
        np.save(where / f"{name}.npy", array, allow_pickle=name == "objects")
    (where / "notes.txt").write_text("none")
    (where / "empty").mkdir()
    return {
        "shape": (where / "shape.npy", "got 1 x 9 x 9"),
        "objects": (where / "objects.npy", "expected an array of numbers as NumPy saves it, got something else"),
        "text": (where / "notes.txt", "a .npy file, got"),
        "empty": (where / "empty", "without any"),
    }


@pytest.mark.parametrize("case", ["shape", "objects", "text", "empty"])
def test_wrong_inputs_are_one_line_and_nothing_is_written(case: str, predict: Terminal, tmp_path: Path) -> None:
    data, says = wrong_inputs(tmp_path)[case]
    out, error = predict(data, "--out", str(tmp_path / "said.csv"), status=2)
    assert out == ""
    assert says in error
    assert error.count("\n") == 1
    assert "pickle" not in error
    assert " object at 0x" not in error
    assert not (tmp_path / "said.csv").exists()


def copied(done: Run, tmp_path: Path) -> Path:
    shutil.copytree(folder(done), tmp_path / "copy")
    return tmp_path / "copy"


def test_folders_that_hold_no_such_model(done: Run, tmp_path: Path) -> None:
    run = copied(done, tmp_path)
    weights, index = run / "models" / "personal-001.safetensors", run / "models" / "index.json"
    whole, listed = weights.read_bytes(), json.loads(index.read_text())
    text = index.read_text()
    index.write_text(text.replace("digits", "digitz", 1))
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        prediction.load(run, 1)
    index.write_text(text)
    prediction.load(run, 1)
    (run / "models" / "index.json.sha256").unlink()  # as of folders that older versions wrote
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"personal-001\.safetensors is damaged"):
        prediction.load(run, 1)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*personal-001"):
        prediction.load(run, 1)
    weights.write_bytes(whole)
    for key, value, says in (
        ("architecture", "digits-cnn2x", "unknown model 'digits-cnn2x'; did you mean"),
        ("architecture", "digits-cnn3", "does not fit the network as it is built now"),
        ("classes", 7, "'head.bias' is \\(10,\\) torch.float32, not \\(7,\\)|'head.weight' is"),
        ("method", "fedhg", "unknown method 'fedhg'; did you mean 'fedgh'"),
        ("hyperparameters", {"header_lrr": 1}, "as this version writes it"),
        ("prepare", None, "went through a function of your own"),
        ("prepare", {"mean": [float("nan")], "std": [1.0]}, "all finite in float32"),
        ("class_names", ["a", "b"], "expected a name for each of 10 classes, got 2"),
        ("keeps", {"personal": ["prototypes"]}, r"state that its method keeps \(prototypes\), got none"),
    ):
        entries = {name: {**entry, key: value} for name, entry in listed.items()}
        index.write_text(json.dumps(entries))
        with pytest.raises(ConfigError, match=says) as caught:
            prediction.load(run, 1)
        assert "\n" not in str(caught.value)
    old = {name: {k: entry[k] for k in ("architecture", "classes", "samples")} for name, entry in listed.items()}
    for content, says in (
        (json.dumps(old), "as this version writes it"),
        ("{", "nothing readable"),
        ("[1, 2]", "noth"),
        (
            text.replace("personal-001.safe", "personal-1.x/../../personal-001.safe"),
            r"expected files as personal-000\.safetensors",
        ),
        (text.replace('"1": {', '"1/..": {'), r"expected numbers of clients, got '1/\.\.'"),
    ):
        index.write_text(content)
        with pytest.raises(ConfigError, match=says):
            prediction.load(run, 1)
    index.write_text(json.dumps({name: entry for name, entry in listed.items() if name != "1"}))
    with pytest.raises(ConfigError, match=r"whose model is in .*models \(0, 2\), got 1"):  # it never joined, say
        prediction.load(run, 1)
    (run / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"finished run, got .* holds no result\.json"):
        prediction.load(run, 1)
    with pytest.raises(ConfigError, match="which is no folder"):
        prediction.load(tmp_path / "absent", 1)


# hostile folders ----------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, bytes]], None]


@pytest.fixture(scope="module")
def by_prototypes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose method predicts by prototypes beside the network; tests must not write into it."""
    place = tmp_path_factory.mktemp("images") / "run"
    finished(place, "images", FedProto())
    return place


def changed(**entries: Any) -> Change:
    """Entries of index.json."""
    return lambda entry, files: entry.update(entries)


def tensors(content: bytes | Callable[[dict[str, Tensor]], dict[str, Tensor]], kind: str = "weights") -> Change:
    """Another file of tensors, or what is made of these, with the right checksum."""

    def change(entry: dict[str, Any], files: dict[str, bytes]) -> None:
        file = entry["stages"][entry["stage"]][kind]
        made = content
        if callable(content):
            made = safetensors.torch.save(content(safetensors.torch.load(files[file])))
        files[file] = made
        entry["sha256"][file] = hashlib.sha256(made).hexdigest()

    return change


def not_finite(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t * float("nan") if t.is_floating_point() else t for name, t in tensors.items()}


def huge(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Finite, of both signs: sums of products of them are inf - inf."""
    return {name: 3e38 * (1 - 2 * (torch.arange(t.numel()) % 2)).view_as(t) for name, t in tensors.items()}


def without_state(entry: dict[str, Any], files: dict[str, bytes]) -> None:
    for files_of_stage in entry["stages"].values():
        del files_of_stage["state"]


def header(size: int) -> bytes:
    """A safetensors file whose tensor is larger than the file."""
    head = json.dumps({"weight": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
    return len(head).to_bytes(8, "little") + head + b"\0" * 40


HOSTILE: dict[str, tuple[Change, str]] = {
    "room": (changed(feature_dim=2**24), r"network for the \d+ bytes of weights .* got settings of a larger one"),
    "widths": (changed(architecture="digits-cnn1#999999-999999"), r"the \d+ bytes of weights .* got settings of a la"),
    "code": (changed(architecture="evil:net", modules=["."]), "names code that is not polyfed's, 'evil:net'"),
    "pickle": (tensors(pickle.dumps({"weight": 1})), "expected weights as safetensors"),
    "header": (tensors(header(2**40)), "expected weights as safetensors"),
    "whole numbers": (tensors(lambda all: {k: t.long() for k, t in all.items()}), "torch.int64, not .* torch.f"),
    "scores of NaN": (tensors(huge), "expected scores of an input of zeros and ones, got some that are no numbers"),
    "weights of NaN": (tensors(not_finite), "expected finite numbers, got others in 'weights/"),
    "state of NaN": (tensors(not_finite, "state"), "expected finite numbers, got others in 'prototypes'"),
    "state of other classes": (
        tensors(lambda all: {k: t[:2] for k, t in all.items()} | {"prototypes": torch.zeros(2, 7)}, "state"),
        "expected scores of an input of zeros, got RuntimeError",
    ),
    "no state": (without_state, r"state that its method keeps \(labels, prototypes\), got none"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_folder_holds_is_checked(case: str, by_prototypes: Path, tmp_path: Path) -> None:
    change, says = HOSTILE[case]
    run = tmp_path / "run"
    shutil.copytree(by_prototypes, run)
    files = {path.name: path.read_bytes() for path in (run / "models").glob("*.safetensors")}
    index = json.loads((run / "models" / "index.json").read_text())
    change(index["1"], files)
    (run / "models" / "index.json").write_text(json.dumps(index))
    (run / "models" / "index.json.sha256").unlink()
    for name, content in files.items():
        (run / "models" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        prediction.load(run, 1)
    assert "\n" not in str(caught.value)
