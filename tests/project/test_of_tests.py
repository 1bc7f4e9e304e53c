"""How the tests are kept: each is where its module is, says what must be true, and uses public names only."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.syntax import nodes

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TESTS = ROOT / "src" / "polyfed", ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
IDS = [path.relative_to(TESTS).as_posix() for path in FILES]
BESIDE = {"helpers", "project", "simulated_gpu"}  # mirror no folder of the library
OF_FOLDERS = {"functional/test_module_list.py", "testing/test_conformance.py"}  # of all modules of their folder
CHECKS = {"raises", "warns", "fail", "exec"}  # code of a page that is executed must run
# of Python, its named tuples, notebooks and PyTorch
PUBLIC = {"_asdict", "_exit", "_forward_hooks", "_replace", "_repr_html_"}


# where they are


def is_at_home(path: Path) -> bool:
    """Whether a test's name begins with that of a module of the same folder."""
    folder = SOURCE / path.parent.relative_to(TESTS)
    words = path.stem.removeprefix("test_")
    return any(words == module.stem or words.startswith(f"{module.stem}_") for module in folder.glob("*.py"))


def test_a_test_lies_where_its_module_lies() -> None:
    """As test_<module>.py, or test_<module>_<more>.py; helpers in tests/helpers."""
    kept = {*OF_FOLDERS, *(name for name in IDS if name.endswith(("__init__.py", "conftest.py")))}
    mirrors = [name for name in IDS if name.partition("/")[0] not in BESIDE and name not in kept]
    assert [name for name in mirrors if not (TESTS / name).name.startswith("test_")] == []
    assert [name for name in mirrors if not is_at_home(TESTS / name)] == []


# private names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC


def words(text: str) -> set[str]:
    """The private names in a text."""
    return set(filter(is_private, re.findall(r"(?<!\w)_\w+", text)))


@functools.cache
def private_names() -> frozenset[str]:
    """All private names of the library."""
    return frozenset().union(*(words(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")))


def named(node: ast.AST) -> Iterator[str]:
    """Names that a piece of code takes from elsewhere: attributes, imports, and what it replaces by name."""
    if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cuda")):
        yield node.attr
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polyfed"):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if called in ("setattr", "delattr", "getattr"):
            given = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            yield from (value.rpartition(".")[2] for value in given if isinstance(value, str))


def private_uses(path: Path) -> list[str]:
    common = private_names() & words(path.read_text(encoding="utf-8"))
    if not common:
        return []
    private = common - {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    uses = ((node, name) for node in nodes(path) if isinstance(node, ast.expr | ast.stmt) for name in named(node))
    return [f"{path.name}:{node.lineno}: {name}" for node, name in uses if name in private]


def test_no_private_name_of_the_library_is_used() -> None:
    """What a test needs of the library has a public name."""
    assert [use for path in FILES for use in private_uses(path)] == []


# what they say


@dataclass(frozen=True)
class Body:
    """A function of the tests. asserts: itself. calls: names of what is called, without what they are names of."""

    name: str
    line: int
    asserts: bool
    calls: frozenset[str]


def read_body(function: ast.FunctionDef) -> Body:
    """What a function does, read once from its first node to its last."""
    asserts = False
    called = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            asserts = True
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute | ast.Name):
                called.add(node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
            asserts = asserts or any(is_check(keyword) for keyword in node.keywords)
    asserts = asserts or any(name in CHECKS or name.startswith("assert_") for name in called)
    return Body(function.name, function.lineno, asserts, frozenset(called))


def is_check(keyword: ast.keyword) -> bool:
    """Whether it asks `subprocess.run` to fail where the command does."""
    return keyword.arg == "check" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True


@functools.cache
def bodies(path: Path) -> tuple[Body, ...]:
    return tuple(read_body(node) for node in nodes(path) if isinstance(node, ast.FunctionDef))


@functools.cache
def checkers() -> frozenset[str]:
    """Names of functions of the tests that assert something, themselves or through another."""
    every = [body for path in FILES for body in bodies(path)]
    found = {body.name for body in every if body.asserts}
    size = 0
    while size < len(found):
        size = len(found)
        found |= {body.name for body in every if not found.isdisjoint(body.calls)}
    return frozenset(found)


def empty_tests(path: Path) -> list[str]:
    tests = (body for body in bodies(path) if body.name.startswith("test_"))
    empty = (test for test in tests if not test.asserts and checkers().isdisjoint(test.calls))
    return [f"{path.name}:{test.line}: {test.name}" for test in empty]


def constant_asserts(path: Path) -> list[str]:
    """Assertions that call nothing and name nothing: they hold or fail whatever the library does."""
    asserts = (node for node in nodes(path) if isinstance(node, ast.Assert))
    return [
        f"{path.name}:{one.lineno}: {ast.unparse(one)}"
        for one in asserts
        if not any(isinstance(each, ast.Name) for each in ast.walk(one.test))
    ]


def test_every_test_asserts_something() -> None:
    assert [found for path in FILES for found in empty_tests(path) + constant_asserts(path)] == []


def test_the_rules_bite(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        "def test_a() -> None:\n    nothing_of_the_kind()\n\n\ndef test_b() -> None:\n    assert 1 < 2\n    x._told\n"
    )
    assert empty_tests(file) == ["test_x.py:1: test_a"]
    assert constant_asserts(file) == ["test_x.py:6: assert 1 < 2"]
    assert private_uses(file) == ["test_x.py:7: _told"]
    assert not is_at_home(TESTS / "core" / "test_nothing.py")
    assert is_at_home(TESTS / "core" / "test_message_odd.py")
