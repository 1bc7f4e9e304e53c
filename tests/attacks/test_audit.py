"""`polyfed audit leakage` on a few digits: it hears what was sent, and finds what is there to be found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed import attacks
from polyfed.attacks.audit import FILES, audit_run
from polyfed.attacks.inference import SERVER, describe_guesses, infer_labels, loss_scores, membership_samples
from polyfed.attacks.replay import Replay, find_full_model, last_upload_rounds, plaintext_facts, replay
from polyfed.cli import app as cli
from polyfed.core.message import get_group, get_tensor
from polyfed.engine.executors.serial import Serial
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import load
from polyfed.records.schema import RoundRecord
from polyfed.records.stored_files import StoredRecipe
from polyfed.report.run_records import RunRecord
from tests.attacks.conftest import Done
from tests.helpers.regression import write_table

RECIPE: dict[str, Any] = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "partition": "by_class",
        "classes_per_client": 6,
        "max_train_per_client": 20,
        "max_test_per_client": 40,
        "split": "1:0:2",
        "holdout": 40,
    },
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedavg"},
    "training": {"rounds": 2, "batch_size": 10, "lr": 0.05},
    "run": {"executor": "serial", "checkpoint_every": 1},
}
KERNELS = {"uploads": "kernels", "alignment_data": {"fixed": True, "transport": "indices", "size": 40}}
PARTS = {"noise_level": 0.3, "num_pairs": 5}


Ran = Callable[..., Done]


@pytest.fixture(scope="module")
def overfitted(ran: Ran) -> tuple[Done, Replay]:
    """A run whose clients know their rows by heart, and its last round."""
    done = ran("fedavg", sections={"training": {"rounds": 1, "local_epochs": 40, "lr": 0.1}})
    return done, replay(done.record)


# what was sent is heard again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "begins"), [(1, 2), (2, 1)])
def test_the_last_round_is_heard_as_it_was(ran: Ran, kept: int, begins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint before it, or where there is none from the start: the mean of what came up is the model."""
    done = ran("fedavg", sections={"run": {"checkpoint_every": kept}})
    before = {path: path.stat().st_mtime_ns for path in done.record.path.rglob("*")}
    worked: list[int] = []
    plain = Serial.run

    def run(self: Serial, jobs: Any, done: Any) -> Any:
        worked.append(jobs[0].round)
        return plain(self, jobs, done)

    monkeypatch.setattr(Serial, "run", run)
    heard = replay(done.record)
    assert worked == list(range(begins, 3))
    assert heard.equal
    ups = [heard.transcripts[number].up for number in range(3)]
    total = sum(int(get_tensor(up, "n")) for up in ups)
    for name, value in get_group(done.federation.server.state, "model union").items():
        mean = sum(get_group(up, "model")[name] * (int(get_tensor(up, "n")) / total) for up in ups)
        assert torch.allclose(torch.as_tensor(mean), value, atol=1e-6)
    assert {path: path.stat().st_mtime_ns for path in done.record.path.rglob("*")} == before


