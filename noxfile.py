"""Checks of the package on every Python, and with the lowest and the newest versions of what it needs.

    make pythons                                    # all of them
    make pythons ARGS="-s wheel-3.12"               # one
    make pythons ARGS="-s lowest -- torch==2.13.0"  # in place of the lowest, of which there is no small build for CPUs

A Python that is not on the path is skipped with a line that says so.
"""

import shutil
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = nox.project.python_versions({"project": PROJECT})  # those of the classifiers
DEMO = ("--methods", "local,fedavg,fedin,fedhenn,fedgh", "--seeds", "0", "--out", "runs")
# What the lowest versions are tried with. Not `vision`: each torchvision fits one PyTorch only.
EXTRAS = ("dev", "flower", "hub", "mlflow", "naturals", "onnx", "privacy", "ray", "tensorboard", "wandb")
EXTRAS_TESTS = (
    "tests/loggers",
    "tests/data/test_hub.py",
    "tests/deploy/test_tls.py",
    "tests/engine/test_dp_sgd.py",
    "tests/engine/test_privacy_ledger.py",
    "tests/engine/executors/test_ray_executor.py",
    "tests/experiments/test_exported_model.py",
    "tests/methods/test_fedlora.py",
)

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False


def install(session, extras, *words):
    """The wheel with extras, after the versions behind ``--``. words: more for pip."""
    (wheel,) = DIST.glob("*.whl")
    if session.posargs:
        session.install(*session.posargs)
    session.install(*words, f"{wheel}[{','.join(extras)}]" if extras else str(wheel))


def lower_bounds(extras, but=()):
    """``name==version`` for the lower bound of each direct dependency, but those of which another version is given."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    given = {Requirement(line).name for line in but}
    for requirement in map(Requirement, lines):
        (bound,) = (each.version for each in requirement.specifier if each.operator == ">=")
        if requirement.name not in given:
            yield f"{requirement.name}=={bound}"


def test(session, *words):
    """The quick tests, and others. They ask the installed package, as `src` is not on the path."""
    session.env["OMP_NUM_THREADS"] = "1"
    pytest = "python -m pytest -q -n auto"
    session.run("make", "-o", "install-dev", "quick", f"PYTEST={pytest}", external=True)
    if words:
        session.run(*pytest.split(), "-m", "not slow", *words)


@nox.session
def build(session):
    """The wheel, made of the sdist, and what an index asks of both."""
    session.install("-c", "constraints.txt", "build", "twine")
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", *map(str, DIST.iterdir()))


@nox.session(python=PYTHONS, requires=["build"])
def wheel(session):
    """The demo in an environment with nothing but the wheel, outside the repository; then the quick tests."""
    install(session, (), "-c", "constraints.txt")
    folder = Path(session.create_tmp())
    shutil.rmtree(folder)
    folder.mkdir()
    with session.chdir(folder):
        session.run("polyfed", "--version")
        session.run("polyfed", "new", "first")
        session.run("polyfed", "run", "first/recipe.toml")
        session.run("polyfed", "compare", str(ROOT / "recipes/quickstart.toml"), *DEMO)
    install(session, ("dev",), "-c", "constraints.txt")
    test(session)


@nox.session(python=PYTHONS[0], requires=["build"])
def lowest(session):
    """Every lower bound of `pyproject.toml`, on the oldest Python."""
    install(session, EXTRAS, *lower_bounds(EXTRAS, session.posargs))
    test(session, *EXTRAS_TESTS)


@nox.session(python=PYTHONS[-1], requires=["build"])
def newest(session):
    """The newest versions, pinned by nobody, on the newest Python."""
    install(session, ("dev",), "--upgrade", "--upgrade-strategy", "eager")
    test(session)


@nox.session(requires=["build"])
def extras(session):
    """All extras together are found in versions that fit each other: nothing is installed."""
    install(session, ("all", "dev", "docs", "release"), "--dry-run", "--quiet", "-c", "constraints.txt")
