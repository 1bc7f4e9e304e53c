"""A deployment beside the same run in one process: seconds per round, and bytes metered against bytes on the wire.

    python benchmarks/wire.py recipes/three-nodes.toml --methods fedgh,fedhenn

Every method runs as `polyfed deploy local` does, for one round and for `--rounds`, while all packets of the loopback
interface are counted by port, and once as `polyfed run` does. The port with most bytes is the SuperLink's. Whatever is
sent passes it twice, from a node to the SuperLink and from there to the server app, or the other way, so that each of
its directions carries what went up and what went down: per round (bytes of all rounds - bytes of the first) / (rounds
- 1), beside the sum of what the rounds' records meter. The difference is Flower's wrapping, TLS and knocking for work.

Needs Linux, the right to read packets (root, or CAP_NET_RAW), the extra `flower`, and a machine that does nothing else.
A line of JSON for each method, then a table; two minutes per method.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
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

    def busiest(self) -> tuple[int, int]:
        """Bytes into and out of the port that most bytes went to or came from."""
        both: Counter[int] = Counter()
        for pair, count in self.bytes.items():
            for port in pair:
                both[port] += count
        port = max(both, key=lambda each: both[each])
        into = sum(count for (_, target), count in self.bytes.items() if target == port)
        return into, both[port] - into


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


def measured(asked: argparse.Namespace, method: str, folder: Path) -> dict[str, Any]:
    """A method on three deployments' worth of runs, below `folder`."""
    settings = [word for each in asked.set for word in ("--set", each)]
    wire: dict[int, tuple[int, int]] = {}
    dropped = 0
    for rounds in (1, asked.rounds):
        out = folder / f"{method}-{rounds}"
        words = ["--recipe", asked.recipe, "--method", method, *settings, "--set", f"training.rounds={rounds}"]
        with Packets() as packets:
            polyfed(["deploy", "local", *words, "--out", str(out), "--quiet"])
        wire[rounds], dropped = packets.busiest(), dropped + packets.dropped
    alone = folder / f"{method}-alone"
    words = [asked.recipe, "--method", method, *settings, "--set", f"training.rounds={asked.rounds}"]
    polyfed(["run", *words, "--out", str(alone), "--quiet"])
    deployed, same = records(folder / f"{method}-{asked.rounds}"), records(alone)
    later = deployed[1:]
    metered = sum(record["bytes_up"] + record["bytes_down"] for record in later) / len(later)
    into, out_of = ((wire[asked.rounds][way] - wire[1][way]) / len(later) for way in (0, 1))
    return {
        "method": method,
        "seconds_per_round": sum(record["seconds"] for record in deployed) / len(deployed),
        "seconds_per_round_in_process": sum(record["seconds"] for record in same) / len(same),
        "metered_per_round": round(metered),
        "into_superlink_per_round": round(into),
        "out_of_superlink_per_round": round(out_of),
        "packets_not_counted": dropped,
        "equal": [{**record, "seconds": 0} for record in deployed] == [{**record, "seconds": 0} for record in same],
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
