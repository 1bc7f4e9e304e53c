"""The two programs of a deployment before they start; the gate before the server's routes; a node's errors."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from polyfed.deploy import supernode
from polyfed.deploy.superlink import Gate, check_system, is_own, serve_nodes
from polyfed.errors import ConfigError, RunError
from tests.helpers.nearby import recipe_of
from tests.helpers.on_flower import WITH_FLOWER

pytestmark = WITH_FLOWER


def touched(path: Path) -> Path:
    path.touch()
    return path


def test_a_program_without_its_keys_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected ca\.crt in .*, as 'polyfed deploy certify' writes it, got none"):
        serve_nodes(tmp_path, database=tmp_path / "db")
    with pytest.raises(ConfigError, match=r"expected the file .*node, as 'polyfed deploy key' writes it, got none"):
        supernode.join(recipe_of(), "", server="x:1", authority=touched(tmp_path / "ca"), key=tmp_path / "node")


def test_a_node_whose_port_is_taken_is_one_line(tmp_path: Path) -> None:
    files = {"authority": touched(tmp_path / "ca"), "key": touched(tmp_path / "node")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"expected a free port of 127\.0\.0\.1, got {port}: .*; choose .* --port"
        ):
            supernode.join(recipe_of(), "", server="x:1", port=port, **files)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the table of sockets is Linux'")
@pytest.mark.parametrize("theirs", [True, False])
def test_a_node_asks_nobody_elses_program_for_work(theirs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user who listens at its port before its SuperNode does would send it messages, and get its uploads."""
    from flwr.supercore.runtime import RuntimeHttpClient

    node = Mock()
    node.AcquireTask.side_effect = EOFError("asked")
    monkeypatch.setattr(RuntimeHttpClient, "from_server_address", lambda **_: node)
    own = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: own + theirs)
    check = Mock(side_effect=[None, RunError("looked again")])
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(RunError if theirs else EOFError):
        supernode.answer_forever(Mock(), listening.getsockname()[1], b"secret", check)
    assert node.AcquireTask.called is not theirs


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("client-id=[", "--node-config: expected 'key=1 key=\"text\"', got 'client-id=\\['"),
        ('client-id=7 state-dir="state"', "expected a client-id below 3, got 7"),
    ],
)
def test_a_wrong_configuration_ends_the_node(
    config: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its SuperNode is started, and not in the middle of a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supernode, "start_supernode", None)
    files = {"authority": touched(tmp_path / "ca"), "key": touched(tmp_path / "node")}
    with pytest.raises(ConfigError, match=line):
        supernode.join(recipe_of(), config, server="x:1", **files)


def test_a_nodes_secret_is_in_no_file_and_its_supernode_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it is killed, and can clean up nothing."""
    program = tmp_path / "flower-supernode"
    option = "--superexec-auth-secret-file"
    program.write_text(f'#!/bin/sh\nwhile [ "$1" != {option} ]; do shift; done\ncat "$2"\nexec sleep 600\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.close(write)
        with supernode.start_supernode([], b"s" * 32):
            signal.pause()
    os.close(write)
    with os.fdopen(read, "rb") as output:
        assert output.read(32) == b"s" * 32
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert output.read() == b"", "no process holds the other end any more"
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.fixture
def logged() -> Iterator[StringIO]:
    """What is logged."""
    handler = logging.StreamHandler(text := StringIO())
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


def test_what_goes_wrong_at_a_node_stays_there(logged: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gets the kind of an error; its text may hold a row."""
    from flwr.app import Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)

    def app(message: object, context: object) -> Message:
        raise ValueError("row 7: age 43")

    asked = Message(RecordDict(), dst_node_id=1, message_type="train")
    answer = supernode.reply(app, asked, None)  # type: ignore[arg-type]
    assert answer.has_error()
    assert answer.error.reason == "ValueError"
    assert "row 7: age 43" in logged.getvalue()


