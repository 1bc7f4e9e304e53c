"""The two programs of a deployment before they start; the gate before the server's routes; a node's errors."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from polyfed.deploy import supernode
from polyfed.deploy.flower_transport import FACTS, RECORD, answering
from polyfed.deploy.superlink import Gate, check_system, is_own, serve_nodes
from polyfed.deploy.tls import make_node_key, make_server_certificate
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
    with pytest.raises(ConfigError, match=r"expected a node's private key in .*node, .* got another file"):
        supernode.join(recipe_of(), "", server="x:1", authority=tmp_path / "ca", key=touched(tmp_path / "node"))
    for server in ("x", "https://x:1", "x:1/y", "::1:1"):
        with pytest.raises(ConfigError, match=f"expected --server as HOST:PORT, got '{server}'"):
            supernode.join(recipe_of(), "", server=server, authority=tmp_path / "ca", key=tmp_path / "node")


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
    """Before it is connected, and not in the middle of a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supernode, "connect", None)
    make_node_key(tmp_path / "node")
    make_server_certificate(tmp_path, ["x"])
    files = {"authority": tmp_path / "ca.crt", "key": tmp_path / "node"}
    with pytest.raises(ConfigError, match=line):
        supernode.join(recipe_of(), config, server="x:1", **files)


class Server:
    """A server's end of a node's connection: announces messages, has their parts, takes answers."""

    def __init__(self, *messages: Any) -> None:
        self.waiting, self.parts, self.answers = list(messages), dict[str, bytes](), list[Any]()
        self.asked: list[str] = []
        self.pulled: list[str] = []

    def fleet(self) -> supernode.Fleet:
        """As Flower gives it."""
        names = ("receive", "send", "get_run", "get_app", "pull_object", "push_object", "confirm")
        return supernode.Fleet(7, *(self.noted(name) for name in names))

    def noted(self, name: str) -> Any:
        def call(*words: Any) -> Any:
            self.asked.append(name)
            return getattr(self, name)(*words)

        return call

    def receive(self) -> Any:
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        if not self.waiting:
            raise RunError("looked for work again")
        message = self.waiting.pop(0)
        if message is not None:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.parts |= {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        return message and (message, get_object_tree(message))

    def pull_object(self, run: int, name: str) -> bytes:
        self.pulled.append(name)
        return self.parts[name]

    def confirm(self, run: int, name: str) -> None:
        assert name in self.parts

    def send(self, message: Any, tree: Any, seconds: float) -> tuple[set[str], str]:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self.answers.append(tree.object_id)
        return {each.object_id for each in iterate_object_tree(tree)}, "session"

    def push_object(self, run: int, session: str, name: str, part: bytes) -> None:
        self.parts[name] = part


@pytest.fixture
def logged() -> Iterator[StringIO]:
    """What is logged."""
    handler = logging.StreamHandler(text := StringIO())
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A message to a node, with three numbers."""
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return Message(RecordDict({"asked": ConfigRecord({"numbers": [1, 2, 3]})}), dst_node_id=7, message_type="train")


def answers(message: Any) -> Any:
    """The app: the sum of the numbers."""
    from flwr.app import ConfigRecord, Message, RecordDict

    total = sum(message.content["asked"]["numbers"])
    return Message(RecordDict({"answer": ConfigRecord({"sum": total})}), reply_to=message)


def test_a_node_fetches_a_message_and_sends_the_answer_over_one_connection(asked: Any) -> None:
    """Every part travels once, and nothing else is asked: of an app nothing, and the next message at once."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    server = Server(asked)
    with pytest.raises(RunError, match="looked for work again"):
        supernode.answer_forever(answers, server.fleet())
    parts = server.asked.count("pull_object")
    assert server.asked == ["receive", *["pull_object"] * parts, "confirm", "send", *["push_object"] * 3, "receive"]
    (name,) = server.answers
    answer: Any = inflate_object_from_contents(name, server.parts)
    assert answer.content["answer"]["sum"] == 6
    assert answer.metadata.reply_to_message_id == asked.object_id


def test_what_goes_wrong_at_a_node_stays_there(asked: Any, logged: StringIO) -> None:
    """The server gets the kind of an error; its text may hold a row."""
    from flwr.app import ConfigRecord

    def answer(envelope: object) -> Any:
        raise ValueError("row 7: age 43")

    asked.content[RECORD] = ConfigRecord({FACTS: '{"kind": "hello"}', "body": b""})
    told = answering(answer)(asked)
    assert dict(told.content[RECORD]) == {"trouble": "ValueError"}
    assert "row 7: age 43" in logged.getvalue()


@pytest.mark.parametrize("error", ["unavailable", "over"])
def test_a_message_that_never_arrives_does_not_keep_a_node(
    error: str, asked: Any, logged: StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run has ended while the node fetched it: part of it is announced for ever, and never there."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
    from flwr.supercore.run import RunNotRunningException

    server = Server(asked)
    why: Any = ObjectUnavailableError("part") if error == "unavailable" else RunNotRunningException()
    monkeypatch.setattr(server, "pull_object", Mock(side_effect=why))
    monkeypatch.setattr(supernode, "ARRIVAL", 0.0)
    with pytest.raises(RunError, match="looked for work again"):
        supernode.answer_forever(answers, server.fleet())
    assert "send" not in server.asked
    assert "a message was not answered" in logged.getvalue()


@pytest.fixture
def connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node's connection to a server that knows its key, but refuses these requests: Flower's, without a network."""
    import httpx
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.proto.fleet_pb2 import ActivateNodeResponse
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse

    made = {
        "activate-node": ActivateNodeResponse(node_id=7).SerializeToString(),
        "send-node-heartbeat": SendNodeHeartbeatResponse(success=True).SerializeToString(),
    }
    beaten = threading.Event()
    make_server_certificate(tmp_path, ["x"])

    def connect(*refused: str, once: int | None = None) -> Any:
        """once: a status by which the first request of all is refused."""
        first = [] if once is None else [httpx.Response(once, text="a reason")]

        def answer(request: Any) -> Any:
            asked = request.url.path.rpartition("/")[2]
            if first:
                return first.pop()
            if asked == "send-node-heartbeat":
                beaten.set()
            return httpx.Response(401) if asked in refused else httpx.Response(200, content=made.get(asked, b""))

        client = functools.partial(httpx.Client, transport=httpx.MockTransport(answer))
        monkeypatch.setattr("flwr.supercore.protobuf.client.httpx.Client", client)
        return supernode.connect("x:1", tmp_path / "ca.crt", ec.generate_private_key(ec.SECP384R1()))

    connect.beaten = beaten  # type: ignore[attr-defined]
    return connect


@pytest.mark.parametrize("refused", ["activate-node", "pull-messages"])
def test_a_node_whose_key_is_no_longer_known_says_so(refused: str, connected: Any) -> None:
    """Flower sends itself SIGINT then."""
    with (
        pytest.raises(RunError, match="expected x:1 to know this node's key, got a refusal"),
        connected(refused) as fleet,
    ):
        fleet.receive()


def test_a_refused_heartbeat_leaves_it_to_the_next_request_to_say_so(connected: Any) -> None:
    """Flower sends SIGINT from the heartbeat's thread, and that ends with a traceback."""
    with connected("send-node-heartbeat") as fleet:
        assert connected.beaten.wait(60)
        assert fleet.receive() is None


def test_another_refusal_is_told_with_its_reason(connected: Any) -> None:
    """As that of a server that takes a node that was killed for connected."""
    with (
        pytest.raises(RunError, match=r"expected x:1 to take this node, got a refusal: .*\b412\b"),
        connected(once=412),
    ):
        pass


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


def asks(path: str, called: socket.socket, operator: int, kind: str = "http", **more: Any) -> str:
    """The fate of a request: "through", or the status of the refusal."""
    theirs, ours = ends(called)
    fate: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        fate.append("through")

    async def send(event: Any) -> None:
        fate.append(event.get("status"))

    async def receive() -> Any:
        raise AssertionError("nothing is read before it is let through")

    scope = {"type": kind, "path": path, "client": theirs, "server": ours, **more}
    asyncio.run(Gate(app, operator)(scope, receive, send))
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


def test_nodes_are_let_through_and_all_else_is_for_the_servers_user() -> None:
    more = ("", "/v1/fleet", "/x/v1/fleet/a", "//v1/fleet/a", "/V1/FLEET/a")
    with connection() as (_, called):
        assert asks("/v1/fleet/pull-messages", called, OTHER) == "through"
        for path in (CONTROL, "/v1/runtime/acquire-task", "/docs", *more):
            assert asks(path, called, ME) == "through"
            assert asks(path, called, OTHER) == "403"
        assert asks("/v1/fleet/x", called, ME, "websocket") == "403"


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    check_system()
    monkeypatch.setattr("polyfed.deploy.superlink.TCP_TABLES", (tmp_path / "none",))
    with pytest.raises(Exception, match="expected a server's machine with Linux"):
        check_system()
    with connection() as (_, called):
        assert asks(CONTROL, called, ME) == "403"
