"""Do learnt layers help a closed form? Candidates beside it, on the same map and the same views of rows.

    python benchmarks/learnt_layers.py --settings cifar10-100,cifar10-400 --seeds 100,101 --out learnt-layers.json
    python benchmarks/learnt_layers.py --out learnt-layers.json --table             what the file has
    python benchmarks/learnt_layers.py --out learnt-layers.json --table --test      the accuracy on test rows

    closed-form   log p = t (phi(x)' W + b) + log pi: a discriminant analysis on fixed features phi of all clients'
                  rows, and each client's own class shares pi, as in the method `closed-form`
    uncalibrated  the same with t = 1
    residual-1, -3    residual blocks: phi + relu(random projections of phi) B, with B by least squares on what a linear
                  model on phi misses (Zozoulenko et al., "Random feature representation boosting", ICML 2025; Tang et
                  al., "DeepAFL", ICLR 2026); all from sums of rows, two exchanges a block
    centers       a second layer: centers of patches of the first layer's maps, by sums of patches (Coates and Ng,
                  "Selecting receptive fields in deep networks", NeurIPS 2011); its features are beside the first's
    network       a small network, trained by weighted averaging; at prediction the client's log pi is added, less that
                  of all rows
    network-offsets   the same, but a client's log pi is added in its loss, too (Menon et al., "Long-tail learning via
                  logit adjustment", ICLR 2021), so that prediction is by the model that was trained
    NETWORK-features  a closed form on the network's last features beside those of the map
    NETWORK-half, NETWORK-chosen  (1 - v) log p of the closed form + v log p of the network: v = 1/2; or v and t chosen

A training row counts with its ten views, of 4,800 rows with two; networks are trained with crops and mirrored images.
Shrinkage s, t, v and the ridge of blocks are chosen on validation rows of all clients together, for each candidate by
itself, so that what has more choices looks better there than it is; test rows have no part in it. Accuracy is the mean
over clients; "difference" is to the closed form on the same map, with its standard error over rows.

Shapes: N rows, D features, C classes, K filters.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import runpy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.message import get_group
from polyfed.core.randomness import generator
from polyfed.data.augmentation import Augmentation, augmentation
from polyfed.experiments.build import build_federation
from polyfed.functional.class_statistics import sum_rows
from polyfed.functional.closed_forms import discriminant
from polyfed.functional.feature_maps import images

FILTERS = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "photograph_filters.py"))
PARTS = ("train", "validation", "test")
SHRINKAGES = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # s
TEMPERATURES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # t
WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)  # v
RIDGES = (0.1, 1.0, 10.0)  # of blocks, in units of the mean variance of their projections
BLOCKS = 3
ROUNDS = 8  # of k-means
BATCH = 20
LR = 0.05  # of networks; a fifth of it after 70 % of the rounds, a 25th after 90 %
UNKNOWN = -30.0  # log share of a class of which a client has no row
SETTINGS = {  # recipe, changes, every which view, rounds of the common network
    "cifar10-100": ("suites/sizes/cifar10.toml", ["data.max_train_per_client=100"], 1, 80),
    "cifar10-400": ("suites/sizes/cifar10.toml", ["data.max_train_per_client=400"], 1, 30),
    "cifar10-4800": ("suites/sizes/cifar10.toml", ["data.max_train_per_client=4800"], 5, 12),  # as it is and mirrored
    "fashion-200": ("suites/small/fashion.toml", [], 1, 30),
}

Features = dict[str, Tensor]  # by part; of training rows those of one view after the other
Scores = dict[str, Tensor]  # by part but the first, (N, C)


@dataclass(frozen=True)
class Rows:
    """A part of all clients' rows, one client after the other."""

    x: Tensor  # (N, channels, side, side) uint8
    y: Tensor  # (N,)
    client: Tensor  # (N,)


