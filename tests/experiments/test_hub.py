"""Personal models on the Hub, which a server on this machine stands in for: sent on a word, checked when they come."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch

import polyfed as pf
from polyfed import registry
from polyfed.cli import app as cli
from polyfed.core.message import flatten, from_bytes
from polyfed.errors import ConfigError
from polyfed.experiments import prediction
from polyfed.experiments.hub import prepare_push
from polyfed.methods import ClosedForm, FedProto
from tests.experiments.test_exported_model import KINDS, finished, of_a_table
from tests.helpers.hospitals import hospitals
from tests.helpers.hub_stub import Hub, serve
from tests.helpers.small_recipe import small_recipe
from tests.project.test_trust import change_index

REPOSITORY = "ana/digits"
PLACE = f"hf://{REPOSITORY}"
STATE = "model.state.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(tmp_path / "cache", monkeypatch) as stub:
        yield stub


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose method predicts by prototypes beside the network; tests must not write into it."""
    place = tmp_path_factory.mktemp("images") / "run"
    finished(place, "images", FedProto())
    return place


def push(run: Path, *words: str) -> int:
    return cli.status(["push", str(run), REPOSITORY, *words])


# sent and fetched -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "tables"])
def test_what_is_fetched_predicts_the_same_bit_for_bit(kind: str, hub: Hub, tmp_path: Path) -> None:
    """Network, preparation, words and what the method keeps beside the network."""
    if kind == "tables":
        x = of_a_table(tmp_path / "run")
    else:
        x = KINDS[kind][0]
        finished(tmp_path / "run", kind)
    assert push(tmp_path / "run", "--client", "1", "--yes") == 0
    expected = prediction.predict(tmp_path / "run", 1, x).scores
    names = {"README.md", "config.json", "model.safetensors", "model.state.safetensors"}
    assert hub.repositories[REPOSITORY].keys() == names | ({"words.txt"} if kind == "texts" else set())
    assert hub.private == {REPOSITORY}
    hub.repositories[REPOSITORY] |= {"evil.py": b"raise SystemExit", "pytorch_model.bin": pickle.dumps(set)}
    fetched = pf.load(PLACE)
    assert torch.equal(fetched.predict(x).scores, expected)
    assert fetched.client == 1
    pf.load(PLACE, revision="v1")
    assert f"GET /api/models/{REPOSITORY}/revision/v1" in hub.asked
    assert not [line for line in hub.asked if line.endswith(("evil.py", ".bin", "README.md"))]


def test_no_counts_of_rows_are_sent_and_shares_are_told_before(tmp_path: Path) -> None:
    finished(tmp_path / "run", "series", ClosedForm(features=20))
    sent = prepare_push(tmp_path / "run", 1, REPOSITORY)
    state = flatten(from_bytes(sent.files[STATE]))
    assert state["own shares"].tolist() == pytest.approx([14 / 27, 13 / 27, 0])
    assert all(float(tensor.double().abs().sum()) != 27 for name, tensor in state.items() if "map" not in name)
    assert "samples" not in json.loads(sent.files["config.json"])
    assert "own shares" in str(sent)
    assert "no noise hides them" in str(sent)
    assert "no noise hides them" in sent.files["README.md"].decode()


def test_the_card_and_what_stays_here(hub: Hub, tmp_path: Path) -> None:
    """No name of a client, number of rows or folder of this machine goes along; a public repository is asked for."""
    settings = hospitals(tmp_path)
    pf.run(pf.Recipe.from_dict(settings), out=tmp_path / "run")
    assert push(tmp_path / "run", "--client", "south", "--public", "--yes") == 0
    assert not hub.private
    files = hub.repositories[REPOSITORY]
    for name in ("README.md", "config.json"):
        assert not [word for word in ("south", str(tmp_path)) if word in files[name].decode()]
    assert not {"samples", "name", "modules"} & json.loads(files["config.json"]).keys()
    yaml = pytest.importorskip("yaml")
    _, front, body = files["README.md"].decode().split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["library_name"] == "polyfed"
    assert metadata["tags"] == ["polyfed", "federated-learning", settings["method"]["name"]]
    assert "license" not in metadata
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for text in (
        f"| method | {settings['method']['name']}",
        f"| seed | {result['seed']} |",
        f"| rounds | {result['rounds']} |",
        f"| {100 * result['clients_table'][1]['accuracy']:.2f} % |",
        f"| {100 * result['accuracy']:.2f} ± {100 * result['accuracy_std']:.2f} % |",
        f'pf.load("{PLACE}")',
    ):
        assert text in body


