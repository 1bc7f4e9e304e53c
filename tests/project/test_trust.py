"""No command runs code that a run folder names, or follows its links; what a recipe imports is said beforehand."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import polyfed as pf
from polyfed import registry
from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError
from polyfed.experiments import prediction
from polyfed.registry import file_of, is_own
from polyfed.report.html_report import read_command
from polyfed.report.run_records import load_runs
from tests.helpers.processes import forked
from tests.helpers.refusals import refusal
from tests.helpers.small_recipe import small_recipe

RECIPE = small_recipe()
EVIL = """
import pathlib
pathlib.Path(__file__).with_name("PWNED").touch()

def net(in_shape, classes):
    raise SystemExit

def rows():
    raise SystemExit

class Method:
    pass
"""
SWITCH = "--trust (trust=True in Python)"
X = np.zeros((1, 1, 8, 8), dtype=np.uint8)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of polyfed's own parts; its recipe lies beside it."""
    place = tmp_path_factory.mktemp("clean")
    (place / "mine.toml").write_text(RECIPE)
    pf.run(place / "mine.toml", out=place / "run")
    return place


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "added_folders", [])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("evil", "parent", "images"):
            del sys.modules[name]


def change_recipe(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "recipe.toml"
    settings = tomllib.loads(path.read_text())
    for section, values in changes.items():
        if isinstance(values, list):
            settings[section] = values
        else:
            settings.setdefault(section, {}).update(values)
    path.write_text(tomli_w.dumps(settings))


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every entry, and renew the checksum."""
    path = folder / "models" / "index.json"
    index = json.loads(path.read_text())
    for entry in index.values():
        change(entry)
    data = json.dumps(index).encode()
    path.write_bytes(data)
    path.with_name("index.json.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  index.json\n")


EVERYTHING = {
    "recipe": {
        "models": {"architectures": ["evil:net"]},
        "method": {"name": "evil:Method"},
        "data": {"dataset": "evil:rows"},
    },
    "index": {"architecture": "evil:net", "method": "evil:Method"},
}
EACH: dict[str, dict[str, dict[str, Any]]] = {  # what the recipe, and the index, of a folder name
    "network": {"recipe": {"models": {"architectures": ["evil:net"]}}, "index": {"architecture": "evil:net"}},
    "network, cut": {
        "recipe": {"models": {"architectures": ["evil:net@none"]}},
        "index": {"architecture": "evil:net@a"},
    },
    "method": {"recipe": {"method": {"name": "evil:Method"}}, "index": {"method": "evil:Method"}},
    "data": {"recipe": {"data": {"dataset": "evil:rows"}}, "index": {"method": "evil:Method"}},
    "executor": {"recipe": {"run": {"executor": "evil:Method"}}, "index": {"architecture": "evil:net"}},
    "plugin": {"recipe": {"plugins": [{"name": "evil:Method"}]}, "index": {"method": "evil:Method"}},
    "public data": {"recipe": {"data": {"public_dataset": "evil:rows"}}, "index": {"auxiliary_model": "evil:net"}},
    "variant": {
        "recipe": {"methods": {"odd": {"name": "evil:Method"}}},
        "index": {"hyperparameters": {"shared": "evil:net"}},
    },
    "profile": {
        "recipe": {"presets": {"odd": {"method": {"name": "evil:Method"}}}},
        "index": {"hyperparameters": {"deep": [{"in": "evil:net"}]}},
    },
    "hyperparameter": {
        "recipe": {"method": {"name": "fml", "shared": "evil:net"}},
        "index": {"auxiliary_model": "evil:net@none"},
    },
}


@pytest.fixture(params=[EVERYTHING], ids=["everything"])
def hostile(request: pytest.FixtureRequest, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that names a module lying in it, and on Python's path besides."""
    wanted = request.param
    folder = tmp_path / "run"
    shutil.copytree(clean / "run", folder)
    shutil.copy(clean / "mine.toml", tmp_path)
    (folder / "evil.py").write_text(EVIL)
    run = {"modules": [str(folder)], **wanted["recipe"].get("run", {})}
    change_recipe(folder, {**wanted["recipe"], "run": run})
    change_index(folder, lambda entry: entry.update(wanted["index"], modules=[str(folder)]))
    np.save(tmp_path / "new.npy", X)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    return folder


def untouched(folder: Path) -> bool:
    return "evil" not in sys.modules and not (folder / "PWNED").exists()


# every command ------------------------------------------------------------------------------------------------------

# command -> its words for a run folder; and whether it has to be refused, with a line that names the switch
READERS: dict[str, tuple[Callable[[Path], list[Any]], bool]] = {
    "predict": (lambda run: [run, "new.npy", "--client", "0"], True),
    "export": (lambda run: [run, "new.pt2", "--client", "0"], True),
    "audit leakage": (lambda run: [run, "--images", "0"], True),
    "report": (lambda run: [run], False),
    "run": (lambda run: ["mine.toml", "--out", run, "--resume", "-q"], False),
    "compare": (lambda run: ["mine.toml", "--out", run, "-q"], False),
    "sweep": (lambda run: ["mine.toml", "--out", run, "--set", "training.lr=0.1,0.2", "-q"], False),
    "deploy forget": (lambda run: [run, "0"], True),
    "deploy local": (lambda run: ["--recipe", "mine.toml", "--out", run, "-q"], False),
}
# read no run folder, or those that sweep and compare read for them
OTHERS = {"benchmark", "check", "methods", "models", "datasets", "recipe", "new"}
OTHERS |= {"deploy init", "deploy check", "deploy certify", "deploy key", "deploy server", "deploy node"}


def test_every_command_is_known() -> None:
    """A new command belongs in one of the two lists above; in the first, if it takes a run folder."""
    top = cli.parser()
    groups = ("audit", "deploy")
    commands = {name for name in top.commands if name not in groups}
    commands |= {f"{group} {name}" for group in groups for name in top.commands[group].commands}
    assert commands == {*READERS, *OTHERS}


@pytest.mark.parametrize("command", READERS)
def test_no_command_runs_what_a_run_folder_names(
    command: str, hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, refused = READERS[command]
    status = cli.status([*command.split(), *map(str, words(hostile))])
    said = capsys.readouterr()
    assert untouched(hostile), said
    if refused:
        assert status == 2
        *before, line = said.err.splitlines()
        assert SWITCH in line
        assert len(before) <= (command == "audit leakage")  # which tells what it is about to do


@pytest.mark.parametrize("hostile", EACH.values(), ids=EACH, indirect=True)
def test_each_name_alone_is_refused(hostile: Path) -> None:
    for read in (lambda: Recipe.of_run(hostile), lambda: prediction.load(hostile, 0)):
        assert SWITCH in refusal(read)
    assert untouched(hostile)


# with trust ---------------------------------------------------------------------------------------------------------


def test_a_trusted_folder_is_read_with_its_code(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('PWNED').touch()\n"
        "from polyfed.registry import MODELS\nnet = MODELS['digits-cnn1']\n"
    )
    (tmp_path / "mine.toml").write_text(small_recipe(models={"architectures": ["evil:net"]}))
    run = pf.run(tmp_path / "mine.toml", out=tmp_path / "run")
    assert run.path is not None
    for read in (
        lambda trust: prediction.predict(run.path, 0, X, trust=trust),
        lambda trust: Recipe.of_run(run.path, trust),
    ):
        with pytest.raises(ConfigError, match="'evil:net'"):
            read(False)
        read(True)


# what an index says of sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"input": {"shape": ["touch", "PWNED"], "type": "uint8"}}, "'input.shape[0]'"),
        ({"input": {"shape": [1, 0, 8], "type": "uint8"}}, "sizes from 1 to"),
        ({"input": {"shape": [2**24, 2**24], "type": "uint8"}}, "an input of at most"),
        ({"input": {"shape": [1, 8, 8], "type": "load"}}, "'load'"),
        ({"classes": 2**40}, "sizes from 1 to"),
        ({"image_size": ["8"]}, "'image_size'"),
        ({"image_size": 2**24}, "the size of the input"),
        ({"prepare": {"mean": ["a"], "std": [1.0]}}, "'prepare.mean[0]'"),
        ({"hyperparameters": ["rm"]}, "'hyperparameters'"),
        ({"sha256": {"../../secret": "0" * 64}}, "personal-000.safetensors"),
        ({"stages": {"personal": {"weights": "../../secret"}}}, "../../secret"),
        ({"stages": {"personal": {"weights": "personal-0.safetensors", "state": "/secret"}}}, "'/secret'"),
        ({"stages": {"personal": {}}}, "'weights'"),
    ],
)
def test_sizes_and_names_are_checked_before_anything_is_built(
    changes: dict[str, Any], names: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(clean / "run", tmp_path / "run")
    change_index(tmp_path / "run", lambda entry: entry.update(changes))
    monkeypatch.setattr(prediction, "build", lambda *_, **__: pytest.fail("something was built"))
    assert names in refusal(lambda: prediction.load(tmp_path / "run", 0))


@pytest.mark.parametrize("name", ["images:net", "a b:net", "evil:net, 3 features", "evil:", ":net", "evil:a.b"])
def test_names_that_are_no_modules_are_not_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is imported is what `is_own` says, which the readers of folders go by."""
    for file in ("images.py", "evil.py", "a b.py"):
        (tmp_path / file).write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_own(name)
    with pytest.raises(ConfigError, match=r"expected 'package\.module:name'"):
        registry.import_object("model", name)
    assert not (tmp_path / "PWNED").exists()


# links ------------------------------------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What lies in a folder: when each was last changed, and what it holds."""
    found = sorted(folder.rglob("*"))
    return {str(p): (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in found}


@pytest.fixture
def linked(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a run folder of which one part is a link to its copy in the folder "outside"."""
    shutil.copytree(clean / "run", tmp_path / "run")
    shutil.copy(clean / "mine.toml", tmp_path)
    (tmp_path / "outside").mkdir()
    np.save(tmp_path / "new.npy", np.zeros((1, 1, 8, 8), dtype=np.uint8))
    monkeypatch.chdir(tmp_path)

    def link(part: str) -> Path:
        place = tmp_path / "run" / part
        if place.exists():
            place.rename(tmp_path / "outside" / place.name)
        place.symlink_to(tmp_path / "outside" / place.name)
        return tmp_path / "run"

    return link


PARTS = (
    *("recipe.toml", "rounds.jsonl", "result.json", "models", "models/index.json", "models/index.json.sha256"),
    *("models/personal-000.safetensors", "checkpoint", "checkpoint/round-000001", "checkpoint/round-000001/index.json"),
    *("analysis", "attack", "tensorboard", "wandb", "nodes.jsonl", "command.txt"),  # which lead to nothing
)


@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_a_run_folder_is_a_link(part: str, linked: Callable[[str], Path]) -> None:
    run = linked(part)
    settings = Recipe.load("mine.toml").to_dict()
    before = listing(run.parent / "outside")
    for read in (
        lambda: load_runs(run.parent),
        lambda: prediction.load(run, 0),
        lambda: Recipe.of_run(run),
        lambda: RunFolder(run).validate(settings, True, False),
        lambda: RunFolder(run).validate(settings, False, True),
        lambda: read_command(run),
    ):
        said = refusal(read)
        assert "got a link" in said
        assert f"{run / part}," in said
    assert listing(run.parent / "outside") == before


def test_what_would_be_written_through_a_link_is_not(linked: Callable[[str], Path]) -> None:
    """A link to a file that is not there yet: going on with the run would have made it."""
    run = linked("rounds.jsonl")
    (Path("outside") / "rounds.jsonl").unlink()
    (run / "result.json").unlink()
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match="got a link"):
            pf.run("mine.toml", out=run, **options)
    assert not [*Path("outside").iterdir()]


@pytest.mark.parametrize("options", [{"resume": True, "overrides": ["training.rounds=3"]}, {"overwrite": True}])
def test_nothing_is_written_through_a_hard_link(options: dict[str, Any], clean: Path, tmp_path: Path) -> None:
    """The same file under a name elsewhere, as in backups that share what has not changed."""
    shutil.copytree(clean / "run", tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "outside", copy_function=os.link)
    before = {str(path): path.read_bytes() for path in (tmp_path / "outside").rglob("*") if path.is_file()}
    pf.run(clean / "mine.toml", out=tmp_path / "run", **options)
    assert {str(path): path.read_bytes() for path in (tmp_path / "outside").rglob("*") if path.is_file()} == before
    load_runs(tmp_path / "outside")


def test_neither_pipes_nor_devices_are_opened(linked: Callable[[str], Path]) -> None:
    run = linked("attack")
    (run / "attack").unlink()
    (run / "recipe.toml").unlink()
    os.mkfifo(run / "recipe.toml")
    for read in (lambda: load_runs(run), lambda: Recipe.of_run(run)):
        with pytest.raises(ConfigError, match="got something else: "):
            read()


# recipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["check"], ["run", "-q"]])
def test_what_a_recipe_imports_is_said_before(command: list[str], tmp_path: Path) -> None:
    """In a process of its own: the module leaves at once, and the line about it is there."""
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "__init__.py").write_text("import os\nos._exit(77)")
    (tmp_path / "parent" / "evil.py").write_text("")
    recipe = RECIPE.replace('"digits-cnn1"', '"parent.evil:net"').replace('"fedgh"', '"evil:Method"')
    (tmp_path / "mine.toml").write_text(f'{recipe}\n[methods.odd]\nname = "parent.evil:Method"\n')
    (tmp_path / "evil.py").write_text("import os\nos._exit(77)")
    ended = forked([command[0], str(tmp_path / "mine.toml"), *command[1:]], tmp_path)
    assert ended.status == 77
    assert len(ended.stderr.splitlines()) == 1
    assert re.fullmatch(rf"imports (parent\.)?evil, from {tmp_path}/(parent/__init__|evil)\.py\n", ended.stderr)


def test_where_code_lies_is_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parent").mkdir()
    for file in ("parent/__init__.py", "evil.py"):
        (tmp_path / file).write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    assert file_of("parent.evil") == str(tmp_path / "parent" / "__init__.py")
    assert file_of("evil") == str(tmp_path / "evil.py")
    assert file_of("subprocess") == subprocess.__file__
    (tmp_path / "bare").mkdir()
    assert file_of("bare") == str(tmp_path / "bare")
    assert file_of("nosuch") is None
    assert not [*tmp_path.rglob("PWNED")]
