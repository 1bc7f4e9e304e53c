"""Do the tests notice an error in the code they test? Change one operator at a time and see whether a test fails.

    python scripts/mutants.py src/polyfed/functional --tests tests/functional --sample 30 --at-least 90

Prints, for each file, how many of its mutants the tests killed, and every mutant that survived. Exits with 1 if fewer
than `--at-least` percent were killed, with 2 if a test fails before anything is changed.

A mutant differs from the code in one place: an operator, a comparison, a condition, a number, a keyword argument that
is left out, a function in the place of its opposite (`min` for `max`), or a call that is not made. Left as they are:
docstrings, error messages, annotations, defaults of arguments, and what runs when a module is imported.

The tests are collected once and run once, to learn which of them call which function. Each mutant is then a fork of
that process with another body in one function, and runs the tests that call it, the quickest first, up to the first
failure. Time is counted as processor time. One that needs 20 times as long as the tests did is killed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

BOTH_WAYS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Break, ast.Continue),
)
OPPOSITES = {a: b for pair in BOTH_WAYS for a, b in (pair, pair[::-1])}
OPPOSITES |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult}
PAIRS = (("min", "max"), ("any", "all"), ("sum", "mean"), ("floor", "ceil"), ("argmin", "argmax"), ("exp", "expm1"))
SWAPPED = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}

# Keyword arguments that may go without a test's notice: zip's `strict` guards against our own errors, only a GPU shows
# a tensor's `device`, `full_matrices` changes no value that is used.
SILENT_KEYWORDS = {"strict", "device", "full_matrices"}

# Why no test could tell -> beginnings of such mutants, as they are printed, without folder and line.
EQUIVALENT: dict[str, tuple[str, ...]] = {
    "which of two equal ways is quicker": (
        "averaging.py _mean: mean.device.type",
        "averaging.py _mean: max(mean.numel(), 1)",
        "channel_slices.py ChannelPlan.entries: ",
        "centering.py smaller_gram: a_LD.shape[1] <= a_LD.shape[0]",
        "kernel_similarity.py cka: min(a_LD.shape[1], b_LE.shape[1]) <=",
        "low_rank.py truncated_svd: triple >= rows * columns",
        "kernel_similarity.py _Nuclear.forward: a_LD.shape[1] <= a_LD.shape[0]",
    ),
    "a bound on rounding, or the first bracket of a bisection": (
        "centering.py center_and_scale: 32",
        "centering.py center_and_scale: _peak(centered) >",
        "mean_kernel_factor.py _leading_eigenvectors: values_W >",
        "kernel_similarity.py _decomposed: singular",
        "kernel_similarity.py _decomposed: max(matrix.shape)",
        "kernel_similarity.py nystroem_features: values_m >",
        "kernel_similarity.py _squared_distances: 32",
        "robust.py geometric_median: moved <",
        "robust.py geometric_median: tolerance",
    ),
    "only the shape of it is used": ("mean_kernel_factor.py MeanKernelFactor.add: 1 -> 2",),
    "the default, or the type that follows from the rest": (
        "mean_kernel_factor.py MeanKernelFactor.__init__: torch.zeros",
        "masks.py pack_bits: torch.arange",
        "masks.py unpack_bits: torch.arange",
    ),
    "only a GPU shows it": (
        "local_training.py _batches: if there.x.is_cpu",
        "local_training.py _batches: if there.y.is_cpu",
        "message.py numbers_of: not value.is_cpu",
    ),
    "a first guess, of which a second look is taken": ("message.py first_nonfinite: value.sum()",),
    "noise is symmetric": ("clipping.py clip_and_noise: t",),
}
NO_TEST_TELLS = tuple(beginning for beginnings in EQUIVALENT.values() for beginning in beginnings)


@dataclass(frozen=True)
class Mutant:
    """One change of one function. `node` is the place in `ast.walk` order, `choice` which of its mutations."""

    path: Path
    function: tuple[str, int]  # qualified name, first line
    node: int
    choice: int
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.function[0]}: {self.what}"


# changing code ----------------------------------------------------------------------------------------------------


def mutations(node: ast.AST) -> list[tuple[str, ast.AST | None]]:
    """What may stand in the place of a node: a description and the new node; None removes the statement."""
    found: list[tuple[str, ast.AST | None]] = []
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in OPPOSITES:
        found.append(_replaced(node, "op", OPPOSITES[type(node.op)]()))
    elif isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            operators = [*node.ops[:place], OPPOSITES[type(operator)](), *node.ops[place + 1 :]]
            found.append(_replaced(node, "ops", operators))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        found.append((f"{ast.unparse(node)} -> {ast.unparse(node.operand)}", node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        found.append(_replaced(node, "value", _other_number(node.value)))
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(
        node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
    ):
        new = _replaced(node, "test", ast.UnaryOp(ast.Not(), node.test))[1]
        found.append((f"if {ast.unparse(node.test)} -> if not", new))
    elif isinstance(node, ast.Call):
        found += _call_mutations(node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        found.append((f"{ast.unparse(node)} -> nothing", None))
    elif isinstance(node, ast.Break | ast.Continue):
        other = OPPOSITES[type(node)]()
        found.append((f"{ast.unparse(node)} -> {ast.unparse(other)}", other))
    return found


def _call_mutations(node: ast.Call) -> Iterator[tuple[str, ast.AST | None]]:
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in SILENT_KEYWORDS:
            yield _replaced(node, "keywords", [*node.keywords[:place], *node.keywords[place + 1 :]])
    if isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
        yield _replaced(node, "func", ast.Name(SWAPPED[node.func.id], ast.Load()))
    if isinstance(node.func, ast.Attribute) and node.func.attr in SWAPPED:
        yield _replaced(node, "func", ast.Attribute(node.func.value, SWAPPED[node.func.attr], ast.Load()))


def _replaced(node: ast.AST, field: str, value: object) -> tuple[str, ast.AST]:
    fields = {name: getattr(node, name) for name in node._fields}
    new = ast.copy_location(type(node)(**{**fields, field: value}), node)
    return f"{_brief(node)} -> {_brief(new)}", new


def _brief(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0]


def _other_number(value: float) -> float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) or value == 0 else 2 * value


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST | None) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST | None:
        if node is not self.old:
            return self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if self.new is None else ast.copy_location(self.new, node)


def places(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function's body that may change: no error message, no annotation, no default of an argument."""
    for node in body:
        if isinstance(node, ast.keyword) and node.arg in SILENT_KEYWORDS:
            continue
        if isinstance(node, ast.Raise | ast.Assert | ast.arguments | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            yield from places([child for child in children if isinstance(child, ast.AST)])


def functions(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module, without those inside of others."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")


def first_line(function: ast.FunctionDef) -> int:
    """As in the function's code object: that of its first decorator."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def mutants_of(path: Path) -> list[Mutant]:
    """All of a file's mutants but those known to be equivalent."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    found = []
    for name, function in functions(tree.body):
        for node in places(function.body):
            for choice, (what, _) in enumerate(mutations(node)):
                line: int = getattr(node, "lineno", function.lineno)
                if not f"{path.name} {name}: {what}".startswith(NO_TEST_TELLS):
                    found.append(Mutant(path, (name, first_line(function)), numbers[id(node)], choice, line, what))
    return found


def mutated_code(mutant: Mutant) -> CodeType:
    """The body of the mutant's function with its change."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    node = list(ast.walk(tree))[mutant.node]
    _Replace(node, mutations(node)[mutant.choice][1]).visit(tree)
    ast.fix_missing_locations(tree)
    pending = [compile(tree, str(mutant.path), "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if (code.co_qualname, code.co_firstlineno) == mutant.function:
            return code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    raise LookupError(f"expected function {mutant.function[0]} in {mutant.path}, found none")


def live_function(module: ModuleType, name: str) -> tuple[FunctionType, Any]:
    """The function of that qualified name that the tests call, and what it is wrapped in."""
    wrapped: Any = module
    for part in name.split("."):
        wrapped = inspect.getattr_static(wrapped, part)
    found = wrapped
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    if not isinstance(found, FunctionType):
        raise LookupError(f"expected a function, got {type(found).__name__} as {name}")
    return found, wrapped


# running tests ----------------------------------------------------------------------------------------------------


class Mutation:
    """A plugin of pytest: runs the collected tests once, then again for each mutant."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self.mutants = mutants
        self.survivors: list[Mutant] = []
        self.unreached: list[Mutant] = []
        self.failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        callers, seconds = self._baseline(session.items)
        if self.failed:
            return True
        once = _fail_in_a_fork(session.items, sum(seconds.values()))
        for item in once:
            print(f"left out, as it passes no second time in a fork: {item.nodeid}", file=sys.stderr, flush=True)
        for number, mutant in enumerate(self.mutants, 1):
            tests = sorted(callers[(str(mutant.path), *mutant.function)] - once, key=lambda item: seconds[item])
            if not tests:
                self.unreached.append(mutant)
            elif _survives(mutant, tests, sum(seconds[item] for item in tests)):
                self.survivors.append(mutant)
                print(f"{number} of {len(self.mutants)}: survived {mutant}", file=sys.stderr, flush=True)
        return True

    def _baseline(
        self, items: list[pytest.Item]
    ) -> tuple[dict[tuple[str, str, int], set[pytest.Item]], dict[pytest.Item, float]]:
        """Which tests call each function, and the processor time of each test."""
        paths = {str(mutant.path) for mutant in self.mutants}
        callers: dict[tuple[str, str, int], set[pytest.Item]] = defaultdict(set)
        seconds = {}
        codes: set[CodeType] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                codes.add(frame.f_code)

        for item in items:
            codes.clear()
            start = time.process_time()
            sys.setprofile(note)
            passed = _passes(item)
            sys.setprofile(None)
            seconds[item] = time.process_time() - start
            if not passed:
                self.failed.append(item.nodeid)
            for code in codes:
                if code.co_filename in paths:
                    callers[(code.co_filename, code.co_qualname, code.co_firstlineno)].add(item)
        return callers, seconds


def _survives(mutant: Mutant, tests: list[pytest.Item], seconds: float) -> bool:
    """Whether the tests pass in a fork with that change."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    killed = True
    try:
        _limit(seconds)
        _install(mutant)
        killed = not all(_passes(item) for item in tests)
    finally:
        os._exit(killed)


def _fail_in_a_fork(tests: list[pytest.Item], seconds: float) -> set[pytest.Item]:
    """The tests that fail in a fork where nothing is changed: they could kill everything."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            _limit(seconds)
            for item in tests:
                os.write(sender, b"\0" if _passes(item) else b"\1")
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as results:
        passed = results.read()
    os.waitpid(child, 0)
    return {item for number, item in enumerate(tests) if passed[number : number + 1] != b"\0"}


def _passes(item: pytest.Item) -> bool:
    names = dict(item.dtest.globs) if isinstance(item, pytest.DoctestItem) else {}
    passed = not any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))
    if isinstance(item, pytest.DoctestItem):
        item.dtest.globs = names  # its run has emptied them
    return passed


