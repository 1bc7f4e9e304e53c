"""The usual models on each client's own rows: what a client can have that needs nobody, and is no network.

With ``run.control = "own-..."`` each client fits an estimator of scikit-learn to its training rows, prepared as for a
network, and is scored with it as with a network:

own-linear    tables, with a 0/1 column for each category and all others standardized: logistic regression
              texts: logistic regression on tf-idf of which words occur
              images and series: ridge regression of +-1 for each class, on the standardized features of the map that
              `ClosedForm` has by default
              numbers to predict: ridge regression on the same features
own-boosting  tables: gradient boosting of trees, by histograms
own-forest    tables: a random forest

Of a small grid of settings (`own_estimators`) those are taken that have the best accuracy, or RMSE, on the client's
validation rows, of equals the first; without validation rows the first of all. As of Local, validation rows choose, and
are not trained on. All that is drawn follows from the run's seed and the client's number. Estimators are kept in memory
only, and made again where they are needed. A round changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Context, Exchange
from polyfed.core.randomness import derive_seed, generator
from polyfed.data.dataset import DatasetSource
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError
from polyfed.functional.feature_maps.feature_map import draw_map
from polyfed.methods.closed_form import ClosedForm
from polyfed.methods.local import Local

__all__ = ["OWN", "own_rows", "rows_of_data"]

OWN = ("own-linear", "own-boosting", "own-forest")
_NEVER = -1e4  # the score of a class that the client has no training rows of


def rows_of_data(source: DatasetSource) -> tuple[str, ...]:
    """The controls that there are of such data."""
    return OWN if _form(source) == "table" else OWN[:1]


def _form(source: DatasetSource) -> Any:
    """See `own_estimators.Form`."""
    if source.words is not None:
        return "texts"
    return "table" if source.train.x.dim() == 2 else "map"


def own_rows(recipe: Recipe, federated: FederatedDataset, prepare: Prepare) -> OwnRows:
    """What fits an estimator to each client's own rows.

    Raises:
        ConfigError: the recipe has another method than Local, or there is no such control of its data.
    """
    control = str(recipe.run.control)
    if recipe.method.name != "local":
        raise ConfigError(f"run.control '{control}': expected the method 'local', got '{recipe.method.name}'")
    if control not in rows_of_data(federated.source):
        raise ConfigError(f"run.control '{control}': expected rows of a table, got '{federated.source.name}'")
    return OwnRows(control, federated, prepare, recipe.run.seed)


class OwnRows(Local):
    """An estimator of scikit-learn for each client.

    No argument is a hyperparameter: they follow from the recipe.

    Args:
        control: one of `OWN`. federated: with the clients' rows. prepare: what networks take of them. seed: the run's.
    """

    name = "local"  # by which a recipe makes it again
    control: str
    federated: FederatedDataset
    prepare: Prepare
    seed: int
    features: Callable[[Tensor], NDArray[Any]]  # of prepared inputs (N, ...): (N, D)
    fitted: dict[int, Any]  # by client

    def __init__(self, control: str, federated: FederatedDataset, prepare: Prepare, seed: int) -> None:
        super().__init__()
        features = _features(federated.source, prepare, seed)
        given = {"control": control, "federated": federated, "prepare": prepare, "seed": seed}
        vars(self).update(**given, features=features, fitted={})  # hyperparameters are frozen, and so is what has them

    def exchanges(self, round: int) -> Sequence[Exchange]:
        """No network is trained."""
        return (Exchange(trains=False),)

    def receive(self, client: Client, message: Message) -> Context:
        """Note whose estimator predicts."""
        client.state["number"] = torch.tensor(client.id)
        return {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Scores of classes (N, C), log probabilities where the estimator has such; or numbers (N, 1)."""
        number = int(get_tensor(context, "number"))
        if number not in self.fitted:
            self.fitted[number] = self._fit(number)
        estimator = self.fitted[number]
        rows = self.features(x)
        if not self.federated.classes:
            return torch.as_tensor(estimator.predict(rows)).reshape(-1, 1).to(x.device)
        width = len(self.federated.clients[number].class_names) or self.federated.classes
        scores = torch.full((len(x), width), _NEVER, dtype=torch.float64)
        scores[:, torch.as_tensor(estimator.classes_)] = _scores(estimator, rows)
        return scores.to(x.device)

    def _fit(self, number: int) -> Any:
        from polyfed.experiments.own_estimators import fit  # as scikit-learn takes a second to import

        source, client = self.federated.source, self.federated.clients[number]
        table = source.columns if client.columns is None else client.columns.table
        categories = [place for place, count in enumerate(table.counts) if count]
        prepare = self.prepare if client.columns is None else self.prepare.of_features(client.columns.features)
        rows = (self._arrays(client.train, prepare), self._arrays(client.validation, prepare))
        seed = derive_seed(self.seed, "own rows", number) % 2**32
        return fit(self.control, _form(source), bool(self.federated.classes), categories, *rows, seed)

    def _arrays(self, samples: LabeledSamples, prepare: Prepare) -> tuple[Any, NDArray[Any]]:
        rows = self.features(prepare(samples.x)) if len(samples) else ()
        return rows, samples.y.numpy()


def _features(source: DatasetSource, prepare: Prepare, seed: int) -> Callable[[Tensor], NDArray[Any]]:
    """What estimators are given of prepared inputs: a table's columns, which words occur, or the features of a map."""
    if _form(source) == "table":
        return lambda x: x.cpu().double().numpy()
    words = len(source.words) if isinstance(source.words, Tensor) else source.words or 0
    example = prepare(source.train.x[:1])
    draws = generator(seed, "random features")
    phi = draw_map(example, ClosedForm().features, draws, words=words, photographs=True)
    return lambda x: phi(x.cpu()).double().numpy()


def _scores(estimator: Any, rows: NDArray[Any]) -> Tensor:
    """(N, C) of the classes that it knows."""
    if hasattr(estimator, "predict_proba"):
        return torch.as_tensor(estimator.predict_proba(rows)).log().clamp(min=_NEVER)
    margins = torch.as_tensor(estimator.decision_function(rows))
    return margins if margins.dim() == 2 else torch.stack([-margins, margins], dim=1)
