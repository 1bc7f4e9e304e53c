"""A deployment beside the same run in one process: seconds per round, processor seconds, bytes metered and on the wire.

    python benchmarks/wire.py recipes/three-nodes.toml --methods fedgh,fedhenn

Every method runs as `polyfed deploy local` does, while all packets of the loopback interface are counted by port, and
as `polyfed run` does. The port with most bytes is the SuperLink's. Whatever is sent passes it twice, from a node to the
SuperLink and from there to the server app, or the other way, so that each of its directions carries what went up and
what went down: per round, beside the sum of what the rounds' records meter. The difference is Flower's wrapping, TLS
and knocking for work. Processor seconds are those of the server app, of the SuperLink with its SuperExec, of all nodes
with the programs that they start, and of `flwr run`, which shows the log.

Times are medians, bytes means, of all rounds but the first.

Needs Linux, the right to read packets (root, or CAP_NET_RAW), the extra `flower`, and a machine that does nothing else.
A line of JSON for each method, then a table; a minute per method.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

_ALL, _FORCED_BUFFER, _OUTGOING, _DROPPED = 3, 33, 4, (263, 6, 8)  # names that the socket module lacks


class Packets:
    """A block during which the TCP payload on the loopback interface is counted: (from port, to port) -> bytes."""

    def __enter__(self) -> Packets:
        self.bytes: Counter[tuple[int, int]] = Counter()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _FORCED_BUFFER, 256 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._reader.join()
        _, self.dropped = struct.unpack("II", self._socket.getsockopt(*_DROPPED))
        self._socket.close()

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                frame, address = self._socket.recvfrom(128)
            except TimeoutError:
                continue
            if address[2] != _OUTGOING or frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
                continue  # every packet is seen twice, going out and coming in
            start = 14 + 4 * (frame[14] & 15)
            payload = struct.unpack(">H", frame[16:18])[0] - (start - 14) - 4 * (frame[start + 12] >> 4)
            self.bytes[struct.unpack(">HH", frame[start : start + 4])] += payload


def busiest(found: Counter[tuple[int, int]]) -> tuple[int, int]:
    """Bytes into and out of the port that most bytes went to or came from."""
    both: Counter[int] = Counter()
    for pair, count in found.items():
        for port in pair:
            both[port] += count
    port = max(both, key=lambda each: both[each])
    into = sum(count for (_, target), count in found.items() if target == port)
    return into, both[port] - into


_PROGRAMS = {  # a word of the command -> what it is
    "serverapp": "server",
    " deploy server ": "link",
    "superexec": "link",
    " deploy node ": "nodes",
    "flower-supernode": "nodes",
    "flwr run ": "log",
}
_TICKS = os.sysconf("SC_CLK_TCK")  # of the processor's clock in a second
_LOOK = 0.05  # seconds between two looks for a new round


class Rounds:
    """A block during which bytes and processor seconds are noted after each round of a deployment.

    Attributes:
        bytes, seconds: so far, after each round.
    """

    def __init__(self, out: Path, packets: Packets) -> None:
        self._records, self._packets = out / "rounds.jsonl", packets
        self.bytes: list[tuple[int, int]] = []
        self.seconds: list[Counter[str]] = []
        self._over = threading.Event()

    def __enter__(self) -> Rounds:
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._reader.join()

    def _read(self) -> None:
        while not self._over.wait(_LOOK):
            done = self._records.read_bytes().count(b"\n") if self._records.exists() else 0
            if done > len(self.bytes):
                self.bytes.append(busiest(self._packets.bytes.copy()))
                self.seconds.append(_seconds())


def _seconds() -> Counter[str]:
    """Processor seconds of all processes below this one, by what they are."""
    children = defaultdict[int, list[int]](list)
    ticks = dict[int, int]()
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(place.parent.name)
        children[int(fields[1])].append(number)
        ticks[number] = int(fields[11]) + int(fields[12])
    found = Counter[str]()
    below = [*children[os.getpid()]]
    while below:
        number = below.pop()
        below += children[number]
        found[_program(number)] += ticks[number]
    return found


def _program(number: int) -> str:
    """What a process is."""
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
    return next((name for mark, name in _PROGRAMS.items() if mark in words), "")


def polyfed(words: list[str]) -> None:
    """The command line in a process of its own."""
    with subprocess.Popen([sys.executable, "-m", "polyfed", *words], stdout=subprocess.DEVNULL) as program:
        try:
            if program.wait():
                raise SystemExit(f"polyfed {' '.join(words)}: status {program.returncode}")
        except KeyboardInterrupt:
            program.send_signal(signal.SIGINT)
            raise


def records(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without the checksum of each line."""
    found = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key != "seal"} for record in found]


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "seconds": 0, "processor_seconds": 0}


def measured(asked: argparse.Namespace, method: str, folder: Path) -> dict[str, Any]:
    """A method in a deployment and in one process, below `folder`."""
    settings = [word for each in (*asked.set, f"training.rounds={asked.rounds}") for word in ("--set", each)]
    words = ["--method", method, *settings, "--quiet"]
    out, alone = folder / method, folder / f"{method}-alone"
    begun = time.monotonic()
    with Packets() as packets, Rounds(out, packets) as rounds:
        polyfed(["deploy", "local", "--recipe", asked.recipe, *words, "--out", str(out)])
    whole = time.monotonic() - begun
    polyfed(["run", asked.recipe, *words, "--out", str(alone)])
    deployed, same = records(out), records(alone)
    later = deployed[1:]
    metered = sum(record["bytes_up"] + record["bytes_down"] for record in later) / len(later)
    into, out_of = ((rounds.bytes[-1][way] - rounds.bytes[0][way]) / (len(rounds.bytes) - 1) for way in (0, 1))
    spent = [after - before for before, after in itertools.pairwise(rounds.seconds)]
    return {
        "method": method,
        "seconds_of_the_command": whole,
        "seconds_per_round": statistics.median(record["seconds"] for record in later),
        "seconds_per_round_in_process": statistics.median(record["seconds"] for record in same[1:]),
        "processor_seconds_per_round": {
            name: statistics.median(each[name] for each in spent) / _TICKS for name in sorted({*_PROGRAMS.values()})
        },
        "metered_per_round": round(metered),
        "into_superlink_per_round": round(into),
        "out_of_superlink_per_round": round(out_of),
        "packets_not_counted": packets.dropped,
        "equal": [_without_times(record) for record in deployed] == [_without_times(record) for record in same],
    }


def main() -> None:
    """Measure, and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's file")
    parser.add_argument("--methods", default="fedgh,fedhenn", help="names, with commas [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="2 or more [%(default)s]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error(f"--rounds: expected 2 or more, got {asked.rounds}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in asked.methods.split(","):
            rows.append(measured(asked, method, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'method':10}{'s a round':>10}{'in process':>12}{'metered':>14}{'into':>14}{'out of':>14}  equal")
    for row in rows:
        times = f"{row['seconds_per_round']:>10.1f}{row['seconds_per_round_in_process']:>12.2f}"
        sizes = "".join(f"{row[key]:>14,}" for key in _SIZES)
        print(f"{row['method']:10}{times}{sizes}  {'yes' if row['equal'] else 'NO'}")


_SIZES = ("metered_per_round", "into_superlink_per_round", "out_of_superlink_per_round")

if __name__ == "__main__":
    main()
