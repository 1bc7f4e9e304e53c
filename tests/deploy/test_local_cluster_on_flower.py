"""Deployments on 127.0.0.1 with Flower's own programs: TLS, node authentication, and what happens when one dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from polyfed.deploy import app_template
from polyfed.deploy.local_cluster import LocalCluster, free_ports, local
from polyfed.experiments.run import run
from polyfed.testing.fixtures import TIMES
from tests.helpers.on_flower import WITH_FLOWER, until

pytestmark = WITH_FLOWER


def records(out: Path, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in (out / name).read_text().splitlines(keepends=True) if line.endswith("\n")]
    return []


def kill(process: subprocess.Popen[bytes]) -> None:
    """A program and all that it has started in its session, at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_same_numbers(out: Path, recipe: Path, alone: Path, **changes: Any) -> None:
    """The run folder holds what a run in one process gives: every record but for times, every weight, bit for bit."""
    run(recipe, out=alone, **changes)
    ours, theirs = records(out), records(alone)
    for record in (*ours, *theirs):
        for name in TIMES:
            record.pop(name)
        record.pop("seal", None)
    assert ours == theirs
    one, other = (json.loads((folder / "models" / "index.json").read_text()) for folder in (out, alone))
    assert [entry["sha256"] for entry in one.values()] == [entry["sha256"] for entry in other.values()]
    results = [json.loads((folder / "result.json").read_text()) for folder in (out, alone)]
    for key in ("accuracy", "accuracy_per_client", "bytes_up", "bytes_down", "accuracy_by_stage"):
        assert results[0][key] == results[1][key], key


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rounds"), [(None, 1), ("own-plus-common", 2)])
def test_a_deployment_gives_the_numbers_of_a_run_in_one_process(
    recipe: Path, tmp_path: Path, method: str | None, rounds: int
) -> None:
    options: dict[str, Any] = {"method": method, "overrides": [f"training.rounds={rounds}"], "seed": 2}
    done = local(recipe, out=tmp_path / "run", **options)
    check_same_numbers(done.path, recipe, tmp_path / "alone", **options)
    assert not (tmp_path / "run-logs").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_who_is_not_registered_or_speaks_plainly_is_refused(loopback: LocalCluster) -> None:
    loopback.start_server()
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"http://{loopback.address}/", timeout=30)
    loopback.register([0])
    for number in (0, 1):
        loopback.start_node(number)
    program = Path(sys.executable).with_name("flower-supernode")
    plain = ["--insecure", "--superlink", loopback.address, "--port", str(free_ports(1)[0])]
    loopback.start("plain-1", [program, *plain])

    def log(name: str) -> str:
        return loopback.log(name).read_text(errors="replace")

    joined = "is connected to"
    until(lambda: joined in log("node-0"), "the registered node is taken")
    until(lambda: not loopback.is_running("node-1"), "the other one is not")
    assert "Failed to activate SuperNode" in log("node-1")
    refused = "Connection attempt failed"
    until(lambda: refused in log("plain-1") or not loopback.is_running("plain-1"), "no word without TLS")
    assert "unrecognized" not in log("plain-1"), "it was started as it should be"
    assert joined not in log("node-1")
    assert "SuperNode ID" not in log("plain-1")
    assert loopback.is_running("node-0")


class Back(Exception):
    """A node takes part again."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_node_that_is_killed_is_left_out_until_it_is_back(
    loopback: LocalCluster, recipe: Path, tmp_path: Path
) -> None:
    out, endless = tmp_path / "run", "training.rounds=100000"
    app_template.create_app(tmp_path / "app", recipe, overrides=[endless], overwrite=True)
    loopback.start_server()
    loopback.register([0, 1])
    nodes = [loopback.start_node(number) for number in (0, 1)]
    steps: list[str] = []

    def look() -> None:
        dropped = [record["dropped"] for record in records(out)]
        if not steps and dropped:
            kill(nodes[1])
            steps.append("killed")
        elif steps == ["killed"] and dropped[-1] == [1]:  # Flower takes a node when it has given up the one before
            loopback.start_node(1)
            steps.append("started")
        elif steps == ["killed", "started"] and dropped[-1] == []:
            raise Back

    with pytest.raises(Back):
        loopback.run({"out": str(out), "deadline": 120.0}, look)
    dropped = [record["dropped"] for record in records(out)]
    assert [each for each, _ in itertools.groupby(dropped)] == [[], [1], []]
    troubles = [event for event in records(out, "nodes.jsonl") if event["event"] == "trouble"]
    assert {event["client"] for event in troubles} == {1}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_server_app_that_dies_loses_no_whole_round(loopback: LocalCluster, recipe: Path, tmp_path: Path) -> None:
    out, short = tmp_path / "run", "training.rounds=2"
    app_template.create_app(tmp_path / "app", recipe, overrides=[short], overwrite=True)
    loopback.start_all()
    loopback.submit({"out": str(out)})
    until(lambda: any((out / "checkpoint").glob("[!.]*")), "a round is done, and can be gone back to")
    kill_server_app(loopback)
    before = records(out)
    until(lambda: not loopback.is_running("run"), "the log ends")
    loopback.run({"out": str(out), "resume": True})
    assert records(out)[: len(before)] == before
    check_same_numbers(out, recipe, tmp_path / "alone", overrides=[short])


def kill_server_app(cluster: LocalCluster) -> None:
    apps = [number for number in cluster.survivors() if "serverapp" in words_of(number)]
    assert apps
    for number in apps:
        os.kill(number, signal.SIGKILL)


def words_of(number: int) -> str:
    """A process's command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_server_that_dies_loses_no_whole_round(loopback: LocalCluster, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    server = loopback.start_server()
    loopback.register([0, 1])
    for number in (0, 1):
        loopback.start_node(number)
    loopback.submit({"out": str(out)})
    until(lambda: len(records(out)) >= 1, "a round is done")
    kill(server)
    kill_server_app(loopback)  # else it may wait for the server
    before = records(out)
    until(lambda: not loopback.is_running("run"), "the log ends")
    loopback.start_server()
    loopback.run({"out": str(out), "resume": True})
    assert records(out)[: len(before)] == before
    check_same_numbers(out, recipe, tmp_path / "alone")
