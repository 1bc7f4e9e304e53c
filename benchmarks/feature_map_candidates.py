"""Which fixed map is best for series, texts and numbers? A closed form on each candidate, together and alone.

    python benchmarks/feature_map_candidates.py --seeds 100,101 --out candidates.json

Every candidate's sums are solved for every shrinkage s, of all clients together and of each client alone, with each
client's own class shares, as in `closed-form` with temperature 1. The table has the best s by validation rows for
either: the mean over clients and seeds of the accuracy on these rows. Test rows have no part in it.

Needs the recipes' extras and Sentiment140; the tables cancer and wine are scikit-learn's. Categories are one-hot.

Shapes: N rows, D features, K kernels, T steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn import datasets
from sklearn.preprocessing import scale
from torch import Tensor

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.data.augmentation import augmentation
from polyfed.experiments.build import build_federation
from polyfed.functional import closed_forms
from polyfed.functional.class_statistics import add, sum_rows
from polyfed.functional.feature_maps.feature_map import draw_map

Phi = Callable[[Tensor], Tensor]  # inputs (N, ...) to features (N, D), or answers (N, K, T) to features (N, K)
Candidate = Callable[[Client, int, Tensor], Tensor]  # features of a client's prepared inputs, by the seed

FEATURES = 576
SHRINKAGES = {
    "series": (0.003, 0.01, 0.03, 0.1, 0.2, 0.4),
    "texts": (0.25, 0.5, 0.667, 0.8, 0.9),
    "numbers": (0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 0.97),
}
DEALT = ["data.partition=dirichlet", "data.dirichlet_alpha=0.5", "data.split=6:3:1", "data.holdout=0"]
WATCH = "recipes/naturals/watch.toml"
SETTINGS = {  # kind of data, recipe, changes
    "watch": ("series", WATCH, ["data.split=official:8:2"]),
    "watch, views": ("series", WATCH, ["data.split=official:8:2", "training.augmentation=shift"]),
    "tweets": ("texts", "suites/small/tweets.toml", []),
    "heart": ("numbers", "recipes/naturals/heart.toml", ["data.split=50:16:34"]),
    "cancer": ("numbers", "recipes/regression.toml", [*DEALT, "data.dataset=feature_map_candidates:cancer"]),
    "wine": ("numbers", "recipes/regression.toml", [*DEALT, "data.dataset=feature_map_candidates:wine"]),
}


def cancer() -> object:
    """569 tumors, thirty measurements, two classes."""
    x, y = datasets.load_breast_cancer(return_X_y=True)
    return pf.from_tensors((scale(x), y), name="cancer")


def wine() -> object:
    """178 wines, thirteen measurements, three classes."""
    x, y = datasets.load_wine(return_X_y=True)
    return pf.from_tensors((scale(x), y), name="wine")


def default(client: Client, seed: int, x: Tensor) -> Tensor:
    """By the library's map."""
    return draw_map(x, FEATURES, torch.Generator().manual_seed(seed), client.categories, client.words)(x)


def longest(above_NKT: Tensor) -> Tensor:
    """Steps of the longest stretch that is True."""
    place = torch.arange(1, above_NKT.shape[2] + 1).expand_as(above_NKT)
    last_below = torch.where(above_NKT, 0, place).cummax(dim=2).values
    return (place - last_below).amax(dim=2)


POOLINGS: dict[str, Phi] = {
    "root": lambda h: h.relu().mean(dim=2).clamp(min=1e-8).sqrt(),
    "maximum": lambda h: h.amax(dim=2),
    "share": lambda h: (h > 0).float().mean(dim=2),  # this and the next three are MultiRocket's (Tan et al., DMKD 2022)
    "mean": lambda h: h.relu().sum(dim=2) / (h > 0).sum(dim=2).clamp(min=1),
    "place": lambda h: ((h > 0) * torch.arange(h.shape[2])).sum(dim=2) / (h > 0).sum(dim=2).clamp(min=1) / h.shape[2],
    "longest": lambda h: longest(h > 0) / h.shape[2],
}


