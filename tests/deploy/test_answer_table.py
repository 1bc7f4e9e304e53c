"""The table of what a node sends at most, against all that a node sends in a whole run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.core.message import flatten
from polyfed.core.releases import Release
from polyfed.deploy.answer_table import AnswerTable, answer_table
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Envelope, decode_body
from polyfed.deploy.server import serve
from polyfed.engine.privacy_ledger import compute_epsilon
from polyfed.errors import ConfigError
from tests.helpers.nearby import FIRST_NODE, Nearby, recipe_of

PUBLIC = {"data": {"holdout": 20}}
ONE = {"models": {"architectures": ["digits-cnn1"]}}
CASES: dict[str, dict[str, Any]] = {
    "local": {},
    "fedproto": {"evaluation": {"extra_stages": ["after_training"]}},
    "fedgh": {"training": {"rounds": 3}},
    "fd": {"evaluation": {"metrics": ["confusion"]}},
    "fedavg": {**ONE, "evaluation": {"extra_stages": ["personal"]}, "training": {"rounds": 4}},
    "fedrep": {**ONE, "hyperparameters": {"final_head_epochs": 1}, "evaluation": {"every_n_rounds": 2}},
    "heterofl": {**ONE, "training": {"rounds": 4}},
    "closed-form": {"hyperparameters": {"features": 9}, "training": {"rounds": 3}},
    "own-plus-common": {"hyperparameters": {"features": 9}},
    "fedmd": PUBLIC,
    "closed-form in sums": {"hyperparameters": {"features": 9}, "secure_sums": {"enabled": True}},
    "fedavg in sums": {**ONE, "secure_sums": {"enabled": True}},
}

KINDS = {  # the first word of a row -> kind of envelope
    **{"introduction": "hello", "training": "train", "scores": "score", "model": "finish", "end": "finish"},
    **{"keys": "keys", "shares": "shares", "opening": "unmask"},
}


class Listening(Nearby):
    """Keeps what the first node has answered, with the request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heard: list[tuple[Envelope, Envelope]] = []

    def ask(self, node: int, envelope: Envelope) -> Answer:
        answer = super().ask(node, envelope)
        if node == FIRST_NODE and isinstance(answer, Envelope):
            self.heard.append((envelope, answer))
        return answer


def weighed(value: Any) -> int:
    """Bytes of what JSON has: 8 for a number, those of text; names of entries do not count."""
    text = json.dumps(value)
    if isinstance(value, str):
        return len(json.loads(text).encode())
    if isinstance(value, dict):
        return sum(weighed(one) for one in value.values())
    return sum(map(weighed, value)) if isinstance(value, list) else 8


def tensors_of(answer: Envelope) -> dict[str, Any]:
    content = decode_body(answer.body) if answer.body else {}
    if answer.kind == "train":
        return flatten(content)
    return {
        f"{stage} {name}": t for stage, parts in content.items() for part in parts for name, t in flatten(part).items()
    }


def told_of(wire: Listening) -> dict[str, list[tuple[dict[str, Any], int]]]:
    """Kind of answer -> tensors and bytes of each. Scores that come with training are counted apart."""
    found: dict[str, list[tuple[dict[str, Any], int]]] = {kind: [] for kind in KINDS.values()}
    for _, answer in wire.heard:
        facts = dict(json.loads(json.dumps(answer.facts)))
        score = facts.pop("score") if answer.kind == "train" else None
        if score is not None:
            found["score"].append(({}, weighed(score)))
        tensors = tensors_of(answer)
        found[answer.kind].append((tensors, weighed(facts) + sum(tensor.nbytes for tensor in tensors.values())))
    return found


def rows_of(table: AnswerTable) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS.values()}
    for one in table.answers:
        found[KINDS[one.name.split()[0].strip(",")]].append(one)
    return found


