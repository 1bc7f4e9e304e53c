"""What does a method send, and how many networks does it hold, beside the others? After table 3 of the FedIN paper.

    python examples/overheads.py recipes/fedin/table3.toml
    python examples/overheads.py recipes/fedin/table3-slices.toml

Two rounds of a recipe are run with each of its methods, nothing is written, and the second round is measured:

    up, down   parameters in a client's messages, mean over the clients: all floating-point numbers but BatchNorm's
               statistics (control variates and features count)
    bytes up   of a client's messages with all that is in them, mean over the clients
    networks   MiB of the clients' own networks, sum over the clients
    kept       MiB of what they keep between rounds: networks and states
    training   MiB of what they hold at the end of training: networks, states, what `receive` and the steps made;
               without data, activations, gradients and the optimizer's own, which come on top with every method
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, flatten, nbytes
from polyfed.core.method import TrainingResult
from polyfed.engine.executors.executor import ExecutorSetup, RunJobs
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.executors.serial import Serial
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.testing.observation import Spy

ROUNDS = 2  # the first message of some methods is smaller than the later ones
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One line of the table; see the top of this file."""

    method: str
    up: float
    down: float
    bytes_up: float
    networks: float
    kept: float
    training: float


@dataclass
class Scales:
    """Looks on while a client works in the last round. All by client; parameters, then bytes."""

    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    networks: dict[int, int] = field(default_factory=dict)
    training: dict[int, int] = field(default_factory=dict)

    def receive(self, call: Any, client: Client, message: Message) -> Any:
        """Around `Method.receive`."""
        if client.round == ROUNDS:
            self.down[client.id] = self.down.get(client.id, 0) + parameters(message, client.model)
        return call(client, message)

    def upload(self, call: Any, client: Client, trained: TrainingResult) -> Message:
        """Around `Method.upload`."""
        held = [client.model, client.state, client.context, trained.sums]
        message: Message = call(client, trained)
        if client.round == ROUNDS:
            self.up[client.id] = self.up.get(client.id, 0) + parameters(message, client.model)
            self.bytes_up[client.id] = self.bytes_up.get(client.id, 0) + nbytes(message)
            self.networks[client.id] = size(client.model)
            self.training[client.id] = max(self.training.get(client.id, 0), size(held))
        return message


def parameters(message: Message, network: nn.Module) -> int:
    """Floating-point numbers of a message, without those that are named like the network's buffers."""
    statistics = {name for name, _ in network.named_buffers()}
    sent = {name: tensor for name, tensor in flatten(message).items() if name.partition("/")[2] not in statistics}
    return sum(tensor.numel() for tensor in sent.values() if tensor.is_floating_point())


def size(thing: object) -> int:
    """Bytes of all tensors in it, each memory once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(thing)}.values())


def tensors(thing: object) -> Iterator[Tensor]:
    """All tensors in mappings, sequences and networks, one within the other."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from tensors(vars(thing))
    elif isinstance(thing, Mapping | tuple | list):
        for part in thing.values() if isinstance(thing, Mapping) else thing:
            yield from tensors(part)


class Watching:
    """Clients work as a watched method says; they are scored by the method itself, as a score sends nothing.

    `federation` is to be set before the run.
    """

    federation: Federation

    def __init__(self, scales: Scales) -> None:
        self._scales = scales

    def around(self, unwatched: RunJobs) -> RunJobs:
        """Work that is watched, in place of an executor's `run`."""

        def run(jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
            federation = self.federation
            watched = Spy(federation.method, receive=self._scales.receive, upload=self._scales.upload)
            setup = ExecutorSetup(watched, federation.model_factory, federation.clients, federation.store)
            return Serial(setup).run(jobs, done)

        return run


def weighed(name: str, recipe: Recipe, data: DataCache) -> Row:
    """Run a recipe with somebody looking on."""
    scales = Scales()
    watching = Watching(scales)
    federation = watching.federation = build_federation(recipe, data=data, wrap=watching.around)
    federation.run()
    kept = sum(nbytes(client.weights or {}) + size(client.state) for client in federation.clients)  # rows have gaps
    return Row(
        method=name,
        up=mean(scales.up.values()),
        down=mean(scales.down.values()),
        bytes_up=mean(scales.bytes_up.values()),
        networks=sum(scales.networks.values()) / MIB,
        kept=kept / MIB,
        training=sum(scales.training.values()) / MIB,
    )


def main() -> None:
    """Print the table, or its rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--methods", metavar="A,B,...", help="of the recipe's [methods]; default: all of them")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, data = [], DataCache()
    try:
        short = [f"training.rounds={ROUNDS}", f"evaluation.every_n_rounds={ROUNDS}"]
        recipe = Recipe.load(arguments.recipe, [*arguments.set, *short])
        names = arguments.methods.split(",") if arguments.methods else recipe.variants()
        chosen = {name: recipe.choose(name) for name in names}
        for name, one in chosen.items():
            rows.append(weighed(name, one, data))
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    heads = "  ".join(f"{head:>13s}" for head in ("up", "down", "bytes up"))
    print(f"{'method':12s}  {heads}  {'networks':>8s}  {'kept':>8s}  {'training':>8s}")
    for row in rows:
        sent = "  ".join(f"{count:13,.1f}".replace(",", " ") for count in (row.up, row.down, row.bytes_up))
        print(f"{row.method:12s}  {sent}  {row.networks:8.1f}  {row.kept:8.1f}  {row.training:8.1f}")


if __name__ == "__main__":
    main()
