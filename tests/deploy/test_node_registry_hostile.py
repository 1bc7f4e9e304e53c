"""One registered node ends nothing: what it says of itself or answers is refused in a line, and the others go on."""

from __future__ import annotations

import contextlib
import json
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.message import State, flatten, unflatten
from polyfed.deploy.node_executor import NodeExecutor
from polyfed.deploy.node_registry import EVENT_LOG, Answer, EventLog, NodeRegistry
from polyfed.deploy.protocol import Envelope, read_message
from polyfed.deploy.server import serve
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.plugin import read_uploads
from polyfed.engine.round_state import Round
from polyfed.engine.wire import encode
from polyfed.errors import ConfigError
from polyfed.registry import METHODS
from tests.deploy.test_server import ONE, SMALL, troubles
from tests.helpers.nearby import FIRST_NODE, Nearby, event_log, recipe_of
from tests.helpers.refusals import refusal

BAD = FIRST_NODE + 1
Change = Callable[[State, dict[str, Any]], bool]  # of a message and its facts; whether there was anything to change


# what a client answers ----------------------------------------------------------------------------------------------


def first_floats(message: State) -> tuple[dict[str, Any], str] | None:
    """Where the first tensor of floats lies that is no single number: its mapping, and its name there."""
    for name, value in message.items():
        group = message if isinstance(value, Tensor) else value
        names = [name] if isinstance(value, Tensor) else list(value)
        for each in names:
            tensor = group[each]
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim():
                return group, each
    return None


def floats_become(change: Callable[[Tensor], Tensor]) -> Change:
    def made(message: State, facts: dict[str, Any]) -> bool:
        place = first_floats(message)
        if place is not None:
            group, name = place
            group[name] = change(group[name])
        return place is not None

    return made


def twice_as_long(message: State, facts: dict[str, Any]) -> bool:
    """Every tensor with its rows once more."""
    doubled = {name: torch.cat([t, t]) if t.dim() else t for name, t in flatten(message).items()}
    message.update(unflatten(doubled))
    return first_floats(message) is not None


def renamed(message: State, facts: dict[str, Any]) -> bool:
    place = first_floats(message)
    if place is not None:
        group, name = place
        group[f"{name}x"] = group.pop(name)
    return place is not None


def extra(message: State, facts: dict[str, Any]) -> bool:
    message["surplus"] = torch.ones(3)
    return True


def filled(name: str, value: int) -> Change:
    """An entry, where there is one of this name, of this number alone."""

    def made(message: State, facts: dict[str, Any]) -> bool:
        if name in message:
            message[name] = torch.full_like(message[name], value)  # type: ignore[arg-type]
        return name in message

    return made


def many_groups(message: State, facts: dict[str, Any]) -> bool:
    message.update({f"group {i}": {} for i in range(50_000)})
    return True


def tell(**facts_: Any) -> Change:
    def made(message: State, facts: dict[str, Any]) -> bool:
        facts.update(facts_)
        return True

    return made


def score_of(rows: int) -> dict[str, Any]:
    figures = {"accuracy": 1.0, "balanced_accuracy": 1.0, "f1": 1.0}
    return {"test": {"total": rows, "figures": figures, "others": {}, "classes": 0, "pairs": []}}


ODD: Mapping[str, Change] = {
    "twice as long": twice_as_long,
    "huge": floats_become(lambda t: torch.full_like(t, 1e300 if t.dtype == torch.float64 else 1e30)),
    "NaN": floats_become(lambda t: torch.full_like(t, float("nan"))),
    "complex": floats_become(lambda t: t.to(torch.complex64)),
    "whole numbers": floats_become(lambda t: t.long()),
    "a single number": floats_become(lambda t: torch.tensor(1.0)),
    "nothing in it": floats_become(lambda t: t.new_zeros((0, *t.shape[1:]))),
    "renamed": renamed,
    "a name more": extra,
    "labels of 10^9": filled("labels", 10**9),
    "2^40 rows": filled("n", 2**40),
    "50 000 groups": many_groups,
    "a score of 2^62 rows": tell(score=score_of(2**62)["test"]),
    "a score of too few rows": tell(score=score_of(0)["test"]),
    "a score that is none": tell(score={}),
    "sums of NaN": tell(sums={"distance": float("nan")}),
    "sums of 1e300": tell(sums={"distance": 1e300}),
    "a loss of 1e308": tell(loss=1e308),
    "a loss that is none": tell(loss=float("nan")),
}
FAST = {"fedavg", "fedgh"}


