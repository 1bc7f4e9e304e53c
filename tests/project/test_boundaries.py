"""Which folder may import which (docs/architecture.md): read off the imports, without running them."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from polyfed.registry import METHODS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "polyfed"

# folder or module -> what else of polyfed it may import
MAY_IMPORT = {
    "errors": {"escaping"},
    "escaping": set(),
    "places": {"errors", "escaping"},
    "records": {"errors", "escaping", "places"},
    "registry": {"errors"},
    "model_groups": set(),
    "signals": set(),
    "functional": set(),
    "validation": {"errors"},
    "models": {"functional", "errors", "registry"},
    "data": {"functional", "errors", "escaping", "places", "records", "registry", "validation"},
    "config": {
        *("core", "data", "engine.method_wrappers", "engine.plugin", "engine.task", "engine.uploads"),
        *("plugins.settings", "errors", "model_groups", "own_methods", "places", "registry", "records", "validation"),
    },
    "core": {"models.split", "data.samples", "functional", "errors", "escaping", "validation"},
    "building_blocks": {
        "core",
        "models.split",
        "data.augmentation",
        "data.samples",
        "functional",
        "errors",
        "validation",
    },
    "methods": {"building_blocks", "core", "functional", "errors", "validation"},
    "engine": {
        *("core", "data", "models", "functional", "validation", "errors", "escaping", "places"),
        *("records", "registry", "signals", "loggers.base", "units", "version"),
    },
}
MAY_IMPORT["plugins"] = {*MAY_IMPORT["engine"], "engine"}
ONLY = {  # package -> who may
    "dp_accounting": "polyfed.engine.privacy_ledger",
    "opacus": "polyfed.engine.dp_sgd",
    "ray": "polyfed.engine.executors.ray_executor",
}
MAY_NOT_IMPORT = {
    "experiments": {"attacks", "cli", "deploy", "testing"},
    "report": {"engine", "core", "data", "models", "methods", "config", "experiments", "cli"},
    "attacks": {"engine", "cli", "methods", "building_blocks"},
    "deploy": {"cli"},
    "testing": {"cli"},
    "loggers": {"engine", "cli"},
}


@dataclass(frozen=True)
class Import:
    """One imported module, as ``importer`` wrote it at ``line``."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules(source: Path) -> dict[str, Path]:
    """Module name -> file, for everything under a package's folder."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = [source.name, *path.relative_to(source).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree; each file is parsed once."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def importing(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """The nodes of a file that import something."""
    kinds = (node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))
    return tuple(node for node in kinds if not isinstance(node, ast.Call) or called(node) == "import_module")


def called(call: ast.Call) -> str:
    """The name of what is called, without what it is a name of."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def imports(name: str, known: dict[str, Path]) -> list[Import]:
    """All imports of a module, also nested ones and those for types; ``from package import module`` is the module."""
    found = []
    for node in importing(known[name]):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [target if target in known else str(node.module) for target in full]
        else:
            targets = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        if targets:
            found += [Import(name, target, node.lineno) for target in dict.fromkeys(targets)]
    return found


def folder_of(module: str) -> str:
    """``polyfed.core.message`` -> ``core``; ``polyfed`` itself; the building blocks of methods count as a folder."""
    parts = module.split(".")
    if parts[1:3] == ["methods", "building_blocks"]:
        return "building_blocks"
    return parts[1] if len(parts) > 1 else parts[0]


def within(module: str, names: set[str]) -> bool:
    """Whether a module lies in one of the named folders or modules of polyfed."""
    if folder_of(module) == "building_blocks":
        return "building_blocks" in names
    return any(f"{module}.".startswith(f"polyfed.{name}.") for name in names)


