"""Pins, versions, the container and the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from polyfed.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    """constraints.txt as name -> version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    return {canonicalize_name(name): version for name, _, version in (text.partition("==") for text in texts if text)}


def direct() -> list[Requirement]:
    """What pyproject.toml asks for: at run time, by every extra, for the build."""
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    asked = [Requirement(line) for line in [*project["dependencies"], *extras, *PROJECT["build-system"]["requires"]]]
    return [requirement for requirement in asked if requirement.name != project["name"]]


def tracked() -> list[Path]:
    """The project's own files: those that git has or would take."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git, so that it cannot be told which files belong to the project")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_direct_dependency_has_a_pin_that_fits() -> None:
    for requirement in direct():
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(pin), f"the pin {requirement.name}=={pin} does not fit '{requirement}'"


def test_all_is_every_extra_that_a_user_can_want() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - {"all", "audit", "dev", "docs", "release"}


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_the_container_is_no_root_user_and_is_built_of_the_wheel_only() -> None:
    steps = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert [step for step in steps if step.startswith("USER")] == ["USER 1000"]
    assert (ROOT / ".dockerignore").read_text(encoding="utf-8").split() == ["*", "!constraints.txt", "!dist/*.whl"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the project's own files."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "a copy"
    for path in tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    build = "from setuptools.build_meta import build_sdist, build_wheel; build_sdist('..'); build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("polyfed-*.whl")
    return found


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package_and_nothing_else(wheel: Path) -> None:
    with tarfile.open(wheel.parent / f"polyfed-{__version__}.tar.gz") as archive:
        parts = [Path(name).parts for name in archive.getnames()]
    assert {inside[0] for _, *inside in parts if inside} == {
        *("LICENSE", "MANIFEST.in", "PACKAGE.md", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src")
    }
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    sources = {path for path in tracked() if path.is_relative_to(ROOT / "src")}
    assert {path.relative_to(ROOT / "src").as_posix() for path in sources} <= held
    assert "polyfed/py.typed" in held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert {name.split("/")[0] for name in held} == {"polyfed", f"polyfed-{__version__}.dist-info"}


def needed_at_run_time() -> dict[str, metadata.Distribution]:
    """What polyfed needs without extras, and what that needs in turn, as it is installed here."""
    found: dict[str, metadata.Distribution] = {}
    asked = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    while asked:
        requirement = asked.pop()
        name = canonicalize_name(requirement.name)
        if name not in found:
            found[name] = metadata.distribution(name)
            more = [Requirement(line) for line in found[name].requires or ()]
            asked += [each for each in more if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def clean(wheel: Path, tmp_path: Path) -> Path:
    """The scripts' folder of an environment with the wheel and what it needs, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    place = next((tmp_path / "env").glob("lib/python*/site-packages"))
    for distribution in needed_at_run_time().values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (place / name).exists():
                (place / name).symlink_to(distribution.locate_file(name))
    scripts = tmp_path / "env" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "--disable-pip-version-check"]
    command = [*pip, "install", "--no-deps", "--no-index", str(wheel)]
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where polyfed may lie, too
    done = subprocess.run(command, capture_output=True, text=True, env=without)
    assert done.returncode == 0, done.stderr
    return scripts


@pytest.mark.slow
def test_the_wheel_works_without_extras(clean: Path, tmp_path: Path) -> None:
    alone = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def said(*words: str | Path, status: int = 0) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=alone, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    polyfed, python, recipe = clean / "polyfed", clean / "python", ROOT / "recipes" / "quickstart.toml"
    assert said(polyfed, "--version") == f"polyfed {__version__}\n"
    assert str(tmp_path) in said(python, "-c", "import polyfed; print(polyfed.__file__)")
    said(python, "-c", "import timm", status=1)
    small = ["--set", "data.limit_train=500", "--set", "data.min_samples=5", "--set", "training.rounds=2"]
    assert "whole run, about" in said(polyfed, "check", recipe, *small)
    said(polyfed, "compare", recipe, *small, "--methods", "fedavg,fedgh", "--out", "runs", "-q")
    assert (tmp_path / "runs" / "report.html").exists()
    outside = ["--set", "models.architectures=['timm:resnet10t']"]
    assert "pip install 'polyfed[vision]'" in said(polyfed, "check", recipe, *small, *outside, status=2)
    followed = ["--logger", "tensorboard", "--out", "followed"]
    assert "polyfed[tensorboard]" in said(polyfed, "run", recipe, *small, *followed, status=2)