@pytest.mark.parametrize("method", CASES)
def test_a_run_is_what_the_table_says(method: str, tmp_path: Path) -> None:
    """All counts and tensors are reached; bytes are no more, and of uploads of one size exactly these."""
    recipe = recipe_of(method.split()[0], **CASES[method])
    own: Mapping[str, Any] = {"share-model": True}
    wire = Listening(recipe, tmp_path / "nodes", configs={0: own})
    serve(recipe, wire, out=tmp_path / "run")
    table = answer_table(recipe, NodeConfig(**wire.configs[FIRST_NODE]))
    told, rows = told_of(wire), rows_of(table)
    for kind, answers in told.items():
        usual = sum(row.usual for row in rows[kind])
        assert len(answers) <= usual if kind == "score" else len(answers) == usual, kind
        assert sum(size for _, size in answers) <= sum(row.usual * row.nbytes for row in rows[kind]), kind
        assert max((size for _, size in answers), default=0) <= max((row.nbytes for row in rows[kind]), default=0), kind
        named = {tensor.rsplit(" ", 2)[0] for row in rows[kind] for tensor in row.tensors}
        assert {name for tensors, _ in answers for name in tensors} == named, kind
    for kind in ("hello", "keys", "shares", "unmask"):
        assert sum(size for _, size in told[kind]) == sum(row.usual * row.nbytes for row in rows[kind])
    assert any(told["keys"]) == ("sums" in method)
    assert told["finish"][0][1] == rows["finish"][0].nbytes


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {**ONE, "privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 4.0}}),
        ("fedavg", {**ONE, "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 2.0}}),
        (
            "closed-form",
            {"hyperparameters": {"features": 9, "unit_features": True}, "privacy": {"noise_multiplier": 5.0}},
        ),
    ],
    ids=["upload", "training", "sums"],
)
def test_epsilon_is_that_of_a_run_and_of_two(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Two answers for each: noise over its effect is smaller by the square root of two, where rows are not drawn."""
    recipe = recipe_of(method, **more)
    configs = {0: {"answers": 2}}
    wire = Nearby(recipe, tmp_path / "nodes", configs=configs)
    run = serve(recipe, wire, out=tmp_path / "run")
    table = answer_table(recipe, NodeConfig(**wire.configs[FIRST_NODE]))
    (unit,) = table.epsilon
    assert table.epsilon[unit] <= run.result["epsilon"][unit] * (1 + 1e-12)
    if unit == "client" or method == "closed-form":  # else it is the client with the fewest rows that counts
        assert table.epsilon == run.result["epsilon"]
        times = 1 if method == "closed-form" else 2
        noise = 5.0 if method == "closed-form" else 4.0
        twice = compute_epsilon([Release("upload", "client", noise, times=2 * times)], recipe.privacy.delta)
        assert table.epsilon_at_most[unit] == pytest.approx(twice)
    assert table.epsilon_at_most[unit] > table.epsilon[unit]
    assert next(one for one in table.answers if one.name.startswith("training")).hidden_by


def test_a_node_with_its_own_rows_and_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe's file is not on its machine."""
    rows = "".join(f"{n % 7},{n % 5},{n % 2}\n" for n in range(60))
    (tmp_path / "own.csv").write_text(f"a,b,label\n{rows}")
    (tmp_path / "recipe.toml").write_text(
        '[data]\ndataset = "csv:theirs.csv"\nnum_clients = 4\n[models]\narchitectures = ["mlp-16-32"]\n'
        '[method]\nname = "fedproto"\n[training]\nrounds = 2\nbatch_size = 8\n'
    )
    config = f'client-id=3 state-dir="{tmp_path}/s" architecture="mlp-64-32" data="csv:{tmp_path}/own.csv"'
    words = ["deploy", "check", "--recipe", str(tmp_path / "recipe.toml"), "--node-config", config]
    assert cli.status([*words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    training = next(one for one in table["answers"] if one["name"] == "training, later rounds")
    assert (training["usual"], training["most"], training["rows"]) == (1, 10, "training")
    assert "labels 2 int32" in training["tensors"]
    assert not (tmp_path / "s").exists()
    assert cli.status(words) == 0
    assert "What the node of client 3 sends at most (fedproto; rows: " in capsys.readouterr().out


def test_a_recipe_that_nodes_cannot_follow_is_refused() -> None:
    recipe = recipe_of("local", run={"keep": "nothing"})
    with pytest.raises(ConfigError, match="expected 'last' or 'best', as nodes keep their own models"):
        answer_table(recipe, NodeConfig(**{"client-id": 0, "state-dir": "s"}))
