"""`polyfed deploy local` with stand-ins for Flower's programs: what they are told, and that they end, whatever happens.

The stand-ins listen, wait and write as Flower's programs and our server app would; test_on_flower.py has the real ones.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.deploy import local_cluster as room
from polyfed.deploy.local_cluster import local
from polyfed.errors import ConfigError, RunError
from tests.helpers.small_recipe import small_recipe

RECIPE = small_recipe(data={"split": "6:1:3"}, training={"rounds": 2})

STAND_IN = """
import json, os, pathlib, re, socket, sys, time

me, words, fault = sys.argv[1], sys.argv[2:], os.environ.get("FAULT", "")
me = {"server": "server", "node": "node"}[words[1]] if me == "polyfed" else me
told = dict(zip(words, words[1:]))
files = {word: pathlib.Path(word).read_bytes().decode()[:40] for word in words if os.path.isfile(word)}
folders = {word: os.listdir(word) for word in words if os.path.isdir(word)}
seen = {"program": me, "words": words, "files": files, "folders": folders, "environment": dict(os.environ)}
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(seen) + "\\n")
if me == "server":
    if fault == "superlink":
        sys.exit("no such certificate")
    with socket.create_server(("127.0.0.1", int(told["--port"]))) as server:
        time.sleep(60)
elif me == "node":
    time.sleep(60)
elif words[0] == "supernode":
    sys.exit("not known" if fault == "register" else 0)
