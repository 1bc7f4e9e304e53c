"""What a federation would do and cost, as data and as a page for people."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.escaping import clients_text
from polyfed.markup import preformatted
from polyfed.report.text_tables import Column, render_text
from polyfed.units import human_bytes, human_seconds

__all__ = ["CostEstimate", "NetworkCost"]

_SHOWN_CLIENTS = 20  # lines of the table of clients
_SHOWN_FEATURES = 40  # columns of a table
_NAME = 24  # characters of a client's name
_LABELS = 60  # characters of a client's labels, about
_WIDTH = 120  # columns of lines that are wrapped


@dataclass(frozen=True)
class NetworkCost:
    """What one network is and costs, measured on one of its clients.

    Attributes:
        name: of the architecture, with the variant of it that the clients train, where the method has several; where
            these change from round to round, as in round 2.
        client: number of the client that was measured. clients: how many have this network.
        parameters: how many numbers are trained.
        flops: floating-point operations of one sample's way forward (`polyfed.engine.operation_counter.flops`).
        down, up: bytes that go to and come from this client in rounds 1 and 2 and the final round; 0 without one.
        nbytes: what such a client keeps: weights, buffers, state.
        peak: bytes of such a client at work: the network, and what training a batch or scoring 128 rows makes.
        seconds_batch: one training step. seconds_row: scoring one row. seconds_rest: all else that one client costs in
            a round.
    """

    name: str
    client: int
    clients: int
    parameters: int
    flops: int
    down: tuple[int, ...]
    up: tuple[int, ...]
    nbytes: int
    peak: int
    seconds_batch: float
    seconds_row: float
    seconds_rest: float


@dataclass(frozen=True)
class CostEstimate:
    """What a federation would do. ``str(check)`` is a page for people.

    Attributes:
        facts: method, dataset, rounds and so on, as in `result.json`.
        architectures: one entry for each network that is trained.
        clients: one entry each: id, architecture, train, validation, test (rows), labels (class -> training rows).
        unused: rows of the data set that nobody gets. holdout: rows that the server holds.
        seconds, bytes_up, bytes_down: estimates for the whole run, if it does not stop early.
        seconds_server, seconds_scoring: what of the seconds is the server's, and what is scoring.
        nbytes: of all clients' weights and states and the server's, in memory. data_nbytes: of the clients' samples and
            those that everybody may see.
        workers: processes that do the clients' work. stack: so many clients train as one, at most.
        device_nbytes: of all clients' weights where these stay on the GPU between rounds; None: there is no GPU.
        averaged: what the method averages with whom, in a line; "" where it averages no networks.
        remarks: who is held out of training; what is odd about the classes
            (`polyfed.data.classes.remarks`) and the data set (`FederatedDataset.remarks`).
    """

    facts: Mapping[str, Any]
    architectures: tuple[NetworkCost, ...]
    clients: tuple[Mapping[str, Any], ...]
    seconds: float
    bytes_up: float
    bytes_down: float
    nbytes: int
    unused: int = 0
    holdout: int = 0
    workers: int = 1
    stack: int = 1
    device_nbytes: int | None = None
    seconds_server: float = 0.0
    seconds_scoring: float = 0.0
    data_nbytes: int = 0
    averaged: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes in memory, a GPU's included, with the largest network at work in every worker.

        Python and PyTorch are not counted.
        """
        return self.nbytes + self.data_nbytes + self.peak_at_work

    @property
    def peak_at_work(self) -> int:
        """Those at work, in all workers together, and of all clients that train as one."""
        return self.workers * max(kind.peak * min(self.stack, kind.clients) for kind in self.architectures)

    @property
    def seconds_round(self) -> float:
        """Of a round, on average."""
        return self.seconds / int(self.facts["rounds"])

    def __repr__(self) -> str:
        facts = self.facts
        what = f"{facts['label'] or facts['method']} on {facts['dataset']}, {facts['clients']} clients"
        sent = f"{human_bytes(self.bytes_up)} up, {human_bytes(self.bytes_down)} down"
        return f"Check({what}: models and data fit; about {human_seconds(self.seconds)}, {sent})"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __str__(self) -> str:
        return "\n".join(_page(self))


# the page ---------------------------------------------------------------------------------------------------------