def read(nodes: NodeExecutor, job: TrainJob, answer: Envelope) -> JobResult:
    """What the server reads of an answer."""
    federation = nodes.federation
    round = Round(
        job.round,
        final=job.is_final,
        method=federation.method,
        server=federation.server,
        history=[],
        present=[],
        evaluated=False,
    )
    (result,) = read_uploads(federation.plugins, round, [job], [nodes.read_outcome(job, answer)])
    return result


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in FAST else pytest.mark.slow) for m in METHODS])
def test_no_odd_answer_counts_or_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Every change to one client's answer, in every exchange; what the server is stays as it was."""
    data = {"limit_train": 400, "holdout": 40}
    recipe = recipe_of(method, **ONE, data=data, hyperparameters=SMALL.get(method), training={"rounds": 1})
    wire = Nearby(recipe, tmp_path)
    seen: list[str] = []
    honest = NodeExecutor.run

    def run(self: NodeExecutor, jobs: Any, done: Any) -> Any:
        outcomes = honest(self, jobs, done)
        job, own = next((job, o) for job, o in zip(jobs, outcomes, strict=True) if job.client.id == 1)
        assert own.counts, own.refused
        answer = wire.last[BAD]
        for what, change in ODD.items():
            message, facts = read_message(answer.body), json.loads(json.dumps(answer.facts))
            state = {name: id(value) for name, value in self.federation.server.state.items()}
            if not change(message, facts):
                continue
            judged = read(self, job, Envelope("train", facts, encode(message)))
            assert not judged.counts, f"{what} counts in '{job.exchange.name}'"
            assert judged.refused is None or "\n" not in judged.refused
            assert {name: id(value) for name, value in self.federation.server.state.items()} == state
            seen.append(what)
        message, facts = read_message(answer.body), dict(answer.facts)
        twice_as_long(message, facts)
        extra(message, facts)
        odd = self.read_outcome(job, Envelope("train", facts, encode(message)))
        return [odd if o.client_id == 1 else o for o in outcomes]

    monkeypatch.setattr(NodeExecutor, "run", run)
    done = serve(recipe, wire, out=tmp_path / "out", deadline=5)
    assert len(done.history) == 1 + bool(recipe.chosen_method.final_exchanges())
    assert {"a name more", "a score of 2^62 rows", "a loss of 1e308", "50 000 groups"} <= {*seen}
    assert {entry["client"] for entry in done.history[0]["refused"]} == {1}
    assert set(done.history[0]["accuracy"]) == {recipe.chosen_method.evaluation_stage}
    assert all("\n" not in reason for _, _, reason in troubles(tmp_path / "out"))


def test_scores_that_cannot_be_are_dropped(tmp_path: Path) -> None:
    """In an answer of scores alone, as where the received model is scored."""
    kept = score_of(2**62)
    recipe = recipe_of("fedavg", **ONE, training={"rounds": 1})
    wire = Nearby(recipe, tmp_path)
    wire.fault = lambda node, envelope: Envelope("score", kept) if (node, envelope.kind) == (BAD, "score") else None
    done = serve(recipe, wire, out=tmp_path / "out", deadline=5)
    assert done.history[0]["accuracy"]["received"]["n"] == 2
    assert (
        ", got something else: accuracy, balanced_accuracy, f1 of 4611686018427387904 rows"
        in troubles(tmp_path / "out")[0][2]
    )


