"""How the tests are kept: each is where its module is, says what must be true, and uses public names only."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TESTS = ROOT / "src" / "polyfed", ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
IDS = [path.relative_to(TESTS).as_posix() for path in FILES]
BESIDE = {"helpers", "project", "simulated_gpu"}  # mirror no folder of the library
OF_FOLDERS = {"functional/test_module_list.py", "testing/test_conformance.py"}  # of all modules of their folder
CHECKS = {"raises", "warns", "fail", "exec"}  # code of a page that is executed must run
# of Python, its named tuples, notebooks and PyTorch
PUBLIC = {"_asdict", "_exit", "_forward_hooks", "_replace", "_repr_html_"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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
    nodes = [*ast.walk(tree(path))] if common else []
    private = common - {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    uses = ((node, name) for node in nodes if isinstance(node, ast.expr | ast.stmt) for name in named(node))
    return [f"{path.name}:{node.lineno}: {name}" for node, name in uses if name in private]


def test_no_private_name_of_the_library_is_used() -> None:
    """What a test needs of the library has a public name."""
    assert [use for path in FILES for use in private_uses(path)] == []


# what they say


@functools.cache
def calls(node: ast.AST) -> frozenset[str]:
    """The names of what is called, without what they are names of."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    attributes = {each.attr for each in called if isinstance(each, ast.Attribute)}
    return frozenset(attributes | {each.id for each in called if isinstance(each, ast.Name)})


@functools.cache
def has_assertion(node: ast.AST) -> bool:
    if any(isinstance(each, ast.Assert | ast.Raise) for each in ast.walk(node)):
        return True
    return any(name in CHECKS or name.startswith("assert_") for name in calls(node))


@functools.cache
def checkers() -> frozenset[str]:
    """Names of functions of the tests that assert something, themselves or through another."""
    bodies = [node for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]
    found = {body.name for body in bodies if has_assertion(body)}
    called = {(body.name, calls(body)) for body in bodies}
    size = 0
    while size < len(found):
        size = len(found)
        found |= {name for name, others in called if found & others}
    return frozenset(found)


def is_checking(node: ast.AST) -> bool:
    told = [k for each in ast.walk(node) if isinstance(each, ast.Call) for k in each.keywords if k.arg == "check"]
    subprocesses = any(isinstance(k.value, ast.Constant) and k.value.value is True for k in told)
    return has_assertion(node) or subprocesses or bool(checkers() & calls(node))


def empty_tests(path: Path) -> list[str]:
    tests = (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef))
    return [f"{path.name}:{t.lineno}: {t.name}" for t in tests if t.name.startswith("test_") and not is_checking(t)]


def constant_asserts(path: Path) -> list[str]:
    """Assertions that call nothing and name nothing: they hold or fail whatever the library does."""
    asserts = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Assert))
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
