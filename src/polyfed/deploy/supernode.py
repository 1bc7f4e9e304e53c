"""A node's program: it fetches messages as Flower's SuperNode does, and answers them. No code that is sent runs.

Flower's own program unpacks the app that the server names, and runs it in another process, which both ask for work
every few seconds. Here one process does both, over Flower's connection: it answers with the installed polyfed and the
recipe of this machine. Of an app it fetches nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from polyfed.config.recipe import Recipe
from polyfed.deploy import OFFLINE, SHORTEST, require_package, wait_on
from polyfed.deploy.flower_transport import answering
from polyfed.deploy.node import Node
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.protocol import Envelope, TaskRequest, shared_config
from polyfed.errors import ConfigError, RunError
from polyfed.places import private_files
from polyfed.signals import raise_on_termination

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from flwr.app import Message
    from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

__all__ = ["join"]

_Content = TypeVar("_Content")
_ADDRESS = re.compile(r"(\[[\da-fA-F:.]+\]|[^\s/:@]+):\d{1,5}")
_IDLE = 3.0  # seconds between two looks for a message, at most, as Flower's own program has them
ARRIVAL = 600.0  # seconds that a message has to arrive: as long as a server waits for its answer by default


class Fleet(NamedTuple):
    """A node's connection to the server, as Flower gives it."""

    node: int
    receive: Callable[[], tuple[Any, Any] | None]
    send: Callable[[Any, Any, float], tuple[set[str], str]]
    get_run: Callable[..., Any]
    get_app: Callable[..., Any]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


@private_files()
def join(recipe: Recipe, config: str, *, server: str, authority: str | Path, key: str | Path) -> None:
    """Be a node until a signal ends it.

    Args:
        recipe: this node's own. config: as ``'client-id=0 state-dir="state"'``; see `NodeConfig`.
        server: its host and port. authority: certificate by which it is verified. key: private half of this node's
            key pair.

    Raises:
        ConfigError: a setting is wrong, a file is missing, or data and network do not fit.
        RunError: the connection has ended: the server does not know the key, for one.
    """
    require_package("flwr", "deploy node")
    if not _ADDRESS.fullmatch(server):
        raise ConfigError(f"expected --server as HOST:PORT, got {server!r}")
    from cryptography.x509 import load_pem_x509_certificate

    os.environ.update(OFFLINE)  # before Flower is imported, which reads them
    private = _read(Path(key), "a node's private key", "key", _node_key)
    _read(Path(authority), "the authority's certificate", "certify", load_pem_x509_certificate)
    node = Node(recipe, read_config(config))
    node.answer(Envelope("hello", TaskRequest(settings=shared_config(recipe)).model_dump()))
    with raise_on_termination(), connect(server, Path(authority), private) as fleet:
        answer_forever(answering(node.answer), fleet)