def pool(poolings: Sequence[str], differences: bool, client: Client, seed: int, x: Tensor) -> Tensor:
    """The library's kernels by other poolings; with `differences` half of them look at differences of the series."""
    inputs = [x, x.diff(dim=2)] if differences else [x]
    kernels = FEATURES // len(poolings) // len(inputs)
    drawn_by = torch.Generator().manual_seed(seed)
    answers = [h_NKT for each in inputs for h_NKT in convolve(each, 2 * kernels, drawn_by)]
    return torch.cat([POOLINGS[name](h_NKT) for name in poolings for h_NKT in answers], dim=1)


def convolve(x: Tensor, features: int, drawn_by: torch.Generator) -> Iterator[Tensor]:
    """Answers (N, K, T) of the kernels of each dilation."""
    drawn = draw_map(x, features, drawn_by).tensors
    for name, kernels in drawn.items():
        if name.startswith("kernels of dilation "):
            dilation = int(name.split()[-1])
            padding = kernels.shape[2] // 2 * dilation
            yield F.conv1d(x, kernels, drawn[f"bias of dilation {dilation}"], padding=padding, dilation=dilation)


def add_pairs(places: int, weight: float, client: Client, seed: int, x: Tensor) -> Tensor:
    """Beside words, which pairs of neighbors occur, by places that a hash gives; a pair counts `weight` of a word."""
    first, second = x[:, :-1], x[:, 1:]
    place = (first * 1_000_003 + second * 7_919) % 2_147_483_647 % places
    occurs = count(place, (first != 0) & (second != 0), places) > 0
    return torch.cat([default(client, seed, x), weight * occurs.float()], dim=1)


def count(places_NT: Tensor, counts_NT: Tensor, width: int) -> Tensor:
    """(N, width), how often each place occurs among those that count."""
    return torch.zeros(len(places_NT), width).scatter_add_(1, places_NT, counts_NT.float())


def numbers(client: Client, seed: int, x: Tensor) -> Tensor:
    """Themselves, categories one-hot."""
    columns = []
    for column, categories in zip(x.split(1, dim=1), client.categories or [0] * x.shape[1], strict=True):
        category = column[:, 0].long().clamp(0, max(0, categories - 1))
        columns.append(F.one_hot(category, categories).float() if categories else column)
    return torch.cat(columns, dim=1)


def cosines(client: Client, seed: int, x: Tensor) -> Tensor:
    """cos(w' x / (2 sqrt F) + b) of F numbers, w normal and b uniform."""
    x = numbers(client, seed, x)
    drawn_by = torch.Generator().manual_seed(seed)
    projection = torch.randn(x.shape[1], FEATURES, generator=drawn_by) / (2 * x.shape[1] ** 0.5)
    return torch.cos(x @ projection + 2 * torch.pi * torch.rand(FEATURES, generator=drawn_by))


def products(client: Client, seed: int, x: Tensor) -> Tensor:
    """The numbers, and all products of two."""
    x = numbers(client, seed, x)
    one, other = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([x, x[:, one] * x[:, other] / 2**0.5], dim=1)


MULTIROCKET = ("share", "mean", "place", "longest")
CANDIDATES: dict[str, dict[str, Candidate]] = {  # by kind of data and name
    "series": {
        "share, root of mean (default)": default,
        "share, maximum": partial(pool, ("share", "maximum"), False),
        "share": partial(pool, ("share",), False),
        "root of mean": partial(pool, ("root",), False),
        "MultiRocket's four": partial(pool, MULTIROCKET, False),
        "share, root of mean; half of differences": partial(pool, ("share", "root"), True),
        "MultiRocket's four; half of differences": partial(pool, MULTIROCKET, True),
    },
    "texts": {
        "words that occur (default)": default,
        "words counted": lambda client, seed, x: count(x, x != 0, client.words),
        "words and 4,000 pairs": partial(add_pairs, 4000, 1.0),
        "words and 16,000 pairs": partial(add_pairs, 16000, 1.0),
        "words and 16,000 pairs of half weight": partial(add_pairs, 16000, 0.5),
    },
    "numbers": {
        "ReLU of projections (default)": default,
        "the numbers": numbers,
        "cosines of projections": cosines,
        "numbers and products": products,
    },
}


