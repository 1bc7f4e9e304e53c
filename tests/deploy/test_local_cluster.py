"""`polyfed deploy local` with stand-ins for Flower's programs: their command lines, and that they end in any case.

The stand-ins listen, wait and write as Flower's programs and our server app would; test_local_cluster_on_flower.py has
the real ones.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.deploy import local_cluster
from polyfed.deploy.local_cluster import ProcessGroup, local
from polyfed.errors import ConfigError, RunError
from tests.helpers.small_recipe import small_recipe

RECIPE = small_recipe(data={"split": "6:1:3"}, training={"rounds": 2})
SLEEP = "import time; time.sleep(60)"

STAND_IN = """
import json, os, pathlib, re, socket, sys, time

me, words, fault = sys.argv[1], sys.argv[2:], os.environ.get("FAULT", "")
me = {"server": "server", "node": "node"}[words[1]] if me == "polyfed" else me
options = dict(zip(words, words[1:]))
files = {word: pathlib.Path(word).read_bytes().decode()[:40] for word in words if os.path.isfile(word)}
folders = {word: os.listdir(word) for word in words if os.path.isdir(word)}
seen = {"program": me, "words": words, "files": files, "folders": folders, "environment": dict(os.environ)}
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(seen) + "\\n")
if me == "server":
    with socket.create_server(("127.0.0.1", int(options["--port"]))) as server:
        time.sleep(60)
elif me == "node":
    if fault == "node" and "client-id=0" in options["--node-config"]:
        sys.exit("no rows here")
    time.sleep(60)
elif words[0] == "supernode":
    sys.exit(0)
else:
    config = dict(re.findall(r'(\\S+?)="?([^" ]+)', options["-c"]))
    out = pathlib.Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.jsonl"):
        old.unlink()
    if fault == "refused":
        print("Traceback (most recent call last):\\npolyfed.errors.ConfigError: expected this, got that\\n\\nbye")
        sys.exit(0)
    if fault in ("node", "away"):
        print("1 of 2 clients are there", flush=True)
        print("node 7 is no client: expected this recipe" if fault == "away" else "", flush=True)
        time.sleep(60)
    for number in (1, 2):
        record = {"round": number, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "accuracy": {}}
        with open(out / "rounds.jsonl", "a") as file:
            file.write(json.dumps(record) + "\\n")
        print(f"round {number}/2\\x1b", flush=True)
        if fault == "hang" and number == 1:
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
    monkeypatch.setattr(local_cluster, "require_package", lambda package, purpose: None)
    monkeypatch.setattr(local_cluster, "find_program", lambda name: programs / name)
    monkeypatch.setattr(local_cluster, "polyfed_command", lambda: [programs / "polyfed"])
    monkeypatch.setattr(local_cluster, "make_server_certificate", stand_in_certify)
    monkeypatch.setattr(local_cluster, "make_node_key", touched)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.jsonl"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touched(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)


def stand_in_certify(folder: Path, hosts: list[str]) -> None:
    assert hosts == ["localhost", "127.0.0.1"]
    for name in ("ca.crt", "ca.key", "server.pem", "server.key"):
        touched(folder / name)


def seen(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "seen.jsonl").read_text().splitlines()]


def options_of(program: dict[str, Any]) -> dict[str, str]:
    return dict(itertools.pairwise(program["words"]))


