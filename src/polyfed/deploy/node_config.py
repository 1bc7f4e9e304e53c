"""What a node's configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.registry import suggest

KEYS: Mapping[str, tuple[type, str]] = {
    "client-id": (int, "the number of this node's client, from 0 on"),
    "partition-id": (int, "in place of client-id, as Flower's simulation gives it"),
    "num-partitions": (int, "given by Flower's simulation, not used"),
    "state-dir": (str, "folder on this node's disk for its client's weights, state and models"),
    "data": (str, "this node's own rows, as data.dataset has it; default: its client's part of the recipe's data"),
    "root": (str, "in place of the recipe's data.root"),
    "architecture": (str, "this node's own network, as models.architectures has it; default: the recipe's"),
    "device": (str, "where this node computes, in place of run.device"),
    "begin-anew": (bool, "whether its client begins again where this disk has lost what it was; default: false"),
    "secret-noise": (
        bool,
        "whether [privacy] upload noise is drawn by a secret of this node; default: with data of its own",
    ),
    "answers": (int, "how many different requests of a kind it answers in a round; default: 1 with noise, else 10"),
    "share-model": (bool, "whether its personal model goes into the server's run folder; default: false"),
}


@dataclass(frozen=True)
class NodeConfig:
    """What a node's configuration says; see `KEYS`."""

    client: int
    state: Path
    data: str | None = None
    root: str | None = None
    architecture: str | None = None
    device: str | None = None
    share: bool = False
    anew: bool = False
    secret: bool = False
    answers: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> NodeConfig:
        """From Flower's node configuration.

        Raises:
            ConfigError: an unknown key, a wrong type, no client or no folder.
        """
        for key, value in config.items():
            if key not in KEYS:
                raise ConfigError(f"node-config: unknown key '{key}'{suggest(key, KEYS)}")
            kind, meaning = KEYS[key]
            if type(value) is not kind or value == "":
                raise ConfigError(f"node-config: expected {meaning} as '{key}' ({kind.__name__}), got {value!r}")
        number = config.get("client-id", config.get("partition-id"))
        if number is None or number < 0:
            raise ConfigError(f"node-config: expected client-id, {KEYS['client-id'][1]}, got {number}")
        if config.get("answers", 1) < 1:
            raise ConfigError(f"node-config: expected 1 or more as 'answers', got {config['answers']}")
        if "state-dir" not in config:
            raise ConfigError(f"node-config: expected state-dir, a {KEYS['state-dir'][1]}, which is missing")
        named = {key: config.get(key) for key in ("data", "root", "architecture", "device")}
        return cls(
            number,
            Path(config["state-dir"]),
            **named,
            share=config.get("share-model", False),
            anew=config.get("begin-anew", False),
            secret=config.get("secret-noise", "data" in config),
            answers=config.get("answers"),
        )