def test_the_page(images: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/hub.md, as a stranger would follow it."""
    page = (Path(__file__).parents[2] / "docs" / "hub.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\n(.*?)\n```", page, flags=re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shown = re.findall(r"```text\n(.*?)\n  README", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(images, tmp_path / "runs" / "mine")
    np.save("new.npy", KINDS["images"][0].numpy())
    said: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    monkeypatch.setattr("polyfed.cli.report_commands.print_text", said.append)
    assert cli.status(shlex.split(command)[1:]) == 0
    assert re.sub(r"polyfed [\d.]+", "", said[0]).startswith(re.sub(r"polyfed [\d.]+", "", shown[0]))
    exec(program, {})


def test_code_of_ones_own_is_that_of_this_machine(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever folders a repository names."""
    monkeypatch.setattr(registry, "added_folders", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "nets_of_hub.py").write_text("from polyfed.models.cnn import digits_cnn1 as net\n")
    (tmp_path / "mine.toml").write_text(small_recipe(models={"architectures": ["nets_of_hub:net"]}))
    pf.run(tmp_path / "mine.toml", out=tmp_path / "run")
    assert push(tmp_path / "run", "--client", "0", "--yes") == 2
    assert push(tmp_path / "run", "--client", "0", "--yes", "--trust") == 0
    files = hub.repositories[REPOSITORY]
    assert "Install the code of nets_of_hub:net first" in files["README.md"].decode()
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"modules": [str(tmp_path)]}).encode()
    with pytest.raises(ConfigError, match=r"names code that is not polyfed's, 'nets_of_hub:net'.*trust=True"):
        pf.load(PLACE)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])
    monkeypatch.setattr(registry, "added_folders", [])
    monkeypatch.delitem(sys.modules, "nets_of_hub")
    with pytest.raises(ConfigError, match="cannot import model 'nets_of_hub:net'"):
        pf.load(PLACE, trust=True)
    monkeypatch.syspath_prepend(tmp_path)
    x = KINDS["images"][0]
    assert torch.equal(pf.load(PLACE, trust=True).scores(x), pf.load(tmp_path / "run", 0, trust=True).scores(x))


def test_nothing_is_sent_without_a_word(
    images: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert push(images, "--client", "1") == 2
    said = capsys.readouterr()
    *files, keeps = said.out.splitlines()[1:]
    assert [line.split()[0] for line in files] == [*prepare_push(images, 1, REPOSITORY).files]
    assert keeps.endswith("model.state.safetensors holds: labels, prototypes")
    assert "to the private repository ana/digits" in said.out
    assert "expected a yes at the terminal, or --yes, got none; nothing was sent" in said.err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for typed in ("", "no", "y"):
        monkeypatch.setattr("builtins.input", lambda *_, typed=typed: typed)
        assert push(images, "--client", "1") == 2
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))  # Ctrl-D
    assert push(images, "--client", "1") == 2
    assert hub.asked == []
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    assert push(images, "--client", "1") == 0
    assert hub.repositories


def test_a_public_repository_gets_nothing_that_was_to_be_private(images: Path, hub: Hub) -> None:
    hub.repositories[REPOSITORY] = {"README.md": b"mine"}
    prepared = prepare_push(images, 1, REPOSITORY)
    with pytest.raises(ConfigError, match="nothing was sent: expected 'ana/digits' to be private, got one that is pub"):
        prepared.send()
    assert hub.repositories[REPOSITORY] == {"README.md": b"mine"}
    prepare_push(images, 1, REPOSITORY, public=True).send()
    assert len(hub.repositories[REPOSITORY]) == 4


def test_without_a_token_nothing_is_asked(images: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"^expected your token .* got none: hf auth login$"):
        prepare_push(images, 1, REPOSITORY).send()
    assert hub.asked == []


@pytest.mark.parametrize("name", ["", "digits", "a/b/c", "../digits", "ana/..", "a na/b", "/etc/passwd", "ana/b?x"])
def test_names_that_are_no_repositories(name: str, images: Path) -> None:
    for deed in (lambda: prepare_push(images, 1, name), lambda: pf.load(f"hf://{name}")):
        with pytest.raises(ConfigError, match="expected a repository of the Hub as owner/name, got"):
            deed()


def test_a_folder_of_this_machine_goes_nowhere(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "run")
    change_index(tmp_path / "run", lambda entry: entry.update(architecture="hf:/disk/ana/net"))
    with pytest.raises(ConfigError, match="can be built elsewhere, got one made of 'hf:/disk/ana/net'"):
        prepare_push(tmp_path / "run", 1, REPOSITORY)


def test_only_one_model_needs_no_client(images: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a client whose model is in .* \(0, 1\), got none"):
        prepare_push(images, None, REPOSITORY)
    with pytest.raises(ConfigError, match=f"expected no client with {PLACE}, which holds one model, got 3"):
        pf.load(PLACE, 3)
    with pytest.raises(ConfigError, match="expected a revision with 'hf://owner/name' only"):
        pf.load(images, 1, revision="main")
    x = KINDS["images"][0]
    assert torch.equal(pf.load(images, 1).scores(x), prediction.load_model(images, 1).scores(x))


def test_without_a_network_what_was_fetched_is_still_there(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path / "cache", monkeypatch):
        push(images, "--client", "1", "--yes")
        pf.load(PLACE)
    assert pf.load(PLACE).client == 1
    for deed in (lambda: pf.load("hf://ana/other"), lambda: prepare_push(images, 1, REPOSITORY).send()):
        with pytest.raises(ConfigError, match=r"^cannot (load|push to) .*Error: ") as caught:
            deed()
        assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for deed in (lambda: pf.load(PLACE), lambda: prepare_push(images, 1, REPOSITORY).send()):
        with pytest.raises(ConfigError, match=r"pip install 'polyfed\[hub\]'"):
            deed()


# hostile repositories ---------------------------------------------------------------------------------------------


def changed(**entries: Any) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    """Entries of config.json."""
    return lambda config, files: config.update(entries)


def weights(
    content: bytes | Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], file: str = "model.safetensors"
) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    """Other weights, or what is made of these, with the right checksum."""

    def change(config: dict[str, Any], files: dict[str, bytes]) -> None:
        made = (
            content
            if isinstance(content, bytes)
            else safetensors.torch.save(content(safetensors.torch.load(files[file])))
        )
        files[file] = made
        config["sha256"][file] = hashlib.sha256(made).hexdigest()

    return change