else:
    config = dict(re.findall(r'(\\S+?)="?([^" ]+)', told["-c"]))
    out = pathlib.Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.jsonl"):
        old.unlink()
    if fault == "run":
        sys.exit("connection lost")
    if fault == "refused":
        print("Traceback (most recent call last):\\npolyfed.errors.ConfigError: expected this, got that\\n\\nbye")
        sys.exit(0)
    for number in (1, 2):
        record = {"round": number, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "accuracy": {}}
        with open(out / "rounds.jsonl", "a") as file:
            file.write(json.dumps(record) + "\\n")
        if fault == "hang" and number == 1:
            print("waiting", flush=True)
            time.sleep(60)
    result = {"method": "local", "dataset": "digits", "class_names": ["0"], "clients": 1, "rounds": 2, "seed": 0}
    result |= {"evaluation": {"stage": "personal"}, "accuracy": 0.5, "accuracy_by_stage": {}}
    result |= {"bytes_up": 2, "bytes_down": 2, "seconds": 2, "refused": 0}
    (out / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, in which Flower's programs are stand-ins."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "stand_in.py").write_text(STAND_IN)
    for name in ("polyfed", "flwr"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{programs}/stand_in.py" {name} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setattr(room, "require_package", lambda package, purpose: None)
    monkeypatch.setattr(room, "find_program", lambda name: programs / name)
    monkeypatch.setattr(room, "polyfed_command", lambda: [programs / "polyfed"])
    monkeypatch.setattr(room, "make_server_certificate", stand_in_certify)
    monkeypatch.setattr(
        room, "make_node_key", lambda path: [touched(path), touched(path.with_name(f"{path.name}.pub"))]
    )
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.jsonl"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)
    return path


def stand_in_certify(folder: Path, hosts: list[str]) -> None:
    assert hosts == ["localhost", "127.0.0.1"]
    for name in ("ca.crt", "ca.key", "server.pem", "server.key"):
        touched(folder / name)


def seen(place: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (place / "seen.jsonl").read_text().splitlines()]


def words_of(program: dict[str, Any]) -> list[str]:
    return list(program["words"])


def living(place: Path) -> list[str]:
    """Command lines of stand-ins that still run."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if f"{place}/programs/stand_in.py" in line]


def test_every_program_is_told_what_makes_it_safe(place: Path) -> None:
    done = local("recipe.toml", nodes=3, out="run", seed=4, overrides=["training.lr=0.5"], deadline=7)
    assert (done.path, len(done.history), done.result["accuracy"]) == (place / "run", 2, 0.5)
    programs = seen(place)
    kinds = [program["program"] for program in programs]
    assert kinds[0] == "server"
    assert sorted(kinds[1:4]) == ["flwr"] * 3
    assert sorted(kinds[4:]) == ["flwr"] + ["node"] * 3
    link, nodes = programs[0], [program for program in programs if program["program"] == "node"]
    told = dict(zip(link["words"], link["words"][1:], strict=False))  # type: ignore[index,call-overload]
    assert told["--host"] == "127.0.0.1"
    ((_, keys),) = link["folders"].items()  # type: ignore[attr-defined]
    assert {"ca.crt", "server.pem", "server.key"} <= {*keys}
    ports = {told["--port"]}
    for program in programs:
        assert "--insecure" not in program["words"]  # type: ignore[operator]
        switches = program["environment"]
        assert switches["FLWR_TELEMETRY_ENABLED"] == "0"  # type: ignore[index]
        assert switches["FLWR_DISABLE_UPDATE_CHECK"] == switches["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"  # type: ignore[index]
        assert Path(switches["FLWR_HOME"]).name == "home"  # type: ignore[index]
        assert not Path(switches["FLWR_HOME"]).exists(), "it was the run's own"  # type: ignore[index]
    numbers = set()
    for program in nodes:
        told = dict(zip(program["words"], program["words"][1:], strict=False))  # type: ignore[index,call-overload]
        config = re.fullmatch(r'client-id=(\d) state-dir="(.+)" share-model=true', told["--node-config"])
        assert config is not None
        assert config[2] == str(place / "run-nodes" / f"node-{config[1]}")
        assert program["files"][told["--key"]] == f"node-{config[1]}"  # type: ignore[index]
        assert program["files"][told["--authority"]] == "ca.crt"  # type: ignore[index]
        own = [
            told["--seed"],
            *(
                word
                for option, word in zip(words_of(program), words_of(program)[1:], strict=False)
                if option == "--set"
            ),
        ]
        assert own == ["4", "training.lr=0.5", "data.num_clients=3"], "what the server has, in its own words"
        numbers.add(config[1])
        ports.add(told["--port"])
    assert numbers == {"0", "1", "2"}
    assert len(ports) == 4
    run = next(program for program in programs if program["words"][0] == "run")  # type: ignore[index]
    told = dict(zip(run["words"], run["words"][1:], strict=False))  # type: ignore[index,call-overload]
    assert told["-c"] == f'out="{place / "run"}" resume=false overwrite=false deadline=7.0'
    assert not (place / "run-nodes").exists()
    assert living(place) == []


def test_the_app_has_what_was_asked_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, object] = {}

    def stand_in(folder: Path, recipe: str, **asked: object) -> None:
        written.update(asked, recipe=recipe)
        raise RunError("enough")

    monkeypatch.setattr(room.app_template, "create_app", stand_in)
    with pytest.raises(RunError, match="enough"):
        local("recipe.toml", nodes=2, method="fedproto", seed=1, overrides=["training.lr=0.5"], out="run")
    assert written == {
        "recipe": "recipe.toml",
        "method": "fedproto",
        "seed": 1,
        "preset": None,
        "overrides": ["training.lr=0.5", "data.num_clients=2"],
    }


def test_the_nodes_are_told_where_modules_of_ones_own_lie(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def stand_in(folder: Path, recipe: str, **asked: Any) -> None:
        told.extend(asked["overrides"])
        raise RunError("enough")

    monkeypatch.setattr(room.app_template, "create_app", stand_in)
    (place / "own_local.py").write_text("from polyfed.methods import Local\n\n\nclass Mine(Local):\n    pass\n")
    with pytest.raises(RunError, match="enough"):
        local("recipe.toml", nodes=2, method="own_local:Mine", out="run")
    assert told == ["data.num_clients=2", f'run.modules=["{place}"]']


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        slow(
            "superlink",
            RunError,
            r"superlink has ended, with status 1: no such certificate \(all of it in .*superlink.log",
        ),
        ("refused", ConfigError, r"^expected this, got that$"),
        slow("register", RunError, r"register-\d ended with status 1: not known"),
        slow("run", RunError, r"run ended with status 1: connection lost"),
        slow("hang", RunError, r"the run was not over in time: waiting \(all of it in "),
    ],
)
def test_a_failure_is_one_line_and_leaves_no_process(
    fault: str, error: type[Exception], message: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(error, match=message):
        local("recipe.toml", out="run", timeout=3 if fault == "hang" else None)
    assert living(place) == []
    assert (place / "run-nodes" / "logs").is_dir(), "what was said is kept"
    monkeypatch.delenv("FAULT")
    assert len(local("recipe.toml", out="run", overwrite=True).history) == 2
    assert not (place / "run-nodes").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_is_told_how_to_go_on(number: int, place: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from polyfed.cli import app as cli
from polyfed.deploy import local_cluster as room
room.require_package = lambda package, purpose: None
room.find_program = lambda name: Path({str(place / "programs")!r}) / name
room.polyfed_command = lambda: [room.find_program("polyfed")]
room.make_server_certificate = lambda folder, hosts: folder.mkdir()
room.make_node_key = lambda path: None
cli.main(["deploy", "local", "--recipe", "recipe.toml", "--out", "run"])
"""
    environment = {**os.environ, "FAULT": "hang"}
    command = [sys.executable, "-c", code]
    caller = subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = place / "run-nodes" / "logs" / "run.log"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and "waiting" in log.read_text()):
        assert caller.poll() is None, caller.communicate()
        time.sleep(0.05)
    assert caller.stderr is not None
    said = ""
    while "round 1/2" not in said:
        line = caller.stderr.readline()
        assert line, said
        said += line
    caller.send_signal(number)
    out, more = caller.communicate(timeout=120)
    said += more
    assert caller.returncode == 128 + number, said
    assert said.splitlines()[-1] == "polyfed: interrupted after 1 whole rounds, which are kept; go on with --resume"
    assert "round 1/2" in said
    assert out == ""
    assert living(place) == []


def test_what_cannot_be_is_said_before_anything_starts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: dict[str, Callable[[], object]] = {
        "expected --deadline as seconds, more than 0, got -1": lambda: local("recipe.toml", deadline=-1),
        "expected --timeout as seconds, more than 0, got inf": lambda: local("recipe.toml", timeout=float("inf")),
        "did you mean 'rounds'": lambda: local("recipe.toml", overrides=["training.round=1"]),
        "one of --resume and --overwrite": lambda: local("recipe.toml", resume=True, overwrite=True),
        "without ';'": lambda: local("recipe.toml", overrides=["run.label='a;b'"], out="run"),
        "without quotation marks": lambda: local("recipe.toml", out='ru"n'),
        "fedhenn|FedHeNN": lambda: local("recipe.toml", method="fedhenn", out="run"),
    }
    for message, call in wrong.items():
        with pytest.raises(ConfigError, match=message):
            call()
    assert not (place / "seen.jsonl").exists()
    assert not (place / "run").exists()
    (place / "run-nodes" / "mine").mkdir(parents=True)
    with pytest.raises(ConfigError, match="with other files in it"):
        local("recipe.toml", out="run")
    (place / "run-nodes" / "mine").rmdir()
    (place / "run-nodes").rmdir()
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"deploy local needs the package 'flwr'; .* pip install 'polyfed\[flower\]'"):
        local(place / "recipe.toml", out=place / "run")


def test_a_finished_run_is_read_and_another_is_not_touched(place: Path) -> None:
    local("recipe.toml", out="run")
    (place / "run" / "recipe.toml").write_text(room.Recipe.load("recipe.toml").dumps())
    begun = len(seen(place))
    assert local("recipe.toml", out="run", resume=True).result["accuracy"] == 0.5
    assert len(seen(place)) == begun
    with pytest.raises(ConfigError, match="already holds a run"):
        local("recipe.toml", out="run")
    with pytest.raises(ConfigError, match="holds another recipe's run"):
        local("recipe.toml", out="run", resume=True, seed=1)
    (place / "run" / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"expected what the nodes of .* have kept in .*run-nodes, got none"):
        local("recipe.toml", out="run", resume=True)


def test_on_the_command_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.status(["deploy", "local", "--recipe", "recipe.toml", "--nodes", "1", "--out", "run"]) == 0
    shown = capsys.readouterr()
    assert "1 clients, 2 rounds" in shown.err
    assert "round 2/2" in shown.err
    assert f"run folder {place / 'run'}" in shown.out
    assert cli.status(["deploy", "local", "--recipe", "recipe.toml", "--nodes", "1", "--out", "run2", "-q"]) == 0
    assert capsys.readouterr().err == ""