def _limit(seconds: float) -> None:
    """No output, no more than 20 times the processor time, no more than 4 GB of further memory."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    used = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + 20 * seconds) + 5, resource.RLIM_INFINITY))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4 * 2**30, resource.RLIM_INFINITY))


def _install(mutant: Mutant) -> None:
    name = ".".join(mutant.path.relative_to(SOURCE).with_suffix("").parts)
    function, wrapped = live_function(import_module(name), mutant.function[0])
    function.__code__ = mutated_code(mutant)
    if hasattr(wrapped, "cache_clear"):
        wrapped.cache_clear()


# the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="files or folders whose code is changed")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders of tests; doctests run, too")
    parser.add_argument("--sample", type=int, help="this many mutants of each file, drawn by --seed (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-least", type=float, default=0.0, help="percent of the mutants that must be killed")
    options = parser.parse_args(arguments)
    files = [path for source in options.sources for path in _files(source.resolve())]
    mutants = [mutant for path in files for mutant in _sample(mutants_of(path), options.sample, options.seed)]
    plugin = Mutation(mutants)
    _quick_hypothesis()
    quiet = ["-q", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--doctest-modules", "-m", "not slow"]
    pytest.main([*quiet, *options.tests, *map(str, files)], plugins=[plugin])
    if plugin.failed:
        print("expected tests that pass before anything is changed; these fail:", *plugin.failed, sep="\n  ")
        return 2
    return _print_results(files, plugin, options.at_least)


def _files(source: Path) -> list[Path]:
    return sorted(source.rglob("*.py")) if source.is_dir() else [source]


def _sample(mutants: list[Mutant], size: int | None, seed: int) -> list[Mutant]:
    if size is None or size >= len(mutants):
        return mutants
    chosen = random.Random(seed).sample(range(len(mutants)), size)
    return [mutants[i] for i in sorted(chosen)]


def _quick_hypothesis() -> None:
    """The same examples for every mutant, and no search for the smallest that fails."""
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None, deadline=None
    )
    settings.load_profile("mutants")


def _print_results(files: list[Path], plugin: Mutation, at_least: float) -> int:
    alive = [*plugin.survivors, *plugin.unreached]
    print(f"{'file':<60} mutants  killed")
    for path in files:
        all_here = sum(mutant.path == path for mutant in plugin.mutants)
        if all_here:
            killed = all_here - sum(mutant.path == path for mutant in alive)
            print(f"{path.relative_to(ROOT)!s:<60} {all_here:7} {killed:7}")
    for title, mutants in (("survived", plugin.survivors), ("in functions that no test calls", plugin.unreached)):
        print(f"\n{title}: {len(mutants)}")
        for mutant in mutants:
            print(f"  {mutant}")
    share = 100 * (1 - len(alive) / max(len(plugin.mutants), 1))
    print(f"\n{share:.1f} % of {len(plugin.mutants)} mutants killed, expected at least {at_least:g} %")
    return 0 if share >= at_least else 1


if __name__ == "__main__":
    sys.exit(main())
