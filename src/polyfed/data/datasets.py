"""Data sets by name: those of `polyfed.data.sources`, and functions of the user's own.

Every source gives both sides as they are stored (uint8 images) and the channel means and deviations for `Prepare`.
Files are found through `root`, else the environment variable POLYFED_DATA; nothing is downloaded, except for a name
that begins with "hub:". A request that names what a data set has no use for is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.data.dataset import DatasetSource, from_tensors
from polyfed.data.options import SourceOptions, as_settings
from polyfed.data.sources import Source, find_source, paths_listed
from polyfed.errors import ConfigError, PolyfedError, kind_and_line
from polyfed.registry import DATASETS, import_object, is_own, suggest

__all__ = ["DatasetSource", "from_tensors", "load_dataset"]


def load_dataset(name: str, root: str | Path | None = None, **settings: Any) -> DatasetSource:
    """Load a data set by name.

    Args:
        name: one that `polyfed datasets` lists. Of ``csv:PATH`` and its like, PATH is looked for below `root`; without
            one, below the present folder, then below $POLYFED_DATA. `clients:` and `npz:` give the further column
            "client". Or ``package.module:function``, a function of your own that is called without arguments and
            returns a `DatasetSource`, or its sides (`from_tensors`): a training side, or a dictionary of "train" and
            "test".
        root: the folder that holds the data sets' folders; default: $POLYFED_DATA.
        settings: how it is read, ``label_column="y"``: those keys of a recipe's ``[data]`` that say so; ``columns``,
            names of further columns of whole numbers or strings; and ``beside``, folders in which ``package.module`` is
            looked for where Python does not find it by itself.

    Raises:
        ConfigError: an unknown name (with the nearest), files that are missing or wrong, or a setting that does not
            exist or that the data set has no use for.
    """
    folder = None if root is None else str(root)
    return load_source(SourceOptions(dataset=str(name), root=folder, **as_settings(settings)))


def load_source(options: SourceOptions) -> DatasetSource:
    """`load_dataset` with all that it takes as one object."""
    name = options.dataset
    found = find_source(name)
    if found is not None:
        source = found.read(options)
    elif is_own(name):
        source = _from_function(options)
    else:
        near = suggest(name, DATASETS)
        raise ConfigError(f"unknown dataset '{name}'{near} (a folder of Parquet files is 'parquet:{name}')")
    for column in options.columns:
        if column not in source.train_columns:
            known = suggest(column, source.train_columns) if source.train_columns else "; it has no further columns"
            raise ConfigError(f"dataset '{source.name}' has no column '{column}'{known}")
    if options.task is not None and not source.is_regression:
        raise ConfigError(
            f"data.task 'regression': expected a table, csv:PATH or clients:PATH, or a data set of numbers to predict, "
            f"got '{source.name}', whose labels are classes"
        )
    return source


def _from_function(options: SourceOptions) -> DatasetSource:
    """What a function of the user's returns: a source, a training side, or a dictionary of both sides."""
    name = options.dataset
    options.check_used("columns")
    try:
        function = import_object("data set", name, options.beside)
    except ConfigError as error:
        raise ConfigError(f"{error}; before a path: {paths_listed()}") from error.__cause__
    if not callable(function):
        raise ConfigError(f"data set '{name}' should be a function without arguments, got a {type(function).__name__}")
    try:
        made = function()
    except PolyfedError:
        raise
    except Exception as error:  # the function is the user's
        raise ConfigError(f"data set '{name}' failed: {kind_and_line(error)}") from error
    if not isinstance(made, DatasetSource):
        sides = made if isinstance(made, Mapping) else {"train": made}
        if "train" not in sides or set(sides) - {"train", "test"}:
            raise ConfigError(
                f"expected a dictionary of 'train' and 'test' from '{name}', got {sorted(map(str, sides))}"
            )
        if hasattr(sides["train"], "iloc"):
            raise ConfigError(
                f"expected a data set from '{name}', got a frame: return polyfed.from_frame(frame, 'label')"
            )
        made = from_tensors(sides["train"], sides.get("test"), name=name)
    return made


def known_sources() -> list[Source]:
    """All that are declared; names with a path come last."""
    declared = [found for name in DATASETS if (found := find_source(name)) is not None]
    return sorted(declared, key=lambda one: ":" in one.name)
