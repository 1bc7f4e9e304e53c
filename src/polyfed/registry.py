"""Names to methods, models, data sets and partitions. Knows where things live, imports them only when asked.

Nothing heavy is imported here, so that ``polyfed --help`` stays quick: an entry is a ``"module:attribute"`` string,
resolved on first use, or an object registered by the user.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError, kind_and_line
from polyfed.errors import suggest as suggest

_OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
MODEL_PACKAGES = ("timm", "torchvision", "hf")  # what names of their networks begin with


# called with a line on code that is not polyfed's before it is imported; the command line prints it
announce: Callable[[str], object] = lambda line: None  # noqa: E731


def import_object(what: str, name: str, beside: Sequence[str] = ()) -> Any:
    """The object of the user's that is called ``"package.module:attribute"``.

    The one place where code is imported that a recipe, a command line or a run folder names.

    Args:
        what: what it is ("method"), for messages.
        beside: folders in which the module is looked for where Python does not find it by itself.

    Raises:
        ConfigError: no such name; it cannot be imported, for whatever reason, or is hidden by another module of its
            name.
    """
    if not is_own(name):
        raise ConfigError(f"cannot import {what} '{name}'; expected 'package.module:name'")
    module, _, attribute = name.partition(":")
    _look_in(beside)
    if module not in sys.modules and (file := file_of(module)) is not None:
        announce(f"imports {module}, from {file}")
    try:
        found = importlib.import_module(module)
        _check_same(module.partition(".")[0], beside)
        return getattr(found, attribute)
    except ConfigError:
        raise
    except Exception as error:  # importing runs the user's code
        reason = kind_and_line(error)
        hint = _hint(error, module, attribute, beside)
        raise ConfigError(f"cannot import {what} '{name}': {reason}{hint}") from error


def _hint(error: Exception, module: str, attribute: str, beside: Sequence[str]) -> str:
    """What to do about a name that cannot be imported; "" where the module itself is at fault."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (missing == module or module.startswith(f"{missing}.")):
        places = ", ".join(beside)
        looked = f"; looked in {places} and on Python's path" if places else "; looked on Python's path"
        return f"{looked}: put the module beside the recipe, or its folder on PYTHONPATH"
    if isinstance(error, AttributeError) and module in sys.modules and not hasattr(sys.modules[module], attribute):
        known = [name for name in vars(sys.modules[module]) if not name.startswith("_")]
        hint = suggest(attribute, known)
        return hint if "did you mean" in hint else "; expected 'package.module:name'"
    return "" if module and attribute else "; expected 'package.module:name'"


added_folders: list[str] = []  # what `_look_in` has put at the end of Python's path


def _look_in(beside: Sequence[str]) -> None:
    """Have Python find modules in these folders, too: behind all others, so that they hide nothing that is installed.

    They stay there, as a module may import others later. Of two recipes' folders, those asked for last come first.
    """
    others = [place for place in sys.path if place not in added_folders]
    added_folders[:] = dict.fromkeys([*(place for place in beside if place not in others), *added_folders])
    sys.path[:] = [*others, *added_folders]
    importlib.invalidate_caches()  # a file may have been written since


def _check_same(package: str, beside: Sequence[str]) -> None:
    """Whether a module is the one of these folders, where it is in one of them.

    Raises:
        ConfigError: it is hidden by another one of the same name.
    """
    wanted = importlib.machinery.PathFinder.find_spec(package, list(beside))
    loaded = getattr(sys.modules[package], "__spec__", None)
    if wanted is None or wanted.origin is None or loaded is None or loaded.origin is None:
        return
    if Path(wanted.origin).resolve() != Path(loaded.origin).resolve():
        raise ConfigError(
            f"expected the module '{package}' of {wanted.origin}, got that of {loaded.origin}, which Python has "
            "already or finds first; rename one of them"
        )


def check_trusted(folder: str | Path, settings: Any, trust: bool) -> None:
    """Whether a run folder names no code but polyfed's, or its code is trusted. To be asked before it is looked for.

    Args:
        folder: the run's. settings: all of what it says from which something is built. trust: the user's word.

    Raises:
        ConfigError: it names some, and is not trusted.
    """
    names = [] if trust else own_names(settings)
    if names:
        raise ConfigError(
            f"{folder} names code that is not polyfed's, '{names[0]}'; that of a run folder is imported with "
            "--trust (trust=True in Python) alone: give it if the folder is yours, or if you have read its code"
        )


def own_names(settings: Any) -> list[str]:
    """All names of the user's code ("package.module:attribute") among the texts of settings."""
    return [text for text in dict.fromkeys(texts(settings)) if is_own(text)]


def texts(settings: Any) -> Iterator[str]:
    """All texts in settings, however deep."""
    waiting = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += reversed([*value.values()])
        elif isinstance(value, list | tuple):
            waiting += reversed(value)


def is_installed(package: str) -> bool:
    """Whether a package is there; it is not imported. A mere folder of its name, as runs have of trackers, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def file_of(module: str) -> str | None:
    """The file of the package of a module, which Python runs first, or its own; None where there is none.

    Nothing is imported.
    """
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # a module that was made in memory
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)  # a folder without __init__.py


def folders_of(names: Iterable[str], beside: Sequence[str]) -> list[str]:
    """Those of the folders that hold a module of the user's among these names ("package.module:attribute")."""
    packages = {name.partition(":")[0].partition(".")[0] for name in names if is_own(name)}
    finder = importlib.machinery.PathFinder
    return [place for place in beside if any(finder.find_spec(package, [place]) for package in packages)]


