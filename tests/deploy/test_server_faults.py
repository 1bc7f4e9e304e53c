"""What nodes and servers can do to each other: the run goes on or resumes, and its folder tells what happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.cli.output import print_run
from polyfed.config.recipe import Recipe
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Envelope, NodeError, deserialize, serialize
from polyfed.deploy.server import serve
from polyfed.engine.federation import Run
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import load_runs
from tests.deploy.test_server import comparable, models
from tests.helpers.nearby import DATA, FIRST_NODE, Nearby, event_log, recipe_of

BAD = FIRST_NODE + 1


class _Killed(Exception):
    """The server's end."""


def three_rounds(method: str = "fedgh", **options: Any) -> Recipe:
    return recipe_of(method, **{"training": {"rounds": 3, "batch_size": 16, "lr": 0.05}, **options})


def troubles(out: Path) -> list[tuple[int, int, str]]:
    """Round, client and reason."""
    return [(line["round"], line["client"], line["reason"]) for line in event_log(out) if line["event"] == "trouble"]


def served(recipe: Recipe, wire: Nearby, folder: Path, **options: Any) -> Run:
    return serve(recipe, wire, out=folder / "out", **{"deadline": 0.05, **options})


def in_round(wire: Nearby, number: int, answer: Callable[[Envelope], Answer]) -> None:
    """Client 1 gives another answer to its job of one round."""

    def fault(node: int, envelope: Envelope) -> Answer | None:
        hit = node == BAD and envelope.kind == "train" and envelope.facts["round"] == number
        return answer(envelope) if hit else None

    wire.fault = fault


# nodes that say nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", ["is away", "is silent"])
def test_whose_node_is_dead_is_scored_no_more(tmp_path: Path, dies: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = three_rounds("local")
    wire = Nearby(recipe, tmp_path)

    def kill(record: Mapping[str, Any]) -> None:
        if dies == "is away":
            wire.away = {BAD}
        wire.fault = lambda node, envelope: NodeError("silence") if node == BAD else None

    run = served(recipe, wire, tmp_path, loggers=[kill])
    first, *later = run.history
    assert [record["accuracy"]["personal"]["n"] for record in run.history] == [3, 2, 2]
    assert [value is None for value in first["accuracy_per_client"]] == [False, False, False]
    for record in later:
        known = record["accuracy_per_client"]
        assert known[1] is None
        assert record["accuracy"]["personal"]["mean"] == pytest.approx((known[0] + known[2]) / 2)
    assert [row.get("last_evaluated") for row in run.result["clients_table"]] == [None, 1, None]
    line = "client 1 was not evaluated after round 1; the last figures are those of the others"
    print_run(run.result, run.path)
    assert line in capsys.readouterr().out
    assert f"local: {line}" in group_runs(load_runs(tmp_path / "out"))[0][0].notes


def test_an_answer_that_never_came_is_undone_at_the_node(tmp_path: Path) -> None:
    """It trained and kept its work; the server goes on from the round before, and so does the node."""
    recipe = three_rounds("local")
    wire, lost = Nearby(recipe, tmp_path / "lost"), []

    def after(envelope: Envelope) -> Answer:
        wire.ask(BAD, envelope)
        lost.append(envelope)
        return NodeError("silence")

    in_round(wire, 2, after)
    run = served(recipe, wire, tmp_path / "lost")
    dropped = Nearby(recipe, tmp_path / "dropped")
    in_round(dropped, 2, lambda envelope: NodeError("killed"))
    expected = served(recipe, dropped, tmp_path / "dropped")
    assert len(lost) == 1
    assert comparable(run.history) == comparable(expected.history)
    assert same_models(tmp_path / "lost", tmp_path / "dropped")


def same_models(one: Path, other: Path) -> bool:
    left, right = models(one), models(other)
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[number][name]) for number, tensors in left.items() for name, tensor in tensors.items()
    )


# nodes that say nonsense ----------------------------------------------------------------------------------------------


