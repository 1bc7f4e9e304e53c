"""Is it the sum or the network that helps? Networks of several methods, each with the common closed form beside it.

    python benchmarks/whose_network.py --seeds 0,1,2 --out benchmarks/whose-network.json
    python benchmarks/whose_network.py --out benchmarks/whose-network.json --table    what the file has

A client's network f_k, as a method leaves it after the last round, and the closed form of all clients' rows (the method
`closed-form`) are calibrated by the client's validation rows and added as in the method `own-plus-common`:

    (1 - v) log softmax(u_k f_k(x)) + v log p_k(x)

v = 0 is the network by itself, v = 1 the closed form. Nothing is chosen here; accuracy is the mean over clients, on
their test rows. Shapes: N rows, C classes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.engine.federation import Federation
from polyfed.engine.run import Run
from polyfed.experiments.build import build_federation
from polyfed.functional.closed_forms import fit_temperature

METHODS = ("local", "fedgh", "fedproto", "fd", "fml")
WEIGHTS = (0.0, 0.5, 0.8, 0.9, 1.0)  # v


def train(given: argparse.Namespace, method: str, seed: int, *more: str) -> tuple[Federation, Run]:
    """A run of a method."""
    changes = [f"run.seed={seed}", "run.workers=1", *given.set, *more]
    federation = build_federation(Recipe.load(Path(given.recipe), changes, method=method))
    return federation, federation.run()


def scores_of(client: Client, x: Tensor, predict: Callable[[Tensor], Tensor]) -> Tensor:
    """Of prepared inputs, some rows at a time; (N, C) in float64."""
    with torch.inference_mode():
        return torch.cat([predict(client.prepare(rows)) for rows in x.split(64)]).double()


def network_log_p(client: Client, model: nn.Module, classes: int) -> Tensor:
    """A network's calibrated log probabilities of the test rows (N, C), without a method's own predictor around it."""
    network = getattr(model, "network", model)
    network.eval()
    held, alike = client.data.validation, torch.ones(classes)
    u = fit_temperature(scores_of(client, held.x[:], network), held.y[:], alike, alike)
    return torch.log_softmax(u * scores_of(client, client.data.test.x[:], network), dim=1)


def accuracies(given: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """In %, by method and v."""
    common, _ = train(given, "closed-form", seed, f"method.shrinkage={given.shrinkage}", "training.rounds=2")
    log_p = [
        scores_of(client, client.data.test.x[:], lambda x, own=client.state: common.method.predict(None, x, own))
        for client in common.clients
    ]
    entries = []
    for method in METHODS:
        federation, run = train(given, method, seed)
        right: dict[float, list[float]] = {weight: [] for weight in WEIGHTS}
        for number, client in enumerate(federation.clients):
            own = network_log_p(client, run.personal_models[number], federation.classes)
            for weight in WEIGHTS:
                mixed = log_p[number] if weight == 1 else (1 - weight) * own + weight * log_p[number]
                shown = own if weight == 0 else mixed
                right[weight].append(float((shown.argmax(dim=1) == client.data.test.y[:]).double().mean()))
        figures = {str(weight): round(100 * mean(values), 2) for weight, values in right.items()}
        entries.append({"method": method, "seed": seed, **figures})
        print(json.dumps(entries[-1]), flush=True)
    return entries


def table(entries: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds and standard deviations, a row per method."""
    lines = [
        f"| network of | seeds | {' | '.join(f'v = {weight:g}' for weight in WEIGHTS)} |",
        "| --- | --: |" + " --: |" * len(WEIGHTS),
    ]
    for method in METHODS:
        group = [entry for entry in entries if entry["method"] == method]
        values = [[entry[str(weight)] for entry in group] for weight in WEIGHTS]
        cells = [f"{mean(one):.1f} ± {stdev(one):.1f}" if len(one) > 1 else f"{one[0]:.1f}" for one in values if one]
        if group:
            lines.append(f"| {method} | {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Add a seed's entries to the file, and show the table of all that it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="suites/rows/cifar10.toml", help="[%(default)s]")
    parser.add_argument("--set", action="append", default=["data.max_rows_per_client=100"], help="a key of the recipe")
    parser.add_argument("--shrinkage", type=float, default=0.1, help="of the closed form [%(default)s]")
    parser.add_argument("--seeds", default="0,1,2", help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("whose-network.json"), help="[%(default)s]")
    parser.add_argument("--table", action="store_true", help="only show what the file has")
    given = parser.parse_args()
    torch.set_num_threads(1)
    entries = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else []
    done = {entry["seed"] for entry in entries}
    for seed in [] if given.table else sorted(set(map(int, given.seeds.split(","))) - done):
        entries.extend(accuracies(given, seed))
        given.out.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8")
    print(table(entries))


if __name__ == "__main__":
    main()
