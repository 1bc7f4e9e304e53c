"""The two commands and what they rest on: pins, the Makefile, CI's script, the wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from polyfed.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEMO = (
    ".venv/bin/python -m polyfed compare recipes/quickstart.toml"
    " --methods local,fedavg,fedin,fedhenn,fedgh --seeds 0 --out runs/quickstart"
)


def pins() -> dict[str, str]:
    """constraints.txt as name -> version; fails on any line that is not a pin."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", text)
            assert match, f"constraints.txt: '{line}' is not NAME==VERSION"
            assert canonicalize_name(match[1]) not in found, f"constraints.txt pins {match[1]} twice"
            found[canonicalize_name(match[1])] = match[2]
    return found


def direct() -> list[Requirement]:
    """What pyproject.toml asks for: at run time, by every extra, for the build."""
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    asked = [Requirement(line) for line in [*project["dependencies"], *extras, *PROJECT["build-system"]["requires"]]]
    return [requirement for requirement in asked if requirement.name != project["name"]]


def tracked() -> list[Path]:
    """The project's own files: what git has or would take; in a copy without .git, what no tool made."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    made = {".venv", "runs", "build", "dist", "site", "__pycache__", ".git"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(p in made or p.endswith(("_cache", ".egg-info")) for p in path.relative_to(ROOT).parts)
    ]


def test_every_direct_dependency_has_a_pin_that_fits() -> None:
    for requirement in direct():
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(pin), f"the pin {requirement.name}=={pin} does not fit '{requirement}'"


def test_all_is_every_extra_that_a_user_can_want() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - {"all", "audit", "dev", "docs", "release"}


def test_the_text_for_an_index_has_no_link_into_the_repository() -> None:
    text = (ROOT / PROJECT["project"]["readme"]).read_text(encoding="utf-8")
    assert not re.search(r"\]\((?!https?:)|src=", text)
    assert all(f"`{extra}`" in text for extra in PROJECT["project"]["optional-dependencies"]["all"][0][8:-1].split(","))


@pytest.mark.parametrize("name", ["Makefile", "constraints.txt", ".ci/run", "noxfile.py"])
def test_the_users_pip_configuration_decides_where_packages_come_from(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"--(extra-)?index-url|--isolated|--find-links|--trusted-host|://|PIP_CONFIG", text)


def test_no_path_of_one_machine() -> None:
    text_files = {".py", ".toml", ".txt", ".md", ".cff", ".yml", ".yaml", ".csv", ".cfg", ""}
    here = re.compile(r"(?<![\w.~/-])/(?:home|root|Users|work|opt|mnt)/[\w.]")
    files = [path for path in tracked() if path.suffix in text_files]
    assert len(files) > 10
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if here.search(line)
    ]
    assert found == []


def script(name: str) -> ModuleType:
    """A program of the folder scripts, imported anew."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The Makefile


# What a make passes on to the makes that it starts: its options, and the variables on its command line.
OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "GNUMAKEFLAGS", "ARGS", "PYTHON", "SAMPLE"}


