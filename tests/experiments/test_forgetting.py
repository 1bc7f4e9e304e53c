"""A client's rows are taken out of a run folder: of one process, and of a deployment at the server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.core.message import State, get_group
from polyfed.deploy.protocol import Envelope, read_message
from polyfed.deploy.server import serve
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.wire import decode
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.forgetting import forget
from polyfed.experiments.prediction import load
from tests.helpers.nearby import DATA, Nearby, recipe_of
from tests.helpers.refusals import refusal

KEPT = {"features": 36, "keep_sums": True}


def recipe_for(rounds: int) -> Recipe:
    settings: dict[str, Any] = {"training": {"rounds": rounds}, "run": {"checkpoint_every": 1}}
    return recipe_of("closed-form", hyperparameters=KEPT, **settings)


def in_one_process(rounds: int, folder: Path, **options: Any) -> list[Envelope]:
    build_federation(recipe_for(rounds), out=folder / "out", data=DATA).run(**options)
    return []


def deployed(rounds: int, folder: Path, **options: Any) -> list[Envelope]:
    """The jobs that nodes were sent."""
    recipe = recipe_for(rounds)
    wire = Nearby(recipe, folder)
    serve(recipe, wire, out=folder / "out", deadline=5, **options)
    return [envelope for _, envelope in wire.sent if envelope.kind == "train"]


def states(folder: Path) -> list[State]:
    """Of the server, by round."""
    files = sorted((folder / "out" / "checkpoint").glob("round-*/states.safetensors"))
    return [decode(file.read_bytes())["server"] for file in files]


@pytest.mark.parametrize("run", [in_one_process, deployed])
def test_all_checkpoints_and_what_follows_are_without_the_client(
    run: Callable[..., list[Envelope]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(2, tmp_path)
    before = states(tmp_path)
    assert cli.status(["deploy", "forget", str(tmp_path / "out"), "1"]) == 0
    said = capsys.readouterr().out
    assert "the rows of client 1 do not count any more; go on with resume=true" in said
    assert ("models/ is removed" in said) is (run is in_one_process)
    assert not list((tmp_path / "out" / "models").glob("*"))
    method = recipe_for(2).chosen_method
    expected = [method.forget(state, 1) for state in before]
    assert len(expected) == 2
    for found, state in zip(states(tmp_path), expected, strict=True):
        torch.testing.assert_close(found, state, rtol=0, atol=0)
    jobs = run(3, tmp_path, resume=True)
    last = states(tmp_path)[-1]
    solution = get_group(last, "solution")
    torch.testing.assert_close(solution, expected[-1]["solution"], rtol=0, atol=0)
    assert {*get_group(last, "versions")} == {"0", "1", "2"}
    if run is deployed:
        sent = [read_message(envelope.body) for envelope in jobs]
        assert len(sent) == 3
        assert all(torch.equal(get_group(message, "solution")["weight"], solution["weight"]) for message in sent)
        assert all("heard" in message for message in sent)
    assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir() if path.name.startswith(".")] == []


ONE_BY_ONE = {"checkpoint_every": 1, "executor": "serial"}
CLOCK = {"devices": {"profiles": ["laptop", "raspberry-pi", "phone-low"], "buffer_size": 2}}
FEW = {"training": {"client_fraction": 0.34}}


def common(rounds: int, more: Mapping[str, Any]) -> Recipe:
    """Own networks plus a common model, whose clients have it in their states."""
    training = {"rounds": rounds, **more.get("training", {})}
    settings = {**more, "training": training, "models": {"architectures": ["digits-cnn1"]}, "run": ONE_BY_ONE}
    return recipe_of("own-plus-common", hyperparameters=KEPT, **settings)


def serve_common(folder: Path, rounds: int, more: Mapping[str, Any], **options: Any) -> None:
    recipe = common(rounds, more)
    serve(recipe, Nearby(recipe, folder, configs={2: {"share-model": True}}), out=folder / "out", deadline=5, **options)


def simulate_common(folder: Path, rounds: int, more: Mapping[str, Any], **options: Any) -> None:
    build_federation(common(rounds, more), out=folder / "out", data=DATA).run(**options)


def needles(folder: Path, client: int) -> list[bytes]:
    """Numbers in which a client's rows are: its sums as they are kept and as they are sent, and solutions with them."""
    found: list[bytes] = []
    for state in states(folder):
        if f"sums of client {client}" in state:
            own, solution = get_group(state, f"sums of client {client}"), get_group(state, "solution")
            rows = float(own["counts"].sum())
            found += [t.contiguous().numpy().tobytes()[:256] for t in (own["sums"], solution["weight"])]
            found.append((own["sums"] / rows).contiguous().numpy().tobytes()[80:160])
    return found


def left(folder: Path, numbers: Sequence[bytes]) -> list[str]:
    """Files of the run folder that have one of these numbers."""
    files = [file for file in (folder / "out").rglob("*") if file.is_file()]
    return [file.name for file in files if any(number in file.read_bytes() for number in numbers)]


