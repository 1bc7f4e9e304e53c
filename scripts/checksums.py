"""Checksums of what small runs leave behind, to show that a change of the code changes no result.

    python scripts/checksums.py --out before.json            before the change
    python scripts/checksums.py --against before.json        after it: says what differs, and exits with 1

Every method runs on handwritten digits; so does every feature that cuts across methods: availability,
devices, privacy, robust aggregation, malicious clients, final rounds, early stop, resume, worker
processes, stacked training, a deployment in memory. Of each run three checksums are taken:

    records   rounds.jsonl and result.json, without times, seals and checksums: keys and values
    values    the same without the keys, so that a key that is only renamed changes nothing
    models    all tensors of all clients' models, without their names

They hold for one machine and one version of PyTorch: elsewhere sums are taken in another order. Takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import polyfed as pf  # noqa: E402
from polyfed.config.recipe import Recipe  # noqa: E402
from polyfed.registry import METHODS  # noqa: E402

RECIPE = ROOT / "recipes" / "quickstart.toml"
TIMES = {"seconds", "processor_seconds", "seconds_per_round", "samples_per_second", "seal", "versions"}
TIMES |= {"made_of"}  # no result; says what the data and the code were
ONE_NETWORK = ('models.architectures=["digits-cnn4"]',)
ONE = (
    "ditto",
    "fedlora",
    "fedrod",
    "fedrolex",
    "heterofl",
    "inclusivefl",
    "pfedfda",
    "scalefl",
)  # of one network
BY_LAYER = (  # methods that average layer by layer unless told otherwise
    "feddpa", "fedfomo", "fedgen", "fednova", "fedprox", "fedrep", "fedselect", "incoavg", "knn-per", "moon",
    "scaffold",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run. changes: of the recipe, as `--set` has them. run: how it is carried out."""

    method: str
    changes: tuple[str, ...] = ()
    run: Callable[[Recipe, Path], None] | None = None

    def recipe(self) -> Recipe:
        """The quickstart with a few rounds and the changes."""
        changes = ["training.rounds=4", *_fitting(self.method), *self.changes]
        return Recipe.load(RECIPE, changes, method=self.method)


def _fitting(method: str) -> tuple[str, ...]:
    """What a method needs on the quickstart's networks."""
    if method in ONE:
        return ONE_NETWORK
    if method == "fedhenn-homogeneous":
        return (*ONE_NETWORK, f"methods.{method}.alignment_data.size=200", f"methods.{method}.alignment_data.every=5")
    if method in BY_LAYER:
        return (f"methods.{method}.aggregation=same-shape",)
    return ()


def plain(recipe: Recipe, out: Path) -> None:
    """One process, one client after the other."""
    pf.run(recipe.with_run(executor="serial"), out=out)


def pooled(recipe: Recipe, out: Path) -> None:
    """Two worker processes."""
    pf.run(recipe.with_run(executor="processes", workers=2), out=out)


def stacked(recipe: Recipe, out: Path) -> None:
    """Clients of one network as one."""
    pf.run(recipe.with_run(executor="vectorized", workers=4), out=out)


