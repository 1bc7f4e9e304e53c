"""Nodes in this process: a wire that carries envelopes to them at once, and faults to put on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.deploy.node import Node
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.node_registry import EVENT_LOG, Answer
from polyfed.deploy.protocol import Envelope, NodeError
from polyfed.errors import PolyfedError
from polyfed.experiments.data_cache import DataCache

DATA = DataCache()  # kept between envelopes, and between tests
FIRST_NODE = 1000  # nodes' numbers are not those of clients
# node and envelope -> what comes back instead, None: what the node says
Fault = Callable[[int, Envelope], Answer | None]

SETTINGS: Mapping[str, Any] = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "limit_train": 120,
        "min_samples": 6,
        "partition": "dirichlet",
        "dirichlet_alpha": 0.5,
    },
    "models": {"architectures": ["digits-cnn1", "digits-cnn2", "digits-cnn3"]},
    "method": {"name": "local"},
    "training": {"rounds": 2, "batch_size": 16, "lr": 0.05},
    "run": {"executor": "serial", "seed": 3},
}


def recipe_of(method: str = "local", *, hyperparameters: Mapping[str, Any] | None = None, **sections: Any) -> Recipe:
    """A small recipe: three clients with digits; sections are laid over it key by key."""
    settings = {name: {**value, **sections.pop(name, {})} for name, value in SETTINGS.items()} | sections
    settings["method"] = {"name": method, **(hyperparameters or {})}
    return Recipe.from_dict(settings)


def own_recipe(folder: Path, module: str) -> Recipe:
    """The same with a method and a network of one's own, whose module is written into the folder."""
    (folder / f"{module}.py").write_text(
        "from polyfed.methods import FedGH\n"
        "from torch import nn\n\n\n"
        "class Mine(FedGH):\n    pass\n\n\n"
        "def net(in_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, classes))\n"
    )
    own = {"method": {"name": f"{module}:Mine"}, "models": {"architectures": [f"{module}:net"]}}
    return Recipe.from_dict({**SETTINGS, **own}, beside=[str(folder)])


class Nearby:
    """A wire to nodes in this process.

    Args:
        recipe: the nodes'. folder: for their disks. clients: which are there. configs: further node configuration.

    Attributes:
        fault: asked before an envelope reaches its node. sent: all envelopes, with their nodes. away: nodes that are
            off. last: what each node last answered.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        clients: Sequence[int] = (0, 1, 2),
        configs: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self.configs: dict[int, dict[str, Any]] = {}
        for client in clients:
            self.add(client, **(configs or {}).get(client, {}))
        self.fault: Fault = lambda node, envelope: None
        self.sent: list[tuple[int, Envelope]] = []
        self.away: set[int] = set()
        self.last: dict[int, Envelope] = {}
        self._answers: dict[str, Answer] = {}

    def add(self, client: int, node: int | None = None, **config: Any) -> None:
        """One more node."""
        number = FIRST_NODE + client if node is None else node
        own = {"client-id": client, "state-dir": str(self.folder / f"node-{client}")}
        self.configs[number] = own | {key.replace("_", "-"): value for key, value in config.items()}

    def nodes(self) -> set[int]:
        return set(self.configs) - self.away

    def send(self, envelopes: Sequence[tuple[int, Envelope]], seconds: float) -> list[str]:
        names = []
        for node, envelope in envelopes:
            self.sent.append((node, envelope))
            names.append(str(len(self.sent)))
            answer = self.fault(node, envelope) or self.ask(node, _traveled(envelope))
            if answer != "silence":
                self._answers[names[-1]] = answer if isinstance(answer, NodeError) else _traveled(answer)
            if isinstance(answer, Envelope):
                self.last[node] = answer
        return names

    def ask(self, node: int, envelope: Envelope) -> Answer:
        """What the node says."""
        try:
            return Node(self.recipe, NodeConfig(**self.configs[node]), DATA).answer(envelope)
        except PolyfedError as error:
            return NodeError(error)

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        return {name: self._answers.pop(name) for name in names if name in self._answers}

    def kinds(self) -> list[str]:
        """The envelopes' kinds, in the order in which they were sent."""
        return [envelope.kind for _, envelope in self.sent]


def event_log(out: Path) -> list[dict[str, Any]]:
    """The lines of a run folder's nodes.jsonl."""
    return [json.loads(line) for line in (out / EVENT_LOG).read_text().splitlines()]


def _traveled(envelope: Envelope) -> Envelope:
    """The envelope with its facts as they come out of JSON."""
    return Envelope(envelope.kind, json.loads(json.dumps(envelope.facts)), envelope.body)
