"""What noise on the sums of the closed form costs: accuracy over epsilon, in three settings.

    python scripts/closed_form_privacy.py [SETTING ...]

Writes the tables of these settings, or of all, into docs/results/tables/closed-form-privacy.json; others stay.

Rows' features are computed once for each width and seed, and all levels of noise and shrinkages are tried on the same
sums, by the functions and the draws of the method (`polyfed.methods.closed_form`): what `polyfed run` gives with these
settings, without the run. Width and shrinkage are chosen for each epsilon on validation rows with the tuning seed.

Needs cifar10 below $POLYFED_DATA, and pip install 'polyfed[naturals,privacy]'.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.inference import map_batches
from polyfed.core.randomness import generator
from polyfed.data.samples import LabeledSamples
from polyfed.engine.privacy_ledger import package
from polyfed.experiments.build import build_federation
from polyfed.functional import class_statistics, closed_forms, noisy_sums
from polyfed.functional.feature_maps.feature_map import FeatureMap, draw_map

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {  # name -> recipe, settings, seeds; the first two are those of suites/small
    "watch": ("recipes/naturals/watch.toml", ["data.split=official:8:2"], (0, 1, 2, 3, 4)),
    "two classes": ("recipes/federation-worth.toml", ["data.split=official:9:1"], (0, 1, 2)),
    "two classes, all images": (
        "recipes/federation-worth.toml",
        ["data.split=official:9:1", "data.num_clients=10", "data.max_train_per_client=5000"],
        (0, 1, 2),
    ),
}
FILE = ROOT / "docs" / "results" / "tables" / "closed-form-privacy.json"
TUNING_SEED = 100
EPSILONS = (1.0, 3.0, 10.0)
DELTA = 1e-5
FEATURES = (36, 144, 576)
SHRINKAGES = (0.01, 0.03, 0.1, 0.3, 0.6, 0.9)


@dataclass(frozen=True)
class Holder:
    """A client's sums, its class counts, and (phi, y) of its validation and test rows."""

    sums: dict[str, Tensor]
    own: Tensor
    scored: dict[str, tuple[Tensor, Tensor]]


@functools.lru_cache(maxsize=1)
def holders(setting: str, features: int, seed: int) -> list[Holder]:
    path, settings, _ = SETTINGS[setting]
    federation = build_federation(Recipe.load(ROOT / path, [*settings, f"run.seed={seed}"], method="local"))
    found = []
    drawn: FeatureMap | None = None
    for client in federation.clients:
        if drawn is None:
            draws = generator(seed, "random features")
            drawn = draw_map(client.prepare(client.data.train.x[:1]), features, draws, client.categories, unit=True)
        found.append(_holder(client, drawn))
    return found


def _holder(client: Client, drawn: FeatureMap) -> Holder:
    def phi(samples: LabeledSamples) -> Tensor:
        nothing = torch.nn.Identity()
        return map_batches(drawn, nothing, samples, client.prepare)

    data = client.data
    return Holder(
        class_statistics.sum_rows(phi(data.train), data.train.y, client.classes),
        data.train.y.bincount(minlength=client.classes),
        {"validation": (phi(data.validation), data.validation.y), "test": (phi(data.test), data.test.y)},
    )


def released(holder: Holder, number: int, seed: int, noise: float) -> dict[str, Tensor]:
    """What a client sends."""
    sums = {**holder.sums, "counts": holder.sums["counts"].double()}
    if not noise:
        return sums
    draws = generator(seed, "noise on sums", number)
    return noisy_sums.add_noise(sums, noise, lambda shape: torch.randn(shape, generator=draws, dtype=torch.float64))


def score(holder: Holder, sums: dict[str, Tensor], shrinkage: float, rows: str) -> float:
    weight, bias = closed_forms.discriminant(sums, shrinkage)
    phi, y = holder.scored[rows]
    found = closed_forms.log_posterior(phi.double() @ weight + bias, sums["counts"], holder.own)
    return float((found.argmax(dim=1) == y).double().mean())


@dataclass(frozen=True)
class Kind:
    """A line: clients "together", "summed" (they share the noise of one, as nobody sees a message) or "alone"."""

    who: str
    epsilon: float | None

    @property
    def words(self) -> tuple[str, str]:
        """As the table has them."""
        noise = {"together": "noise of each client", "summed": "noise of one, shared"}
        return (noise[self.who], f"{self.epsilon:g}") if self.epsilon else (f"{self.who}, without noise", "none")

    def accuracies(self, setting: str, features: int, seed: int, rows: str) -> dict[float, float]:
        """By shrinkage, the mean over clients."""
        held = holders(setting, features, seed)
        noise = float(package().get_sigma_gaussian(self.epsilon, DELTA)) if self.epsilon else 0.0
        if self.who == "summed":
            noise /= len(held) ** 0.5
        sent = [released(one, number, seed, noise) for number, one in enumerate(held)]
        if self.who != "alone":
            sent = [noisy_sums.nearest_possible(functools.reduce(class_statistics.add, sent))] * len(held)
        return {
            shrinkage: _mean([score(one, sums, shrinkage, rows) for one, sums in zip(held, sent, strict=True)])
            for shrinkage in SHRINKAGES
        }


KINDS = [
    *(Kind(who, epsilon) for who in ("together", "summed") for epsilon in EPSILONS),
    Kind("together", None),
    Kind("alone", None),
]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure(setting: str) -> list[list[str]]:
    """A row for each kind."""
    tried: dict[Kind, dict[tuple[int, float], float]] = {kind: {} for kind in KINDS}
    for features in FEATURES:
        for kind in KINDS:
            scores = kind.accuracies(setting, features, TUNING_SEED, "validation")
            tried[kind] |= {(features, shrinkage): value for shrinkage, value in scores.items()}
    chosen = {kind: max(found, key=lambda key: found[key]) for kind, found in tried.items()}
    scored: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for seed in SETTINGS[setting][2]:
        for features in FEATURES:
            for kind in [one for one in KINDS if chosen[one][0] == features]:
                scored[kind].append(kind.accuracies(setting, features, seed, "test")[chosen[kind][1]])
    return [[*kind.words, *map(str, chosen[kind]), *_percents(scored[kind])] for kind in KINDS]


def _percents(values: Sequence[float]) -> tuple[str, str]:
    """Their mean, and each."""
    return f"{100 * _mean(values):.1f}", ", ".join(f"{100 * value:.1f}" for value in values)


def main() -> None:
    """Measure the settings that are named, or all."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    for setting in sys.argv[1:] or SETTINGS:
        (table,) = (one for one in content["tables"] if one["caption"].startswith(f"{setting}: "))
        local = [row for row in table["rows"] if row[0] == "Local, tuned"]  # of suites/small
        table["rows"] = [table["rows"][0], *measure(setting), *local]
        FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