def test_a_shared_model_of_another_network_is_left_out(tmp_path: Path) -> None:
    recipe = recipe_of("local", training={"rounds": 1})
    wire = Nearby(recipe, tmp_path, configs={k: {"share-model": True} for k in range(3)})
    bad = Envelope("finish", {"shared": True}, encode({"personal": [{"x": torch.ones(2)}, {}]}))
    wire.fault = lambda node, envelope: bad if (node, envelope.kind) == (BAD, "finish") else None
    serve(recipe, wire, out=tmp_path / "out", deadline=5)
    files = sorted(path.name for path in (tmp_path / "out" / "models").glob("*.safetensors"))
    assert files == ["personal-000.safetensors", "personal-002.safetensors"]
    assert "as the model's" in troubles(tmp_path / "out")[0][2]


# what a node says of itself -----------------------------------------------------------------------------------------


def greeted(wire: Nearby, recipe: Recipe, folder: Path, count: int = 3) -> tuple[NodeRegistry, list[str]]:
    """A registry after everybody has said hello, and what it told."""
    said: list[str] = []
    found = NodeRegistry(recipe, wire, 5.0, EventLog(folder / EVENT_LOG, False), count, said.append)
    found.poll()
    return found, said


def lying(wire: Nearby, node: int, **claim: Any) -> None:
    """The node's own introduction, with something else in it."""

    def fault(to: int, envelope: Envelope) -> Answer | None:
        if (to, envelope.kind) != (node, "hello"):
            return None
        own = wire.ask(node, envelope)
        assert isinstance(own, Envelope)
        return replace(own, facts={**own.facts, **claim})

    wire.fault = fault


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ({"train": 2**40}, "got others at 'train'"),
        ({"words": 2**40}, "got others at 'words'"),
        (
            {"class_names": [str(i) for i in range(2_000)]},
            "expected the classes ['0', '1', '2', '3', '4', '5', ...], got",
        ),
        ({"class_names": [str(i) for i in range(20_000)]}, "got others at 'class_names'"),
        ({"feature_dim": 2**20, "class_names": [str(i) for i in range(2_000)]}, "numbers in a head, got 2098200576"),
        ({"shape": [2**14, 2**14]}, "expected at most 4194304 numbers in an input"),
        ({"mean": [float("nan")], "std": [1.0]}, "got others at 'mean.0'"),
        ({"std": [0.0]}, "expected one positive std per mean"),
        ({"token": "x"}, "got others at 'token'"),
    ],
)
def test_a_hello_that_cannot_be_is_turned_away(tmp_path: Path, claim: Mapping[str, Any], reason: str) -> None:
    names = [str(i) for i in range(10)]
    recipe = recipe_of("local", data={"class_names": names})
    wire = Nearby(recipe, tmp_path)
    lying(wire, BAD, **claim)
    found, said = greeted(wire, recipe, tmp_path)
    assert set(found.known) == {0, 2}
    assert len(said) == 1
    assert reason in said[0]
    assert "\n" not in said[0]
    assert len(said[0]) < 1100


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Within the block this process gets half a gigabyte more than it has, and an error for anything beyond."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + 2**29, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_no_number_of_rows_that_a_node_claims_takes_memory(tmp_path: Path) -> None:
    recipe = recipe_of("fedproto", training={"rounds": 1}, models={"feature_dim": 8})
    wire = Nearby(recipe, tmp_path)
    lying(wire, BAD, train=2**31, validation=2**31, test=2**31)
    with little_memory():
        done = serve(recipe, wire, out=tmp_path / "out", deadline=5)
    assert done.history[0]["clients"] == [0, 1, 2]
    assert "turned away" not in (tmp_path / "out" / EVENT_LOG).read_text()


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ({"shape": [3]}, "client 1: digits-cnn2 needs images"),
        ({"feature_dim": 7}, "client 1: expected 'digits-cnn2' with 8 features, got 7"),
        ({"architecture": "own:net", "linear": False}, "client 1: expected a linear layer with biases as the head"),
        ({"class_names": ["a", "b"]}, "client 1: expected the classes"),
        ({"shape": [1, 2**9, 2**10]}, "client 1: expected inputs of at most 262144 numbers, got 524288"),
        (
            {"architecture": "mlp-64-32", "categories": [2**18] * 2**8},
            "client 1: expected inputs of at most 262144 numbers",
        ),
        ({"architecture": "resnet152-preact-1000"}, "client 1: expected a network of at most 33554432 numbers"),
    ],
)
def test_who_does_not_fit_is_named_before_the_run_begins(tmp_path: Path, claim: Mapping[str, Any], reason: str) -> None:
    """And no network is built that is far larger than others."""
    recipe = recipe_of("fedproto", training={"rounds": 1}, models={"feature_dim": 8})
    wire = Nearby(recipe, tmp_path)
    lying(wire, BAD, **claim)
    with little_memory(), pytest.raises(ConfigError, match=re.escape(reason)):
        serve(recipe, wire, out=tmp_path / "out", deadline=5)
    assert not (tmp_path / "out").exists()


