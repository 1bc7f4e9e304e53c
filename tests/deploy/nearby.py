"""Nodes in this process: a wire that carries letters to them at once, and faults to put on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.deploy.node import Node
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Letter, Trouble
from polyfed.errors import PolyfedError
from polyfed.experiments.data_cache import DataCache

DATA = DataCache()  # kept between letters, and between tests
FIRST_NODE = 1000  # nodes' numbers are not those of clients
Fault = Callable[[int, Letter], Answer | None]  # node and letter -> what comes back instead, None: what the node says

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
        fault: asked before a letter reaches its node. sent: all letters, with their nodes. away: nodes that are off.
        last: what each node last answered.
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
        self.fault: Fault = lambda node, letter: None
        self.sent: list[tuple[int, Letter]] = []
        self.away: set[int] = set()
        self.last: dict[int, Letter] = {}
        self._answers: dict[str, Answer] = {}

    def add(self, client: int, node: int | None = None, **config: Any) -> None:
        """One more node."""
        number = FIRST_NODE + client if node is None else node
        own = {"client-id": client, "state-dir": str(self.folder / f"node-{client}")}
        self.configs[number] = own | {key.replace("_", "-"): value for key, value in config.items()}

    def nodes(self) -> set[int]:
        return set(self.configs) - self.away

    def send(self, letters: Sequence[tuple[int, Letter]], seconds: float) -> list[str]:
        names = []
        for node, letter in letters:
            self.sent.append((node, letter))
            names.append(str(len(self.sent)))
            answer = self.fault(node, letter) or self.ask(node, _traveled(letter))
            if answer != "silence":
                self._answers[names[-1]] = answer if isinstance(answer, Trouble) else _traveled(answer)
            if isinstance(answer, Letter):
                self.last[node] = answer
        return names

    def ask(self, node: int, letter: Letter) -> Answer:
        """What the node says."""
        try:
            return Node(self.recipe, NodeConfig.read(self.configs[node]), DATA).answer(letter)
        except PolyfedError as error:
            return Trouble(error)

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        return {name: self._answers.pop(name) for name in names if name in self._answers}

    def kinds(self) -> list[str]:
        """The letters' kinds, in the order in which they were sent."""
        return [letter.kind for _, letter in self.sent]


def _traveled(letter: Letter) -> Letter:
    """The letter with its facts as they come out of JSON."""
    return Letter(letter.kind, json.loads(json.dumps(letter.facts)), letter.body)
