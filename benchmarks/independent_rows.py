"""Rows of a benchmark's table once more, by a program that shares nothing with polyfed but the clients' rows.

    python benchmarks/independent_rows.py deal --recipe suites/rows/cifar10.toml --most 25 --rows rows-25
    python benchmarks/independent_rows.py score --rows rows-25 --runs runs/rows-25 --out figures.json

`deal` writes which images each client has, a file a seed: images (N, C, H, W) as they are stored, labels, clients, and
parts, 0 to train on, 1 for validation, 2 to test. `score` needs NumPy, scikit-learn and safetensors, and has of polyfed
the file of filters alone. After the pages of ClosedForm, of feature maps and of controls it computes

closed-form          scikit-learn's LinearDiscriminantAnalysis on all clients' views, with the map "photographs", a
                     client's class shares and its temperature
closed-form-alone    the same on each client's own views
own-linear           ridge regression of +-1 for each class, on each client's own rows

with the shrinkage of the stored run, and compares each client's accuracy with that run's, RUNS/ROW/seed-N/result.json.
All is float64; polyfed's features are float32, so that a test row may lie on the other side of a tie. Beside them are
models of scikit-learn that all clients' training rows, with their views, are fitted to in one place:

ridge-map            RidgeClassifier on the map's standardized features. It has no probabilities, and no class shares
logistic-map         LogisticRegression on the same
logistic-pixels      the same on standardized pixels
forest-pixels        RandomForestClassifier, 300 trees, on pixels. A probability is at least 0.001

To log probabilities of the latter three is added, for a client, log(its share of the class / the share in all rows);
"common" is the accuracy without. Of each model's settings those are taken that have the best mean accuracy on the
clients' validation rows of the same seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

Array = NDArray[Any]
Model = Callable[[Array], Array]  # features (N, D) to scores (N, C)

FILTERS = Path(__file__).parents[1] / "src/polyfed/functional/feature_maps/photographs.safetensors"
TRAIN, VALIDATION, TEST = range(3)
CLASSES = 10
FEATURES, CELLS, SIDE = 576, 3, 5
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's pixels, as usually quoted
TEMPERATURES = 2.0 ** (-np.arange(25) / 4)
OWN_ALPHAS = (100.0, 1000.0, 10.0, 10000.0, 1.0)  # of equals the first
NEVER = -np.inf


def deal(given: argparse.Namespace) -> None:
    """Write each seed's rows. polyfed is used here alone."""
    from polyfed.config.recipe import Recipe
    from polyfed.experiments.data_cache import DataCache

    data = DataCache()
    given.rows.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds.split(","):
        changes = [f"data.max_rows_per_client={given.most}", f"run.seed={seed}"]
        clients = data.federated(Recipe.load(given.recipe, changes)).clients
        samples = [part for client in clients for part in (client.train, client.validation, client.test)]
        lengths = [len(part) for part in samples]
        np.savez(
            given.rows / f"seed-{seed}.npz",
            images=np.concatenate([part.x.numpy() for part in samples]),
            labels=np.concatenate([part.y.numpy() for part in samples]),
            clients=np.repeat(np.repeat(np.arange(len(clients)), 3), lengths),
            parts=np.repeat(np.tile(np.arange(3), len(clients)), lengths),
        )


# features ------------------------------------------------------------------------------------------------------------


def views(images: Array) -> list[Array]:
    """Ten views: the images and four diagonal shifts by 2 pixels, black where nothing is, and each of them mirrored."""
    side = images.shape[-1]
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    corners = [(2, 2), (0, 0), (4, 4), (0, 4), (4, 0)]
    crops = [padded[:, :, down : down + side, right : right + side] for down, right in corners]
    return crops + [crop[..., ::-1] for crop in crops]


def pixels(images: Array) -> Array:
    """(N, C H W) in float32, 0 to 1."""
    return images.reshape(len(images), -1).astype(np.float32) / 255