# whose a number is --------------------------------------------------------------------------------------------------


def test_a_number_belongs_to_the_node_that_came_with_it(tmp_path: Path) -> None:
    """Over a restart: another node is turned away."""
    recipe, out = recipe_of("local", training={"rounds": 1}), tmp_path / "out"
    first = Nearby(recipe, tmp_path)
    serve(recipe, first, out=out, deadline=5)
    longer = recipe_of("local")

    def again(client_1: Mapping[str, Any], node: int) -> tuple[set[int], list[str]]:
        """Who is known after a restart with one more node."""
        wire = Nearby(longer, tmp_path, (0, 2))
        wire.add(1, node=node, **client_1)
        said: list[str] = []
        found = NodeRegistry(longer, wire, 5.0, EventLog(out / EVENT_LOG, True), 3, said.append)
        found.poll()
        return set(found.node_of), said

    there, said = again({"state_dir": str(tmp_path / "thief")}, FIRST_NODE + 50)
    assert there == {0, 2}
    assert said == [
        f"node {FIRST_NODE + 50} is no client: client-id 1 belongs to the node registered as {BAD}, got another; where "
        "a machine is replaced, its state-dir moves with it"
    ]
    assert again({}, FIRST_NODE + 51)[0] == {0, 1, 2}, "registered anew, with its own state-dir, it is known again"
    assert again({"state_dir": str(tmp_path / "lost")}, BAD)[0] == {0, 1, 2}, "and so is the same registration"


def test_a_number_is_not_told_by_the_run_folder(tmp_path: Path) -> None:
    """Whoever reads the event log cannot come as somebody else."""
    recipe = recipe_of("local", training={"rounds": 1})
    wire = Nearby(recipe, tmp_path)
    serve(recipe, wire, out=tmp_path / "out", deadline=5)
    hellos = [line["claims"] for line in event_log(tmp_path / "out") if line["event"] == "hello"]
    thief = Nearby(recipe, tmp_path, (0, 2))
    thief.add(1, node=FIRST_NODE + 9, state_dir=str(tmp_path / "thief"))
    lying(thief, FIRST_NODE + 9, token=hellos[1]["token"])
    found = NodeRegistry(recipe, thief, 5.0, EventLog(tmp_path / "out" / EVENT_LOG, True), 3, lambda text: None)
    found.poll()
    assert set(found.node_of) == {0, 2}


@pytest.mark.parametrize("line", ['{"event": "experiment", "experiment": "../../x"}', "[]", ""])
def test_a_damaged_event_log_is_one_line(tmp_path: Path, line: str) -> None:
    (tmp_path / EVENT_LOG).write_text(line + "\n")
    assert "expected the event log of nodes in" in refusal(lambda: EventLog(tmp_path / EVENT_LOG, True))