def changed(own: Envelope, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> Envelope:
    """An answer with other tensors and facts."""
    message = deserialize(own.body)[0]
    return Envelope("train", {**own.facts, **facts}, serialize({**message, **tensors}))


NONSENSE: Mapping[int, tuple[Callable[[Envelope], Envelope], str, str]] = {  # round -> change, its effect, the reason
    2: (lambda own: changed(own, {"lars": torch.full((3, 64), float("nan"))}, {}), "refused", "not finite ('lars')"),
    3: (lambda own: changed(own, {"lars": torch.zeros(3, 7)}, {}), "refused", "in 'lars', got the shape (3, 7)"),
    4: (lambda own: changed(own, {}, {"loss": float("inf")}), "refused", "the training loss is inf"),
    5: (lambda own: Envelope("train", {}, b""), "dropped", "expected the facts of an envelope (task result)"),
    6: (lambda own: changed(own, {}, {"steps": -1}), "dropped", "got others at 'steps'"),
    7: (lambda own: changed(own, {}, {"mark": "000009-00"}), "dropped", "expected the mark 000007-00, got '000009-00'"),
    8: (lambda own: dataclasses.replace(own, body=b"\xff" * 50), "dropped", "got 50 that are none"),
    9: (lambda own: changed(own, {"lars": torch.zeros(300, 1000)}, {}), "dropped", "at most 1000000 bytes, got 1200"),
}


def test_one_node_sends_all_kinds_of_nonsense_and_the_others_go_on(tmp_path: Path) -> None:
    recipe = three_rounds(training={"rounds": 9, "batch_size": 16, "lr": 0.05})
    wire = Nearby(recipe, tmp_path)

    def fault(node: int, envelope: Envelope) -> Answer | None:
        if (node, envelope.kind, envelope.facts["round"]) == (BAD, "train", 1) or (node, envelope.kind) != (
            BAD,
            "train",
        ):
            return None
        own = wire.ask(BAD, envelope)
        assert isinstance(own, Envelope)
        return NONSENSE[envelope.facts["round"]][0](own)

    wire.fault = fault
    run = served(recipe, wire, tmp_path, max_megabytes=1.0)
    reasons = {number: reason for number, _, reason in troubles(tmp_path / "out")}
    for record in run.history[1:]:
        _, effect, reason = NONSENSE[record["round"]]
        assert [entry["client"] for entry in record["refused"]] == ([1] if effect == "refused" else [])
        assert record["dropped"] == ([1] if effect == "dropped" else [])
        given = record["refused"][0]["reason"] if effect == "refused" else reasons[record["round"]]
        assert reason in given
        assert "\n" not in given


def test_a_refused_upload_leaves_no_trace(tmp_path: Path) -> None:
    recipe = three_rounds()
    wire, other = Nearby(recipe, tmp_path), Nearby(recipe, tmp_path / "dropped")
    in_round(wire, 2, lambda envelope: NONSENSE[2][0](wire.ask(BAD, envelope)))  # type: ignore[arg-type]
    in_round(other, 2, lambda envelope: NodeError("killed"))
    run, expected = served(recipe, wire, tmp_path), served(recipe, other, tmp_path / "dropped")
    assert [len(record["refused"]) for record in run.history] == [0, 1, 0]
    assert same_models(tmp_path, tmp_path / "dropped")
    assert run.history[2]["accuracy"] == expected.history[2]["accuracy"]


# coming, going, coming back -------------------------------------------------------------------------------------------


def test_a_late_node_joins(tmp_path: Path) -> None:
    recipe = three_rounds(models={"architectures": ["digits-cnn1"]})
    wire = Nearby(recipe, tmp_path, (0, 1))
    rounds: list[int] = []

    def come(record: Mapping[str, Any]) -> None:
        rounds.append(record["round"])
        if record["round"] == 1:
            wire.add(2)

    run = served(recipe, wire, tmp_path, min_nodes=2, loggers=[come])
    assert rounds == [1, 2, 3]
    assert [record["clients"] for record in run.history] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    assert sorted(models(tmp_path)) == [0, 1, 2]
    like = three_rounds(models={"architectures": ["digits-cnn1"]})
    assert [entry["samples"] for entry in run.result["clients_table"]] == [
        c.n for c in build_federation(like, data=DATA).clients
    ]


@pytest.mark.parametrize(
    "method", ["fedgh", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedmd", "scaffold"))]
)
def test_a_server_that_was_killed_resumes_as_if_nothing_had_been(tmp_path: Path, method: str) -> None:
    """It dies in the middle of a round, when one node has already trained; the others are then a round behind it.

    What carries envelopes has died, too, and has forgotten nodes' numbers: they come back with others.
    """
    recipe = three_rounds(method, data={"holdout": 20}, models={"architectures": ["digits-cnn1"]})
    wire = Nearby(recipe, tmp_path / "killed")
    last = recipe.chosen_method.exchanges(2)[-1]

    def die(node: int, envelope: Envelope) -> Answer | None:
        place = len(recipe.chosen_method.exchanges(2)) - 1
        if (
            node == BAD
            and envelope.kind == "train"
            and (envelope.facts["round"], envelope.facts["exchange_index"]) == (2, place)
        ):
            raise _Killed
        return None

    assert last.trains
    wire.fault = die
    with pytest.raises(_Killed):
        served(recipe, wire, tmp_path / "killed")
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        served(recipe, wire, tmp_path / "killed")
    again = Nearby(recipe, tmp_path / "killed", ())
    for client in range(3):
        again.add(client, node=9000 - client)
    run = served(recipe, again, tmp_path / "killed", resume=True)
    expected = served(recipe, Nearby(recipe, tmp_path / "whole"), tmp_path / "whole")
    assert comparable(run.history) == comparable(expected.history)
    assert same_models(tmp_path / "killed", tmp_path / "whole")
    read = served(recipe, Nearby(recipe, tmp_path / "killed", ()), tmp_path / "killed", resume=True)  # nobody is there
    assert comparable(read.history) == comparable(expected.history)


def lose(folder: Path) -> None:
    """A node's disk forgets."""
    for file in folder.glob("*/client-*/*.state"):
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_a_node_without_its_state_says_so_or_begins_again(tmp_path: Path, anew: bool) -> None:
    recipe = three_rounds("local")
    wire = Nearby(recipe, tmp_path, configs={1: {"begin-anew": anew}})

    def forget(record: Mapping[str, Any]) -> None:
        if record["round"] == 1:
            lose(tmp_path / "node-1")

    run = served(recipe, wire, tmp_path, loggers=[forget])
    assert [record["dropped"] for record in run.history] == ([[], [], []] if anew else [[], [1], [1]])
    said = [reason for _, _, reason in troubles(tmp_path / "out")]
    assert all("expected the state after '000001-00'" in reason and "got nothing" in reason for reason in said)
    assert bool(said) is not anew
