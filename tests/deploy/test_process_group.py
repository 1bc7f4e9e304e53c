"""Programs end with their block, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyfed.deploy import process_group as room
from polyfed.deploy.process_group import ProcessGroup, free_ports, raise_on_termination
from polyfed.errors import RunError

SLEEP = "import time; time.sleep(60)"


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *words]


def lives(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_what_was_started_ends_with_the_block_and_its_output_stays(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "logs", {"GREETING": "hello"}) as started:
        process = started.start("talker", python("import os; print(os.environ['GREETING'], flush=True); " + SLEEP))
        assert started.is_running("talker")
        while not started.log("talker").read_text():
            time.sleep(0.01)
    assert process.poll() == -signal.SIGTERM
    assert (tmp_path / "logs" / "talker.log").read_text() == "hello\n"
    assert "GREETING" not in os.environ


def test_who_does_not_listen_is_made_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "GRACE_SECONDS", 0.1)
    with ProcessGroup(tmp_path, {}) as started:
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); " + SLEEP
        process = started.start("deaf", python(code))
        while not started.log("deaf").read_text():
            time.sleep(0.01)
    assert process.poll() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such signal")
def test_what_was_started_ends_with_who_is_killed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with ProcessGroup(tmp_path, {}) as started:
            started.start("sleeper", python("import os, time; print(os.getpid(), flush=True); time.sleep(1000)"))
            signal.pause()
    log = tmp_path / "sleeper.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.01)
    number = int(log.read_text())
    assert lives(number)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while lives(number):
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system does not tell environments")
def test_children_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}], start_new_session=True)"
    )
    with ProcessGroup(tmp_path, {}) as started:
        started.start("parent", python(code + "; print(p.pid, flush=True)"))
        started.wait_for_success("parent", 300)
        child = int(started.log("parent").read_text())
        assert lives(child)
    deadline = time.monotonic() + 300  # on a busy machine
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(child)


def test_others_with_another_mark_are_left_alone(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "a", {}) as one, ProcessGroup(tmp_path / "b", {}) as other:
        kept = other.start("kept", python(SLEEP))
        one.stop()
        assert kept.poll() is None


def test_failures_say_the_last_words(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, {}) as started:
        started.start("bad", python("import sys; print('first'); print('no such thing'); print(); sys.exit(3)"))
        with pytest.raises(RunError, match=r"bad ended with status 3: no such thing \(all of it in .*bad.log\)"):
            started.wait_for_success("bad", 300)
        with pytest.raises(RunError, match="bad has ended, with status 3"):
            started.check_alive(["bad"])
        with pytest.raises(RunError, match="bad has ended"):
            started.wait_for_answer("bad", free_ports(1)[0], 300)
        started.start("slow", python(SLEEP))
        with pytest.raises(RunError, match=r"slow has not ended within 0.1 s \(see .*slow.log\)"):
            started.wait_for_success("slow", 0.1)
        with pytest.raises(RunError, match=r"slow does not answer within 0\.1 s"):
            started.wait_for_answer("slow", free_ports(1)[0], 0.1)
        with pytest.raises(RunError, match="nobody cannot be started"):
            started.start("nobody", [tmp_path / "nowhere"])


def test_a_program_that_has_died_can_be_started_again(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path, {}) as started:
        first = started.start("node-0", python("print('one')"))
        first.wait()
        second = started.start("node-0", python("print('two')"))
        started.wait_for_success("node-0", 300)
        assert second.pid != first.pid
    assert (tmp_path / "node-0.log").read_text() == "one\ntwo\n"


def test_an_answer_is_waited_for(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    code = (
        "import socket, sys, time; time.sleep(0.2); s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); " + SLEEP
    )
    with ProcessGroup(tmp_path, {}) as started:
        started.start("server", python(code, str(port)))
        started.wait_for_answer("server", port, 300)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))


def test_free_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 <= port <= 65535 for port in ports)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_the_blocks_and_ends_the_programs(number: int, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from polyfed.deploy.process_group import ProcessGroup, raise_on_termination
with raise_on_termination(), ProcessGroup(Path(sys.argv[1]), {{}}) as started:
    print(started.start("x", [sys.executable, "-S", "-c", {SLEEP!r}]).pid, flush=True)
    import time
    time.sleep(60)
"""
    caller = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert caller.stdout is not None
    child = int(caller.stdout.readline())
    caller.send_signal(number)
    _, said = caller.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said or b"TerminationSignal" in said
    assert not lives(child)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with raise_on_termination():
        assert signal.getsignal(signal.SIGTERM) != before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("first", "order"), [(None, "ba"), ("a", "ab"), ("nobody", "ba")])
def test_the_last_started_ends_first_unless_another_is_named(first: str | None, order: str, tmp_path: Path) -> None:
    code = "import signal, sys\nsignal.signal(15, lambda *_: (open(sys.argv[1], 'a').write(sys.argv[2]), sys.exit()))"
    with ProcessGroup(tmp_path, {}) as started:
        for name in "ab":
            started.start(name, python(f"{code}\nprint(1, flush=True)\n{SLEEP}", str(tmp_path / "order"), name))
            while not started.log(name).read_text():
                time.sleep(0.01)
        started.stop(first)
    assert (tmp_path / "order").read_text() == order


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_termination():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_logs_of_another_time_go(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("ConfigError: long ago")
    with ProcessGroup(tmp_path, {}) as started:
        assert not started.log("run").exists()
