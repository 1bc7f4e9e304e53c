"""Is this checkout ready to be released? Prints what is missing, and ends with 1 where something is: ``make release``.

It reads the working tree and what is said of the version, builds the package and tries it (noxfile.py), and makes the
documentation. Nothing is tagged or uploaded. Words on the command line go to nox.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def statements(root: Path) -> Iterator[str]:
    """What the project's files lack. root: of the checkout."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = _found(r'__version__ = "(.+)"', root / "src/polyfed/version.py")
    cited = _found(r"^version: (.+)", root / "CITATION.cff")
    newest, date = re.findall(r"^## \[?([^\]\s]+)\]?(.*)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[0]
    if cited != version:
        yield f"CITATION.cff: expected version {version}, got {cited}"
    if newest != version:
        yield f"CHANGELOG.md: expected {version} first, got {newest}"
    if not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", date):
        yield f"CHANGELOG.md: expected a date behind {newest}, as in '## [{newest}] - 2030-01-31', got '{date}'"
    if "urls" not in project:
        yield "pyproject.toml: [project.urls] with the addresses of the repository and the documentation"
    for classifier in project["classifiers"]:
        python = "python" + classifier.removeprefix("Programming Language :: Python :: ")
        if re.fullmatch(r"python3\.\d+", python) and not is_here(python):
            yield f"{python} on the path: what is said of it was not tried"


def is_here(python: str) -> bool:
    """Whether an interpreter is on the path, and is none of the stand-ins of a version manager, which only fail."""
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "--version"], capture_output=True).returncode == 0


def changes(root: Path) -> Iterator[str]:
    """What of the working tree is in no commit."""
    listed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        yield f"a commit of {line[3:]}"


def _found(pattern: str, file: Path) -> str:
    return re.findall(pattern, file.read_text(encoding="utf-8"), re.M)[0]


def main(words: list[str]) -> int:
    """Try everything, and say what is missing; the exit status."""
    missing = [*changes(ROOT), *statements(ROOT)]
    steps = {"the package": ["nox", *words], "the documentation": ["mkdocs", "build", "--strict"]}
    for name, step in steps.items():
        if subprocess.run([sys.executable, "-m", *step], cwd=ROOT, check=False).returncode:
            missing.append(f"{name} without errors: see above")
    for line in missing:
        print(f"missing: {line}")
    if not missing:
        print("ready: dist holds the wheel and the sdist; then tag the commit and upload both with twine")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
