"""The executor `ray` on Ray itself: half a minute and more each, but for the first, on a busy machine.

Ray reads its settings when it is imported, so that this process imports it by the executor alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyfed.config.recipe import Recipe
from polyfed.experiments.build import build_federation
from polyfed.experiments.run import run
from polyfed.testing.fixtures import TIMES
from tests.helpers.nearby import DATA, SETTINGS, recipe_of

if importlib.util.find_spec("ray") is None:
    pytest.skip("the extra 'ray' is not installed", allow_module_level=True)

PATIENCE = 900.0  # seconds
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
ONE = {"models": {"architectures": ["digits-cnn1"]}}


def whole(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records without their times."""
    return [{key: value for key, value in record.items() if key not in (*TIMES, "seal")} for record in history]


def records(out: Path) -> list[dict[str, Any]]:
    """The records of a run folder that are whole, without their times."""
    try:
        lines = (out / "rounds.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return whole([json.loads(line) for line in lines if line.endswith("\n")])


class Caller:
    """`polyfed run --executor ray` in a process group of its own, whose offspring bear a mark."""

    def __init__(self, recipe: Path, out: Path, **environment: str) -> None:
        self._mark = f"POLYFED_TEST_MARK={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        words = ["run", str(recipe), "--out", str(out), "--executor", "ray", "--workers", "2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyfed", *words],
            env={**os.environ, name: value, **environment},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def offspring(self) -> dict[int, str]:
        """Process -> command line, of all that it has started and that still runs."""
        found = {}
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in place.read_bytes().split(b"\0"):
                    words = place.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words.strip():
                        found[int(place.parent.name)] = words
        return found

    def addresses(self) -> set[str]:
        """Where these processes listen, as hexadecimal numbers of the system's own tables."""
        sockets = set()
        for number in self.offspring():
            for handle in Path(f"/proc/{number}/fd").glob("*"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(handle).removeprefix("socket:[").removesuffix("]"))
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
        listening = [words for words in lines if words[3] == "0A"]
        return {words[1].partition(":")[0] for words in listening if words[9] in sockets}

    def wait_for(self, out: Path, rounds: int) -> None:
        """Until so many rounds are whole."""
        until = time.monotonic() + PATIENCE
        while len(records(out)) < rounds:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_of("fedgh", training={"rounds": 500}).dumps())
    return path


@pytest.mark.slow
def test_two_rounds_are_those_of_one_process() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    recipe = recipe_of("fedavg", **ONE, privacy={"upload_clip_norm": 1.0, "upload_noise_multiplier": 0.1})
    found = build_federation(recipe.with_run(executor="ray", workers=2), data=DATA).run()
    expected = build_federation(recipe, data=DATA).run()
    assert whole(found.history) == whole(expected.history)
    assert found.result["accuracy"] == expected.result["accuracy"]
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ended", ["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_who_is_ended_leaves_whole_rounds_and_no_process(recipe: Path, tmp_path: Path, ended: str) -> None:
    """What was done is what one process does, bit for bit; and one process goes on with it."""
    out = tmp_path / "run"
    caller = Caller(recipe, out, TMPDIR=str(tmp_path))
    try:
        caller.wait_for(out, 6)  # the checkpoint of round 5 is there
        assert any("raylet" in words for words in caller.offspring().values())
        assert caller.addresses()
        assert caller.addresses() <= LOOPBACK
    finally:
        if ended == "Ctrl-C":  # a terminal tells the whole group
            os.killpg(caller.process.pid, signal.SIGINT)
        else:
            caller.process.send_signal(getattr(signal, ended))
        _, said = caller.process.communicate(timeout=PATIENCE)
    if ended != "SIGKILL":
        assert caller.process.returncode == 128 + (signal.SIGINT if ended == "Ctrl-C" else signal.SIGTERM), said
        assert "whole round" in said.splitlines()[-1]
        assert list(tmp_path.glob("polyfed-*")) == []
    until = time.monotonic() + PATIENCE
    while caller.offspring() and time.monotonic() < until:
        time.sleep(0.2)
    assert caller.offspring() == {}
    before = len(records(out))
    short = [f"training.rounds={before + 1}"]
    alone = run(recipe, out=tmp_path / "alone", overrides=[*short, "run.executor=serial"])
    assert records(out) == records(tmp_path / "alone")[:before]
    stored = out / "recipe.toml"
    stored.write_text(stored.read_text().replace("rounds = 500", f"rounds = {before + 1}"))
    resumed = run(recipe, out=out, overrides=[*short, "run.executor=serial"], resume=True)
    assert records(out) == records(tmp_path / "alone")
    assert resumed.result["accuracy"] == alone.result["accuracy"]


WITNESS = '''
from pathlib import Path

from polyfed.methods import FedGH


class Witness(FedGH):
    """Notes on which node clients train."""

    def receive(self, client, message):
        import ray

        if ray.is_initialized():
            Path(__file__).with_name(f"node-{ray.get_runtime_context().get_node_id()}").touch()
        return super().receive(client, message)
'''


CLUSTER = """
import sys

from ray.cluster_utils import Cluster

made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
made.add_node(num_cpus=1)
print(made.address, *(node.node_id for node in made.list_all_nodes()), flush=True)
sys.stdin.readline()  # "" at the end of the test
made.shutdown()
"""


class TwoNodes:
    """Two nodes of one core each on this machine, each with its own raylet and object store."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", CLUSTER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address, *nodes = self.process.stdout.readline().split()
        self.nodes = set(nodes)

    def end(self) -> None:
        """Kill all of it."""
        self.process.communicate(timeout=PATIENCE)


@pytest.fixture
def cluster() -> Iterator[TwoNodes]:
    made = TwoNodes()
    try:
        yield made
    finally:
        made.end()


def witnessed(folder: Path, module: str, rounds: int) -> Path:
    """A recipe whose method notes where it works."""
    (folder / f"{module}.py").write_text(WITNESS)
    settings = {**SETTINGS, "method": {"name": f"{module}:Witness"}, "training": {"rounds": rounds, "batch_size": 16}}
    path = folder / "recipe.toml"
    path.write_text(Recipe.from_dict(settings, beside=[str(folder)]).dumps())
    return path


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_nodes_of_a_cluster_share_the_work(cluster: TwoNodes, tmp_path: Path) -> None:
    path, out = witnessed(tmp_path, "witness", 4), tmp_path / "run"
    caller = Caller(path, out, RAY_ADDRESS=cluster.address)
    _, said = caller.process.communicate(timeout=PATIENCE)
    assert caller.process.returncode == 0, said
    nodes = {place.name.removeprefix("node-") for place in tmp_path.glob("node-*")}
    assert nodes == cluster.nodes
    run(path, out=tmp_path / "alone", overrides=["run.executor=serial"])
    assert records(out) == records(tmp_path / "alone")
    for name in ("index.json", "README.md"):
        assert (out / "models" / name).exists()
    for model in (out / "models").glob("*.safetensors"):
        assert model.read_bytes() == (tmp_path / "alone" / "models" / model.name).read_bytes()