def forbidden_imports(known: dict[str, Path]) -> list[str]:
    """Every import that is not allowed, one line each."""
    found = []
    for name in known:
        for one in imports(name, known):
            here, top = folder_of(name), one.imported.partition(".")[0]
            if top == "flwr" and here != "deploy":
                found.append(f"{one}: only deploy/ may")
            if top in ONLY and name != ONLY[top]:
                found.append(f"{one}: only {ONLY[top]} may")
            if here == "functional" and top not in {"torch", "safetensors", "polyfed", *sys.stdlib_module_names}:
                found.append(f"{one}: functional/ knows torch and its files only")
            if top != "polyfed":
                continue
            own = {here}
            if here == "methods":  # a method may import the methods that some extend; `methods/__init__.py` lists all
                bases = ("closed_form", "fedavg", "fedhenn", "fedproto", "fedprox", "heterofl")
                own = {here, "registry"} if name == "polyfed.methods" else {f"methods.{base}" for base in bases}
            if here in MAY_IMPORT and not within(one.imported, MAY_IMPORT[here] | own):
                found.append(f"{one}: {here} may know {', '.join(sorted(MAY_IMPORT[here])) or 'nothing of polyfed'}")
            if within(one.imported, MAY_NOT_IMPORT.get(here, set())):
                found.append(f"{one}: {here} must not")
    return found


def import_cycle(known: dict[str, Path], by_folder: bool) -> list[str] | None:
    """A cycle of imports between files, or between folders; None when there is none. Imports for types count, too."""
    graph: dict[str, set[str]] = {}
    for name in known:
        for one in imports(name, known):
            if one.imported in known:
                here, there = (folder_of(name), folder_of(one.imported)) if by_folder else (name, one.imported)
                if here != there:
                    graph.setdefault(here, set()).add(there)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


KNOWN = modules(SOURCE)


def test_folders_import_what_they_may() -> None:
    assert forbidden_imports(KNOWN) == []


@pytest.mark.parametrize("by_folder", [False, True])
def test_no_import_cycle(by_folder: bool) -> None:
    assert import_cycle(KNOWN, by_folder) is None


def test_the_engine_names_no_method() -> None:
    # "local" is also an ordinary word (local training)
    names = {name.lower() for name in METHODS} - {"local"}
    for name in (name for name in KNOWN if folder_of(name) == "engine"):
        for node in nodes(KNOWN[name]):
            for said in (getattr(node, field, None) for field in ("value", "id", "attr")):
                line = getattr(node, "lineno", 0)
                assert not (isinstance(said, str) and said.lower() in names), f"{name}:{line} names {said}"


HELP = "import runpy; sys.argv = ['polyfed', '--help']; runpy.run_module('polyfed', run_name='__main__')"
LISTED = "from polyfed.cli.app import status; assert not status(['methods'])"


@pytest.mark.parametrize("statement", ["import polyfed", HELP, LISTED], ids=["import", "help", "lists"])
def test_torch_is_not_loaded_before_it_is_needed(statement: str) -> None:
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


_RUNS_CODE = {"eval", "exec", "compile", "__import__", "torch.load", "torch.save", "os.system", "os.popen"}
_UNSAFE = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def dangers(code: Iterable[ast.AST]) -> list[str]:
    """What could run code out of a file or a string: unpickling, evaluation, a shell."""
    found = []
    for node in code:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.partition(".")[0] in _UNSAFE]
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in _RUNS_CODE:
                found.append(f"{function}(")
            found += ["shell" for keyword in node.keywords if keyword.arg == "shell"]
            found += [
                "allow_pickle"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False
            ]
    return found


def test_nothing_unpickles_or_evaluates() -> None:
    found = [f"{name}: {danger}" for name, path in KNOWN.items() for danger in dangers(nodes(path))]
    assert not found, "\n".join(found)


def callers(what: str) -> set[str]:
    """The modules that call a function of this name."""
    calls = ((name, node) for name in KNOWN for node in nodes(KNOWN[name]) if isinstance(node, ast.Call))
    return {name for name, call in calls if called(call) == what}


def test_code_that_a_text_names_is_imported_in_one_place() -> None:
    """In `registry.import_object`; readers of run folders ask `registry.check_trusted` before they come there."""
    importers = callers("import_module")
    # the modules of a package of ours; timm and torchvision
    fixed = {"polyfed", "polyfed.models.networks", "polyfed.data.sources", "polyfed.models.third_party"}
    constant = {"polyfed.engine.run"}
    assert importers - fixed - constant == {"polyfed.registry"}
    assert callers("import_object") == {
        *("polyfed.config.recipe", "polyfed.own_methods", "polyfed.models.zoo", "polyfed.data.datasets"),
        "polyfed.engine.executors.choice",
    }
    assert callers("check_trusted") == {"polyfed.config.recipe", "polyfed.experiments.prediction"}