@pytest.mark.parametrize(
    ("run", "more"),
    [
        *((run, more) for run in (serve_common, simulate_common) for more in ({}, FEW)),
        (simulate_common, CLOCK),  # nodes are devices of their own
    ],
    ids=[*(f"{where}-{who}" for where in ("nodes", "one process") for who in ("all", "few")), "work in flight"],
)
def test_nothing_of_the_client_is_left_or_comes_back(
    run: Callable[..., None], more: Mapping[str, Any], tmp_path: Path
) -> None:
    """Not in an older checkpoint, other clients' states, models, or what killed processes have left."""
    run(tmp_path, 4, more)
    out, checkpoints = tmp_path / "out", tmp_path / "out" / "checkpoint"
    numbers = needles(tmp_path, 2)
    assert numbers
    assert left(tmp_path, numbers)
    old = tmp_path / "old"
    shutil.copytree(checkpoints, old)
    newest = max(old.iterdir())
    for name in (f".{newest.name}.4242.tmp", f".{newest.name}.4242.before.tmp"):
        shutil.copytree(newest, checkpoints / name)
    forget(out, 2)
    assert left(tmp_path, numbers) == []
    forget(out, 2)
    shutil.rmtree(checkpoints)
    shutil.copytree(old, checkpoints)
    run(tmp_path, 7, more, resume=True)
    assert left(tmp_path, numbers) == []
    assert set(common(7, more).chosen_method.remembered(states(tmp_path)[-1])) == {0, 1}
    run(tmp_path, 2, {}, overwrite=True)
    assert set(common(2, more).chosen_method.remembered(states(tmp_path)[-1])) == {0, 1}


def test_who_forgets_is_killed_at_any_step_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_common(tmp_path, 2, {})
    numbers = needles(tmp_path, 2)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "out", kept)

    class Killed(BaseException):
        pass

    for step in range(100):
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(kept, tmp_path / "out")
        left_steps = [step]

        def counted(real: Callable[..., Any], steps: list[int] = left_steps) -> Callable[..., Any]:
            def change(*args: Any, **options: Any) -> Any:
                steps[0] -= 1
                if steps[0] < 0:
                    raise Killed
                return real(*args, **options)

            return change

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "link", "mkdir", "rmdir", "unlink"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                forget(tmp_path / "out", 2)
                done = True
            except Killed:
                done = False
        listed = RunFolder(tmp_path / "out").forgotten()
        forget(tmp_path / "out", 2)
        assert left(tmp_path, numbers) == []
        assert len(states(tmp_path)) == 2 or not listed
        if done:
            break
    assert step > 10


@pytest.mark.parametrize("kept", [{"run": {"keep": "best"}}, {"evaluation": {"patience": 2}}], ids=["best", "patience"])
@pytest.mark.parametrize("method", ["closed-form", "own-plus-common"])
def test_the_best_round_is_one_without_the_client(method: str, kept: Mapping[str, Any], tmp_path: Path) -> None:
    """Scores of before are of models that have gone: they are not reported beside models without the client."""
    for rounds, resume in ((3, False), (6, True)):
        sections = {"data": {"split": "6:2:2"}, "models": {"architectures": ["digits-cnn1"]}, **kept}
        sections["run"] = {**ONE_BY_ONE, **kept.get("run", {})}
        recipe = recipe_of(method, hyperparameters=KEPT, training={"rounds": rounds}, **sections)
        federation = build_federation(recipe, out=tmp_path, data=DATA)
        result = federation.run(resume=resume).result
        for client, reported in zip(federation.clients, result["accuracy_per_client"], strict=True):
            scores = load(tmp_path, client.id).scores(client.data.test.x)
            assert float((scores.argmax(dim=1) == client.data.test.y).double().mean()) == reported
        assert (result["best_round"] > 3) is resume
        if not resume:
            forget(tmp_path, 1)


def test_a_run_by_a_method_that_cannot_forget_is_refused_where_somebody_is(tmp_path: Path) -> None:
    simulate_common(tmp_path, 1, {})
    forget(tmp_path / "out", 1)
    with pytest.raises(ConfigError, match=r"^expected a method that can take out a client's rows"):
        build_federation(recipe_of("local"), out=tmp_path / "out", data=DATA).run(overwrite=True)
    (tmp_path / "out" / "forgotten.json").write_text('{"clients": [1]}')
    with pytest.raises(ConfigError, match=r"^expected the list of forgotten clients in .*, got something else"):
        simulate_common(tmp_path, 2, {}, resume=True)


def test_what_cannot_be_forgotten_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    assert "recipe.toml" in refusal(lambda: forget(tmp_path, 0))
    in_one_process(1, tmp_path)
    with pytest.raises(ConfigError, match=r"^expected a client whose rows count \(0, 1, 2\), got 3$"):
        forget(tmp_path / "out", 3)
    forget(tmp_path / "out", 1)
    (state,) = states(tmp_path)
    with pytest.raises(ConfigError, match=r"^expected a client whose rows count \(0, 2\), got 3$"):
        forget(tmp_path / "out", 3)
    torch.testing.assert_close(states(tmp_path)[0], state, rtol=0, atol=0)
    (file,) = (tmp_path / "out" / "checkpoint").glob("round-*/states.safetensors")
    file.write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"^expected a whole checkpoint in .*, got none; what is left .* --overwrite$"
    ):
        forget(tmp_path / "out", 0)
