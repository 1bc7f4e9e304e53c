"""`import polyfed as pf`: what it offers is seen, though nothing is imported before it is asked for."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import polyfed as pf

FACE = Path(pf.__file__).with_suffix(".pyi")


def test_every_name_is_there_and_the_stub_says_the_same() -> None:
    places = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(FACE.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(places) == sorted(pf.__all__)
    for name, module in places.items():
        assert getattr(pf, name) is getattr(importlib.import_module(str(module)), name), name


def test_dir_shows_the_names_and_loads_nothing() -> None:
    code = "import sys, polyfed as pf\nprint(*dir(pf), *dir(pf.methods))\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    names, loaded = done.stdout.splitlines()
    assert names.split() == sorted([*pf.__all__, "__version__"]) + sorted(pf.methods.__all__)
    assert loaded == "False"


@pytest.mark.parametrize(("name", "hint"), [("Federaton", "; did you mean 'Federation'?"), ("zzz", "")])
def test_a_name_that_is_not_there(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as said:
        getattr(pf, name)
    assert str(said.value) == f"polyfed has no attribute '{name}'{hint}"
