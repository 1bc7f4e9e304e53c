"""What maps of the closed form are worth and what they cost: accuracy together and alone, bytes, time and memory.

    python benchmarks/feature_maps.py --maps random,photographs --features 576,1152 --rows 100 --augmentation crop-flip
    python benchmarks/feature_maps.py --recipe suites/small/digits.toml --seeds 0,1,2 --out maps.json --test

For every map, number of features D, augmentation, number of rows and seed, the method `closed-form` runs one round of
the recipe, which leaves the sums of all clients and of each. They are solved for every shrinkage s, together and for
each client alone; the table has the best s by validation rows for either. Test rows are scored, too, and printed with
--test.

Up and down are bytes of a client, of all that makes map and solution. Seconds of the processor are of one client's map
of its rows as they are, of their sums, and of the server's solution; memory is the largest that these three add to a
process of their own, on random inputs of the same form; it is not measured of a map that is a network. What --out
already holds is not computed again. Needs the recipe's data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.inference import CHUNK
from polyfed.core.message import get_group, nbytes
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.client_work import working_copy
from polyfed.engine.federation import Federation
from polyfed.experiments.build import build_federation
from polyfed.functional import closed_forms, metrics
from polyfed.functional.class_statistics import add, sum_rows
from polyfed.functional.feature_maps.feature_map import FeatureMap

_MIB = 2**20
_KEYS = ("recipe", "changes", "map", "features", "augmentation", "rows", "seed")

Phi = Callable[[Tensor], Tensor]
Sums = Mapping[str, Tensor]
Solution = tuple[Tensor, Tensor]


def measure(wanted: dict[str, Any], shrinkages: Sequence[float]) -> dict[str, Any]:
    """All figures of one map on one seed's data."""
    federation, result = run(wanted)
    state = federation.server.state
    total = get_group(state, "sums")
    maps = maps_of(federation)
    own = {number: get_group(state, f"sums of client {number}") for number in maps}
    scores = {
        "together": judge(federation, maps, dict.fromkeys(maps, total), shrinkages),
        "alone": judge(federation, maps, own, shrinkages),
    }
    clients = len(federation.clients)
    solution = nbytes({"solution": get_group(state, "solution")})  # sent down in the next round
    sent = {"up": result["bytes_up"] / clients, "down": result["bytes_down"] / clients + solution}
    return {**wanted, **scores, **sent, **costs(federation.clients[0], maps[0], total)}


def run(wanted: Mapping[str, Any]) -> tuple[Federation, dict[str, Any]]:
    """One round of the method."""
    named = [
        f"method.map={wanted['map']}",
        f"method.features={wanted['features']}",
        f"training.augmentation={wanted['augmentation']}",
        f"run.seed={wanted['seed']}",
        "training.rounds=1",
        *([f"data.max_train_per_client={wanted['rows']}"] if wanted["rows"] else []),
        "method.keep_sums=true",
        *wanted["changes"],
    ]
    federation = build_federation(Recipe.load(Path(wanted["recipe"]), named, method="closed-form"))
    return federation, federation.run().result


def maps_of(federation: Federation) -> dict[int, Phi]:
    """Each client's map."""
    exposed = federation.method.exposed
    assert exposed is not None
    workers = [working_copy(client, "", federation.model_factory) for client in federation.clients]
    return {worker.id: exposed.function(worker) for worker in workers}


def judge(
    federation: Federation, maps: Mapping[int, Phi], sums: Mapping[int, Sums], shrinkages: Sequence[float]
) -> dict[str, dict[str, float]]:
    """For each s the mean score of the clients on validation and test rows, each by the sums given for it."""
    by_part: dict[tuple[float, str], list[float]] = {}
    solved: dict[tuple[int, float], Solution] = {}
    for client in federation.clients:
        own = sums[client.id]
        for part, rows in parts(client).items():
            phi_ND = embed(maps[client.id], client, rows)
            for s in shrinkages:
                if (id(own), s) not in solved:  # all of them have the same sums, or each its own
                    solved[id(own), s] = solve(own, client.classes, s)
                scored = score(client, phi_ND, rows.y[:], own, solved[id(own), s])
                by_part.setdefault((s, part), []).append(scored)
    return {str(s): {part: fmean(by_part[s, part]) for of, part in by_part if of == s} for s in shrinkages}