def _read(path: Path, what: str, maker: str, parse: Callable[[bytes], _Content]) -> _Content:
    """The content of a file that `polyfed deploy` writes."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.x509 import InvalidVersion

    written = f"as 'polyfed deploy {maker}' writes it"
    if not path.is_file():
        raise ConfigError(f"expected the file {path}, {written}, got none")
    try:
        return parse(path.read_bytes())
    except (TypeError, ValueError, UnsupportedAlgorithm, InvalidVersion) as error:  # TypeError: it has a passphrase
        raise ConfigError(f"expected {what} in {path}, {written}, got another file: {error}") from None


def _node_key(data: bytes) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    key = load_ssh_private_key(data, None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("a key of another kind")
    return key


def read_config(text: str) -> NodeConfig:
    """A node's configuration as Flower reads one on a command line.

    Raises:
        ConfigError: it is none, or Flower is not installed.
    """
    require_package("flwr", "--node-config")
    import click
    from flwr.common.config import parse_config_args

    try:
        given = parse_config_args([text])
    except (click.ClickException, ValueError, OSError) as error:
        raise ConfigError(f"--node-config: expected 'key=1 key=\"text\"', got {text!r}: {error}") from None
    return NodeConfig(**given)


@contextmanager
def connect(server: str, authority: Path, key: EllipticCurvePrivateKey) -> Iterator[Fleet]:
    """A connection to the server, which tells it that the node is there; it is made anew where it breaks.

    Raises:
        RunError: it cannot be made, the server no longer knows the key, or what is done in the block has failed.
    """
    from flwr.supercore import log
    from flwr.supernode.fleet_http_connection import http_request_response

    failed: list[Exception] = []
    _raise_refusals(server)
    with http_request_response(server, False, authority.read_bytes(), (key, key.public_key())) as given:
        fleet = Fleet(*given)
        log(logging.INFO, "Node %d is connected to %s", fleet.node, server)
        try:
            yield fleet
        except Exception as error:  # Flower would drop it
            failed.append(error)
    if failed:
        raise RunError(f"the connection to {server} has ended: {failed[0]}") from failed[0]


def _raise_refusals(server: str) -> None:
    """Have connections made from now on raise an error where the server refuses the node or its key (status 401).

    Flower would end the program, some seconds later even if that is caught; or send SIGINT, where a heartbeat was
    refused from a thread, in the middle of training. The next request is early enough.
    """
    import httpx
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    def refuse(_: int, message: str = "") -> NoReturn:
        raise RunError(
            f"expected {server} to take this node, got a refusal: {' '.join(message.split())}; in place of one that "
            "was killed it is let in after about a minute"
        )

    class Saying(NodeAuthHttpInterceptor):  # type: ignore[misc]
        def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
            response: httpx.Response = super().intercept(context, call_next)
            if response.status_code != httpx.codes.UNAUTHORIZED:
                return response
            if context.rpc_method.endswith("Heartbeat"):
                raise httpx.TransportError("refused")
            raise RunError(
                f"expected {server} to know this node's key, got a refusal: it is not registered, or clocks differ"
            )

    vars(fleet_http_connection).update(flwr_exit=refuse, NodeAuthHttpInterceptor=Saying)


# messages -----------------------------------------------------------------------------------------------------------


def answer_forever(app: Callable[[Message], Message], fleet: Fleet) -> None:
    """Answer the server's messages, one after the other."""
    from flwr.supercore.run import RunNotRunningException

    since = time.monotonic()
    while True:
        found = None
        with contextlib.suppress(RunNotRunningException):
            found = fleet.receive()
        if found is None:
            wait_on(since, _IDLE)
            continue
        try:
            _answer_one(app, fleet, *found)
        except (Exception, RunNotRunningException):  # Flower's is no Exception
            logging.getLogger("polyfed").exception("a message was not answered")
        since = time.monotonic()


def _answer_one(app: Callable[[Message], Message], fleet: Fleet, announced: Message, tree: Any) -> None:
    """Fetch an announced message, and send the app's answer. tree: the names of the message's parts.

    A message whose run ends while it is fetched never arrives; Flower would ask for hours.
    """
    from flwr.app import Message as FlowerMessage
    from flwr.supercore import log
    from flwr.supercore.inflatable import inflatable_object
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects

    run = announced.metadata.run_id
    log(logging.INFO, "Round %s: %s", announced.metadata.group_id, announced.metadata.message_type)
    message = pull_and_inflate_object_from_tree(
        tree,
        functools.partial(fleet.pull_object, run),
        functools.partial(fleet.confirm, run),
        return_type=FlowerMessage,
        max_time=ARRIVAL,
        initial_backoff=SHORTEST,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    begun = time.monotonic()
    answer = app(message)
    answer.metadata.__dict__["_message_id"] = answer.object_id
    with inflatable_object.no_object_id_recompute():
        parts = inflatable_object.get_object_tree(answer)
        wanted, session = fleet.send(answer, parts, time.monotonic() - begun)
        objects = inflatable_object.get_all_nested_objects(answer)
        push_objects(objects, functools.partial(fleet.push_object, run, session), object_ids_to_push=wanted)
