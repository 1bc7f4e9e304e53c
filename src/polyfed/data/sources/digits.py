"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from polyfed.data.dataset import DatasetSource, from_tensors
from polyfed.data.options import SourceOptions
from polyfed.data.sources import source


@source("digits")
def digits(options: SourceOptions) -> DatasetSource:
    """The 1797 handwritten digits that come with scikit-learn, (1, 8, 8), without a test side; needs no files.

    Their values 0..16 are stored times 15 (0..240), so ``x // 15`` gives them back exactly.
    """
    options.check_used("columns")
    table = _handwritten()
    x = torch.from_numpy(table[:, :-1] * np.uint8(15)).reshape(-1, 1, 8, 8)
    return from_tensors((x, table[:, -1]), name="digits")


def _handwritten() -> np.ndarray:
    """(1797, 65) uint8: 64 values 0..16 and the label.

    Read from scikit-learn's file, as every process that trains would spend a second on importing the loader.
    """
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",", dtype=np.uint8)
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True)).astype(np.uint8)