@dataclass(frozen=True)
class Setting:
    """Rows of a seed by part, and what is the same for all candidates."""

    recipe: Path
    changes: Sequence[str]
    rows: Mapping[str, Rows]
    prepare: Callable[[Tensor], Tensor]
    augment: Augmentation
    log_shares: Tensor  # log pi (clients, C), of training rows
    classes: int
    seed: int
    every: int  # which view
    rounds: int

    def features(self, phi: Callable[[Tensor], Tensor]) -> Features:
        """Features of all rows, of training rows by view, some rows at a time."""
        found = {}
        for part, rows in self.rows.items():
            views = self.augment.views(rows.x.shape[1:])
            views = views[:: self.every] if part == "train" else views[:1]
            with torch.inference_mode():
                found[part] = torch.cat([phi(self.prepare(view(x))) for view in views for x in rows.x.split(32)])
        return found

    def labels(self, features: Features) -> Tensor:
        """Classes of the training rows of all views."""
        y = self.rows["train"].y
        return y.repeat(len(features["train"]) // len(y))


def load(name: str, seed: int) -> Setting:
    """A setting's rows."""
    recipe, of_setting, every, rounds = SETTINGS[name]
    changes = [f"run.seed={seed}", *of_setting]
    federation = build_federation(Recipe.load(Path(recipe), changes, method="local"))
    rows = {}
    for part in PARTS:
        samples = [getattr(client.data, part) for client in federation.clients]
        client = torch.repeat_interleave(torch.tensor([len(one.y) for one in samples]))
        rows[part] = Rows(torch.cat([one.x[:] for one in samples]), torch.cat([one.y[:] for one in samples]), client)
    counts = torch.zeros(len(federation.clients), federation.classes)
    counts.index_put_((rows["train"].client, rows["train"].y), torch.tensor(1.0), accumulate=True)
    log_shares = (counts / counts.sum(dim=1, keepdim=True)).log().clamp(min=UNKNOWN)
    prepare, classes = federation.clients[0].prepare, federation.classes
    augment = augmentation("crop-flip")
    assert augment is not None
    return Setting(Path(recipe), changes, rows, prepare, augment, log_shares, classes, seed, every, rounds)


# closed forms --------------------------------------------------------------------------------------------------------


def accuracy(setting: Setting, scores: Tensor, part: str) -> tuple[float, Tensor]:
    """In %, the mean over clients; and per row what it adds to that mean."""
    rows = setting.rows[part]
    numbers = torch.bincount(rows.client)
    added = 100 * (scores.argmax(dim=1) == rows.y).double() / (numbers[rows.client] * len(numbers))
    return float(added.sum()), added


def log_probabilities(setting: Setting, scores: Scores, temperature: float = 1.0) -> Scores:
    """With each client's own class shares."""
    shares = {part: setting.log_shares[setting.rows[part].client] for part in scores}
    return {part: torch.log_softmax(temperature * scores[part] + shares[part], dim=1) for part in scores}


@dataclass(frozen=True)
class Fit:
    """A closed form with what was best for it on validation rows."""

    accuracy: float
    s: float
    t: float
    scores: Scores


def closed_form(setting: Setting, features: Features, temperatures: Sequence[float] = TEMPERATURES) -> Fit:
    """The best discriminant analysis by s and t."""
    sums = sum_rows(features["train"], setting.labels(features), setting.classes)
    fits = []
    for s in SHRINKAGES:
        weight, bias = discriminant(sums, s)
        scores = {part: features[part].double() @ weight + bias for part in PARTS[1:]}
        for t in temperatures:
            log_p = log_probabilities(setting, {"validation": scores["validation"]}, t)
            fits.append(Fit(accuracy(setting, log_p["validation"], "validation")[0], s, t, scores))
    return max(fits, key=lambda fit: fit.accuracy)


def beside(one: Features, other: Features) -> Features:
    """Features of both."""
    return {part: torch.cat([one[part], other[part]], dim=1) for part in PARTS}


# layers made of sums -------------------------------------------------------------------------------------------------


def residual_block(setting: Setting, features: Features, s: float, ridge: float, block: int) -> Features:
    """Add r B to phi: r = relu(projections), W is the ridge regression of y on phi, B W that of y - phi W on r.

    Needed of the rows are the second moments of phi and of r, and the products of r with y - phi W.
    """
    centered = {part: features[part] - features["train"].mean(dim=0) for part in PARTS}
    phi = centered["train"].double()
    y = F.one_hot(setting.labels(features), setting.classes).double()
    width = phi.shape[1]
    weight = ridge_regression(phi, y - y.mean(dim=0), s / (1 - s))
    draws = generator(setting.seed, f"block {block}")
    projection = torch.randn(width, width, generator=draws) / width**0.5
    bias = 0.25 * torch.randn(width, generator=draws)
    std = phi.std(dim=0).clamp(min=1e-6).float()
    layer = {part: torch.relu((centered[part] / std) @ projection + bias) for part in PARTS}
    mean = layer["train"].mean(dim=0)
    step = ridge_regression((layer["train"] - mean).double(), y - y.mean(dim=0) - phi @ weight, ridge)  # B W
    learnt = (step @ torch.linalg.pinv(weight)).float()
    return {part: features[part] + (layer[part] - mean) @ learnt for part in PARTS}


def ridge_regression(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Weights of x for y, both centered; the ridge is in units of x's mean variance."""
    second = x.T @ x
    second += ridge * second.trace() / len(second) * torch.eye(len(second), dtype=x.dtype)
    weight: Tensor = torch.linalg.solve(second, x.T @ y)
    return weight


def first_maps(made: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What the first layer's filters find: means over 4 x 4 pixels, and their roots, (N, K, side, side)."""
    if "filters" in made:
        maps = F.conv2d(x, made["filters"], made["bias"], padding=2)
    else:  # centers, see `feature_maps.images`
        average = torch.full_like(made["directions"][:1], 1 / made["directions"][0].numel())
        variance = F.conv2d(x.square(), average) - F.conv2d(x, average).square()
        spread = variance.clamp(min=1e-8).sqrt() + 0.3
        maps = F.conv2d(x, made["directions"]) / spread - made["offsets"].view(-1, 1, 1)
    return F.avg_pool2d(maps.relu(), 4).clamp(min=1e-8).sqrt()


def second_layer(setting: Setting, made: Mapping[str, Tensor]) -> Features:
    """Features of as many centers of 3 x 3 patches of the first layer's maps, which are centers like the first's."""
    x = setting.prepare(setting.rows["train"].x[:4000])
    with torch.inference_mode():
        patches = torch.cat([FILTERS["normalize_patches"](first_maps(made, some), 3) for some in x.split(32)])
        mean, whitening = FILTERS["whitening"](len(patches), patches.sum(dim=0), patches.T @ patches)
        whitened = (patches - mean.float()) @ whitening.float()
    count = len(next(iter(made.values())))
    centers = F.normalize(torch.randn(count, len(mean), generator=generator(setting.seed, "second layer")), dim=1)
    for _ in range(ROUNDS):
        sums = FILTERS["sum_nearest"](whitened, centers)
        centers = F.normalize(torch.where(sums.norm(dim=1, keepdim=True) > 0, sums, centers), dim=1)
    second = FILTERS["filters_of_centers"](centers, mean, whitening, count, 3)
    return setting.features(lambda x: images.find_features(second, first_maps(made, x)))


# a common network ----------------------------------------------------------------------------------------------------


def small_network(channels: int, classes: int) -> nn.Sequential:
    """Three convolutions; 128 features before the last layer."""
    widths = (channels, 32, 64, 64)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(3)
    body = [*layers, nn.Flatten(), nn.Linear(9 * widths[-1], 128), nn.ReLU(), nn.Linear(128, classes)]
    network = nn.Sequential(*body)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def train_network(setting: Setting, offsets: Tensor) -> nn.Sequential:
    """Weighted averaging, an epoch a round; `offsets` (clients, C) are added to a client's scores in the loss."""
    rows = setting.rows["train"]
    draws = generator(setting.seed, "network")
    torch.manual_seed(setting.seed)
    common = small_network(rows.x.shape[1], setting.classes)
    for round in range(setting.rounds):
        done = round / setting.rounds
        lr = LR if done < 0.7 else LR / 5 if done < 0.9 else LR / 25
        total = {name: torch.zeros_like(value) for name, value in common.state_dict().items()}
        for client, offset in enumerate(offsets):
            own = copy.deepcopy(common)
            optimizer = torch.optim.SGD(own.parameters(), lr=lr, momentum=0.9)
            of_client = (rows.client == client).nonzero().flatten()
            for batch in of_client[torch.randperm(len(of_client), generator=draws)].split(BATCH):
                drawn = setting.augment.draw(len(batch), rows.x.shape[1:], draws)
                x = setting.prepare(setting.augment.apply(rows.x[batch], drawn))
                optimizer.zero_grad()
                scores = own(x.contiguous(memory_format=torch.channels_last))
                F.cross_entropy(scores + offset, rows.y[batch]).backward()
                nn.utils.clip_grad_norm_(own.parameters(), 5.0)
                optimizer.step()
            for name, value in own.state_dict().items():
                total[name] += value * len(of_client) / len(rows.y)
        common.load_state_dict(total)
    return common.eval()


# candidates ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """What is recorded of one."""

    name: str
    log_p: Scores
    chosen: Mapping[str, float]
    up: int  # bytes that a client sends
    exchanges: int
    seconds: float  # of processor time: maps, layers and training of all clients


@dataclass(frozen=True)
class Base:
    """The closed form on a map."""

    features: Features
    fit: Fit
    log_p: Scores
    up: int
    seconds: float


def bytes_of_sums(features: Features, classes: int) -> int:
    """Of n, M and S, as float64."""
    width = features["train"].shape[1]
    return 8 * (width * (width + 1) // 2 + classes * (width + 1))


def candidates_of_sums(setting: Setting, name: str, wanted: Sequence[str]) -> tuple[Base, list[Candidate]]:
    """The closed form on a map, and what is made of sums on it."""
    began = time.process_time()
    made = make_map(setting, name)
    features = setting.features(lambda x: images.find_features(made, x))
    fit = closed_form(setting, features)
    up = bytes_of_sums(features, setting.classes)
    base = Base(features, fit, log_probabilities(setting, fit.scores, fit.t), up, time.process_time() - began)

    def of_fit(name: str, fit: Fit, up: int, exchanges: int, seconds: float, **more: float) -> Candidate:
        log_p = log_probabilities(setting, fit.scores, fit.t)
        return Candidate(name, log_p, {"s": fit.s, "t": fit.t, **more}, up, exchanges, base.seconds + seconds)

    found = [of_fit("closed-form", fit, up, 1, 0.0)]
    found.append(of_fit("uncalibrated", closed_form(setting, features, (1.0,)), up, 1, 0.0))
    if "residual" in wanted:
        began = time.process_time()
        layered = {ridge: [features] for ridge in RIDGES}
        for block, (ridge, layers) in itertools.product(range(BLOCKS), layered.items()):
            layers.append(residual_block(setting, layers[-1], fit.s, ridge, block))
        seconds = (time.process_time() - began) / len(RIDGES) / BLOCKS
        for blocks in (1, BLOCKS):
            fits = {ridge: closed_form(setting, layers[blocks]) for ridge, layers in layered.items()}
            ridge, best = max(fits.items(), key=lambda item: item[1].accuracy)
            sent = up + blocks * 2 * up  # the second moments of projections, and those of the new features
            found.append(of_fit(f"residual-{blocks}", best, sent, 1 + 2 * blocks, blocks * seconds, ridge=ridge))
    if "centers" in wanted:
        began = time.process_time()
        both = beside(features, second_layer(setting, made))
        seconds = time.process_time() - began
        count = len(next(iter(made.values())))
        numbers = 9 * count  # of a patch
        sent = 8 * (numbers * (numbers + 3) // 2 + ROUNDS * numbers * count) + bytes_of_sums(both, setting.classes)
        found.append(of_fit("centers", closed_form(setting, both), sent, 2 + ROUNDS, seconds))
    return base, found


def make_map(setting: Setting, name: str) -> Mapping[str, Tensor]:
    """Tensors of a map of the library, by its name and D."""
    kind, features = name.split("-")
    changes = [f"method.map={kind}", f"method.features={features}", "training.rounds=1"]
    federation = build_federation(Recipe.load(setting.recipe, [*setting.changes, *changes], method="closed-form"))
    federation.run()
    return get_group(federation.clients[0].state, "map")


def candidates_of_network(setting: Setting, name: str, bases: Mapping[str, Base]) -> Iterator[tuple[str, Candidate]]:
    """Per map a network by itself, and with the closed form."""
    began = time.process_time()
    log_shares = setting.log_shares
    network = train_network(setting, log_shares if name == "network-offsets" else torch.zeros_like(log_shares))
    rounds = setting.rounds
    sent = 4 * rounds * sum(value.numel() for value in network.parameters())
    last = setting.features(lambda x: network[:-1](x.contiguous(memory_format=torch.channels_last)))
    seconds = time.process_time() - began
    with torch.inference_mode():
        scores = {part: network[-1](last[part]) for part in PARTS[1:]}
    if name == "network":  # it has learnt the shares of all clients' rows
        counts = torch.bincount(setting.rows["train"].y, minlength=setting.classes)
        scores = {part: scores[part] - (counts / counts.sum()).clamp(min=1e-9).log() for part in scores}
    own = log_probabilities(setting, scores)
    for map_name, base in bases.items():
        yield map_name, Candidate(name, own, {}, sent, rounds, seconds)
        layered = beside(base.features, last)
        fit = closed_form(setting, layered)
        log_p = log_probabilities(setting, fit.scores, fit.t)
        up = sent + bytes_of_sums(layered, setting.classes)
        chosen = {"s": fit.s, "t": fit.t}
        yield map_name, Candidate(f"{name}-features", log_p, chosen, up, rounds + 1, base.seconds + seconds)
        mixed = {}
        for t, v in itertools.product(TEMPERATURES, WEIGHTS):
            closed = log_probabilities(setting, base.fit.scores, t)
            mixed[t, v] = {part: (1 - v) * closed[part] + v * own[part] for part in closed}
        best = max(mixed, key=lambda choice: accuracy(setting, mixed[choice]["validation"], "validation")[0])
        for end, (t, v) in {"half": (base.fit.t, 0.5), "chosen": best}.items():
            chosen = {"s": base.fit.s, "t": t, "v": v}
            up, both = sent + base.up, base.seconds + seconds
            yield map_name, Candidate(f"{name}-{end}", mixed[t, v], chosen, up, rounds + 1, both)


# results -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def record(path: Path, keys: dict[str, Any], setting: Setting, candidate: Candidate, base: Base) -> None:
    """Write an entry, in the place of an older one: the accuracy, and how far it is above the closed form's."""
    keys = {**keys, "candidate": candidate.name}
    costs = {"bytes_up": candidate.up, "exchanges": candidate.exchanges, "seconds": round(candidate.seconds, 1)}
    entry: dict[str, Any] = {**keys, **candidate.chosen, **costs}
    for part in PARTS[1:]:
        value, added = accuracy(setting, candidate.log_p[part], part)
        gain = added - accuracy(setting, base.log_p[part], part)[1]
        figures = {"accuracy": value, "difference": float(gain.sum()), "error": float(gain.square().sum().sqrt())}
        entry[part] = {name: round(figure, 2) for name, figure in figures.items()}
    others = [one for one in read(path) if any(one[name] != value for name, value in keys.items())]
    path.write_text("[\n" + ",\n".join(map(json.dumps, [*others, entry])) + "\n]\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in entry.items() if name != "test"}), flush=True)


def table(entries: list[dict[str, Any]], part: str) -> str:
    """Markdown: means over seeds, a row per setting, map and candidate."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["setting"], entry["map"], entry["candidate"]), []).append(entry)
    heads = ["setting", "map", "candidate", "seeds", "accuracy", "above closed form", "MB up", "exchanges", "s"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- " + "| ---: " * 6 + "|"]
    for names, group in sorted(groups.items()):
        value, gain = (sum(one[part][key] for one in group) / len(group) for key in ("accuracy", "difference"))
        error = sum(one[part]["error"] ** 2 for one in group) ** 0.5 / len(group)
        seconds = sum(one["seconds"] for one in group) / len(group)
        cells = [str(len(group)), f"{value:.1f}", f"{gain:+.1f} ± {error:.1f}", f"{group[0]['bytes_up'] / 1e6:.1f}"]
        lines.append(f"| {' | '.join([*names, *cells, str(group[0]['exchanges']), f'{seconds:.0f}'])} |")
    return "\n".join(lines)


def main() -> None:
    """Make entries, and show the table of all that the file has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="cifar10-100", help=f"of {', '.join(SETTINGS)} [%(default)s]")
    parser.add_argument("--seeds", default="100,101", help="[%(default)s]")
    parser.add_argument("--maps", default="random-576,photographs-576", help="NAME-FEATURES [%(default)s]")
    parser.add_argument("--candidates", default="residual,centers,network,network-offsets", help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("learnt-layers.json"), help="[%(default)s]")
    parser.add_argument("--table", action="store_true", help="only show what the file has")
    parser.add_argument("--test", action="store_true", help="show test rows instead of validation rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = given.candidates.split(",")
    runs = [] if given.table else list(itertools.product(given.settings.split(","), map(int, given.seeds.split(","))))
    for name, seed in runs:
        setting = load(name, seed)
        bases = {}
        for map_name in given.maps.split(","):
            bases[map_name], found = candidates_of_sums(setting, map_name, wanted)
            for one in found:
                record(given.out, {"setting": name, "seed": seed, "map": map_name}, setting, one, bases[map_name])
        for network in [one for one in ("network", "network-offsets") if one in wanted]:
            for map_name, one in candidates_of_network(setting, network, bases):
                record(given.out, {"setting": name, "seed": seed, "map": map_name}, setting, one, bases[map_name])
    print(table(read(given.out), "test" if given.test else "validation"))


if __name__ == "__main__":
    main()