def parts(client: Client) -> dict[str, LabeledSamples]:
    """A client's rows that are not trained on, where it has some."""
    every = {"validation": client.data.validation, "test": client.data.test}
    return {name: rows for name, rows in every.items() if rows is not None and len(rows)}


def embed(phi: Phi, client: Client, rows: LabeledSamples) -> Tensor:
    """Features (N, D) of rows, in float64."""
    with torch.no_grad():
        return torch.cat([phi(client.prepare(some)).double() for some in rows.x[:].split(CHUNK)])


def solve(sums: Sums, classes: int, shrinkage: float) -> Solution:
    """W and b."""
    if not classes:
        return closed_forms.ridge(sums, shrinkage)
    if "products" in sums:
        return closed_forms.discriminant(sums, shrinkage)
    return closed_forms.naive_bayes(sums, shrinkage)


def score(client: Client, phi_ND: Tensor, y_N: Tensor, sums: Sums, solution: Solution) -> float:
    """Accuracy in percent, with the client's own class shares; of numbers minus the root of the mean squared error."""
    weight, bias = solution
    scores_NC = phi_ND @ weight + bias
    if not client.classes:
        return -metrics.rmse(scores_NC[:, 0], y_N)
    own_C = client.data.train.y.bincount(minlength=client.classes).double()
    chosen_N = closed_forms.log_posterior(scores_NC, sums["counts"].double(), own_C).argmax(dim=1)
    return 100 * float((chosen_N == y_N).double().mean())


# costs ---------------------------------------------------------------------------------------------------------------


