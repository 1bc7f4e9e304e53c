"""A client's own network beside a common closed form: ways to put both together, compared on validation rows.

    python benchmarks/closed_form_candidates.py --settings digits,heart --json candidates.json      # all candidates
    python benchmarks/closed_form_candidates.py --settings fashion --only 'local|mixtures' --seeds 100
    python benchmarks/closed_form_candidates.py --json candidates.json --settings "" --page page.md    # tables alone

Trains federations in settings of the suite (`suites/small`) on its tuning seeds and scores each client's validation
rows; test rows are not looked at. The methods are in `candidate_methods.py`. `alone`: the same candidate, every client
with the sums of its own rows only. The shrinkage was chosen on the same rows before, for together and alone.

`network`: mean over clients of the validation accuracy of f, the client's own network. `both`: of f and t, the closed
form, together: log softmax f + t, or what a candidate was trained with. Runs that the JSON has are not done again. A
line of JSON per run, then the table. Many hours for all; `--only` and `--settings` choose.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from candidate_maps import grow, joined
from candidate_methods import common_scores
from torch import Tensor

from polyfed.config.protocol import Protocol
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.randomness import generator
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.functional import class_statistics
from polyfed.functional.random_features import apply_map, draw_map
from polyfed.methods.building_blocks.weight_averaging import weights_for

HERE = Path(__file__).resolve().parent
SUITE = HERE.parent / "suites" / "small"
SETTINGS = ("digits", "watch", "heart", "cifar10-few", "fashion", "tweets")
SHRINKAGE = {  # together, alone
    "digits": (0.1, 0.3),
    "watch": (0.03, 0.1),
    "heart": (0.6, 0.6),
    "cifar10-few": (0.1, 0.6),
    "fashion": (0.01, 0.1),
    "tweets": (0.6, 0.6),
}
BEGIN, END = "<!-- begin table -->\n", "<!-- end table -->\n"  # of a page
WEIGHTS = (0.25, 0.5, 1.0, 2.0)  # of t beside log softmax f

TAUGHT = "candidate_methods:Taught"
RESIDUAL = "candidate_methods:Residual"
Choice = tuple[str, dict[str, Any], bool]  # a method, its hyperparameters, whether it is alone


def candidates() -> dict[str, Choice | None]:
    """All that is compared, by name; None: `run_maps`."""
    found: dict[str, Choice | None] = {
        "local": (TAUGHT, {"weight": 0.0}, False),
        "local, 60 rounds": (TAUGHT, {"weight": 0.0, "rounds": 60}, False),
    }
    for leaves_out, scales in (("nothing", (1.0,)), ("client", (0.25, 0.5, 1.0)), ("row", (0.25, 0.5, 1.0))):
        for scale in scales:
            found[f"residual, without {leaves_out}, {scale:g} t"] = (
                RESIDUAL,
                {"leaves_out": leaves_out, "scale": scale},
                False,
            )
    found["residual, without row, 1 t, alone"] = (RESIDUAL, {"leaves_out": "row"}, True)
    for inputs in ("rows", "mixtures", "cuts", "noise", "public", "drawn"):
        found[f"taught, {inputs}"] = (TAUGHT, {"inputs": inputs}, False)
        found[f"taught, {inputs}, alone"] = (TAUGHT, {"inputs": inputs}, True)
    for inputs in ("mixtures", "cuts", "public", "drawn"):
        for weight, temperature in ((3.0, 1.0), (3.0, 2.0), (10.0, 1.0)):
            choice = {"inputs": inputs, "weight": weight, "temperature": temperature}
            found[f"taught, {inputs}, lambda {weight:g}, T {temperature:g}"] = (TAUGHT, choice, False)
        choice = {"inputs": inputs, "weight": 3.0, "copies": 4}
        found[f"taught, {inputs}, lambda 3, 4 copies"] = (TAUGHT, choice, False)
        found[f"taught, {inputs}, lambda 3, 4 copies, alone"] = (TAUGHT, choice, True)
        found[f"taught, {inputs}, lambda 3, 4 copies, labels"] = (TAUGHT, {**choice, "targets": "labels"}, False)
        controls = ("permuted", "shares") if inputs == "public" else ("permuted", "labels", "shares")
        for targets in controls:
            found[f"taught, {inputs}, {targets}"] = (TAUGHT, {"inputs": inputs, "targets": targets}, False)
        found[f"pretrained, {inputs}"] = (TAUGHT, {"inputs": inputs, "pretraining": 10}, False)
        found[f"pretrained, {inputs}, alone"] = (TAUGHT, {"inputs": inputs, "pretraining": 10}, True)
        found[f"pretrained 40 passes, {inputs}"] = (TAUGHT, {"inputs": inputs, "pretraining": 40}, False)
        found[f"pretrained 40 passes, {inputs}, alone"] = (TAUGHT, {"inputs": inputs, "pretraining": 40}, True)
    return {**found, "maps": None}


def recipe_of(setting: str, seed: int, method: str, overrides: Sequence[str]) -> Recipe:
    """The setting's recipe with a method, scored once, in this process."""
    protocol = Protocol.load(SUITE)
    asked = protocol.settings[setting]
    given = [*protocol.overrides_of(setting), "evaluation.extra_stages=[]", "evaluation.every_n_rounds=1000"]
    preset = asked.preset or None
    path = SUITE / asked.recipe
    return Recipe.load(path, [*given, *overrides], method=method, preset=preset, seed=seed, executor="serial")


