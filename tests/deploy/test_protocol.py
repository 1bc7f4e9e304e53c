"""What crosses comes out as it went in, and a node's disk has what the server may ask for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.deploy.node_disk import ClientSnapshot, NodeCheckpoints, checkpoint_id
from polyfed.deploy.protocol import ClientHello, parse, read_message, read_score
from polyfed.engine.scoring import Score, score_to_json
from polyfed.engine.wire import encode
from polyfed.errors import RunError
from polyfed.records.main_score import RMSE


@pytest.mark.parametrize(
    "value",
    [
        3,
        {"a/b": torch.ones(1)},
        {"a": 1.0},
        {"a": {"b": {"c": torch.ones(1)}}},
        {f"group {i}": {} for i in range(20_000)},
        {"long": "x" * 2**22},
        {str(i): torch.ones(1) for i in range(2**14 + 1)},
    ],
    ids=["number", "name", "value", "depth", "groups", "header", "tensors"],
)
def test_what_is_no_message_is_refused(value: Any) -> None:
    assert read_message(encode({"a": {"b": torch.ones(1)}, "none": {}}))["none"] == {}
    with pytest.raises(RunError, match="expected"):
        read_message(encode(value))


def test_a_score_survives() -> None:
    pairs = torch.tensor([[0, 0, 3], [0, 1, 1], [1, 1, 2]], dtype=torch.int32)
    figures = {"accuracy": 5 / 6, "auc": math.nan}
    score = Score(6, figures, {"other": Score(6, {"accuracy": 0.5})}, pairs=pairs, classes=2)
    sent = json.loads(json.dumps(score_to_json(score), allow_nan=False))
    received = read_score(sent, 6, 2, ["auc", "confusion"], ["other"])
    assert received.confusion().tolist() == [[3, 1], [0, 2]]
    assert received.value == 5 / 6
    assert math.isnan(received.figures["auc"])
    assert received.others["other"].figures == {"accuracy": 0.5}


@pytest.mark.parametrize(
    "change",
    [
        {"total": 7},
        {"figures": {"accuracy": 0.5}},
        {"figures": {"accuracy": 0.5, "auc": 1.5}},
        {"figures": "x"},
        {"others": {"foreign": {}}},
        {"classes": 3},
        {"pairs": [[0, 0, 5], [0, 2, 1]]},
        {"pairs": [[0, 0, 5]]},
        {"pairs": [[0, 0, 7], [0, 1, -1]]},
        {"pairs": [[0, 0, 3], [0, 0, 3]]},
        {"pairs": [[0, 0, 2**62]]},
        {"pairs": None},
    ],
)
def test_an_odd_score_is_one_line(change: dict[str, Any]) -> None:
    sent = {"total": 6, "figures": {"accuracy": 0.5, "auc": None}, "others": {}, "classes": 2, "pairs": [[0, 0, 6]]}
    read_score(sent, 6, 2, ["auc", "confusion"])
    with pytest.raises(RunError, match="expected a score of 6 rows, got something else"):
        read_score({**sent, **change}, 6, 2, ["auc", "confusion"])


@pytest.mark.parametrize(
    "figures",
    [{"rmse": -1.0, "r2": 0.5}, {"rmse": 2.0}, {"accuracy": 0.5}, {"rmse": 2.0, "r2": 1.0, "more": 0}, {"rmse": "x"}],
)
def test_a_score_of_numbers_to_predict_is_an_rmse(figures: dict[str, Any]) -> None:
    sent = {"total": 6, "figures": {"rmse": 2000.0, "r2": -3.5}, "others": {}, "classes": 0, "pairs": []}
    sent["figures"] |= {name: None for name in RMSE.metrics if name != "r2"}
    assert read_score(sent, 6, 0).value == 2000
    for odd in (figures, {**sent["figures"], "rmse": math.inf}):
        with pytest.raises(RunError, match="expected a score of 6 rows, got something else"):
            read_score({**sent, "figures": odd}, 6, 0)


def test_facts_are_checked() -> None:
    with pytest.raises(RunError, match=r"expected the facts of an envelope \(client hello\), got others at 'client'"):
        parse(ClientHello, {"client": -1})


# the checkpoints ----------------------------------------------------------------------------------------------


def kept(value: float) -> ClientSnapshot:
    return ClientSnapshot("v", {"w": torch.full((2,), value)}, {"c": torch.tensor(value), "g": {"x": torch.ones(1)}})


def test_a_shelf_keeps_the_last_and_the_one_before(tmp_path: Path) -> None:
    checkpoints = NodeCheckpoints(tmp_path / "client")
    assert checkpoints.read("") == ClientSnapshot()
    base = ""
    for number in (1, 2, 5):
        checkpoints.write(checkpoint_id(number, 0), kept(number), (base,))
        base = checkpoint_id(number, 0)
    assert checkpoints.marks() == ["000002-00", "000005-00"]
    found = checkpoints.read("000002-00")
    assert found.variant == "v"
    assert found.weights is not None
    assert torch.equal(found.weights["w"], torch.tensor([2.0, 2.0]))
    assert found.state.keys() == {"c", "g"}
    assert float(found.state["c"]) == 2  # type: ignore[arg-type]
    checkpoints.rollback("000002-00")
    assert checkpoints.marks() == ["000002-00"]
    with pytest.raises(RunError, match=r"expected the state after '000005-00' in .*, got 000002-00"):
        checkpoints.read("000005-00")


def test_the_state_before_a_round_outlives_its_exchanges(tmp_path: Path) -> None:
    checkpoints = NodeCheckpoints(tmp_path)
    checkpoints.write("000001-00", kept(1), ())
    checkpoints.write("000002-00", kept(2), ("000001-00",))
    checkpoints.write("000002-01", kept(3), ("000002-00",))
    checkpoints.write("000002-02", kept(4), ("000002-01",))
    assert checkpoints.marks() == ["000001-00", "000002-01", "000002-02"]
    checkpoints.write("000003-00", kept(5), ("000002-02",))
    assert checkpoints.marks() == ["000002-02", "000003-00"]
    for number in (4, 5, 6):
        checkpoints.write(f"00000{number}-00", kept(number), (f"00000{number - 1}-00", "000003-00"))
    assert checkpoints.marks() == ["000003-00", "000005-00", "000006-00"], "the best round's stays"


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    checkpoints = NodeCheckpoints(tmp_path)
    checkpoints.write("000001-00", kept(1), ())
    file = tmp_path / "000001-00.state"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(RunError, match="expected a message as bytes"):
        checkpoints.read("000001-00")