def photographs(images: Array) -> Array:
    """Features (N, 576) of the map "photographs"."""
    file = load_file(FILTERS)
    count = FEATURES // CELLS**2
    directions = file[f"directions 3 x {SIDE} x {SIDE}"][:count].reshape(count, -1).astype(np.float64)
    offsets = file[f"offsets 3 x {SIDE} x {SIDE}"][:count].astype(np.float64)
    return np.concatenate([pool(images[at : at + 32], directions, offsets) for at in range(0, len(images), 32)])


def pool(images: Array, directions: Array, offsets: Array) -> Array:
    """Roots of the means over cells of what the filters answer."""
    prepared = (images / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    windows = np.lib.stride_tricks.sliding_window_view(prepared, (SIDE, SIDE), axis=(2, 3))
    patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(len(images), *windows.shape[2:4], -1)
    centered = patches - patches.mean(axis=-1, keepdims=True)
    normalized = centered / (patches.std(axis=-1, keepdims=True) + 0.3)
    answers = np.maximum(normalized @ directions.T - offsets, 0)
    height = answers.shape[1]
    cells = [slice(i * height // CELLS, -(-(i + 1) * height // CELLS)) for i in range(CELLS)]
    means = [answers[:, down, right].mean(axis=(1, 2)) for down in cells for right in cells]
    return np.sqrt(np.maximum(np.concatenate(means, axis=1), 1e-8))


class Rows:
    """A seed's rows, their features, and the views of those to train on.

    Args:
        path: a file that `deal` wrote.
    """

    def __init__(self, path: Path) -> None:
        file = np.load(path, allow_pickle=False)
        self.images, self.labels, self.clients, self.parts = (
            file[name] for name in ("images", "labels", "clients", "parts")
        )
        self.count = int(self.clients.max()) + 1
        self.train = self.parts == TRAIN
        self.phi = photographs(self.images)
        self.view_phi = [photographs(view) for view in views(self.images[self.train])]

    def of(self, client: int, part: int) -> Array:
        """Which rows they are."""
        return (self.clients == client) & (self.parts == part)

    def shares(self, client: int | None) -> Array:
        """Class shares (C,) of a client's training rows, or of all."""
        chosen = self.train if client is None else self.of(client, TRAIN)
        return np.bincount(self.labels[chosen], minlength=CLASSES) / chosen.sum()

    def viewed(self, client: int | None) -> tuple[Array, Array]:
        """Features and labels of the views of a client's training rows, or of all."""
        chosen = np.ones(self.train.sum(), bool) if client is None else self.clients[self.train] == client
        return np.concatenate([phi[chosen] for phi in self.view_phi]), np.tile(self.labels[self.train][chosen], 10)


def accuracies(rows: Rows, score: Callable[[int, Array], Array], part: int = TEST) -> list[float]:
    """Each client's, of score(client, which rows) -> (N, C)."""
    found = []
    for client in range(rows.count):
        chosen = rows.of(client, part)
        found.append(float((score(client, chosen).argmax(axis=1) == rows.labels[chosen]).mean()))
    return found


# rows of the table ---------------------------------------------------------------------------------------------------


def discriminant(phi: Array, labels: Array, shrinkage: float) -> Model:
    """W and b, without class shares; classes without rows: never. All rows have as many views, so each may be one."""
    known = np.unique(labels)
    if len(known) == 1:
        return lambda new: np.where(np.arange(CLASSES) == known, 0.0, np.full((len(new), 1), NEVER))
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(phi, labels)
    log_priors = np.log(model.priors_)

    def score(new: Array) -> Array:
        found = model.decision_function(new)
        if len(known) == 2:  # scikit-learn has the difference of the two
            found = np.stack([np.zeros(len(new)), found - log_priors[1] + log_priors[0]], axis=1)
        else:
            found = found - log_priors
        scores = np.full((len(new), CLASSES), NEVER)
        scores[:, known] = found
        return scores

    return score


def log_posterior(scores: Array, shares: Array, temperature: float) -> Array:
    """Log probabilities (N, C); of a class without a share minus infinity."""
    with np.errstate(divide="ignore"):
        shifted = temperature * scores + np.log(shares)
    return shifted - np.logaddexp.reduce(shifted, axis=1, keepdims=True)


def find_temperature(scores: Array, labels: Array, shares: Array) -> float:
    """Chosen by a client's validation rows."""
    can_be = shares[labels] > 0
    scores, labels = scores[can_be], labels[can_be]
    if not len(labels):
        return 0.5
    likelihoods = [log_posterior(scores, shares, t)[np.arange(len(labels)), labels].sum() for t in TEMPERATURES]
    return float(TEMPERATURES[np.argmax(likelihoods - np.log(2 * TEMPERATURES) ** 2 / 2)])


def closed_form(rows: Rows, shrinkage: float, alone: bool) -> list[float]:
    """Together, or each client by its own rows."""
    sources = range(rows.count) if alone else [None]
    models = [discriminant(*rows.viewed(source), shrinkage) for source in sources]

    def score(client: int, chosen: Array) -> Array:
        model, shares, judges = models[client if alone else 0], rows.shares(client), rows.of(client, VALIDATION)
        temperature = find_temperature(model(rows.phi[judges]), rows.labels[judges], shares)
        return log_posterior(model(rows.phi[chosen]), shares, temperature)

    return accuracies(rows, score)


def ridge(phi: Array, labels: Array, alpha: float) -> Model:
    """Ridge regression of +-1 on standardized features, by its dual form."""
    mean, std = phi.mean(axis=0), phi.std(axis=0)
    std[std == 0] = 1
    standard, targets = (phi - mean) / std, 2.0 * np.eye(CLASSES)[labels] - 1
    offset = targets.mean(axis=0)
    kernel = standard @ standard.T
    weight = standard.T @ np.linalg.solve(kernel + alpha * np.eye(len(phi)), targets - offset)
    return lambda new: (new - mean) / std @ weight + offset


def own_linear(rows: Rows) -> list[float]:
    """The alpha of each client by its validation rows."""

    def score(client: int, chosen: Array) -> Array:
        train, judges = rows.of(client, TRAIN), rows.of(client, VALIDATION)
        models = [ridge(rows.phi[train], rows.labels[train], alpha) for alpha in OWN_ALPHAS]
        merits = [(model(rows.phi[judges]).argmax(axis=1) == rows.labels[judges]).sum() for model in models]
        return models[int(np.argmax(merits))](rows.phi[chosen])

    return accuracies(rows, score)


# all clients' rows in one place --------------------------------------------------------------------------------------


def logistic(strengths: Sequence[float]) -> list[Any]:
    """To choose among."""
    return [make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=300)) for c in strengths]


def in_one_place(rows: Rows) -> dict[str, dict[str, list[float]]]:
    """Accuracies with a client's class shares and without, by model."""
    phi, labels = rows.viewed(None)
    raw = np.concatenate([pixels(view) for view in views(rows.images[rows.train])])
    new, new_raw = rows.phi, pixels(rows.images)
    ridges = [make_pipeline(StandardScaler(), RidgeClassifier(alpha=a)) for a in (1.0, 100.0, 10000.0)]
    forests = [RandomForestClassifier(300, min_samples_leaf=n, random_state=0) for n in (1, 20)]
    return {
        "ridge-map": best(rows, ridges, phi, labels, new),
        "logistic-map": best(rows, logistic((1e-5, 1e-4, 1e-3, 1e-2)), phi, labels, new),
        "logistic-pixels": best(rows, logistic((1e-6, 1e-5, 1e-4)), raw, labels, new_raw),
        "forest-pixels": best(rows, forests, raw, labels, new_raw),
    }


def best(rows: Rows, models: Sequence[Any], x: Array, labels: Array, new: Array) -> dict[str, list[float]]:
    """Each client's accuracy with its class shares and without, of the models that validation rows choose."""
    answers = [answer(model.fit(x, labels), new) for model in models]
    common = pick(rows, [lambda _, chosen, one=one: one[chosen] for one in answers])
    if not hasattr(models[0], "predict_proba"):
        return {"common": common}
    with np.errstate(divide="ignore"):
        shifts = [np.log(rows.shares(client)) - np.log(rows.shares(None) + 1e-12) for client in range(rows.count)]
    own = pick(rows, [lambda client, chosen, one=one: one[chosen] + shifts[client] for one in answers])
    return {"own": own, "common": common}


def answer(fitted: Any, new: Array) -> Array:
    """Log probabilities (N, C), or margins."""
    answers = np.full((len(new), CLASSES), NEVER)
    if hasattr(fitted, "predict_proba"):
        answers[:, fitted.classes_] = np.log(np.maximum(fitted.predict_proba(new), 1e-3))
    else:
        answers[:, fitted.classes_] = fitted.decision_function(new)
    return answers


def pick(rows: Rows, scores: Sequence[Callable[[int, Array], Array]]) -> list[float]:
    """Accuracies on test rows of the one with the best mean accuracy on validation rows."""
    return accuracies(rows, max(scores, key=lambda score: np.mean(accuracies(rows, score, VALIDATION))))


# results -------------------------------------------------------------------------------------------------------------


def compare(rows: Rows, runs: Path, seed: str) -> dict[str, dict[str, float]]:
    """By row that has a stored run: both accuracies in percent, and how many test rows lie between them."""
    found = {}
    for name in ("closed-form", "closed-form-alone", "own-linear"):
        path = runs / name / f"seed-{seed}" / "result.json"
        if not path.exists():
            continue
        stored = json.loads(path.read_text(encoding="utf-8"))
        if name == "own-linear":
            computed = own_linear(rows)
        else:
            computed = closed_form(rows, stored["hyperparameters"]["shrinkage"], alone=name.endswith("alone"))
        sizes = [int(rows.of(client, TEST).sum()) for client in range(rows.count)]
        apart = np.abs(np.subtract(computed, stored["accuracy_per_client"])) * sizes
        means = {"stored": 100 * stored["accuracy"], "computed": 100 * float(np.mean(computed))}
        found[name] = {key: round(mean, 3) for key, mean in means.items()} | {"rows_apart": round(float(apart.sum()))}
    return found


def score(given: argparse.Namespace) -> None:
    """Compute what --out does not hold yet."""
    out = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    for path in sorted(given.rows.glob("seed-*.npz")):
        seed = path.stem.removeprefix("seed-")
        kept = out.setdefault(given.rows.name, {}).setdefault(seed, {})
        rows = Rows(path)
        kept["compared"] = kept.get("compared", {}) | compare(rows, given.runs, seed)
        print(json.dumps({"seed": seed, **kept["compared"]}), flush=True)
        if given.in_one_place and "in one place" not in kept:
            found = in_one_place(rows)
            kept["in one place"] = {
                name: {kind: round(100 * float(np.mean(of_clients)), 3) for kind, of_clients in kinds.items()}
                for name, kinds in found.items()
            }
            print(json.dumps({"seed": seed, **kept["in one place"]}), flush=True)
        given.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    others = {"polyfed", "torch"} & {name.split(".")[0] for name in sys.modules}
    assert not others, f"expected a program without polyfed and torch, got {others}"


def main() -> None:
    """Deal, or score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("deal", "score"))
    parser.add_argument("--rows", type=Path, required=True, help="folder of the clients' rows, a file a seed")
    parser.add_argument("--recipe", type=Path, help="deal: whose data")
    parser.add_argument("--most", type=int, help="deal: labeled rows of a client, data.max_rows_per_client")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="deal: with commas between [%(default)s]")
    parser.add_argument("--runs", type=Path, help="score: folder of the stored runs of a setting")
    parser.add_argument("--out", type=Path, help="score: JSON file to write, and to go on with")
    parser.add_argument("--in-one-place", action="store_true", help="score: also models of all clients' rows")
    given = parser.parse_args()
    needed = ("recipe", "most") if given.action == "deal" else ("runs", "out")
    missing = [f"--{name}" for name in needed if getattr(given, name) is None]
    if missing:
        parser.error(f"{given.action}: expected {' and '.join(missing)}")
    (deal if given.action == "deal" else score)(given)


if __name__ == "__main__":
    main()