def not_finite(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t * float("nan") if t.is_floating_point() else t for name, t in tensors.items()}


def huge(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Finite, of both signs: sums of products of them are inf - inf."""
    return {name: 3e38 * (1 - 2 * (torch.arange(t.numel()) % 2)).view_as(t) for name, t in tensors.items()}


def without_state(config: dict[str, Any], files: dict[str, bytes]) -> None:
    del config["sha256"][STATE]
    for files_of_stage in config["stages"].values():
        del files_of_stage["state"]


def header(size: int) -> bytes:
    """A safetensors file whose tensor is larger than the file."""
    head = json.dumps({"weight": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
    return len(head).to_bytes(8, "little") + head + b"\0" * 40


def remove(name: str) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    return lambda config, files: files.__delitem__(name)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any], dict[str, bytes]], None], str]] = {
    "no model": (remove("model.safetensors"), r"cannot read .*model\.safetensors: No such file"),
    "not ours": (changed(library_name="timm"), "'library_name': expected one of polyfed, got 'timm'"),
    "client": (changed(client="../1"), "'client': expected a whole number from 0 to"),
    "room": (changed(feature_dim=2**24), r"network for the \d+ bytes of weights .* got settings of a larger one"),
    "widths": (
        changed(architecture="digits-cnn1#999999-999999"),
        r"the \d+ bytes of weights .* got settings of a larger one",
    ),
    "code": (changed(architecture="evil:net", modules=["."]), "names code that is not polyfed's, 'evil:net'"),
    "pickle": (weights(pickle.dumps({"weight": 1})), "expected weights as safetensors"),
    "header": (weights(header(2**40)), "expected weights as safetensors"),
    "others": (weights(safetensors.torch.save({"w": torch.zeros(2)})), "does not fit the network as it is built now"),
    "weights of whole numbers": (
        weights(lambda all: {k: t.long() for k, t in all.items()}),
        "is torch.int64, not torch.f",
    ),
    "complex weights": (
        weights(lambda all: {k: t.cfloat() for k, t in all.items()}),
        "is torch.complex64, not torch.f",
    ),
    "scores of NaN": (weights(huge), "expected scores of an input of zeros and ones, got some that are no numbers"),
    "weights of NaN": (weights(not_finite), "expected finite numbers, got others in 'weights/"),
    "state of NaN": (weights(not_finite, STATE), "expected finite numbers, got others in 'prototypes'"),
    "state of other classes": (
        weights(
            lambda tensors: {name: t[:2] for name, t in tensors.items()} | {"prototypes": torch.zeros(2, 7)}, STATE
        ),
        "expected scores of an input of zeros, got RuntimeError",
    ),
    "no state": (without_state, r"state that its method keeps \(labels, prototypes\), got none"),
    "keeps": (changed(keeps={}), "as this version writes it"),
    "mean": (changed(prepare={"mean": [float("nan")], "std": [1.0]}), "std per mean, all finite .* got mean .nan"),
    "std": (changed(prepare={"mean": [0.0], "std": [1e-320]}), "std per mean, all finite .* and std .1e-320"),
    "names": (changed(class_names=["a"]), "expected a name for each of 3 classes, got 1"),
    "damaged": (lambda config, files: files.update({"model.safetensors": b"x"}), "is damaged"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_repository_holds_is_checked(case: str, images: Path, hub: Hub) -> None:
    change, says = HOSTILE[case]
    files = dict(prepare_push(images, 1, REPOSITORY).files)
    config = json.loads(files["config.json"])
    change(config, files)
    hub.repositories[REPOSITORY] = {**files, "config.json": json.dumps(config).encode()}
    with pytest.raises(ConfigError, match=says) as caught:
        pf.load(PLACE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{" * 10**5, b'{"library_name": NaN}', b" " * (2**24 + 1)])
def test_a_config_that_is_none(content: bytes, hub: Hub) -> None:
    hub.repositories[REPOSITORY] = {"config.json": content}
    with pytest.raises(ConfigError, match=r"expected (a model that polyfed has pushed in|at most 16777216 bytes)"):
        pf.load(PLACE)
    hub.repositories[REPOSITORY] = {"README.md": content}
    with pytest.raises(ConfigError, match=r"got a repository without config\.json"):
        pf.load(PLACE)