def test_a_message_that_never_arrives_does_not_keep_a_node(logged: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run has ended while the SuperNode fetched it: part of it is announced for ever, and never there."""
    from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
    from flwr.proto.runtime_pb2 import AcquireTaskResponse, PullAppMessagesResponse, PullTaskInputResponse
    from flwr.proto.task_pb2 import Task
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    ends: list[str] = []
    offered = iter([AcquireTaskResponse(task=Task(task_id=1), token="token")])
    node = Mock()
    node.AcquireTask.side_effect = lambda _: next(offered, AcquireTaskResponse())
    node.PullTaskInput.return_value = PullTaskInputResponse(task_id=1)
    tree = ObjectTree(object_id="part")
    node.PullMessages.return_value = PullAppMessagesResponse(messages_list=[{}], message_object_trees=[tree])
    node.PullObject.return_value = PullObjectResponse(object_found=True, object_available=False)
    node.PushTaskOutput.side_effect = lambda request: ends.append(request.sub_status)
    monkeypatch.setattr(RuntimeHttpClient, "from_server_address", lambda **_: node)
    monkeypatch.setattr(supernode, "ARRIVAL", 0.0)

    def check() -> None:
        if ends:
            raise RunError("looked for work again")

    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(RunError, match="looked for work again"):
        supernode.answer_forever(Mock(), listening.getsockname()[1], b"secret", check)
    assert ends == ["failed"]
    assert "expected a message to arrive within 0 s" in logged.getvalue()


# the gate, with real connections of this machine ----------------------------------------------------------------------

ME, OTHER = os.geteuid(), os.geteuid() + 1
CONTROL = "/v1/control/start-run"


@contextmanager
def connection(family: int = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends: the one that called, the one that was called."""
    try:
        listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError:
        pytest.skip("no IPv6 here")
    with (
        closing(listening),
        closing(
            socket.create_connection(("127.0.0.1" if host == "::" else host, listening.getsockname()[1]))
        ) as calling,
    ):
        called, _ = listening.accept()
        with closing(called):
            yield calling, called


def ends(called: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    """Theirs and ours, as a server sees them."""
    return called.getpeername()[:2], called.getsockname()[:2]


def asks(path: str, called: socket.socket, keeper: int, kind: str = "http") -> str:
    """The fate of a request: "through", or the status of the refusal."""
    theirs, ours = ends(called)
    fate: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        fate.append("through")

    async def send(event: Any) -> None:
        fate.append(event.get("status", event.get("code")))

    async def receive() -> Any:
        raise AssertionError("nothing is read before it is let through")

    asyncio.run(Gate(app, keeper)({"type": kind, "path": path, "client": theirs, "server": ours}, receive, send))
    return str(fate[0])


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
)
def test_a_connection_has_its_owner(family: int, host: str) -> None:
    with connection(family, host) as (_, called):
        theirs, ours = ends(called)
        assert is_own(theirs, ours, ME)
        assert not is_own(theirs, ours, OTHER)
        assert not is_own((theirs[0], theirs[1] ^ 1), ours, ME), "another connection"
        assert not is_own(("192.0.2.7", theirs[1]), ours, ME), "from elsewhere"
        assert not is_own(("nonsense", 0), ours, ME)


def test_a_closed_connection_has_no_owner() -> None:
    """The table calls closed sockets root's: a request that hangs up at once would be root's."""
    with connection() as (calling, called):
        theirs, ours = ends(called)
        calling.close()
        assert not is_own(theirs, ours, ME)
        assert not is_own(theirs, ours, 0)


def test_nodes_are_let_through() -> None:
    with connection() as (_, called):
        assert asks("/v1/fleet/pull-messages", called, OTHER) == "through"


def test_all_else_is_for_the_servers_user() -> None:
    paths = (
        CONTROL,
        "/v1/runtime/acquire-task",
        "/docs",
        "",
        "/v1/fleet",
        "/x/v1/fleet/a",
        "//v1/fleet/a",
        "/V1/FLEET/a",
    )
    with connection() as (_, called):
        for path in paths:
            assert asks(path, called, ME) == "through"
            assert asks(path, called, OTHER) == "403"
        assert asks("/v1/fleet/x", called, ME, "websocket") == "1008"


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    check_system()
    monkeypatch.setattr("polyfed.deploy.superlink.TCP_TABLES", (tmp_path / "none",))
    with pytest.raises(Exception, match="expected a server's machine with Linux"):
        check_system()
    with connection() as (_, called):
        assert asks(CONTROL, called, ME) == "403"