def run(setting: str, seed: int, choice: Choice, data: DataCache) -> dict[str, float]:
    """Train a federation and score it on validation rows, in percent."""
    name, values, is_alone = choice
    federation = build_federation(recipe_of(setting, seed, name, in_toml(setting, values, is_alone)), data=data)
    federation.run()
    return scores(federation, SHRINKAGE[setting], values.get("scale", 1.0))


def in_toml(setting: str, values: Mapping[str, Any], is_alone: bool) -> list[str]:
    """Overrides of a recipe that set a candidate's hyperparameters."""
    chosen = {"shrinkage": SHRINKAGE[setting][is_alone], **values}
    if is_alone:
        chosen["alone"] = True
    sections = {"rounds": "training"}
    return [f"{sections.get(name, 'method')}.{name}={json.dumps(value)}" for name, value in chosen.items()]


def scores(federation: Federation, shrinkage: tuple[float, float], scale: float) -> dict[str, float]:
    """Means over clients, in percent: of f, t, both with several weights, and of the same with own sums."""
    own = [of_client(federation, client, shrinkage, scale) for client in federation.clients]
    return {name: 100 * sum(one[name] for one in own) / len(own) for name in own[0]}


def of_client(federation: Federation, client: Client, shrinkage: tuple[float, float], scale: float) -> dict[str, float]:
    """Shares of a client's validation rows that are right."""
    rows = client.data.validation
    x = client.prepare(rows.x[:])
    network = federation.export(client.id)
    with torch.no_grad():
        log_f = torch.cat([network(some) for some in x.split(128)]).double().log_softmax(dim=1)
    drawn, counts_C = client.state["map"], client.state["own counts"]
    t = common_scores(drawn, client.state["solution"], counts_C, x).clamp(min=-1e4)
    t_own = common_scores(drawn, own_solution(client, shrinkage[1]), counts_C, x).clamp(min=-1e4)
    found = {"network": accuracy(log_f, rows.y), "closed form": accuracy(t, rows.y)}
    found |= {"closed form, own sums": accuracy(t_own, rows.y), "as trained": accuracy(log_f + scale * t, rows.y)}
    for weight in WEIGHTS:
        found[f"both, {weight:g}"] = accuracy(log_f + weight * t, rows.y)
    return found | {"both, own sums": accuracy(log_f + t_own, rows.y)}


def accuracy(scores_NC: Tensor, y_N: Tensor) -> float:
    """The share of rows that are right."""
    return float((scores_NC.argmax(dim=1) == y_N).double().mean())


