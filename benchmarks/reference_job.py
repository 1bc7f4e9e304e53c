"""The reference job against a bare PyTorch loop that does the same passes over the same models, samples and batches.

    python benchmarks/reference_job.py --batch-size 10 --workers 1
    python benchmarks/reference_job.py --batch-size 64 --workers 2 --methods local,fedavg,fedgh --rounds 3
    python benchmarks/reference_job.py --methods fedavg --model fedgh-cnn1

The job is `recipes/reference.toml`: CIFAR-10, 20 clients of 500 images, five CNNs. The bare loop is what one writes by
hand for it with one computing thread: float images that are normalized already, `torch.optim.SGD` as it comes, no
message, no record, no check; with the method's own passes (class means, the RAD, pairs of features), and one test pass
per stage that is scored. Both make the clients' networks in round 1. The two take turns in one process, and workers are
counted with what they work for. Neither loading the data nor PyTorch's first optimizer counts.

A line of JSON per method: medians of processor and of wall seconds per round, and `ratio_to_bare_loop`, polyfed's over
the bare loop's: of processor time with one worker, of wall time with more. Wall times are worth something on a quiet
machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.models import build

RECIPE = Path(__file__).parents[1] / "recipes" / "reference.toml"
LR, MU, LAMBDA, RAD_ROWS, RAD_BATCH, RAD_EVERY, CHUNK = 0.01, 0.1, 1.0, 1000, 256, 5, 512
Extra = Callable[["One", Tensor, Tensor, int], Tensor]  # (client, images, labels, step) -> a loss beside the task's


class One:
    """A client of the bare loop: its own network, its images as floats."""

    def __init__(self, client: Client, classes: int) -> None:
        train, test = client.data.train, client.data.test
        self.x, self.y = client.prepare(train.x), train.y
        self.test_x, self.test_y = client.prepare(test.x), test.y
        self.kind, self.classes = client.architecture, classes
        self.before: list[Tensor] = []

    def begin(self) -> None:
        """Make the network, its weights laid out as PyTorch does by itself."""
        made = build(self.kind, tuple(self.x.shape[1:]), self.classes)
        self.model: Any = made.to(memory_format=torch.contiguous_format)

    def epoch(self, batch_size: int, extra: Extra | None) -> None:
        """One pass over the training images, in random order."""
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        for step, rows in enumerate(torch.randperm(len(self.x)).split(batch_size)):
            x, y = self.x[rows], self.y[rows]
            optimizer.zero_grad()
            z = self.model.represent(x)
            loss = functional.cross_entropy(self.model.head(z), y)
            if extra is not None:
                loss = loss + extra(self, z, y, step)
            loss.backward()
            optimizer.step()

    def features(self, x: Tensor) -> Tensor:
        """Representations, without gradient."""
        self.model.eval()
        with torch.no_grad():
            return torch.cat([self.model.represent(rows) for rows in x.split(CHUNK)])

    def test(self) -> int:
        """How many test images it gets right."""
        return int((self.model.head(self.features(self.test_x)).argmax(1) == self.test_y).sum())


class Bare:
    """The job by hand: `round()` is one round of `method` over all clients."""

    def __init__(self, method: str, federation: Federation, batch_size: int) -> None:
        torch.manual_seed(0)
        self.method, self.batch_size = method, batch_size
        self.clients = [One(client, federation.classes) for client in federation.clients]
        public = federation.clients[0].public
        self.rad = None if public is None else public.prepare(public.samples.x[:RAD_ROWS])
        self.factor = self.prototypes = torch.empty(0)
        self.pairs: tuple[Tensor, Tensor] | None = None
        self.rounds = 0

    def round(self) -> None:
        """Everybody trains, in round 1 a new network; then what the method adds; then the test passes."""
        if not self.rounds:
            for one in self.clients:
                one.begin()
        extra: Extra | None = getattr(self, f"_{self.method}", None)
        started = self.rounds > 0
        if self.method == "fedhenn" and started:
            self._kernels()
        for one in self.clients:
            one.before = [p.detach().clone() for p in one.model.parameters()] if self.method == "fedin" else []
            one.epoch(self.batch_size, extra if started or self.method == "fedin" else None)
            if self.method in ("fedgh", "fedproto"):
                self._class_means(one)
        if self.method == "fedin":
            self._exchange_pairs()
        own = sum(one.test() for one in self.clients)
        if self.method in ("fedavg", "fedin"):
            self._average()
        if self.method != "local":
            own += sum(one.test() for one in self.clients)  # as received
        self.rounds += 1

    def _class_means(self, one: One) -> None:
        means = torch.zeros(10, one.model.feature_dim).index_add_(0, one.y, one.features(one.x))
        self.prototypes = means / torch.bincount(one.y, minlength=10).clamp(min=1)[:, None]

    def _fedproto(self, one: One, z: Tensor, y: Tensor, step: int) -> Tensor:
        apart: Tensor = functional.mse_loss(z, self.prototypes[y])
        return LAMBDA * apart

    def _kernels(self) -> None:
        """The factor of the mean kernel of all clients' representations of the RAD."""
        columns = []
        for one in self.clients:
            a = one.features(self.rad)  # type: ignore[arg-type]
            a = a - a.mean(0)
            columns.append(a / (a.T @ a).norm().sqrt())
        whole = torch.cat(columns, dim=1)
        values, vectors = torch.linalg.eigh(whole @ whole.T)
        self.factor = vectors[:, -128:] * values[-128:].clamp(min=0).sqrt()

    def _fedhenn(self, one: One, z: Tensor, y: Tensor, step: int) -> Tensor:
        if step % RAD_EVERY:
            return torch.zeros(())
        rows = torch.randperm(RAD_ROWS)[:RAD_BATCH]
        a = one.model.represent(self.rad[rows])  # type: ignore[index]
        f = self.factor[rows]
        a, f = a - a.mean(0), f - f.mean(0)
        apart: Tensor = 1 - (a.T @ f).square().sum() / ((a.T @ a).norm() * (f.T @ f).norm())
        return 0.001 * apart

    def _exchange_pairs(self) -> None:
        some = self.clients[0].x[: self.batch_size]
        with torch.no_grad():
            s_in = [one.model.extract(some) for one in self.clients]
            s_out = [one.model.transform(s) for one, s in zip(self.clients, s_in, strict=True)]
        self.pairs = s_in[0].clone(), s_out[0].clone()

    def _fedin(self, one: One, z: Tensor, y: Tensor, step: int) -> Tensor:
        loss = torch.zeros(())
        for p, before in zip(one.model.parameters(), one.before, strict=True):
            loss = loss + MU / 2 * (p - before).square().sum()
        if self.pairs is not None:
            loss = loss + functional.mse_loss(one.model.transform(self.pairs[0]), self.pairs[1])
        return loss

    def _average(self) -> None:
        for kind in dict.fromkeys(one.kind for one in self.clients):
            states = [one.model.state_dict() for one in self.clients if one.kind == kind]
            mean = {name: sum(s[name] for s in states) / len(states) for name in states[0]}
            for one in self.clients:
                if one.kind == kind:
                    one.model.load_state_dict(mean)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Processor seconds, of this process and of children that have ended, and wall seconds."""
    cpu, began = sum(os.times()[:4]), time.perf_counter()
    work()
    return sum(os.times()[:4]) - cpu, time.perf_counter() - began


def measure(method: str, recipe: Recipe, data: DataCache, batch_size: int, repeats: int) -> dict[str, Any]:
    """The medians over `repeats` turns of the bare loop and of polyfed."""
    chosen = recipe.choose(method)
    rounds = chosen.training.rounds
    bare_s, ours_s = [], []
    for _ in range(repeats):
        loop, federation = (
            Bare(method, build_federation(chosen, data=data), batch_size),
            build_federation(chosen, data=data),
        )
        bare_s.append(timed(lambda loop=loop: [loop.round() for _ in range(rounds)]))  # type: ignore[misc]
        ours_s.append(timed(federation.run))
    bare, ours = ([median(turn[i] for turn in turns) / rounds for i in (0, 1)] for turns in (bare_s, ours_s))
    workers = federation.executor.workers
    cpu, wall = ours[0] / bare[0], ours[1] / bare[1]
    return {
        "method": method,
        "batch_size": batch_size,
        "workers": workers,
        "rounds": rounds,
        "bare_cpu_s": bare[0],
        "bare_wall_s": bare[1],
        "cpu_s": ours[0],
        "wall_s": ours[1],
        "cpu_ratio": cpu,
        "wall_ratio": wall,
        "ratio_to_bare_loop": cpu if workers == 1 else wall,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure every method asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", default="local,fedavg,fedgh,fedproto,fedhenn,fedin", metavar="A,B,...", help="[all]"
    )
    parser.add_argument("--batch-size", type=int, default=10, help="[10]")
    parser.add_argument("--workers", type=int, default=1, help="[1]")
    parser.add_argument("--rounds", type=int, default=2, help="of either's turn [2]")
    parser.add_argument("--repeats", type=int, default=3, help="turns, of which the median counts [3]")
    parser.add_argument("--model", metavar="NAME", help="one architecture for all clients [the recipe's five]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the recipe"
    )
    asked = parser.parse_args(words)
    if asked.rounds < 1 or asked.repeats < 1:
        parser.error("expected at least 1 round and 1 repeat")
    methods = list(dict.fromkeys(asked.methods.split(",")))
    if unknown := [m for m in methods if m not in ("local", "fedavg", "fedgh", "fedproto", "fedhenn", "fedin")]:
        parser.error(f"expected methods that the bare loop knows, got '{unknown[0]}'")
    settings = [f"training.batch_size={asked.batch_size}", f"training.rounds={asked.rounds}"]
    settings += [f"run.workers={asked.workers}", f"run.executor={'serial' if asked.workers == 1 else 'processes'}"]
    settings += [f"models.architectures={json.dumps([asked.model])}"] if asked.model else []
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    data, rows = DataCache(), []
    try:
        recipe = Recipe.load(str(RECIPE), [*settings, *asked.set])
        for method in methods:
            rows.append(measure(method, recipe, data, asked.batch_size, asked.repeats))
            print(json.dumps(rows[-1]), flush=True)
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    names = f"{'bare cpu':>10}{'cpu':>8}{'ratio':>7}{'bare wall':>11}{'wall':>8}{'ratio':>7}"
    print(f"\n{'method':10}{'batch':>6}{'workers':>8}{names}")
    for r in rows:
        cpu = f"{r['bare_cpu_s']:10.2f}{r['cpu_s']:8.2f}{r['cpu_ratio']:7.2f}"
        wall = f"{r['bare_wall_s']:11.2f}{r['wall_s']:8.2f}{r['wall_ratio']:7.2f}"
        print(f"{r['method']:10}{r['batch_size']:6}{r['workers']:8}{cpu}{wall}")


if __name__ == "__main__":
    main()
