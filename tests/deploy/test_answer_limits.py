"""What a node answers is its own to count: noise is not averaged away by asking once more, in whatever way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.core.message import flatten, unflatten
from polyfed.deploy.answer_limits import count_answer
from polyfed.deploy.protocol import Envelope, NodeError, read_message, shared_config
from polyfed.deploy.server import serve
from polyfed.engine.wire import encode
from polyfed.errors import RunError
from tests.helpers.nearby import FIRST_NODE, Nearby, event_log, recipe_of

_RUNS: dict[str, tuple[Path, list[tuple[int, Envelope]]]] = {}  # arguments of `asked` -> disks, envelopes
NOISY = {"privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 1.0}}


def asked(
    folder: Path, kind: str = "train", config: dict[str, Any] | None = None, **sections: Any
) -> tuple[Nearby, Envelope]:
    """Nodes that took part in a run, and an envelope of its first round to the first of them.

    The run is that of an earlier test with the same arguments, if there was one, with disks of its own.
    """
    recipe = recipe_of("fedavg", models={"architectures": ["digits-cnn1"]}, **sections)
    wire = Nearby(recipe, folder / "nodes", configs={0: {"secret_noise": True, **(config or {})}})
    key = json.dumps([config, sections], sort_keys=True)
    if key in _RUNS:
        disks, wire.sent = _RUNS[key]
        shutil.copytree(disks, folder / "nodes")
    else:
        serve(recipe, wire, out=folder / "run")
        kept = folder.parent / f"{folder.name}-disks"
        shutil.copytree(folder / "nodes", kept)
        _RUNS[key] = (kept, wire.sent)
    return wire, next(
        envelope
        for node, envelope in wire.sent
        if node == FIRST_NODE and envelope.kind == kind and envelope.facts["round"] == 1
    )


def moved(envelope: Envelope, step: float) -> Envelope:
    """The envelope with every number of its message moved a little."""
    message = {
        name: value + step if value.is_floating_point() else value
        for name, value in flatten(read_message(envelope.body)).items()
    }
    return Envelope(envelope.kind, envelope.facts, encode(unflatten(message)))


def told(envelope: Envelope, **facts: Any) -> Envelope:
    return Envelope(envelope.kind, {**envelope.facts, **facts}, envelope.body)


def test_the_noise_of_a_round_is_not_averaged_away(tmp_path: Path) -> None:
    """Requests that differ by 1e-7 have no answer, else each would have other noise."""
    wire, envelope = asked(tmp_path, **NOISY)
    answers = [wire.ask(FIRST_NODE, moved(envelope, 1e-7 * number)) for number in range(1, 21)]
    assert {str(answer) for answer in answers} == {
        "expected at most 1 different requests for training in round 1, exchange 0 "
        "(answers, in this node's configuration), got one more"
    }
    assert all(isinstance(answer, NodeError) for answer in answers)


@pytest.mark.parametrize("facts", [{"base": "000001-00"}, {"parts": ["test"]}], ids=str)
def test_another_question_is_another_request(tmp_path: Path, facts: dict[str, Any]) -> None:
    wire, envelope = asked(tmp_path, **NOISY)
    assert "got one more" in str(wire.ask(FIRST_NODE, told(envelope, **facts)))


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"class_names": ["a", "b"]}, "got others at 'class_names'"),
        ({"figures": ["f1", "confusion"]}, "got others at 'figures'"),
        ({"scores": True}, "got others at 'scores'"),
        ({"round": 3}, "expected a round from 1 to 2, as in this node's recipe, got 3"),
        ({"round": 0}, "expected a round from 1 to 2, as in this node's recipe, got 0"),
        ({"exchange_index": 1}, "expected one of 1 exchanges in round 1, got 1"),
        ({"auxiliary_model": "digits-cnn2"}, "expected an auxiliary model that the recipe knows, got 'digits-cnn2'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_in_the_nodes_recipe_is_refused_and_not_counted(
    tmp_path: Path, facts: dict[str, Any], named: str
) -> None:
    wire, envelope = asked(tmp_path)
    before = [file.read_bytes() for file in sorted((tmp_path / "nodes" / "node-0" / "answered").glob("[!.]*"))]
    assert named in str(wire.ask(FIRST_NODE, told(envelope, **facts)))
    assert before == [file.read_bytes() for file in sorted((tmp_path / "nodes" / "node-0" / "answered").glob("[!.]*"))]


@pytest.mark.parametrize("change", [{"rounds": 3}, {"rounds": 40}, {"lr": 0.01}], ids=str)
@pytest.mark.parametrize("step", [0.0, 1e-7], ids=["the same", "moved"])
def test_noise_is_counted_whatever_the_recipe_is_now(tmp_path: Path, change: dict[str, Any], step: float) -> None:
    """Also a run that is lengthened, as its operator restarts the node for it."""
    wire, envelope = asked(tmp_path, **NOISY)
    wire.recipe = recipe_of("fedavg", models={"architectures": ["digits-cnn1"]}, training=change, **NOISY)
    again = told(moved(envelope, step), settings=shared_config(wire.recipe))
    assert "at most 1 different requests for training in round 1" in str(wire.ask(FIRST_NODE, again))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("heterofl", {"rates": "dynamic_a1-c1"}),
        ("fedrolex", {"rates": "fix_a1-c1"}),
        ("scalefl", {"levels": "0.5@0.5 1@1"}),
        ("fedlora", {"ranks": "1 2"}),
        ("fedavg", {}),
    ],
)
def test_a_node_trains_scores_and_writes_the_network_of_its_recipe_alone(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    recipe = recipe_of(method, models={"architectures": ["digits-cnn1"]}, hyperparameters=settings)
    wire = Nearby(recipe, tmp_path / "nodes")
    serve(recipe, wire, out=tmp_path / "run")
    assert not [each for each in event_log(tmp_path / "run") if each["event"] == "trouble"]
    sent = [envelope for node, envelope in wire.sent if node == FIRST_NODE and envelope.kind != "hello"]
    assert {"train", "finish"} <= {envelope.kind for envelope in sent}
    for envelope in sent:
        for other in {"", "a", "c", "1", "2"} - {envelope.facts["variant"]}:
            refusal = f"expected the variant '{envelope.facts['variant']}' of client 0's network in round"
            assert refusal in str(wire.ask(FIRST_NODE, told(envelope, variant=other)))


def test_another_name_of_the_run_is_no_other_request(tmp_path: Path) -> None:
    """From the beginning on all is the same: so is the answer, and nothing new is told."""
    wire, envelope = asked(tmp_path, **NOISY)
    again = wire.ask(FIRST_NODE, told(envelope, experiment="0" * 16))
    assert isinstance(again, Envelope)
    assert isinstance(first := wire.ask(FIRST_NODE, envelope), Envelope)
    assert again.body == first.body


def test_a_client_of_another_state_is_another_request(tmp_path: Path) -> None:
    """The marks are the server's to give: what lies behind them on the node's disk counts."""
    wire, envelope = asked(tmp_path, config={"answers": 2}, **NOISY)
    second = next(each for node, each in wire.sent if node == FIRST_NODE and each.facts["round"] == 2)
    begun = told(moved(envelope, 1e-7), experiment="0" * 16)
    assert isinstance(wire.ask(FIRST_NODE, begun), Envelope)
    other = told(second, experiment="0" * 16)
    assert isinstance(wire.ask(FIRST_NODE, other), Envelope), (
        "the same envelope, of a client that was trained otherwise"
    )
    assert "got one more" in str(wire.ask(FIRST_NODE, moved(second, 1e-7))), "that one was counted"


def test_scores_are_counted_over_rounds_runs_and_restarts(tmp_path: Path) -> None:
    """As many as two rounds and a final one need: trained, as the client stands, after receiving. Four were given."""
    wire, envelope = asked(tmp_path, "score", evaluation={"extra_stages": ["after_training"]})
    answers = [
        wire.ask(FIRST_NODE, told(moved(envelope, 1e-3 * n), round=n % 3, experiment=f"{n:016x}", base=""))
        for n in range(1, 10)
    ]
    assert [isinstance(answer, Envelope) for answer in answers] == [True] * 5 + [False] * 4
    assert "at most 9 different requests for scores (answers, in this node's configuration)" in str(answers[-1])
    assert isinstance(wire.ask(FIRST_NODE, told(moved(envelope, 1e-3), round=1, base="")), Envelope)
    train = next(one for node, one in wire.sent if node == FIRST_NODE and one.kind == "train")
    done = wire.ask(FIRST_NODE, moved(train, 1e-3))
    assert isinstance(done, Envelope), "the work is wanted, without scores"
    assert done.facts["score"] is None


@pytest.mark.parametrize("noise", [{}, NOISY], ids=["plain", "noisy"])
def test_a_run_that_is_lengthened_again_and_again_is_scored_each_time(tmp_path: Path, noise: dict[str, Any]) -> None:
    """Each length has a last round: its operator has asked for it by another recipe."""
    more = {"models": {"architectures": ["digits-cnn1"]}, "evaluation": {"every_n_rounds": 5}, **noise}
    for rounds in (1, 2, 3):
        recipe = recipe_of("fedrep", training={"rounds": rounds}, **more)
        run = serve(recipe, Nearby(recipe, tmp_path / "nodes"), out=tmp_path / "run", resume=rounds > 1)
        assert None not in run.result["accuracy_per_client"]
    assert [each for each in event_log(tmp_path / "run") if each["event"] == "trouble"] == []


def test_scores_have_no_classes_where_the_recipe_has_no_counts(tmp_path: Path) -> None:
    wire, envelope = asked(tmp_path, "score")
    answer = wire.ask(FIRST_NODE, envelope)
    assert isinstance(answer, Envelope)
    score = answer.facts["test"]
    assert {*score["figures"]} == {"accuracy", "balanced_accuracy", "f1"}
    assert (score["classes"], score["pairs"]) == (0, [])


def test_noisy_sums_are_one_release_over_rounds_runs_and_recipes(tmp_path: Path) -> None:
    """Nothing that a server or an operator changes draws other noise on the same rows without being counted."""

    def node(features: int = 8, rounds: int = 3) -> Nearby:
        recipe = recipe_of(
            "closed-form",
            models={"architectures": ["digits-cnn1"]},
            hyperparameters={"features": features, "unit_features": True},
            privacy={"noise_multiplier": 5.0},
            training={"rounds": rounds},
        )
        return Nearby(recipe, tmp_path, (0,), {0: {"secret_noise": True}})

    def sums(wire: Nearby, number: int, **facts: Any) -> Any:
        task = {"settings": shared_config(wire.recipe), "round": number, **facts}
        answer = wire.ask(FIRST_NODE, Envelope("train", task, encode({})))
        return read_message(answer.body)["sums"] if isinstance(answer, Envelope) else str(answer)

    first = sums(node(), 1)
    others = [
        sums(node(), 2, base="000001-00"),
        sums(node(), 2),
        sums(node(), 3, experiment="f" * 16),
        sums(node(rounds=9), 9),
    ]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    assert "at most 1 different requests for sums of all rows" in sums(node(features=36), 2)


def test_a_final_round_comes_once(tmp_path: Path) -> None:
    """Whatever round a server says it is: each would be one more answer about the same rows."""
    recipe = recipe_of(
        "fedrep", models={"architectures": ["digits-cnn1"]}, hyperparameters={"final_head_epochs": 1}, **NOISY
    )
    wire = Nearby(recipe, tmp_path / "nodes", configs={0: {"secret_noise": True}})
    serve(recipe, wire, out=tmp_path / "run")
    envelopes = [envelope for node, envelope in wire.sent if node == FIRST_NODE and envelope.facts["is_final"]]
    assert [envelope.facts["round"] for envelope in envelopes] == [3]
    for number in (1, 2, 3):
        facts = {**envelopes[0].facts, "round": number}
        asked = Envelope("train", facts, encode({}))
        assert "for training in the final round, exchange 0" in str(wire.ask(FIRST_NODE, asked))


def test_a_shared_model_is_sent_at_the_end_and_not_after_each_round(tmp_path: Path) -> None:
    """With noise once: models have none."""
    wire, _ = asked(tmp_path, config={"share_model": True}, **NOISY)
    end = next(envelope for node, envelope in wire.sent if node == FIRST_NODE and envelope.kind == "finish")
    assert isinstance(wire.ask(FIRST_NODE, end), Envelope)
    others = [told(end, round=0), told(end, round=1), told(end, base="000001-00"), moved(end, 1e-3)]
    assert {str(wire.ask(FIRST_NODE, other)) for other in others} == {
        "expected at most 1 different requests for the model at the end (answers, in this node's configuration), got "
        "one more"
    }


def test_what_was_counted_is_on_the_disk(tmp_path: Path) -> None:
    wire, envelope = asked(tmp_path, **NOISY)
    (file,) = (tmp_path / "nodes" / "node-0" / "answered").glob("[!.]*")
    kinds = [json.loads(line)[0] for line in file.read_text().splitlines()]
    assert kinds.count("training in round 1, exchange 0") == 1
    file.unlink()  # its operator's word
    assert isinstance(wire.ask(FIRST_NODE, moved(envelope, 1e-7)), Envelope)


def test_a_torn_last_line_was_never_answered(tmp_path: Path) -> None:
    count_answer(tmp_path / "ledger", "a", "1", 1)
    with (tmp_path / "ledger").open("a") as file:
        file.write('["a", "2')
    count_answer(tmp_path / "ledger", "b", "3", 1)
    assert [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()] == [["a", "1"], ["b", "3"]]
    with pytest.raises(RunError, match=r"at most 1 different requests for a .*, got one more"):
        count_answer(tmp_path / "ledger", "a", "2", 1)


def test_a_damaged_ledger_answers_nothing(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"{\n")
    with pytest.raises(RunError, match="expected a kind and a request in each line"):
        count_answer(tmp_path / "ledger", "a", "1", 1)
    with pytest.raises(RunError, match=r"expected to note what is answered in .*, got File exists"):
        count_answer(tmp_path / "ledger" / "below", "a", "1", 1)