def resumed(recipe: Recipe, out: Path) -> None:
    """Interrupted in its third round, then resumed."""

    def stop(record: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with contextlib.suppress(pf.errors.RunInterrupted):
        pf.run(recipe.with_run(executor="serial"), out=out, loggers=[stop])
    pf.run(recipe.with_run(executor="serial"), out=out, resume=True)


def deployed(recipe: Recipe, out: Path) -> None:
    """A server and its nodes in this process."""
    from polyfed.deploy.server import serve
    from tests.helpers.nearby import Nearby

    recipe = recipe.with_run(executor="serial")
    with tempfile.TemporaryDirectory() as disks:
        clients = range(recipe.data.num_clients)
        nodes = Nearby(recipe, Path(disks), clients, {number: {"share-model": True} for number in clients})
        serve(recipe, nodes, out=out)


FEATURES: dict[str, Case] = {
    "partial participation": Case("fedavg", ("training.client_fraction=0.4",)),
    "dropped clients": Case("fedgh", ("availability.dropout_rate=0.3", "availability.dropout_stage=after")),
    "joiners": Case("fedproto", ("availability.late_joiners=3", "availability.join_round=3")),
    "devices": Case("fedavg", ("devices.profiles=[\"raspberry-pi\",\"laptop\"]", "devices.round_timeout=1.0")),
    "noise on uploads": Case("fedavg", ("privacy.upload_clip_norm=1.0", "privacy.upload_noise_multiplier=0.5")),
    "DP-SGD": Case("fedavg", ("privacy.max_grad_norm=1.0", "privacy.noise_multiplier=1.0")),
    "median": Case("fedavg", ("robust_aggregation.aggregator=median", "adversaries.sign_flip_fraction=0.2")),
    "Krum": Case("fedavg", ("robust_aggregation.aggregator=multi_krum", "adversaries.label_flip_fraction=0.2")),
    "final round": Case("fedrep", ("methods.fedrep.final_head_epochs=2",)),
    "final average": Case("fedhenn-homogeneous", ("methods.fedhenn-homogeneous.final_average=true",)),
    "early stop": Case("local", ("training.rounds=8", "evaluation.patience=1", "evaluation.min_delta=0.2")),
    "schedule": Case("fedavg", ("training.lr_schedule=cosine",)),
    "one test set": Case("fedavg", ("data.test=global",)),
    **{f"resumed {name}": Case(name, run=resumed) for name in ("fedgh", "fedin", "fedkd")},
    **{f"two workers, {name}": Case(name, run=pooled) for name in ("fedhenn", "fedin", "fedselect", "fedgen")},
    **{f"stacked {name}": Case(name, run=stacked) for name in ("fedavg", "fedgh", "fedhenn", "fml")},
    **{f"deployed {name}": Case(name, ("data.num_clients=3",), deployed) for name in ("fedgh", "fedhenn", "fedavg")},
}  # fmt: skip
CASES: dict[str, Case] = {**{name: Case(name) for name in METHODS}, **FEATURES}


def sums(out: Path) -> dict[str, str]:
    """The three checksums of a run folder."""
    lines = (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    held = [*map(json.loads, lines), json.loads((out / "result.json").read_text(encoding="utf-8"))]
    timeless = [_timeless(record) for record in held]
    values = sorted(json.dumps(value) for record in timeless for value in _leaves(record))
    models = [
        (str(tensor.dtype), list(tensor.shape), tensor.contiguous().view(torch.uint8).flatten().tolist())
        for file in sorted((out / "models").glob("*.safetensors"))
        for tensor in load_file(file).values()
        if tensor.dim()
    ]
    return {"records": _digest(timeless), "values": _digest(values), "models": _digest(sorted(map(_digest, models)))}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [_timeless(inner) for inner in value]
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases and write or compare their checksums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the checksums to this file")
    parser.add_argument("--against", type=Path, help="compare with those in this file")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    before = json.loads(asked.against.read_text(encoding="utf-8")) if asked.against else {}
    found, differing = {}, 0
    for name, case in CASES.items():
        if asked.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (case.run or plain)(case.recipe(), Path(folder) / "run")
            found[name] = sums(Path(folder) / "run")
        known = before.get(name, found[name])
        changed = [kind for kind in found[name] if known.get(kind) != found[name][kind]]
        differing += bool(changed)
        print(f"{name:32}{' '.join(found[name].values())}  {', '.join(changed)}", flush=True)
    missing = [name for name in before if asked.only in name and name not in found]
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if asked.against:
        print(f"{len(found)} cases, {differing} differ" + (f", not run: {', '.join(missing)}" if missing else ""))
    return int(differing > 0 or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
