"""The two programs of a deployment before they start, and what a node makes of an app's error."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from polyfed.deploy import supernode
from polyfed.deploy.superlink import serve_nodes
from polyfed.errors import ConfigError, RunError
from tests.helpers.nearby import recipe_of

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")


def touched(path: Path) -> Path:
    path.touch()
    return path


def test_a_server_without_its_keys_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected ca\.crt in .*, as 'polyfed deploy certify' writes it, got none"):
        serve_nodes(tmp_path, database=tmp_path / "db")


def test_a_node_without_its_key_is_one_line(tmp_path: Path) -> None:
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
        ("client-id=1 state-dir=", "expected state-dir"),
        ("client-id=[", "--node-config: expected 'key=1 key=\"text\"', got 'client-id=\\['"),
        ('client-id=7 state-dir="state"', "expected a client-id below 3, got 7"),
        ('client-id=0 state-dir="state" data="csv:none.csv"', "none.csv"),
    ],
)
def test_a_wrong_configuration_is_told_at_the_node(
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
    with os.fdopen(read, "rb") as said:
        assert said.read(32) == b"s" * 32
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert said.read() == b"", "nobody holds the other end any more"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_goes_wrong_at_a_node_stays_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is told the kind of an error; its text may have a row in it."""
    from flwr.app import Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)

    def app(message: object, context: object) -> Message:
        raise ValueError("row 7: age 43")

    asked = Message(RecordDict(), dst_node_id=1, message_type="train")
    said = supernode.reply(app, asked, None)  # type: ignore[arg-type]
    assert said.has_error()
    assert said.error.reason == "ValueError"
    assert "row 7: age 43" in caplog.text


def test_a_message_that_never_arrives_does_not_keep_a_node(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert "expected a message to arrive within 0 s" in caplog.text