def test_a_run_that_does_not_come_out_as_recorded_is_refused(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ran("fedavg").record
    lines = list(record.read_rounds())
    for changed in ({"bytes_by_client": {}}, {"train_loss": 7.0}):
        others = [line.model_copy(update=changed) for line in lines]
        monkeypatch.setattr(RunRecord, "read_rounds", lambda _, others=others: iter(others))
        if "train_loss" in changed:
            assert not replay(record).equal
            continue
        with pytest.raises(ConfigError, match=r"'bytes_by_client'.* 2"):
            replay(record)
    with pytest.raises(ConfigError, match="recipe"):
        replay(dataclasses.replace(record, recipe=StoredRecipe()))


def test_the_last_upload_is_the_last_that_arrived(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that was refused, that never left a client, or of a final round."""
    lines: list[dict[str, Any]] = [
        {"round": 1, "clients": [0, 1, 2, 3]},
        {"round": 2, "clients": [0, 1, 2], "refused": [{"client": 0, "reason": "nan"}], "dropped": [2]},
        {"round": 3, "clients": [0, 1, 2], "final_round": True},
    ]
    monkeypatch.setattr(RunRecord, "read_rounds", lambda _: iter([RoundRecord(**line) for line in lines]))
    assert last_upload_rounds(ran("fedavg").record) == {0: 1, 1: 2, 2: 1, 3: 1}


# what the messages say ----------------------------------------------------------------------------------------------


def test_facts_in_the_clear_are_compared_with_the_data(ran: Ran) -> None:
    client = ran("fedavg").federation.clients[0]
    classes, counts = client.data.train.y.unique(return_counts=True)
    message = {"labels": classes.int(), "counts": counts.int(), "n": torch.tensor(client.n), "mask": classes > 3}
    assert plaintext_facts(message, client) == {
        "which classes": "labels", "samples per class": "counts", "number of samples": "n"
    }  # fmt: skip
    assert plaintext_facts({"labels": classes[1:], "n": torch.tensor(client.n + 1)}, client) == {}
    heard = replay(ran("fedproto").record)
    assert set(plaintext_facts(heard.transcripts[0].up, heard.federation.clients[0])) == {
        "which classes",
        "samples per class",
    }


@pytest.mark.slow
def test_classes_are_guessed_from_what_goes_up(ran: Ran) -> None:
    def guessed(method: str, **hyperparameters: Any) -> Any:
        heard = replay(ran(method, **hyperparameters).record)
        return infer_labels(heard)

    assert guessed("fedgh")["how"] == "stated"
    head = guessed("fedavg")
    assert head["how"] == "head's step"
    assert head["auc"]["low"] > 0.5
    assert "neither stated, nor" in guessed("fedhenn", **KERNELS)["why_not"]
    assert guessed("local")["why_not"] == "nothing goes up"


# which rows -----------------------------------------------------------------------------------------------------------


def test_an_overfitted_network_gives_its_rows_away_and_one_that_never_saw_them_does_not(
    overfitted: tuple[Done, Replay],
) -> None:
    done, heard = overfitted
    own, strange, fresh = [], [], []
    for number in range(3):
        transcript, client = heard.transcripts[number], heard.federation.clients[number]
        score = find_full_model(heard, transcript)
        assert score is not None
        samples, member = membership_samples(client)
        others = heard.transcripts[(number + 1) % 3].up
        for guesses, message in ((own, transcript.up), (strange, others), (fresh, transcript.job.message)):
            guesses.append((loss_scores(score(message, samples.x, client), samples.y), member))
        kept = load(done.record.path, number, stage="personal")
        holder = loss_scores(kept.scores(samples.x), samples.y)
        assert torch.allclose(holder, own[-1][0], atol=1e-5), "what a client keeps is what it sent"
    assert describe_guesses(SERVER, own)["auc"]["low"] > 0.55
    for blind in (strange, fresh):
        chance = describe_guesses(SERVER, blind)["auc"]
        assert chance["low"] < 0.5 < chance["high"]


# the report ---------------------------------------------------------------------------------------------------------


def say(*words: str | Path) -> int:
    return cli.status([str(word) for word in words])


@pytest.mark.slow
def test_the_command_reports_methods_side_by_side(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [ran(name, **KERNELS if name == "fedhenn" else {}).record.path for name in ("local", "fedavg", "fedhenn")]
    runs += [ran("fedin", None, **PARTS).record.path]
    words = ["audit", "leakage", *runs, "--steps", "2", "--out", tmp_path / "a", "--images"]
    assert say(*words, "2") == 0
    out = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "a").iterdir()} == set(FILES)
    told = json.loads((tmp_path / "a" / "leakage.json").read_text())
    local, fedavg, fedhenn, fedin = told["runs"]
    assert local["bytes_up_per_client"] == 0
    assert [one["by"] for one in local["membership"]] == ["holder of the network"]
    assert [one["by"] for one in fedavg["membership"]] == ["server", "holder of the network"]
    assert fedavg["in_the_clear"] == ["number of samples"]
    assert fedavg["membership"][0]["members"] == 60
    assert fedavg["reconstruction"] is None
    assert "holds no whole network" in fedhenn["membership_why_not"]
    assert "weights are not inverted" in fedhenn["reconstruction_why_not"]
    assert (fedin["reconstruction"]["what"], fedin["reconstruction"]["images"]) == ("features (s_in)", 2)
    for number in (f"{fedavg['membership'][0]['auc']['value']:.3f}", f"{fedin['reconstruction']['psnr']:.2f}"):
        assert number in out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert say(*words, "2") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert say(*words, "0", "--overwrite") == 0
    assert json.loads((tmp_path / "a" / "leakage.json").read_text())["runs"][3]["reconstruction"] is None


@pytest.mark.slow
def test_methods_that_send_a_part_say_so(ran: Ran) -> None:
    part = audit_run(ran("fedrep").record, 0, 1)[0]
    assert "no whole network" in part["membership_why_not"]
    assert all(guess["by"] != "server" for guess in part["membership"])


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--images", "-1"], ("--images", "-1")),
        (["--steps", "0"], ("--steps", "0")),
        (["--out", "RUN/recipe.toml"], ("recipe.toml",)),
    ],
)
def test_wrong_options_are_one_line(
    words: list[str], names: tuple[str, ...], ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ran("fedavg").record.path
    before = sorted(path.rglob("*"))
    assert say("audit", "leakage", path, *(word.replace("RUN", str(path)) for word in words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in names)
    assert sorted(path.rglob("*")) == before


def test_a_run_that_predicts_numbers_is_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path / "costs.csv")
    recipe = {
        "data": {"dataset": f"csv:{table}", "label_column": "cost", "task": "regression", "num_clients": 2},
        "models": {"architectures": ["mlp-64-32"]},
        "method": {"name": "fedavg"},
        "training": {"rounds": 1},
    }
    pf.run(pf.Recipe.from_dict(recipe), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="run on classes"):
        attacks.leakage(tmp_path / "run")