def own_code(settings: Any, beside: Sequence[str]) -> dict[str, str]:
    """Module -> checksum of its file, of the user's modules that settings name and of those beside them.

    Only modules that have been imported are looked at.
    """
    packages = {name.partition(":")[0].partition(".")[0] for name in own_names(settings)}
    if not packages:
        return {}
    real = functools.cache(os.path.realpath)  # thousands of modules lie in few folders
    folders = {real(place) for place in beside}
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name == "__main__":
            continue
        if name.partition(".")[0] in packages or real(os.path.dirname(file)) in folders:
            with contextlib.suppress(OSError):  # it has gone since, or lies in an archive
                found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def is_own(name: str) -> bool:
    """Whether a name is that of the user's code, ``"package.module:attribute"``."""
    if _OWN.fullmatch(re.split("[@#]", name)[0]) is None:
        return False
    first, _, _ = name.partition(":")
    return first not in MODEL_PACKAGES and f"{first}:" not in DATASETS


class Registry(Mapping[str, Any]):
    """A named collection. ``registry["name"]`` imports and returns the object; unknown names suggest the nearest.

    Args:
        kind: what the entries are, in the singular, for messages ("method").
        entries: name -> ``"module:attribute"``.
        summaries: name -> what it is, in a line, for lists that import nothing.
        package: what adds further entries when it is imported, which it is when a name is first asked for.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, str] | None = None,
        summaries: Mapping[str, str] | None = None,
        package: str = "",
    ) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(entries or {})
        self._summaries = dict(summaries or {})
        self._package = package

    @property
    def entries(self) -> dict[str, Any]:
        """Name -> object, or where it is."""
        package, self._package = self._package, ""
        if package:
            importlib.import_module(package)
        return self._entries

    def __getitem__(self, name: str) -> Any:
        if name not in self.entries:
            raise ConfigError(f"unknown {self.kind} '{name}'{suggest(str(name), self.entries)}")
        entry = self.entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(importlib.import_module(module), attribute)
            self.entries[name] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def summary(self, name: str) -> str:
        """What an entry is, in a line; the first paragraph of its docstring where the registry has none."""
        if name in self._summaries:
            return self._summaries[name]
        return " ".join((self[name].__doc__ or "").partition("\n\n")[0].replace("`", "").split())

    def add(self, name: str, entry: Any) -> None:
        """Register an object of your own, or a ``"module:attribute"`` string. A name is taken once.

        Raises:
            ConfigError: the name is taken by something else.
        """
        if name in self.entries and self.entries[name] is not entry:
            raise ConfigError(f"the {self.kind} name '{name}' is taken; choose another")
        self.entries[name] = entry


# in a file: the last class with hyperparameters, and the first paragraph of its docstring
_LAST_CLASS = re.compile(r'.*^@hyperparameters\nclass (\w+)[^"]*"""(.*?)\.?(?:\n\n|""")', re.DOTALL | re.MULTILINE)


def _methods_in(folder: Path) -> Registry:
    """A method for each file of a folder, called as the file is; none is imported, as PyTorch takes seconds."""
    entries, summaries = {}, {}
    for file in sorted(folder.glob("[!_]*.py")):
        found = _LAST_CLASS.match(file.read_text(encoding="utf-8"))
        assert found is not None, f"{file}: expected a class with @hyperparameters and a docstring"
        name = file.stem.replace("_", "-")
        entries[name] = f"polyfed.methods.{file.stem}:{found[1]}"
        summaries[name] = " ".join(found[2].split())
    return Registry("method", entries, summaries)


METHODS = _methods_in(Path(__file__).with_name("methods"))

MODELS = Registry("model", package="polyfed.models.networks")

DATASETS = Registry("dataset", package="polyfed.data.sources")  # "csv:" stands for all names that begin so
_PARTITIONS = ("iid", "dirichlet", "by_class", "by_group")
PARTITIONS = Registry("partition", {name: f"polyfed.data.partition:{name}" for name in _PARTITIONS})
PLUGINS = Registry(  # in the order of their hooks
    "plugin",
    {
        "availability": "polyfed.plugins.availability:ClientAvailability",
        "devices": "polyfed.plugins.device_simulation:DeviceSimulation",
        "robust_aggregation": "polyfed.plugins.robust_aggregation:RobustAggregator",
        "adversaries": "polyfed.plugins.adversaries:AdversarialClients",
        "frozen parameters": "polyfed.plugins.frozen_parameters:FrozenParameters",
        "privacy": "polyfed.plugins.privacy:UploadPrivacy",
        "secure_sums": "polyfed.plugins.secure_sums:SecureSummation",
    },
)
EXECUTORS = Registry(
    "executor",
    {
        "auto": "polyfed.engine.executors.choice:automatic",
        "serial": "polyfed.engine.executors.serial:Serial",
        "processes": "polyfed.engine.executors.process_pool:ProcessPool",
        "vectorized": "polyfed.engine.executors.vectorized:VectorizedExecutor",
        "ray": "polyfed.engine.executors.ray_executor:RayExecutor",
    },
    {
        "auto": "processes where it pays, on a GPU vectorized",
        "serial": "one client after the other",
        "processes": "worker processes",
        "vectorized": "clients of a network as one",
        "ray": "processes of Ray, also on a cluster",
    },
)
LOGGERS = Registry(
    "logger",
    {
        "console": "polyfed.loggers.console:Console",
        "tensorboard": "polyfed.loggers.tensorboard:TensorBoard",
        "mlflow": "polyfed.loggers.mlflow:MLflow",
        "wandb": "polyfed.loggers.wandb:WandB",
    },
)