def _page(check: CostEstimate) -> Iterator[str]:
    facts = check.facts
    yield (
        f"{facts['label'] or facts['method']} on {facts['dataset']}: {facts['clients']} clients, "
        f"{facts['rounds']} rounds, seed {facts['seed']}. Models and data fit the method."
    )
    yield from _wrap([check.averaged])
    yield ""
    yield from _networks(check.architectures)
    yield from _clients(check)
    yield ""
    features = facts["feature_names"]
    classes = facts["class_names"]
    if features:
        more = f", ... and {len(features) - _SHOWN_FEATURES} more" if len(features) > _SHOWN_FEATURES else ""
        yield from _wrap([f"features: {', '.join(features[:_SHOWN_FEATURES])}{more}"])
    if list(classes) != [str(label) for label in range(len(classes))]:
        listed = ", ".join(f"{k} {name}" for k, name in enumerate(classes))
        yield from textwrap.wrap(f"classes: {listed}", _WIDTH)
    yield from _client_summary(check.clients)
    yield from _wrap(check.remarks)
    yield f"rows: {check.holdout} held out for the server, {check.unused} unused"
    workers = f" with {check.workers} workers" if check.workers > 1 else ""
    yield (
        f"whole run, about: {human_seconds(check.seconds)}{workers} (scoring "
        f"{human_seconds(check.seconds_scoring)}, the server {human_seconds(check.seconds_server)}); "
        f"{human_bytes(check.bytes_up)} up, {human_bytes(check.bytes_down)} down"
    )
    yield (
        f"memory, about: {human_bytes(check.peak)} beside Python and PyTorch: "
        f"{human_bytes(check.nbytes)} of weights and states, {human_bytes(check.data_nbytes)} of data, "
        f"{human_bytes(check.peak_at_work)} at work{workers}"
    )
    if check.device_nbytes is not None:
        yield (
            f"on the GPU: {human_bytes(check.peak_at_work)} at work, up to {check.stack} clients as one; "
            f"{human_bytes(check.device_nbytes)} of weights between rounds, and as much again within a round"
        )


def _networks(kinds: Sequence[NetworkCost]) -> Iterator[str]:
    columns = [
        Column("network", [kind.name for kind in kinds], words=True),
        Column("clients", [str(kind.clients) for kind in kinds]),
        Column("parameters", [f"{kind.parameters:,}" for kind in kinds]),
        Column("FLOPs", [f"{kind.flops:,}" for kind in kinds]),
        Column("down, rounds 1, 2", [", ".join(map(human_bytes, kind.down[:2])) for kind in kinds]),
        Column("up, rounds 1, 2", [", ".join(map(human_bytes, kind.up[:2])) for kind in kinds]),
        Column("one batch", [f"{1000 * kind.seconds_batch:.1f} ms" for kind in kinds]),
        Column("memory at work", [human_bytes(kind.peak) for kind in kinds]),
    ]
    yield render_text(columns, _WIDTH)
    yield ""


def _clients(check: CostEstimate) -> Iterator[str]:
    shown = check.clients[:_SHOWN_CLIENTS]
    columns = [
        Column(head, [str(one[key]) for one in shown])
        for head, key in (("client", "id"), ("train", "train"), ("valid.", "validation"), ("test", "test"))
    ]
    columns.append(Column("architecture", [one["architecture"] for one in shown], words=True))
    if any(one.get("name") for one in check.clients):
        columns.append(Column("name", [one["name"][:_NAME] for one in shown], words=True))
    if any(one["labels"] for one in check.clients):  # else numbers are predicted
        labels = [" ".join(f"{label}:{n}" for label, n in one["labels"].items()) for one in shown]
        cells = [
            text if len(text) <= _LABELS else f"{len(one['labels'])} classes"
            for text, one in zip(labels, shown, strict=True)
        ]
        columns.append(Column("training rows of each class", cells, words=True))
    yield render_text(columns, _WIDTH)
    more = len(check.clients) - _SHOWN_CLIENTS
    if more > 0:
        yield f"... and {more} more"


def _client_summary(clients: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Over all clients: how unequal they are."""
    counted = {
        "training rows": [client["train"] for client in clients],
        "test rows": [client["test"] for client in clients],
        "classes": [len(client["labels"]) for client in clients],
    }
    ranges = [
        f"{what} {min(sizes)} to {max(sizes)}, median {statistics.median_low(sizes)}"
        for what, sizes in counted.items()
        if what != "classes" or any(sizes)
    ]
    yield f"a client has: {'; '.join(ranges)}"
    names = [client.get("name", "") for client in clients]
    alone = [client["id"] for client in clients if len(client["labels"]) == 1]
    untested = [client["id"] for client in clients if not client["test"]]
    for what, who in (
        ("clients with one class only", alone),
        ("clients without test rows, which are not scored", untested),
    ):
        if who:
            yield from _wrap([f"{what} ({len(who)}): {clients_text(who, names)}"])


def _wrap(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")]