def own_solution(client: Client, shrinkage: float) -> dict[str, Tensor]:
    """The closed form of the client's own rows."""
    train = client.data.train
    drawn = client.state["map"]
    phi_ND = torch.cat([apply_map(drawn, client.prepare(some)) for some in train.x.split(128)])
    has_words = "words" in drawn
    sums = class_statistics.sum_rows(phi_ND, train.y, client.classes, products=not has_words)
    solve = class_statistics.naive_bayes if has_words else class_statistics.discriminant
    weight, bias = solve(sums, shrinkage)
    return {"weight": weight, "bias": bias, "counts": sums["counts"]}


# maps learnt in rounds ------------------------------------------------------------------------------------------------

SHARED = {"digits": "digits-cnn1", "cifar10-few": "fedgh-cnn5", "fashion": "fedgh-cnn5"}  # who has images
GAMMAS = (0.1, 1.0, 10.0)
SHRINKAGES = (0.01, 0.03, 0.1, 0.3, 0.6)
BLOCKS = 3


def run_maps(setting: str, seed: int, data: DataCache) -> dict[str, float]:
    """Validation accuracy of closed forms on maps that grow, or that an averaged network gives, each at its best s.

    They replace or join the random map; `own sums` is the control, the same map with each client's own sums.
    """
    shared = SHARED[setting]
    federation = build_federation(recipe_of(setting, seed, "fedavg", [f'models.architectures=["{shared}"]']), data=data)
    federation.run()
    clients = federation.clients
    network = federation.server.model(shared, weights_for(federation.server, "same-shape", shared))
    drawn = draw_map(clients[0].prepare(clients[0].data.train.x[:1]), 576, generator(seed, "random features"))
    parts = ("train", "validation")
    phi = {part: [features(lambda x: apply_map(drawn, x), client, part) for client in clients] for part in parts}
    learnt = {part: [features(network.represent, client, part) for client in clients] for part in parts}
    whole = torch.cat(phi["train"])
    whole_learnt = torch.cat(learnt["train"])
    side = {
        part: [joined(pair, [whole, whole_learnt]) for pair in zip(phi[part], learnt[part], strict=True)]
        for part in parts
    }
    found = best("random map", phi, clients) | best("learnt map", learnt, clients) | best("both maps", side, clients)
    labels = torch.cat([client.data.train.y for client in clients])
    for gamma in GAMMAS:
        grown = grow(whole, labels, clients[0].classes, BLOCKS, gamma, generator(seed, "blocks"))
        for count, deeper in enumerate(grown):
            of_it = {part: [deeper(rows) for rows in phi[part]] for part in parts}
            found |= best(f"{count} blocks, gamma {gamma:g}", of_it, clients)
    return found


def features(function: Callable[[Tensor], Tensor], client: Client, part: str) -> Tensor:
    """What a function gives of a part of a client's rows, (N, D), float64."""
    rows = getattr(client.data, part).x[:]
    with torch.no_grad():
        return torch.cat([function(client.prepare(some)) for some in rows.split(128)]).double()


def best(name: str, phi: Mapping[str, Sequence[Tensor]], clients: Sequence[Client]) -> dict[str, float]:
    """Mean validation accuracy of the closed form on such features, together and with own sums, at the best s each."""
    sums = [
        class_statistics.sum_rows(rows, client.data.train.y, client.classes)
        for rows, client in zip(phi["train"], clients, strict=True)
    ]
    total = functools.reduce(class_statistics.add, sums)
    found = {name: 0.0, f"{name}, own sums": 0.0}
    for shrinkage in SHRINKAGES:
        solution = class_statistics.discriminant(total, shrinkage)
        hits = {key: list[float]() for key in found}
        for rows, own, client in zip(phi["validation"], sums, clients, strict=True):
            solved = {name: solution, f"{name}, own sums": class_statistics.discriminant(own, shrinkage)}
            for key, (weight, bias) in solved.items():
                counts = own["counts"] if key.endswith("own sums") else total["counts"]
                t = class_statistics.log_posterior(rows @ weight + bias, counts, own["counts"])
                hits[key].append(accuracy(t, client.data.validation.y))
        found = {key: max(found[key], 100 * sum(one) / len(one)) for key, one in hits.items()}
    return found


# tables ---------------------------------------------------------------------------------------------------------------


