"""Estimators of scikit-learn for a client's own rows, and which of their settings its validation rows choose.

All are pipelines that end in the model. Of each grid the first combination is taken where nothing can choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.model_selection import ParameterGrid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

Form = Literal["table", "texts", "map"]  # of inputs: columns, which words occur, features of a map
Rows = tuple[NDArray[Any], NDArray[Any]]  # (N, D) and labels (N,)

# first the defaults of scikit-learn; but features of a map are hundreds, and leaves of boosting hold 5 rows, not 20
_GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "logistic": {"C": (1.0, 0.1, 10.0, 0.01, 100.0)},
    "ridge": {"alpha": (1.0, 10.0, 0.1, 100.0, 0.01)},
    "ridge on a map": {"alpha": (100.0, 1000.0, 10.0, 10000.0, 1.0)},
    "boosting": {"max_iter": (100, 30), "max_leaf_nodes": (31, 4)},
    "forest": {"min_samples_leaf": (1, 5)},
}


def fit(
    control: str, form: Form, has_classes: bool, categories: Sequence[int], train: Rows, validation: Rows, seed: int
) -> Any:
    """The estimator that is best on validation rows, fitted to training rows; of one class alone that class.

    Args:
        control: see `polyfed.experiments.own_rows`. categories: columns of a table that are numbers of categories.
        validation: may be none.
    """
    if has_classes and len(np.unique(train[1])) == 1:
        return DummyClassifier().fit(*train)
    model = control.removeprefix("own-")
    if model == "linear":
        model = "ridge on a map" if form == "map" else "logistic" if has_classes else "ridge"
    options = list(ParameterGrid(_GRIDS[model]))
    chosen = options if len(validation[1]) else options[:1]
    made = [make_pipeline(_scaling(form, categories), _model(model, has_classes, seed, one)) for one in chosen]
    fitted = [each.fit(*train) for each in made]
    if len(fitted) == 1:
        return fitted[0]
    merits = [each.score(*validation) for each in fitted]  # accuracy; or R2, which is larger where RMSE is smaller
    return fitted[int(np.argmax(merits))]


def _scaling(form: Form, categories: Sequence[int]) -> Any:
    if form == "texts":
        return TfidfTransformer()
    if not categories:
        return StandardScaler()
    columns = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_column_transformer((columns, list(categories)), remainder=StandardScaler())


def _model(name: str, has_classes: bool, seed: int, options: Mapping[str, Any]) -> Any:
    if name == "boosting":
        boosting = HistGradientBoostingClassifier if has_classes else HistGradientBoostingRegressor
        return boosting(min_samples_leaf=5, early_stopping=False, random_state=seed, **options)
    if name == "forest":
        forest = RandomForestClassifier if has_classes else RandomForestRegressor
        return forest(random_state=seed, **options)
    if name == "logistic":
        return LogisticRegression(max_iter=1000, **options)
    return RidgeClassifier(**options) if has_classes else Ridge(**options)
