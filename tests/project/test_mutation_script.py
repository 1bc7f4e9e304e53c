"""scripts/mutants.py: what it changes, what it leaves alone."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "mutants.py")))

CODE = '''
LIMIT = 3


class Box:
    @property
    def size(self) -> int:
        """Docstrings (1 + 1) stay."""
        return LIMIT * 2


def largest(values, start=0):
    best = start
    for value in values:
        if not value:
            continue
        if value < 0:
            raise ValueError(f"expected at least {0 + 0}, got {value - 0}")
        best = max(best, sum([value], start=0))
    return best
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    monkeypatch.setitem(MUTANTS.mutants_of.__globals__, "ROOT", tmp_path)
    return path


def test_a_mutant_is_the_function_with_that_change(module: Path) -> None:
    namespace: dict[str, object] = {}
    exec(compile(CODE, str(module), "exec"), namespace)
    largest = namespace["largest"]
    assert isinstance(largest, FunctionType)
    values = {}
    for mutant in MUTANTS.mutants_of(module):
        if mutant.function[0] == "largest":
            changed = FunctionType(MUTANTS.mutated_code(mutant), namespace, argdefs=largest.__defaults__)
            try:
                values[mutant.what] = changed([2, 0, 5, 1])
            except (NameError, ValueError) as error:
                values[mutant.what] = type(error)
    assert largest([2, 0, 5, 1]) == 5
    assert values == {
        "not value -> value": 0,
        "continue -> break": 2,
        "value < 0 -> value <= 0": 5,
        "0 -> 1": 6,
        "max(best, sum([value], start=0)) -> min(best, sum([value], start=0))": 0,
        "sum([value], start=0) -> sum([value])": 5,
        "sum([value], start=0) -> mean([value], start=0)": NameError,
    }