def measure(setting: str, name: str, seed: int) -> dict[str, Any]:
    """A candidate's scores on one seed's validation rows, for every s."""
    kind, recipe, changes = SETTINGS[setting]
    solve = closed_forms.naive_bayes if kind == "texts" else closed_forms.discriminant
    federation = build_federation(Recipe.load(Path(recipe), [f"run.seed={seed}", *changes], method="local"))
    phi = partial(CANDIDATES[kind][name], federation.clients[0], seed)
    own = [sum_views(client, phi, kind != "texts") for client in federation.clients]
    total = reduce(add, own)
    features = [phi(client.prepare(client.data.validation.x[:])).double() for client in federation.clients]
    scores: dict[str, dict[str, float]] = {"together": {}, "alone": {}}
    for s in SHRINKAGES[kind]:
        solution = solve(total, s)
        together, alone = [], []
        for client, phi_ND, sums in zip(federation.clients, features, own, strict=True):
            if len(phi_ND):
                together.append(accuracy(client, phi_ND, solution, total["counts"]))
                alone.append(accuracy(client, phi_ND, solve(sums, s), sums["counts"]))
        scores["together"][str(s)] = round(fmean(together), 2)
        scores["alone"][str(s)] = round(fmean(alone), 2)
    return {"setting": setting, "candidate": name, "seed": seed, **scores}


def sum_views(client: Client, phi: Phi, products: bool) -> dict[str, Tensor]:
    """Sums of a client's training rows, of which each is the mean over its views."""
    x, y = client.data.train.x[:], client.data.train.y[:]
    augment = augmentation(client.training.augmentation)
    changes = augment.views(x.shape[1:]) if augment else [lambda x: x]
    each = [sum_rows(phi(client.prepare(change(x))), y, client.classes, products) for change in changes]
    total = reduce(add, each)
    return {name: total[name] // len(each) if name == "counts" else total[name] / len(each) for name in total}


def accuracy(client: Client, phi_ND: Tensor, solution: tuple[Tensor, Tensor], known_C: Tensor) -> float:
    """In % of a client's validation rows, by a solution from rows of `known_C`, with the client's own class shares."""
    weight, bias = solution
    own_C = client.data.train.y[:].bincount(minlength=client.classes).double()
    log_p = closed_forms.log_posterior(phi_ND @ weight + bias, known_C.double(), own_C)
    return 100 * float((log_p.argmax(dim=1) == client.data.validation.y[:]).double().mean())


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: of each candidate the best s, and the mean over seeds."""
    lines = ["| data | candidate | together | s | alone | s |", "| --- | --- | --: | --: | --: | --: |"]
    for setting, name in dict.fromkeys((one["setting"], one["candidate"]) for one in found):
        seeds = [one for one in found if (one["setting"], one["candidate"]) == (setting, name)]
        cells = [setting, name]
        for row in ("together", "alone"):
            means = {s: fmean(one[row][s] for one in seeds) for s in seeds[0][row]}
            best = max(means, key=means.__getitem__)
            cells += [f"{means[best]:.1f}", best]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a line of JSON for each candidate and seed, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="100,101,102", help="with commas between [%(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for setting, (kind, *_) in SETTINGS.items():
        for name, seed in itertools.product(CANDIDATES[kind], map(int, given.seeds.split(","))):
            found.append(measure(setting, name, seed))
            print(json.dumps(found[-1]), flush=True)
    lines = ",\n".join(map(json.dumps, found))
    given.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
