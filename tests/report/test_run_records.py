"""Finding, reading, naming run folders, and what is said when they are broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError
from polyfed.records.read import seal
from polyfed.records.schema import RoundRecord
from polyfed.report.run_records import load_runs, to_frame
from tests.helpers.refusals import refusal


def test_finds_runs_at_and_below_and_counts_each_once(two_by_two: Path) -> None:
    assert [run.path.name for run in load_runs(two_by_two)] == ["fedgh-0", "fedgh-1", "local-0", "local-1"]
    assert load_runs([two_by_two / "local-1", two_by_two])[0].path.name == "local-1"
    assert len(load_runs([two_by_two / "local-1", two_by_two])) == 4
    assert [(run.name, run.seed) for run in load_runs(two_by_two)][1] == ("fedgh", 1)


def test_numbers_in_names_sort_as_numbers_and_checkpoints_are_not_searched(make: Any) -> None:
    for seed in (10, 2):
        folder = make(f"local-{seed}", seed=seed)
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "rounds.jsonl").write_text("")
    assert [run.seed for run in load_runs(make.root)] == [2, 10]


def test_names_labels_and_differing_hyperparameters(make: Any) -> None:
    make("a", "fedgh", hyperparameters={"header_epochs": 1, "header_lr": 0.01})
    make("b", "fedgh", hyperparameters={"header_epochs": 100, "header_lr": 0.01})
    make("c", "fedhenn", hyperparameters={"eta0": 0.1})
    make("d", "fedgh", hyperparameters={"header_epochs": 1, "header_lr": 0.0}, label="fixed head")
    make("e", "fedavg", training={"lr": 0.1})
    make("f", "fedavg", training={"lr": 0.5})
    assert [run.name for run in load_runs(make.root)] == [
        "fedgh (header_epochs=1)",
        "fedgh (header_epochs=100)",
        "fedhenn",
        "fixed head",
        "fedavg (lr=0.1)",
        "fedavg (lr=0.5)",
    ]


def test_unfinished_runs_come_last_and_say_so(make: Any) -> None:
    make("a", "fedgh", finished=False)
    make("b", "local")
    stopped = make.root / "c"
    stopped.mkdir()
    (stopped / "recipe.toml").write_text('[method]\nname = "fedin"\n[training]\nrounds = 9\n')
    runs = load_runs(make.root)
    assert [(run.name, run.finished) for run in runs] == [("local", True), ("fedgh", False), ("fedin", False)]
    assert "unfinished, 2 of 2 rounds done" in runs[1].notes[0]
    assert "unfinished, 0 of 9 rounds done" in runs[2].notes[0]


def test_what_is_kept_of_a_round_does_not_grow_with_the_clients() -> None:
    def size(clients: int) -> int:
        everyone = list(range(clients))
        record = RoundRecord.model_validate(
            {
                "round": 1, "clients": everyone, "dropped": everyone, "stragglers": everyone,
                "refused": [{"client": client, "reason": "not finite"} for client in everyone],
                "bytes_by_client": {str(client): {"down": 1, "up": 1} for client in everyone},
                "accuracy": {"personal": {"mean": 0.5}}, "accuracy_per_client": [0.5] * clients,
                "held_out_per_client": {"received": {str(client): 0.5 for client in everyone}},
            }
        )  # fmt: skip
        return len(to_frame([record], None))

    assert size(100) == size(900)


def test_a_cut_off_last_line_is_ignored_with_a_note(make: Any) -> None:
    folder = make("a")
    with (folder / "rounds.jsonl").open("a") as stream:
        stream.write('{"round": 3, "acc')
    (run,) = load_runs(folder)
    assert set(run.lines["round"].dropna()) == {1, 2}
    assert "cut off" in run.notes[0]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("result.json", "{", "result.json cannot be read"),
        ("result.json", "[1]", "expected an object, got list"),
        ("result.json", b"\xff\xfe", "result.json cannot be read"),
        ("rounds.jsonl", '{"round": 1}\n{"rou\n{"round": 3}\n', "rounds.jsonl, line 2"),
        ("recipe.toml", "[", "recipe.toml cannot be read"),
    ],
)
def test_broken_files_are_named_in_one_line(make: Any, name: str, content: str | bytes, says: str) -> None:
    folder = make("a")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    said = refusal(lambda: load_runs(make.root))
    assert says in said
    assert str(folder / name) in said


@pytest.mark.parametrize("sealed", [True, False])
def test_a_changed_digit_of_a_sealed_result_is_seen(make: Any, sealed: bool) -> None:
    folder = make("a", accuracy=0.625)
    path = folder / "result.json"
    result = json.loads(path.read_text())
    path.write_bytes(seal(result, indent=2) + b"\n" if sealed else json.dumps(result).encode())
    assert load_runs(folder)[0].result.accuracy == 0.625
    assert RunFolder(folder).read_result() == result
    path.write_bytes(path.read_bytes().replace(b'"accuracy": 0.625', b'"accuracy": 0.725', 1))
    if not sealed:  # as older versions wrote it
        assert load_runs(folder)[0].result.accuracy == 0.725
        return
    for read in (load_runs, lambda place: RunFolder(place).read_result()):
        with pytest.raises(ConfigError, match=r"result\.json.*: it does not match its seal"):
            read(folder)


@pytest.mark.parametrize(("key", "value"), [("seed", "0"), ("accuracy", "high"), ("evaluation", {}), ("dataset", None)])
def test_a_result_of_wrong_types_is_refused(make: Any, key: str, value: Any) -> None:
    folder = make("a", **{key: value})
    with pytest.raises(ConfigError, match=key):
        load_runs(folder)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        load_runs(tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        load_runs(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no path"):
        load_runs([])