def living(place: Path) -> list[str]:
    """Command lines of stand-ins that still run."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if f"{place}/programs/stand_in.py" in line]


def test_every_program_is_started_safely(place: Path) -> None:
    done = local("recipe.toml", nodes=3, out="run", seed=4, overrides=["training.lr=0.5"])
    assert (done.path, len(done.history), done.result["accuracy"]) == (place / "run", 2, 0.5)
    programs = seen(place)
    kinds = [program["program"] for program in programs]
    assert kinds[:4] == ["server", "flwr", "flwr", "flwr"]
    assert sorted(kinds[4:]) == ["flwr", "node", "node", "node"]
    server, nodes = programs[0], [program for program in programs if program["program"] == "node"]
    assert options_of(server)["--host"] == "127.0.0.1"
    ((_, keys),) = server["folders"].items()
    assert {"ca.crt", "server.pem", "server.key"} <= {*keys}
    for program in programs:
        assert "--insecure" not in program["words"]
        switches = program["environment"]
        assert switches["FLWR_TELEMETRY_ENABLED"] == "0"
        assert switches["FLWR_DISABLE_UPDATE_CHECK"] == switches["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert Path(switches["FLWR_HOME"]).name == "home"
        assert not Path(switches["FLWR_HOME"]).exists(), "it was the run's own"
    numbers = set()
    for program in nodes:
        options = options_of(program)
        config = re.fullmatch(r'client-id=(\d) state-dir="(.+)" share-model=true', options["--node-config"])
        assert config is not None
        assert not Path(config[2]).exists(), "state that only this run needed"
        assert program["files"][options["--key"]] == f"node-{config[1]}"
        assert program["files"][options["--authority"]] == "ca.crt"
        numbers.add(config[1])
    assert numbers == {"0", "1", "2"}
    run = next(program for program in programs if program["words"][0] == "run")
    assert options_of(run)["-c"] == f'out="{place / "run"}" overwrite=false'
    assert not (place / "run-logs").exists()
    assert living(place) == []


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("refused", ConfigError, r"^expected this, got that$"),
        ("node", RunError, r"^node-0 has ended, with status 1: no rows here \(all of it in .*node-0\.log\)$"),
        ("away", RunError, r"^a node was turned away: expected this recipe$"),
    ],
)
def test_a_failure_is_one_line_and_leaves_no_process(
    fault: str, error: type[Exception], message: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(error, match=message):
        local("recipe.toml", out="run")
    assert living(place) == []
    assert list((place / "run-logs").glob("*.log")), "the output is kept"
    monkeypatch.delenv("FAULT")
    assert len(local("recipe.toml", out="run", overwrite=True).history) == 2
    assert not (place / "run-logs").exists()


def test_a_wrong_request_starts_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: dict[str, Callable[[], object]] = {
        "did you mean 'rounds'": lambda: local("recipe.toml", overrides=["training.round=1"]),
        "without quotation marks": lambda: local("recipe.toml", out='ru"n'),
        "fedhenn|FedHeNN": lambda: local("recipe.toml", method="fedhenn", out="run"),
    }
    for message, call in wrong.items():
        with pytest.raises(ConfigError, match=message):
            call()
    assert not (place / "seen.jsonl").exists()
    assert not (place / "run").exists()
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"deploy local needs the package 'flwr'; .* pip install 'polyfed\[flower\]'"):
        local(place / "recipe.toml", out=place / "run")


# programs -----------------------------------------------------------------------------------------------------------


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *words]


def lives(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def wait_until_dead(number: int) -> None:
    deadline = time.monotonic() + 300  # on a busy machine
    while lives(number):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_program_ends_first_and_a_deaf_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "GRACE_SECONDS", 0.5)
    noting = "import signal, sys\nsignal.signal(15, lambda *_: (open(sys.argv[1], 'a').write(sys.argv[2]), sys.exit()))"
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)"
    with ProcessGroup(tmp_path, {}) as started:
        for name, code in (("a", noting), ("b", noting), ("deaf", deaf)):
            process = started.start(
                name, python(f"{code}\nprint(1, flush=True)\n{SLEEP}", str(tmp_path / "order"), name)
            )
            while not started.log(name).read_text():
                time.sleep(0.01)
    assert (tmp_path / "order").read_text() == "ab"
    assert process.poll() == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system does not show environments")
def test_children_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}], start_new_session=True)"
    )
    with ProcessGroup(tmp_path, {}) as started:
        started.start("parent", python(code + "; print(p.pid, flush=True)"))
        started.wait_for_success("parent", 300)
        child = int(started.log("parent").read_text())
        assert lives(child)
    wait_until_dead(child)
