"""A node's program: Flower's SuperNode fetches messages, and this process answers them. No code that is sent runs.

By default a SuperNode unpacks the app that the server names, and runs it. Here it is started without that half
(``--isolation process``): it keeps the app as bytes, and waits for answers. `answer_forever` gives them, with the
installed polyfed and the recipe of this machine; of an app it reads nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.config.recipe import Recipe
from polyfed.deploy import OFFLINE, require_package
from polyfed.deploy.flower_transport import client_app
from polyfed.deploy.node import Node
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.protocol import Envelope, TaskRequest, shared_config
from polyfed.deploy.superlink import listens
from polyfed.errors import ConfigError, RunError
from polyfed.experiments.data_cache import DataCache
from polyfed.places import private_files
from polyfed.signals import end_with_parent, raise_on_termination

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.clientapp import ClientApp

__all__ = ["join"]

_HOST = "127.0.0.1"
_PAUSE = 0.2  # seconds between two looks for work
_GRACE = 10.0  # seconds that the SuperNode has to end
ARRIVAL = 600.0  # seconds that a message has to arrive: as long as a server waits for its answer by default
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"  # the request that the secret guards; others have a token from it


@private_files()
def join(recipe: Recipe, config: str, *, server: str, authority: str | Path, key: str | Path, port: int = 9094) -> None:
    """Be a node until a signal ends it.

    Args:
        recipe: this node's own. config: as ``'client-id=0 state-dir="state"'``; see `NodeConfig`.
        server: its host and port. authority: certificate by which it is verified. key: private half of this node's
            key pair. port: of 127.0.0.1, free, between the SuperNode and this process.

    Raises:
        ConfigError: a setting is wrong, a file is missing, the port is taken, or data and network do not fit.
        RunError: the SuperNode has ended: the server does not know the key, for one.
    """
    require_package("flwr", "deploy node")
    for file, maker in ((authority, "certify"), (key, "key")):
        if not Path(file).is_file():
            raise ConfigError(f"expected the file {file}, as 'polyfed deploy {maker}' writes it, got none")
    _check_free(port)
    os.environ.update(OFFLINE)  # before Flower is imported, which reads them
    place = NodeConfig.read(_settings(config))
    data = DataCache()
    Node(recipe, place, data).answer(Envelope("hello", TaskRequest(settings=shared_config(recipe)).model_dump()))

    def answer(envelope: Envelope, _: object) -> Envelope:
        return Node(recipe, place, data).answer(envelope)

    words = ["--superlink", server, "--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
    words += ["--port", str(port)]
    secret = secrets.token_bytes(32)
    with raise_on_termination(), start_supernode(words, secret) as supernode:

        def check_alive() -> None:
            if (status := supernode.poll()) is not None:
                raise RunError(f"the SuperNode has ended, with status {status}; its reason is above")

        answer_forever(client_app(answer), port, secret, check_alive)


def _settings(config: str) -> Mapping[str, Any]:
    """A node's configuration as Flower reads one on a command line."""
    import click
    from flwr.common.config import parse_config_args

    try:
        return dict(parse_config_args([config]))
    except (click.ClickException, ValueError, OSError) as error:
        raise ConfigError(f"--node-config: expected 'key=1 key=\"text\"', got {config!r}: {error}") from None


def _check_free(port: int) -> None:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the SuperNode does
        try:
            trial.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"expected a free port of {_HOST}, got {port}: {error.strerror}; choose another with --port"
            ) from None


@contextmanager
def start_supernode(words: list[str], secret: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """A SuperNode that runs no app, and reads its secret from a pipe; it ends with the block, or with this process."""
    program = Path(sys.executable).with_name("flower-supernode")
    alone = ["--isolation", "process", "--superexec-auth-secret-file", "/dev/stdin", "--host", _HOST]
    process = subprocess.Popen([str(program), *alone, *words], stdin=subprocess.PIPE, preexec_fn=end_with_parent)
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended
            process.stdin.write(secret)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# messages -----------------------------------------------------------------------------------------------------------


def answer_forever(app: ClientApp, port: int, secret: bytes, check: Callable[[], None]) -> None:
    """Answer the messages that a SuperNode has fetched, one after the other.

    Args:
        app: answers. port: where the SuperNode listens, on this machine. secret: shared with it.
        check: called between two looks; ends this by raising.
    """
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

    asking = _client(port, SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_ACQUIRE]))
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while True:
        check()
        if not listens(_HOST, port, os.geteuid()):  # not up yet, or another user's program
            time.sleep(_PAUSE)
            continue
        try:
            found = asking.AcquireTask(wanted)
        except httpx.TransportError:  # it is just ending
            time.sleep(_PAUSE)
            continue
        if found.HasField("task") and found.token:
            _answer_one(app, port, found.token)
        else:
            time.sleep(_PAUSE)


def _answer_one(app: ClientApp, port: int, token: str) -> None:
    """Take a message by its token, and give the SuperNode the app's answer."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
    from flwr.supercore.heartbeat import HeartbeatSender
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    client = _client(port, RuntimeTokenHttpInterceptor(token))
    client.PullObject = functools.partial(_pull, client.PullObject, time.monotonic() + ARRIVAL)

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError:
            return False
        return True

    beating = HeartbeatSender(beat)
    beating.start()
    try:
        message, context, _, _ = pull_task_input(client)  # the last one is the app
        push_message(client, reply(app, message, context), context)
        push_task_output(client, None, "completed", "")
    except Exception:  # the run may be over meanwhile
        logging.getLogger("polyfed").exception("a message was not answered")
        push_task_output(client, None, "failed", "")
    finally:
        beating.stop()
        client.close()


def _pull(pull: Callable[[Any], Any], end: float, request: Any) -> Any:
    """A part of a message from the SuperNode; where it is not there yet, Flower asks again.

    A message whose run ends while the SuperNode fetches it never arrives; Flower would ask for hours.
    """
    if time.monotonic() >= end:
        raise RunError(f"expected a message to arrive within {ARRIVAL:g} s, got a part of it; its run may have ended")
    return pull(request)


def reply(app: ClientApp, message: Message, context: Any) -> Message:
    """The app's answer; an error is one, too, of which the server gets the kind alone, as its text may hold a row."""
    from flwr.app import Message as FlowerMessage
    from flwr.app.error import Error
    from flwr.common.constant import ErrorCode

    try:
        return app(message=message, context=context)
    except Exception as error:
        logging.getLogger("polyfed").exception("a message was answered with an error")
        return FlowerMessage(
            Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=type(error).__name__), reply_to=message
        )


def _client(port: int, interceptor: Any) -> Any:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        server_address=f"{_HOST}:{port}",
        insecure=True,  # it does not leave this machine
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="polyfed"), interceptor],
    )
