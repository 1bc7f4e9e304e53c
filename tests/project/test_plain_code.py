"""How the library's code reads: idioms that need a second reading are not in it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.syntax import nodes

SOURCE = Path(__file__).resolve().parents[2] / "src" / "polyfed"
FILES = sorted(SOURCE.rglob("*.py"))

# A method is understood from its own file and one building block. These need two, as their papers' algorithms are made
# of two parts: an average of weights, and what is aligned or exchanged beside it; a cut of the channels, and of depth;
# a cut of depth, and who has which.
TWO_BLOCKS = {
    "feddf": {"ensemble_distillation", "weight_averaging"},
    "feddpa": {"proximal", "weight_averaging"},
    "fedet": {"ensemble_distillation", "weight_averaging"},
    "fedin": {"feature_pairs", "proximal", "weight_averaging"},
    "heterofl": {"channel_groups", "static_batchnorm", "weight_averaging"},
    "scalefl": {"early_exits", "weight_averaging"},
}


def is_text_or_list(node: ast.expr) -> bool:
    """Whether it is a sequence as it is written down."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def is_truth(node: ast.expr) -> bool:
    """Whether it is true or false, by how it is written."""
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return negated or isinstance(node, ast.Compare | ast.BoolOp)


def of_calls(call: ast.Call) -> Iterator[str]:
    """Conditionals that are called, or whose attribute is; a name that is given in the middle of a call."""
    called = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if isinstance(called, ast.IfExp):
        yield "a conditional is called"
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if any(isinstance(argument, ast.NamedExpr) for argument in arguments):
        yield "a name is given inside a call"


def of_products(product: ast.BinOp) -> Iterator[str]:
    """Texts and lists that are there as often as something is true."""
    sides = (product.left, product.right)
    if isinstance(product.op, ast.Mult) and any(map(is_text_or_list, sides)) and any(map(is_truth, sides)):
        yield "a sequence times a truth"


def of_assignments(assignment: ast.Assign) -> Iterator[str]:
    """Several things made in one line; swaps, and values that depend on each other's old ones, are one thing."""
    targets, value = assignment.targets[0], assignment.value
    if not isinstance(targets, ast.Tuple) or not isinstance(value, ast.Tuple):
        return
    names = {ast.unparse(target) for target in targets.elts}
    read = {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)}
    plain = all(isinstance(each, ast.Name | ast.Attribute | ast.Constant) for each in value.elts)
    if not names & read and not (plain and len(value.elts) == 2):
        yield "two assignments in a line"


def of_names(place: str, node: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that are given in the middle of something."""
    for each in ast.walk(node):
        if isinstance(each, ast.NamedExpr):
            yield each.lineno, f"a name is given inside {place}"


def of_loops(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Loops over a conditional, and names that are given within a comprehension or a key."""
    if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.IfExp):
        yield node.iter.lineno, "a loop over a conditional"
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield from of_names("a comprehension", node)
    if isinstance(node, ast.Subscript):
        yield from of_names("a key", node.slice)


def of_conditionals(conditional: ast.IfExp) -> Iterator[str]:
    """Conditionals with another one in them."""
    if any(isinstance(each, ast.IfExp) and each is not conditional for each in ast.walk(conditional)):
        yield "a conditional inside a conditional"


def of_classes(definition: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Attributes of a class that are made as a tuple."""
    for each in definition.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Tuple):
            yield each.lineno, "class attributes as a tuple"


def idioms(code: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """The line and the name of everything that needs a second reading."""
    for node in code:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            yield from ((line, what) for what in of_calls(node))
        elif isinstance(node, ast.BinOp):
            yield from ((line, what) for what in of_products(node))
        elif isinstance(node, ast.Assign):
            yield from ((line, what) for what in of_assignments(node))
        elif isinstance(node, ast.ClassDef):
            yield from of_classes(node)
        elif isinstance(node, ast.IfExp):
            yield from ((line, what) for what in of_conditionals(node))
        else:
            yield from of_loops(node)


def test_nothing_needs_a_second_reading() -> None:
    found = [f"{path}:{line}: {what}" for path in FILES for line, what in idioms(nodes(path))]
    assert not found, "\n".join(found)


def blocks_of(path: Path) -> set[str]:
    """The building blocks that a method's file imports."""
    found: set[str] = set()
    package = "polyfed.methods.building_blocks"
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            found.add(str(node.module).rpartition(".")[2])
    return found


def test_a_method_needs_one_building_block() -> None:
    blocks = {path.stem: blocks_of(path) for path in (SOURCE / "methods").glob("*.py")}
    assert {name: used for name, used in blocks.items() if len(used) > 1} == TWO_BLOCKS


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("x = 's' * (n != 1)", "a sequence times a truth"),
        ("x = [1] * (not y)", "a sequence times a truth"),
        ("(a if b else c)(1)", "a conditional is called"),
        ("(a if b else c).f()", "a conditional is called"),
        ("f(x := 1)", "a name is given inside a call"),
        ("f(key=(x := 1))", "a name is given inside a call"),
        ("[y for x in z if (y := x)]", "a name is given inside a comprehension"),
        ("a[x := 1]", "a name is given inside a key"),
        ("x = 1 if a else 2 if b else 3", "a conditional inside a conditional"),
        ("for x in y if c else ():\n    pass", "a loop over a conditional"),
        ("a, b = f(1), g(2)", "two assignments in a line"),
        ("a, b, c = x, y, z", "two assignments in a line"),
        ("class A:\n    a, b = 1, 2", "class attributes as a tuple"),
    ],
)
def test_an_idiom_is_seen(code: str, what: str) -> None:
    assert what in [said for _, said in idioms(ast.walk(ast.parse(code)))]