def table(kept: Mapping[str, Mapping[str, float]]) -> str:
    """Two tables in Markdown: candidates, and maps; means over the seeds that there are, * one, ** two."""
    found: dict[str, dict[str, dict[str, Mapping[str, float]]]] = {}
    for key, run_scores in kept.items():
        setting, seed, name = key.split(" | ")
        found.setdefault(name, {}).setdefault(setting, {})[seed] = run_scores
    settings = [setting for setting in SETTINGS if setting in found["local"]]
    maps = found.pop("maps", {})
    lines = [*header("candidate", [f"{setting}: network, both" for setting in settings])]
    for score in ("closed form", "closed form, own sums"):
        lines.append(row(score, [cell(found["local"][setting], (score,), {}) for setting in settings]))
    for name in (one for one in candidates() if one in found):
        scored = ("network", "as trained" if name.startswith("residual") else "both, 1")
        cells = [cell(found[name].get(setting, {}), scored, found["local"][setting]) for setting in settings]
        lines.append(row(name, cells))
    if maps:
        lines += ["", *header("map", [f"{setting}: together, own sums" for setting in maps])]
        first = next(iter(next(iter(maps.values())).values()))
        for name in (one for one in first if f"{one}, own sums" in first):
            lines.append(row(name, [cell(runs, (name, f"{name}, own sums"), {}) for runs in maps.values()]))
    return "\n".join(lines) + "\n"


def header(first: str, others: Sequence[str]) -> list[str]:
    """The first two lines of a table."""
    return [row(first, others), row(":--", ["--:"] * len(others))]


def row(first: str, others: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join([first, *others])} |"


def cell(
    runs: Mapping[str, Mapping[str, float]], scored: Sequence[str], local: Mapping[str, Mapping[str, float]]
) -> str:
    """Means over seeds, the network's with its difference to Local's on the same seeds."""
    if not runs:
        return ""
    texts = []
    for score in scored:
        mean = sum(one[score] for one in runs.values()) / len(runs)
        text = f"{mean:.1f}"
        shared = [seed for seed in runs if seed in local]
        if score == "network" and runs is not local and shared:
            gains = [runs[seed][score] - local[seed][score] for seed in shared]
            text += f" ({sum(gains) / len(gains):+.1f})"
        texts.append(text)
    marks = {1: "*", 2: "**"}
    return ", ".join(texts) + marks.get(len(runs), "")


def main() -> None:
    """Run what is asked for and is not there yet; then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"[{','.join(SETTINGS)}]")
    parser.add_argument("--seeds", default="100,101,102", help="tuning seeds [100,101,102]")
    parser.add_argument("--only", default="", metavar="REGEX", help="candidates whose name it matches, all of it")
    parser.add_argument("--json", type=Path, help="keeps all runs")
    parser.add_argument("--page", type=Path, help="a page in Markdown, whose tables are replaced")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, dict[str, float]] = {}
    if asked.json and asked.json.exists():
        kept = json.loads(asked.json.read_text(encoding="utf-8"))
    data = DataCache()
    wanted = {name: one for name, one in candidates().items() if not asked.only or re.fullmatch(asked.only, name)}
    for setting in filter(None, asked.settings.split(",")):
        for name, choice in wanted.items():
            for seed in map(int, asked.seeds.split(",")):
                key = f"{setting} | {seed} | {name}"
                if key in kept or (choice is None and setting not in SHARED):
                    continue
                began = time.process_time()
                try:
                    kept[key] = run_maps(setting, seed, data) if choice is None else run(setting, seed, choice, data)
                except PolyfedError as error:
                    parser.exit(error.exit_status, f"{key}: {error}\n")
                kept[key]["seconds"] = time.process_time() - began
                print(json.dumps({key: {n: round(v, 2) for n, v in kept[key].items()}}), flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if any(key.endswith(" | local") for key in kept):
        print(table(kept))
        if asked.page:
            before, rest = asked.page.read_text(encoding="utf-8").split(BEGIN)
            text = f"{before}{BEGIN}{table(kept)}{END}{rest.split(END)[1]}"
            asked.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
