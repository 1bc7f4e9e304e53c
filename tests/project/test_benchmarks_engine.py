"""The benchmarks of the engine run on tiny sizes, and measure what they say."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark with these words after its name, in this process; gives its lines of JSON."""

    def run(name: str, *words: str) -> list[dict[str, Any]]:
        path = ROOT / "benchmarks" / name
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        runpy.run_path(str(path), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        assert any(line and not line.startswith("{") for line in lines), "a table for people"
        return [json.loads(line) for line in lines if line.startswith("{")]

    return run


def test_overhead_of_the_engine(benchmark: Run) -> None:
    rows = benchmark("overhead.py", "--clients", "4", "--rounds", "3", "--workers", "0")
    assert [(row["kind"], row["executor"]) for row in rows] == [(k, "serial") for k in ("asked", "kept", "changed")]
    assert all(0 < row["cpu_ms"] < 1000 for row in rows)


def test_scaling_of_a_federation(benchmark: Run) -> None:
    words = [
        "--data",
        "digits",
        "--start-clients",
        "20",
        "--start-model",
        "digits-cnn1",
        "--round-model",
        "digits-cnn2",
    ]
    words += ["--clients", "4,8", "--participating", "2", "--rounds", "3", "--repeats", "1"]
    start, few, more = benchmark("scaling.py", *words)
    assert start["clients"] == 20
    assert start["seconds_to_start"] > 0
    assert [(few["clients"], few["growth"]), more["clients"]] == [(4, 1.0), 8]
    assert more["growth"] == pytest.approx(more["seconds_per_round"] / few["seconds_per_round"])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_counts_all_processes_of_a_run() -> None:
    held = runpy.run_path(str(ROOT / "benchmarks" / "memory.py"))["held"]
    before, read, write = held(os.getpid()), *os.pipe()
    child = os.fork()
    if child == 0:
        try:
            block = bytearray(b"x") * 2**26  # 64 MiB, which only the child has
            os.write(write, block[:1])
            os.read(os.pipe()[0], 1)
        finally:
            os._exit(0)
    os.read(read, 1)
    with_child = held(os.getpid())
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert 2**25 < with_child - before < 2**27  # the system may take back pages of this process meanwhile


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_of_a_run(benchmark: Run) -> None:
    words = [str(ROOT / "recipes" / "quickstart.toml"), "--rounds", "2", "--set", "data.max_train_per_client=20"]
    fedavg, local = benchmark("memory.py", *words, "--methods", "fedavg,local")
    assert (fedavg["method"], local["method"]) == ("fedavg", "local")
    assert 50 < local["peak_mib"] < 2000
    assert 0 < local["bytes_per_round"] < 10_000


def test_the_wire_counts_what_crosses_it() -> None:
    counted = runpy.run_path(str(ROOT / "benchmarks" / "wire.py"))["Packets"]()
    try:
        counted.__enter__()
    except (OSError, AttributeError) as problem:
        pytest.skip(f"packets cannot be read here: {problem}")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
                mine = client.getsockname()[1]
                client.sendall(bytes(30_000))
                other.recv(30_000, socket.MSG_WAITALL)
                other.sendall(bytes(20_000))
                client.recv(20_000, socket.MSG_WAITALL)
                until = time.monotonic() + 300  # on a busy machine
                while counted.bytes[port, mine] < 20_000 and time.monotonic() < until:
                    time.sleep(0.01)
    finally:
        counted.__exit__()
    sizes = counted.bytes[mine, port], counted.bytes[port, mine]
    assert all(size <= found < 2 * size for size, found in zip((30_000, 20_000), sizes, strict=True)), sizes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_over_many_rounds(benchmark: Run) -> None:
    words = ["--methods", "local", "--executors", "processes", "--rounds", "240", "--every", "10"]
    (row,) = benchmark("endurance_memory.py", *words)
    assert (row["method"], row["executor"], row["rounds"]) == ("local", "processes", 240)
    assert 1000 < row["history_bytes_per_round"] < 20_000
    assert row["run_bytes_per_round"] < row["history_bytes_per_round"] + 200_000, "no leak of a network a round"
