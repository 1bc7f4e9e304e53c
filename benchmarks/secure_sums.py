"""Secure sums over Flower with TLS: nodes killed at each stage; seconds, bytes and the solution beside plain sums.

    python benchmarks/secure_sums.py --out benchmarks/secure-sums.json
    python benchmarks/secure_sums.py --out benchmarks/secure-sums.json --table    what the file has

One round of closed-form on handwritten digits, on one cluster of processes as `polyfed deploy local` starts them: plain
sums; secure sums with all nodes; then, for each kind of request of the protocol, secure sums of which some nodes are
killed as that request reaches them. Killed nodes are started again before the next run.

The solution is compared to that of plain sums of the clients in the total, in one process: the largest difference of a
number of W, over the largest number. Bytes are those of requests and answers at all nodes, without Flower's wrapping
and TLS, and without introductions and scores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

import safetensors.torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.deploy import app_template, node, supernode
from polyfed.deploy.local_cluster import LocalCluster
from polyfed.deploy.protocol import Envelope
from polyfed.engine.executors.executor import RunJobs
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.run_folder import RunFolder
from polyfed.experiments.build import build_federation

KINDS = ("keys", "shares", "train", "unmask")
SECURE = "secure_sums"
PATIENCE = 300.0  # seconds in which a killed node is to be back


def recipe_of(clients: int, secure: bool) -> Recipe:
    settings: dict[str, Any] = {
        "data": {"dataset": "digits", "num_clients": clients},
        "models": {"architectures": ["digits-cnn1"]},
        "method": {"name": "closed-form"},
        "training": {"rounds": 1},
    }
    return Recipe.from_dict(settings | ({SECURE: {"enabled": True}} if secure else {}))


# a node -------------------------------------------------------------------------------------------------------------


def be_node(folder: Path, number: int, address: str) -> None:
    """A node that follows the recipe of whichever server asks, notes the bytes, and ends where it is told to."""
    recipes = {secure: Recipe.load(folder / f"app-{secure}" / "recipe.toml") for secure in (False, True)}
    honest = node.Node.answer

    def answer(self: node.Node, envelope: Envelope) -> Envelope:
        deadly = json.loads((folder / "killed.json").read_text(encoding="utf-8"))
        if envelope.kind == deadly["kind"] and number in deadly["nodes"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.recipe = recipes[SECURE in envelope.facts["settings"]]
        found = honest(self, envelope)
        sizes = [len(json.dumps(dict(one.facts))) + len(one.body) for one in (envelope, found)]
        with (folder / "bytes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([envelope.kind, *sizes]) + "\n")
        return found

    vars(node)["Node"].answer = answer
    keys = folder / "keys"
    config = f'client-id={number} state-dir="{folder}/nodes/{number}" share-model=true answers=20'
    supernode.join(recipes[True], config, server=address, authority=keys / "ca.crt", key=keys / f"node-{number}")


class Cluster(LocalCluster):
    """A cluster of such nodes."""

    def __init__(self, folder: Path, logs: Path, nodes: int) -> None:
        super().__init__(folder, logs, nodes)
        self._place = folder

    def start_node(self, number: int) -> Popen[bytes]:
        return self.start(
            f"node-{number}", [sys.executable, __file__, "--node", str(number), self._place, self.address]
        )

    def bring_back(self, numbers: Collection[int]) -> None:
        """Start killed nodes until the server takes them."""
        (self._place / "killed.json").write_text(json.dumps({"kind": "", "nodes": []}), encoding="utf-8")
        before = {number: self.output(f"node-{number}").count("is connected") for number in numbers}
        deadline = time.monotonic() + PATIENCE
        while waiting := [n for n in numbers if self.output(f"node-{n}").count("is connected") == before[n]]:
            for number in waiting:
                if not self.is_running(f"node-{number}"):
                    self.start_node(number)
            if time.monotonic() > deadline:
                raise SystemExit(f"nodes {waiting} are not back")
            time.sleep(5)


# runs ---------------------------------------------------------------------------------------------------------------


def measured(cluster: Cluster, folder: Path, kind: str, killed: Collection[int], deadline: float) -> dict[str, Any]:
    """A run. kind: "plain", "all there", or the request at which nodes are killed."""
    (folder / "bytes.jsonl").write_text("", encoding="utf-8")
    (folder / "killed.json").write_text(json.dumps({"kind": kind, "nodes": list(killed)}), encoding="utf-8")
    out = folder / f"out {kind}"
    begun = time.monotonic()
    cluster.run({"out": str(out), "deadline": deadline}, app=folder / f"app-{kind != 'plain'}")
    seconds = time.monotonic() - begun
    (record,) = RunFolder(out).records(sealed=False)
    counted: Counter[str] = Counter()
    for line in (folder / "bytes.jsonl").read_text(encoding="utf-8").splitlines():
        name, received, sent = json.loads(line)
        if name in KINDS:
            counted[name] += received + sent
    everybody = range(cluster.nodes)
    summed = record.get(SECURE, {"summed": list(everybody)})["summed"]
    return {
        "killed_at": kind,
        "killed": len(killed),
        "summed": len(summed),
        "difference": difference(out, summed, cluster.nodes),
        "accuracy": record["accuracy"]["received"]["mean"],
        "seconds_of_the_command": round(seconds, 1),
        "seconds_of_the_round": round(record["seconds"], 1),
        "bytes": dict(counted),
    }


def difference(out: Path, summed: Collection[int], clients: int) -> float:
    """Of the solution in a run folder to that of plain sums of these clients."""
    expected = plain_solution(summed, clients)
    file = next(iter(sorted((out / "models").glob("received-*.state.safetensors"))))
    found = safetensors.torch.load_file(file)["solution/weight"]
    return float((found - expected).abs().max() / expected.abs().max())


def plain_solution(summed: Collection[int], clients: int) -> Tensor:
    """W of plain sums of these clients, in one process."""
    federation = build_federation(recipe_of(clients, secure=False).with_run(executor="serial"))

    def only(run: RunJobs) -> RunJobs:
        def chosen(jobs: Any, done: Any) -> list[JobResult]:
            results = run(jobs, done)
            return [one if one.client_id in summed else JobResult(one.client_id, dropped=True) for one in results]

        return chosen

    federation.executor.run = only(federation.executor.run)  # type: ignore[method-assign]
    federation.run()
    solution: Mapping[str, Tensor] = federation.server.state["solution"]  # type: ignore[assignment]
    return solution["weight"]


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| killed at | in the total | accuracy | difference | seconds of the round | MB | times plain |"]
    lines.append("| --- | --: | --: | --: | --: | --: | --: |")
    plain = sum(found[0]["bytes"].values())
    for one in found:
        size = sum(one["bytes"].values())
        lines.append(
            f"| {one['killed_at']} | {one['summed']} | {100 * one['accuracy']:.1f} | {one['difference']:.0e} | "
            f"{one['seconds_of_the_round']:.0f} | {size / 1e6:.1f} | {size / plain:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--lost", type=int, default=3, help="nodes that are killed")
    parser.add_argument("--kinds", default=",".join(KINDS), help="requests at which they are killed")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that a node has to answer")
    parser.add_argument("--out", type=Path, required=True, help="file of the figures")
    parser.add_argument("--table", action="store_true", help="print what the file has, and run nothing")
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads(asked.out.read_text(encoding="utf-8"))))
        return
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, logs = Path(temporary), Path(temporary) / "logs"
        logs.mkdir()
        for secure in (False, True):
            (folder / "recipe.toml").write_text(recipe_of(asked.nodes, secure).dumps(), encoding="utf-8")
            app_template.create_app(folder / f"app-{secure}", folder / "recipe.toml")
        (folder / "killed.json").write_text(json.dumps({"kind": "", "nodes": []}), encoding="utf-8")
        with Cluster(folder, logs, asked.nodes) as cluster:
            cluster.start_all()
            for place, kind in enumerate(["plain", "all there", *asked.kinds.split(",")]):
                first = place * asked.lost % asked.nodes
                killed = [(first + one) % asked.nodes for one in range(asked.lost)] if kind in KINDS else []
                found.append(measured(cluster, folder, kind, killed, asked.deadline))
                print(json.dumps(found[-1]), flush=True)
                asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                cluster.bring_back(killed)
    print(table(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--node"]:
        be_node(Path(sys.argv[3]), int(sys.argv[2]), sys.argv[4])
    else:
        main()
