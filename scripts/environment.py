"""Make ``.venv`` hold this checkout and its pinned dependencies; do nothing when it already does.

    python scripts/environment.py [extra ...]        # "dev" for the tests

Runs on any Python 3.11+ with the standard library alone, from any folder. pip reads the user's own configuration.

An install leaves ``.venv/polyfed-installed`` (what was installed, written last) and, while it runs,
``.venv/polyfed-installing``. A folder that still has the second was interrupted and is made anew: a package over which
pip was killed can look installed and not be whole. So is one whose Python is missing, does not run or has no pip.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
INSTALLED = VENV / "polyfed-installed"
INSTALLING = VENV / "polyfed-installing"


def fingerprint() -> str:
    """Changes when another install is due: the pins, the Python, or the folder (an editable install points at it)."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", ROOT / "constraints.txt"):
        digest.update(part.read_bytes() + b"\0")
    digest.update(f"{sys.implementation.cache_tag} {ROOT}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def installed_extras() -> set[str] | None:
    """The extras of the finished install; None when there is none, or it is not this checkout's as it is now."""
    try:
        found, *extras = INSTALLED.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return set(extras) if found == fingerprint() else None


def usable() -> bool:
    """Whether ``.venv`` is whole: no install was cut short, and its Python runs, is this version and has pip."""
    if INSTALLING.exists():
        return False
    probe = "import sys, pip; print(sys.implementation.cache_tag, sys.prefix)"
    try:
        answer = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    tag, _, prefix = answer.strip().partition(" ")
    return tag == sys.implementation.cache_tag and Path(prefix).resolve() == VENV.resolve()


def run(command: list[str | Path]) -> None:
    """Run one step of the install, with the output in view. The step inherits the lock of `alone`."""
    subprocess.run(command, cwd=ROOT, check=True, close_fds=False)


def create() -> None:
    """Make an empty ``.venv`` in the place of whatever was there."""
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(
            PYTHON.parent, ignore_errors=True
        )  # first, so that a half-removed folder is never taken for whole
        shutil.rmtree(VENV)
    VENV.mkdir()
    INSTALLING.touch()
    # The interpreter that .venv would be made of, even when this one is the .venv's own (an activated shell).
    base = getattr(sys, "_base_executable", None) or sys.executable
    run([base, "-m", "venv", VENV])


def compile_all() -> None:
    """Compile what was installed, and this checkout, on all cores: pip would do it on one, and its tests too.

    Left out is what a run seldom imports; what it does is compiled then. Files for other Pythons fail to compile.
    """
    folders = [*VENV.glob("lib/python*/site-packages"), ROOT / "src"]
    unused = r"[/\\](tests?|torch[/\\](_inductor|testing)|site-packages[/\\](mypyc?|pip|ray|setuptools))[/\\]"
    command = [PYTHON, "-m", "compileall", "-qq", "-j", "0", "-x", unused, *folders]
    subprocess.run(command, cwd=ROOT, check=False, close_fds=False)


def install(extras: set[str]) -> None:
    """Install this checkout, editable, with its extras, into ``.venv``."""
    INSTALLING.touch()
    INSTALLED.unlink(missing_ok=True)
    pip = [PYTHON, "-m", "pip", "install", "--no-compile", "-c", "constraints.txt"]
    # setuptools first and no isolated build: the build tool is pinned too, and comes through the same pip.
    run([*pip, "--quiet", "setuptools"])
    target = f".[{','.join(sorted(extras))}]" if extras else "."
    run([*pip, "--no-build-isolation", "-e", target])
    compile_all()
    INSTALLED.write_text("\n".join([fingerprint(), *sorted(extras)]) + "\n", encoding="utf-8")
    INSTALLING.unlink()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let one install at a time into the checkout. pip inherits the lock, and keeps it if this process is killed."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    folder = os.open(ROOT, os.O_RDONLY)
    os.set_inheritable(folder, True)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: go on without
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("polyfed: another install into .venv is running; waiting for it", file=sys.stderr)
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def main(wanted: set[str]) -> int:
    """Bring ``.venv`` up to date; returns the exit status."""
    with alone():
        whole = usable()
        present = installed_extras() if whole else None
        if present is not None and wanted <= present:
            return 0
        began = time.monotonic()
        print("polyfed: installing into .venv; the first time this takes a few minutes", flush=True)
        try:
            if not whole:
                create()
            install(wanted | (present or set()))
        except subprocess.CalledProcessError as error:
            print(
                f"polyfed: the install failed (status {error.returncode}), see above; then try again", file=sys.stderr
            )
            return 1
        print(f"polyfed: installed in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(set(sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit(130)
