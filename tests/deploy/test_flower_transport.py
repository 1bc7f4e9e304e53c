"""The two apps, with Flower's own messages and a grid that hands them over at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from polyfed.config.recipe import Recipe
from polyfed.deploy import flower_transport
from polyfed.deploy.flower_transport import FlowerTransport, RunConfig, answering, make_server_app
from polyfed.deploy.node import Node
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.protocol import Envelope
from polyfed.engine.federation import Run
from polyfed.engine.run import History
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError
from tests.deploy.test_server import same
from tests.helpers.nearby import DATA, recipe_of
from tests.helpers.on_flower import WITH_FLOWER
from tests.helpers.refusals import refusal


def test_without_flower_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"polyfed\[flower\]"):
        make_server_app("recipe.toml")


def node_of(recipe: Recipe) -> Any:
    """What answers Flower's messages as `polyfed deploy node` does."""

    def answered(message: Any, context: Any) -> Any:
        return answering(lambda envelope: Node(recipe, NodeConfig(**context.node_config), DATA).answer(envelope))(
            message
        )

    return answered


class Grid:
    """Carries messages to nodes at once; what is asked of it and what it says are Flower's own."""

    def __init__(self, app: Any, run_config: dict[str, Any], folder: Path, clients: Iterable[int]) -> None:
        from flwr.app import Context, RecordDict

        self.app, self.replies = app, dict[str, Any]()
        self.contexts = {
            10 + k: Context(
                run_id=1,
                node_id=10 + k,
                node_config={"client-id": k, "state-dir": str(folder / f"node-{k}")},
                state=RecordDict(),
                run_config=run_config,
            )
            for k in clients
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        names = []
        for message in messages:
            name = str(len(self.replies) + 1)
            message.metadata.__dict__["_message_id"] = name
            received = _over_the_wire(message)
            self.replies[name] = _over_the_wire(self.app(received, self.contexts[message.metadata.dst_node_id]))
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        return [self.replies[name] for name in names]


def _over_the_wire(message: Any) -> Any:
    """The message as it comes out of Flower's own bytes."""
    from flwr.common.serde import message_from_proto, message_to_proto

    sent = message_to_proto(message)
    return message_from_proto(type(sent).FromString(sent.SerializeToString()))


def flown(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Grid:
    """Run a recipe with both apps, one node per client; the grid that carried it."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    settings = RunConfig(**{"out": str(folder / "out"), **config}).model_dump(by_alias=True)
    grid = Grid(node_of(recipe), settings, folder, range(3))
    make_server_app(recipe)(grid, grid.contexts[10])
    return grid


@WITH_FLOWER
@pytest.mark.parametrize("small", [0, 2**30])
def test_both_apps_give_the_run_of_one_process(small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages beside the facts and as arrays."""
    monkeypatch.setattr(flower_transport, "_SMALL", small)
    recipe = recipe_of("fedhenn", data={"holdout": 20}, hyperparameters={"alignment_data": {"size": 10}})
    flown(recipe, tmp_path, monkeypatch)
    folder = RunFolder(tmp_path / "out")
    result = folder.read_result()
    assert result is not None
    same(recipe, Run(result, History(folder.rounds(2)), {}, folder.path, {}), tmp_path)


@WITH_FLOWER
def test_a_nodes_trouble_comes_back_as_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    grid = Grid(node_of(recipe_of("local")), {}, tmp_path, [0])
    grid.contexts[10].node_config["client-idd"] = 1
    wire = FlowerTransport(grid)  # type: ignore[arg-type]
    (name,) = wire.send([(10, Envelope("hello", {"settings": {}}))], 5.0)
    assert wire.collect([name])[name] == "unknown key 'node-config.client-idd'; did you mean 'client-id'?"
    del grid.contexts[10].node_config["client-idd"]
    nested = ConfigRecord({flower_transport.FACTS: "[" * 100_000})
    text = ConfigRecord({flower_transport.FACTS: '{"kind":"train"}', "body": "text"})
    lacking = ConfigRecord({flower_transport.FACTS: '{"kind":"train"}'})
    records = [{"x": ConfigRecord({"y": 1})}, *({flower_transport.RECORD: each} for each in (nested, text, lacking))]
    for strange in records:
        (stray,) = grid.push_messages([Message(RecordDict(strange), 10, "query.hello")])
        assert "expected an envelope of polyfed's" in str(wire.collect([stray])[stray])
    monkeypatch.setattr(flower_transport, "MAX_FACTS_BYTES", 1000)
    long = ConfigRecord({flower_transport.FACTS: "[" * 1001})
    (stray,) = grid.push_messages([Message(RecordDict({flower_transport.RECORD: long}), 10, "query.hello")])
    assert "expected facts of at most 1000 bytes, got 1001" in str(wire.collect([stray])[stray])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"deadlin": 1.0}, "unknown key 'run-config.deadlin'; did you mean 'deadline'?"),
        ({"resume": 1}, "run-config.resume: expected true or false, got 1"),
        ({"deadline": -1.0}, "run-config.deadline: expected more than 0, got -1.0"),
    ],
)
def test_wrong_run_configuration_is_one_line(given: dict[str, Any], line: str) -> None:
    assert refusal(lambda: RunConfig(**given)) == line