def costs(client: Client, phi: Phi, total: Sums) -> dict[str, Any]:
    """Width, seconds of the processor and memory of a client's work and the server's."""
    inputs = client.prepare(client.data.train.x[:])
    phi_ND, map_seconds = timed(lambda: phi(inputs))
    labels = client.data.train.y[:]
    _, sum_seconds = timed(lambda: sum_rows(phi_ND, labels, client.classes, "products" in total))
    _, solve_seconds = timed(lambda: solve(total, client.classes, 0.1))
    added = None
    if isinstance(phi, FeatureMap) and inputs.is_floating_point():
        task = (dict(phi.tensors), inputs.shape, client.classes, "products" in total)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            added = pool.apply(memory, task)
    return {
        "width": phi_ND.shape[1],
        "map_seconds": map_seconds,
        "sum_seconds": sum_seconds,
        "solve_seconds": solve_seconds,
        "memory": added,
    }


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and seconds of processor time."""
    began = time.process_time()
    return work(), time.process_time() - began


def memory(tensors: dict[str, Tensor], shape: torch.Size, classes: int, products: bool) -> int:
    """Bytes that map, sums and solution add to the largest memory of this process."""
    torch.set_num_threads(1)
    inputs = torch.randn(shape)
    labels = torch.arange(len(inputs)) % classes if classes else torch.randn(len(inputs))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the largest
    before = memory_now("VmRSS")
    sums = sum_rows(FeatureMap(tensors)(inputs), labels, classes, products)
    solve(add(sums, sums), classes, 0.1)
    return memory_now("VmHWM") - before


def memory_now(name: str) -> int:
    """Bytes of "VmRSS", or "VmHWM", the largest since it was reset (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


# results -------------------------------------------------------------------------------------------------------------


def table(found: Sequence[Mapping[str, Any]], with_test: bool) -> str:
    """Markdown: a line per map, D, augmentation and number of rows, means over seeds."""
    heads = ["recipe", "rows", "map", "D", "augmentation", "together", "s", "alone", "s"]
    heads += ["test together", "test alone"] if with_test else []
    heads += ["up, KiB", "down, KiB", "map, ms", "sums, ms", "solution, ms", "memory, MiB"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        groups.setdefault(json.dumps([one[key] for key in _KEYS if key != "seed"]), []).append(one)
    return "\n".join([*lines, *(_line(group, with_test) for group in groups.values())])


def _line(group: Sequence[Mapping[str, Any]], with_test: bool) -> str:
    first = group[0]
    cells = [Path(first["recipe"]).stem, str(first["rows"] or ""), first["map"], f"{first['width']:,}"]
    cells.append(first["augmentation"])
    tested = []
    for row in ("together", "alone"):
        s = best_shrinkage(group, row)
        cells += [f"{mean_of(group, row, s, 'validation'):.2f}", s]
        tested.append(f"{mean_of(group, row, s, 'test'):.2f}")
    cells += tested if with_test else []
    cells += [f"{first[key] / 1024:,.0f}" for key in ("up", "down")]
    cells += [f"{1000 * first[key]:,.0f}" for key in ("map_seconds", "sum_seconds", "solve_seconds")]
    cells.append("" if first["memory"] is None else f"{first['memory'] / _MIB:.0f}")
    return f"| {' | '.join(cells)} |"


def best_shrinkage(group: Sequence[Mapping[str, Any]], row: str) -> str:
    """The s of the best mean score on validation rows."""
    return max(group[0][row], key=lambda s: mean_of(group, row, s, "validation"))


def mean_of(group: Sequence[Mapping[str, Any]], row: str, s: str, part: str) -> float:
    """Mean score over the seeds."""
    return fmean(one[row][s][part] for one in group)


def main() -> None:
    """Measure, keep and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="suites/sizes/cifar10.toml", help="whose data are used [%(default)s]")
    parser.add_argument("--set", action="append", default=[], help="a change of the recipe, KEY=VALUE; may be repeated")
    parser.add_argument("--maps", default="random", help="of ClosedForm, with commas between [%(default)s]")
    parser.add_argument("--features", default="576", help="numbers D, with commas between [%(default)s]")
    parser.add_argument("--augmentation", default="none", help="whose views rows have [%(default)s]")
    parser.add_argument("--rows", default="0", help="training rows of a client at most, 0: the recipe's [%(default)s]")
    parser.add_argument("--seeds", default="100,101,102", help="with commas between [%(default)s]")
    parser.add_argument("--shrinkage", default="0.005,0.02,0.05,0.1,0.2,0.4", help="values of s [%(default)s]")
    parser.add_argument("--out", type=Path, help="JSON file to write, and to go on with")
    parser.add_argument("--test", action="store_true", help="print scores on test rows, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shrinkages = [float(s) for s in given.shrinkage.split(",")]
    kept = json.loads(given.out.read_text(encoding="utf-8")) if given.out and given.out.exists() else []
    known = {json.dumps([one[key] for key in _KEYS]): one for one in kept}
    found = []
    lists = [text.split(",") for text in (given.rows, given.maps, given.features, given.augmentation, given.seeds)]
    for rows, name, features, augmentation, seed in itertools.product(*lists):
        values = (given.recipe, given.set, name, int(features), augmentation, int(rows), int(seed))
        wanted = dict(zip(_KEYS, values, strict=True))
        key = json.dumps(list(values))
        if key not in known:
            known[key] = measure(wanted, shrinkages)
            if given.out:
                given.out.write_text(json.dumps(list(known.values()), indent=1) + "\n", encoding="utf-8")
        found.append(known[key])
        print(json.dumps(wanted | {"width": known[key]["width"]}), flush=True)
    print(table(found, given.test))


if __name__ == "__main__":
    main()