def make(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make apart from the make that may be running these tests, and from its variables."""
    clean = {key: value for key, value in os.environ.items() if key not in OF_MAKE}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=60
    )


def test_the_demo_is_the_agreed_command() -> None:
    assert DEMO in make("-n", "demo").stdout


def test_all_tests_run_with_every_extra() -> None:
    (installed,) = re.findall(r"--editable '\.\[([\w,]+)\]'", make("-n", "install-all", "-W", "pyproject.toml").stdout)
    (everything,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["all"])
    assert {*installed.split(",")} == everything.extras | {"dev", "docs"}


def test_the_quick_tests_are_there() -> None:
    words = make("-n", "-o", "install-dev", "quick").stdout.split()
    asked = [word.partition("::") for word in words if word.startswith("tests/")]
    assert len(asked) > 3
    for file, _, test in asked:
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), test


# A Python that notes what pip is to install; a second name for another version of it.
STAND_IN = """#!/bin/sh
case "$*" in
*version_info\\[:2*) echo "($(basename "$(readlink -f "$0")"))";;
*" .venv") mkdir -p .venv/bin && rm -f .venv/installed* && touch .venv/pyvenv.cfg && ln -sf "$0" .venv/bin/python;;
*"pip install"*) echo "$*" >> steps; test ! -e fails;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a space in its name, and two Pythons beside it."""
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, folder / name)
    for name in ("one", "other"):
        (tmp_path / name).write_text(STAND_IN, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    return folder


def steps(checkout: Path, target: str, python: str = "one", status: int = 0) -> list[str]:
    """What is installed by make, in order."""
    (checkout / "steps").unlink(missing_ok=True)
    done = make(target, f"PYTHON={checkout.parent / python}", folder=checkout)
    assert done.returncode == status, done.stderr
    noted = checkout / "steps"
    return [line.split()[-1] for line in noted.read_text().splitlines()] if noted.exists() else []


def test_what_is_installed_is_not_installed_again(checkout: Path) -> None:
    assert steps(checkout, "install") == ["setuptools", "."]
    assert steps(checkout, "install") == []
    assert steps(checkout, "install-docs") == ["setuptools", ".[docs]"]
    assert steps(checkout, "install-docs") == []
    os.utime(checkout / "constraints.txt")
    assert steps(checkout, "install") == ["setuptools", "."]


def test_what_failed_or_is_of_another_python_is_installed_anew(checkout: Path) -> None:
    (checkout / "fails").touch()
    assert steps(checkout, "install", status=2) == ["setuptools"]
    (checkout / "fails").unlink()
    assert steps(checkout, "install") == ["setuptools", "."]
    assert steps(checkout, "install", "other") == ["setuptools", "."]
    assert steps(checkout, "install", "other") == []
    assert steps(checkout, "install", "none", status=2) == []


# scripts/release.py


def test_a_release_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = script("release")
    files = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "src/polyfed/version.py")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    changelog, project = tmp_path / "CHANGELOG.md", tmp_path / "pyproject.toml"
    changelog.write_text(f"# Changelog\n\n## [{__version__}] - 2030-01-31\n\n## 0.0.1\n")
    project.write_text(
        project.read_text().replace("[project.scripts]", "[project.urls]\nSource = 'x'\n[project.scripts]")
    )
    monkeypatch.setattr(release, "is_here", lambda name: True)
    assert list(release.statements(tmp_path)) == []
    changelog.write_text("## [9.9] - unreleased\n")
    shutil.copy2(ROOT / "pyproject.toml", project)
    monkeypatch.setattr(release, "is_here", lambda name: name != "python3.12")
    found = "\n".join(release.statements(tmp_path))
    assert f"expected {__version__} first, got 9.9" in found
    assert "expected a date behind 9.9" in found
    assert "[project.urls]" in found
    assert "python3.12 on the path" in found


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


# .ci/run


def test_ci_runs_make_test_in_the_repository_with_the_data_beside_it(tmp_path: Path) -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    copy = tmp_path / "a clone" / "main" / ".ci" / "run"
    copy.parent.mkdir(parents=True)
    shutil.copy2(script, copy)
    stand_in = tmp_path / "bin" / "make"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$PWD|$*|${POLYFED_DATA-unset}"\nexit 7\n')
    stand_in.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "POLYFED_DATA"}
    environment["PATH"] = f"{stand_in.parent}{os.pathsep}{environment['PATH']}"
    repository = copy.parent.parent.resolve()

    def run(**more: str) -> str:
        done = subprocess.run(["bash", copy], cwd=tmp_path, env=environment | more, capture_output=True, text=True)
        assert done.returncode == 7, done.stderr  # make's own
        return done.stdout.strip()

    assert run() == f"{repository}|test|unset"
    data = repository.parent / "shared" / "data"
    data.mkdir(parents=True)
    assert run() == f"{repository}|test|{data}"
    assert run(POLYFED_DATA="elsewhere") == f"{repository}|test|elsewhere"


# The command's start


def test_the_help_comes_at_once() -> None:
    """Under half a second; of the processor's, as other tests run at the same time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "polyfed", "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Usage: polyfed" in done.stdout, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


# The wheel


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
def test_the_sdist_holds_no_tests(wheel: Path) -> None:
    with tarfile.open(wheel.parent / f"polyfed-{__version__}.tar.gz") as archive:
        held = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
    assert {path.parts[0] for path in held if path.parts} == {
        *("LICENSE", "MANIFEST.in", "PACKAGE.md", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src")
    }


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
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
