"""Methods, networks and data of one's own by name: from the command line, in recipes, and out of run folders."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import polyfed as pf
from polyfed import registry
from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import load
from polyfed.registry import import_object
from tests.helpers.small_recipe import small_recipe

pytestmark = pytest.mark.usefixtures("unrendered")

MODULE = '''
"""All of one's own."""
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

import polyfed as pf
from polyfed.core.method import hyperparameters
from polyfed.methods import FedAvg, FedGH


@hyperparameters
class Gentle(FedGH):
    """FedGH whose header goes only a part of the way."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0  # of the way; 1 is FedGH

    def aggregate(self, server, uploads):
        before = server.state["header"]
        super().aggregate(server, uploads)
        after = server.state["header"]
        server.state["header"] = {k: before[k] + self.share * (after[k] - before[k]) for k in before}


class Bare(pf.Method):
    """Without hyperparameters."""


class Forgotten(FedAvg):
    """The decorator is missing."""

    strength: float = 0.5


@hyperparameters
class Named(Gentle):
    name = "gentle-two"


@hyperparameters
class Heir(Named):
    """Called as its class."""


@hyperparameters
class Twin(Gentle):
    name = "gentle-two"


@hyperparameters
class NoFolder(Gentle):
    name = "../gentle"


@hyperparameters
class NotIts(Gentle):
    name = "fedavg"


METHOD = Gentle()


def net(in_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))


def rows():
    x = torch.randint(0, 256, (300, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return x, torch.arange(300) % 10
'''
RECIPE = small_recipe(data={"num_clients": 3})
VARIANT = '\n[methods.half-way]\nname = "own_all:Gentle"\nshare = 0.5\n'


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's path and modules are those from before the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "added_folders", [])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a module beside it, in a folder that is neither on Python's path nor the present one."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "mine.toml").write_text(RECIPE)
    (place / "own_all.py").write_text(MODULE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return place


def polyfed(*words: str | Path) -> int:
    return cli.status([*map(str, words)])


def forget() -> None:
    """As in a new process."""
    sys.modules.pop("own_all", None)
    sys.path[:] = [place for place in sys.path if place not in registry.added_folders]
    registry.added_folders.clear()


def test_a_method_by_name_from_the_run_to_what_is_made_of_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", project / "mine.toml", "--method", "own_all:Gentle", "--set", "method.share=0.5", "-q"]
    assert polyfed(*words) == 0
    folder = Path("runs/mine-gentle-seed0")
    kept = tomllib.loads((folder / "recipe.toml").read_text())
    assert kept["method"]["name"] == "own_all:Gentle"
    assert kept["run"]["label"] == "gentle"
    assert kept["run"]["modules"] == [str(project)]
    result = json.loads((folder / "result.json").read_text())
    assert (result["method"], result["label"]) == ("own_all:Gentle", "gentle")
    assert result["hyperparameters"]["share"] == 0.5

    np.save("new.npy", np.zeros((2, 1, 8, 8), dtype=np.uint8))
    for after in (
        ["predict", folder, "new.npy", "--client", "0", "--trust"],
        ["audit", "leakage", folder, "--images", "1", "--steps", "1", "--trust"],
        ["report", folder],
        [*words, "--resume"],
    ):
        forget()
        assert polyfed(*after) == 0, capsys.readouterr().err
    assert "gentle" in (folder / "comparison.md").read_text()
    assert type(load(folder, 0, trust=True).method).__name__ == "Gentle"


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def tutorial() -> str:
    """The cell of the tutorial that has the class with its imports."""
    cells = json.loads((ROOT / "examples" / "own-method.ipynb").read_text(encoding="utf-8"))["cells"]
    (found,) = (text for cell in cells if "class Echo(pf.Method)" in (text := "".join(cell["source"])))
    return found


def test_the_page_of_own_methods_as_a_stranger_would_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("echo.py").write_text("\n\n".join([tutorial(), blocks("python")[0]]), encoding="utf-8")
    (subclass,) = (block for block in blocks("python") if block.startswith("# gentle.py"))
    Path("gentle.py").write_text(subclass, encoding="utf-8")
    (recipe,) = blocks("toml")
    Path("mine.toml").write_text(recipe, encoding="utf-8")
    np.save("new.npy", np.zeros((2, 1, 8, 8), dtype=np.uint8))
    fewer = ["--set", "data.max_train_per_client=20", "--set", "data.max_test_per_client=10"]
    for line in blocks("bash")[0].splitlines():
        program, command, *words = shlex.split(line, comments=True)
        assert program == "polyfed"
        more = [*fewer, "-q"] if command in ("run", "compare", "sweep") else fewer if command == "check" else []
        monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])
        monkeypatch.setattr(registry, "added_folders", [])
        for module in ("echo", "gentle"):
            sys.modules.pop(module, None)
        assert cli.status([command, *words, *more]) == 0, (line, capsys.readouterr().err)
    for module in ("echo", "gentle"):
        sys.modules.pop(module, None)
    assert json.loads(Path("runs/echo/result.json").read_text())["rounds"] == 8
    assert {path.name for path in Path("runs/compared").iterdir() if path.is_dir()} == {
        *("local", "echo-features", "echo-loud", "gentle", "fedgh"),
    }


@pytest.mark.slow
def test_in_a_recipe_with_networks_and_data_in_worker_processes(project: Path) -> None:
    (project / "mine.toml").write_text(RECIPE.replace('"fedgh"', '"own_all:Gentle"\nshare = 1.0') + VARIANT)
    more = ['models.architectures=["own_all:net"]', 'data.dataset="own_all:rows"']
    pooled = pf.run(project / "mine.toml", overrides=[*more, "run.executor=processes"], workers=2, out="pooled")
    assert pooled.result["workers"] == 2
    forget()
    serial = pf.run(project / "mine.toml", overrides=[*more, "run.executor=serial"])
    assert pooled.result["accuracy_per_client"] == serial.result["accuracy_per_client"]
    plain = pf.run(project / "mine.toml", method="fedgh", overrides=[*more, "run.executor=serial"])
    assert plain.result["accuracy_per_client"] == serial.result["accuracy_per_client"], "share = 1 is FedGH"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Named", "gentle-two"),
        ("Gentle", "gentle"),
        ("Heir", "heir"),
        ("NoFolder", "own_all.NoFolder"),
        ("NotIts", "own_all.NotIts"),
    ],
)
def test_a_class_is_called_by_its_name_where_no_other_method_is(project: Path, kind: str, name: str) -> None:
    chosen = Recipe.load(project / "mine.toml", method=f"own_all:{kind}")
    assert chosen.name == name
    assert chosen.choose_alone(f"own_all:{kind}").name == f"{name}-alone"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_all:Gentel", "module 'own_all' has no attribute 'Gentel'; did you mean 'Gentle'?"),
        ("own_al:Gentle", "No module named 'own_al'; looked in {project}, {here} and on Python's path"),
        ("own_all.Gentle", "unknown method 'own_all.Gentle'; a method of your own is 'package.module:Class'"),
        ("own_all:", "unknown method 'own_all:'; a method of your own is 'package.module:Class'"),
        ("own_all:net", "expected a class that extends polyfed.Method, got an object of function"),
        ("own_all:METHOD", "expected a class that extends polyfed.Method, got an object of Gentle"),
        ("own_all:nn", "expected a class that extends polyfed.Method, got an object of module"),
        (
            "own_all:Bare",
            "expected @hyperparameters (of polyfed.core.method) above the class Bare, got a class without it",
        ),
        (
            "own_all:Forgotten",
            "above the class Forgotten, got a class without it, so that 'strength' is no hyperparameter",
        ),
    ],
)
def test_what_is_no_method_is_one_line(project: Path, name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert polyfed("run", project / "mine.toml", "--method", name) == 2
    *before, said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("imports own_al") for line in before)
    assert says.format(project=project, here=Path.cwd()) in said
    assert not Path("runs").exists()


def test_a_module_that_has_gone_is_one_line_that_says_where_it_was(project: Path) -> None:
    pf.run(project / "mine.toml", method="own_all:Gentle", out="run")
    np.save("new.npy", np.zeros((2, 1, 8, 8), dtype=np.uint8))
    shutil.move(project / "own_all.py", "own_all.py.gone")
    forget()
    with pytest.raises(ConfigError, match=f"No module named 'own_all'; looked in {project} and on Python's path: put"):
        load("run", 0, trust=True)
    with pytest.raises(ConfigError, match="No module named 'own_all'"):
        Recipe.of_run("run", trust=True)
    shutil.move("own_all.py.gone", project / "own_all.py")
    load("run", 0, trust=True)


def test_a_run_folder_is_no_place_for_modules(project: Path) -> None:
    """A reader of a run folder imports nothing that lies in it, nor in the present folder."""
    pf.run(project / "mine.toml", method="own_all:Gentle", out="run")
    (project / "own_all.py").unlink()
    Path("run/own_all.py").write_text("raise SystemExit('run from a run folder')")
    Path("own_all.py").write_text("raise SystemExit('run from the present folder')")
    forget()
    for read in (lambda: load("run", 0, trust=True), lambda: Recipe.of_run("run", trust=True)):
        with pytest.raises(ConfigError, match="cannot import method"):
            read()


def test_two_modules_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_twin.py").write_text(f"def which():\n    return '{name}'\n")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert import_object("data set", "own_twin:which", [a])() == "a"
    with pytest.raises(ConfigError, match=r"expected the module 'own_twin' of \S+/b/own_twin.py, got that of \S+/a/"):
        import_object("data set", "own_twin:which", [b])
    del sys.modules["own_twin"]
    assert import_object("data set", "own_twin:which", [b])() == "b", (
        "the folder asked for comes before those of others"
    )


def test_a_folder_beside_hides_nothing_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken for the standard library')")
    (tmp_path / "own_reader.py").write_text("import json\n\n\ndef read():\n    return json.loads('1')\n")
    assert import_object("data set", "own_reader:read", [str(tmp_path)])() == 1
    with pytest.raises(ConfigError, match="expected the module 'json' of"):
        import_object("data set", "json:loads", [str(tmp_path)])
