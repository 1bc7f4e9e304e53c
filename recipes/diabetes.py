"""The diabetes table that comes inside scikit-learn: 442 patients, ten measurements, progression after a year."""

from sklearn.datasets import load_diabetes

import polyfed as pf


def table() -> object:
    """Its rows; the labels are floats, so that they are predicted as numbers."""
    measurements, progression = load_diabetes(return_X_y=True)
    return pf.from_tensors((measurements / measurements.std(axis=0), progression), name="diabetes")
