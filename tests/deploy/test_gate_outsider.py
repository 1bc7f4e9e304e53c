"""An outsider without a key against Flower's own programs: from elsewhere, and as another user of the machine."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from polyfed.deploy import OFFLINE, app_template
from polyfed.deploy.local_cluster import LocalCluster, ProcessGroup, free_ports
from polyfed.deploy.tls import make_node_key, make_server_certificate
from tests.helpers.on_flower import PATIENCE, WITH_FLOWER, until

pytestmark = [WITH_FLOWER, pytest.mark.slow, pytest.mark.timeout(1800)]

PROTOBUF = "application/protobuf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
OURS = "from flwr.cli.app import app; app()"
NOBODYS = """
import os, socket

def make(self, *words, _make=socket.socket.__init__, **more):
    os.seteuid(65534)  # the socket is this user's from now on, whoever writes into it
    try:
        _make(self, *words, **more)
    finally:
        os.seteuid(0)

socket.socket.__init__ = make
from flwr.cli.app import app
app()
"""
OTHER_CODE = """
import pathlib
from flwr.clientapp import ClientApp

pathlib.Path({mark!r}).touch()
client_app = ClientApp()
"""


class Caller:
    """An outsider with the server's address, its certificate, an app and a key pair of their own; and `flwr`.

    Args:
        folder: of theirs. port: of this machine, where they call. recipe: of the app. authority: the certificate.
        program: what `flwr` is.
    """

    def __init__(self, folder: Path, port: int, recipe: Path, authority: Path, program: str = OURS) -> None:
        self._folder, self._program = folder, program
        app_template.create_app(folder / "app", recipe)
        make_node_key(folder / "key")
        shutil.copy(authority, folder / "ca.crt")
        connection = {"address": f"localhost:{port}", "root-certificates": str(folder / "ca.crt")}
        (folder / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "x", "x": connection}}))

    def runs(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`flwr` with these words."""
        environment = {**os.environ, **OFFLINE, "FLWR_HOME": str(self._folder), "HOME": str(self._folder)}
        return subprocess.run(
            [sys.executable, "-c", self._program, *words],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def does(self, *words: str) -> str:
        """The output of `flwr` with these words, which must succeed."""
        done = self.runs(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def nodes(self) -> list[Mapping[str, Any]]:
        """The registered nodes."""
        found = json.loads(self.does("supernode", "list", "x", "--format", "json"))["nodes"]
        return [{key: node[key] for key in ("node-id", "owner-name")} for node in found]


def check_is_refused(outsider: Caller, operator: Caller) -> None:
    """All requests of the outsider fail and change nothing; the operator's succeed."""
    nodes, runs = operator.nodes(), operator.does("list", "x", "--format", "json")
    assert nodes
    node = str(nodes[0]["node-id"])
    for words in (
        ["run", "app", "x"],
        ["supernode", "list", "x"],
        ["supernode", "register", "key.pub", "x"],
        ["supernode", "unregister", node, "x"],
        ["list", "x"],
        ["log", "1", "x", "--show"],
        ["stop", "1", "x"],
    ):
        done = outsider.runs(*words)
        assert done.returncode != 0, (words, done.stdout)
        assert "403" in done.stdout + done.stderr, (words, done.stdout, done.stderr)
    assert operator.nodes() == nodes
    assert operator.does("list", "x", "--format", "json") == runs


def status(url: str, authority: Path, method: str = "POST") -> int:
    """What a plain request is answered with."""
    request = urllib.request.Request(url, data=b"" if method == "POST" else None, method=method)
    request.add_header("content-type", PROTOBUF)
    try:
        context = ssl.create_default_context(cafile=authority)
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


# from elsewhere -----------------------------------------------------------------------------------------------------


class Generated:
    """The folder that `deploy init` writes, with its server, its proxy and two nodes, as its README has it."""

    def __init__(self, recipe: Path, folder: Path, processes: ProcessGroup) -> None:
        self.app, self._processes = folder / "app", processes
        self.inner, self.outer = free_ports(2)
        app_template.create_app(self.app, recipe, host="localhost")
        make_server_certificate(self.app / "keys", ["localhost"])
        self.authority = self.app / "keys" / "ca.crt"
        self.operator = Caller(folder / "operator", self.inner, recipe, self.authority)

    def start(self) -> None:
        command = [sys.executable, "-m", "polyfed", "deploy", "server", "keys", "--port", str(self.inner)]
        self._processes.start("server", command, self.app)
        self._processes.wait_for_answer("server", self.inner, PATIENCE)
        site = (self.app / "nginx.conf").read_text()
        changes = {
            "/srv/app": self.app,
            "listen 443": f"listen 127.0.0.1:{self.outer}",
            "127.0.0.1:8000": f"127.0.0.1:{self.inner}",
        }
        for old, new in changes.items():
            assert old in site
            site = site.replace(old, str(new))
        place = self.app.parent / "nginx"
        place.mkdir()
        (place / "site.conf").write_text(site)
        temporary = f"client_body_temp_path {place}/body;\nproxy_temp_path {place}/proxy;\n"
        main = f"pid {place}/pid;\ndaemon off;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}"
        (place / "main.conf").write_text(f"{main}include {place}/site.conf;\n}}\n")
        self._processes.start("nginx", [str(NGINX), "-p", place, "-e", place / "log", "-c", place / "main.conf"])
        self._processes.wait_for_answer("nginx", self.outer, PATIENCE)

    def start_nodes(self) -> None:
        for number in (0, 1):
            key = self.app / "keys" / f"node-{number}"
            make_node_key(key)
            self.operator.does("supernode", "register", f"{key}.pub", "x")
            words = ["--recipe", "recipe.toml", "--server", f"localhost:{self.outer}", "--key", str(key)]
            own = f'client-id={number} state-dir="{self.app.parent}/state-{number}"'
            command = [sys.executable, "-m", "polyfed", "deploy", "node", *words, "--node-config", own]
            self._processes.start(f"node-{number}", command, self.app)


@pytest.mark.skipif(NGINX is None, reason="nginx is not here")
def test_through_the_generated_proxy_only_nodes_come(recipe: Path, tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, OFFLINE) as processes:
        made = Generated(recipe, tmp_path, processes)
        made.start()
        made.start_nodes()
        outsider = Caller(tmp_path / "outsider", made.outer, recipe, made.authority)
        check_is_refused(outsider, made.operator)
        url = f"https://localhost:{made.outer}"
        paths = ["/v1/control/list-nodes", "//v1/control/list-nodes", "/v1/fleet/../control/list-nodes", "/docs", "/"]
        paths += ["/v1/fleet/%2e%2e/control/list-nodes", "/v1/fleet/..%2fcontrol/list-nodes"]
        paths += ["/v1/control/list-nodes?/v1/fleet/", "/v1/runtime/acquire-task"]
        for path in paths:
            assert status(url + path, made.authority) in (400, 403, 404), path
            assert status(url + path, made.authority, "GET") in (400, 403, 404, 405), path
        assert status(f"{url}/v1/fleet/pull-messages", made.authority) == 401, "without a key"
        assert status(f"{url}/v1/fleet/pull-messages", made.authority, "GET") == 403
        output = made.operator.does("run", str(made.app), "x", "--stream", "-c", f'out="{tmp_path}/run"')
        assert (tmp_path / "run" / "result.json").exists(), output
        made.operator.does("supernode", "unregister", str(made.operator.nodes()[0]["node-id"]), "x")


# on the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_is_refused(loopback: LocalCluster, recipe: Path, tmp_path: Path) -> None:
    authority = tmp_path / "keys" / "ca.crt"
    loopback.start_server()
    loopback.register([0])
    loopback.start_node(0)
    operator = Caller(tmp_path / "operator", loopback.port, recipe, authority)
    check_is_refused(Caller(tmp_path / "outsider", loopback.port, recipe, authority, NOBODYS), operator)


# what the server sends ----------------------------------------------------------------------------------------------


def test_a_node_runs_no_code_and_takes_no_setting_that_a_server_sends(loopback: LocalCluster, tmp_path: Path) -> None:
    mark, app = tmp_path / "PWNED", tmp_path / "sent"
    shutil.copytree(tmp_path / "app", app)
    (app / "client_part.py").write_text(OTHER_CODE.format(mark=str(mark)))
    project = tomllib.loads((app / "pyproject.toml").read_text())
    project["tool"]["flwr"]["app"]["components"]["clientapp"] = "client_part:client_app"
    (app / "pyproject.toml").write_text(tomli_w.dumps(project))
    loopback.start_server()
    loopback.register([0, 1])
    for number in (0, 1):
        loopback.start_node(number)
    loopback.run({"out": str(tmp_path / "run")}, app=app)
    assert (tmp_path / "run" / "result.json").exists(), "the nodes' own polyfed has answered"
    assert not mark.exists()
    app_template.create_app(app, tmp_path / "recipe.toml", overrides=["training.lr=0.5"], overwrite=True)
    loopback.submit({"out": str(tmp_path / "other")}, app)
    log = loopback.log("run")
    until(lambda: "is no client" in log.read_text(errors="replace"), "it is refused")
    assert "but training.lr is 0.5 at the server and" in log.read_text(errors="replace")
