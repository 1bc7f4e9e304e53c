"""What a federation would do and cost, as data and as a page for people."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.escaping import clients_text
from polyfed.markup import preformatted
from polyfed.units import human_bytes, human_seconds

__all__ = ["ArchitectureCheck", "CostEstimate"]

_SHOWN_CLIENTS = 20  # lines of the table of clients
_SHOWN_FEATURES = 40  # columns of a table
_NAME = 24  # characters of a client's name
_LABELS = 60  # characters of a client's labels, about
_WIDTH = 120  # of lines that are wrapped


@dataclass(frozen=True)
class ArchitectureCheck:
    """What one network is and costs, measured on one of its clients.

    Attributes:
        name: of the architecture, with the variant of it that the clients train, where the method has several; where
            these change from round to round, as in round 2.
        client: number of the client that was measured. clients: how many have this network.
        parameters: how many numbers are trained. nbytes: what such a client keeps: weights, buffers, state.
        flops: floating-point operations of one sample's way forward (`polyfed.engine.operation_counter.flops`).
        peak: bytes of such a client at work: the network, and what training a batch or scoring 128 rows makes.
        cut: shape of a sample where it leaves the extractor. feature_dim: width of its representation.
        down, up: bytes that go to and come from this client in rounds 1 and 2.
        seconds_batch: one training step. seconds_row: scoring one row. seconds_rest: all else that one client costs in
            a round.
        final_round: bytes down, bytes up and seconds of the final round; zeros where there is none.
        operations: of this client's receiving, training and uploading in rounds 1 and 2; counted where devices are
            simulated.
    """

    name: str
    client: int
    clients: int
    parameters: int
    nbytes: int
    cut: tuple[int, ...] | None
    feature_dim: int | None
    down: tuple[int, int]
    up: tuple[int, int]
    seconds_batch: float
    seconds_rest: float
    seconds_row: float = 0.0
    flops: int = 0
    peak: int = 0
    final_round: tuple[int, int, float] = (0, 0, 0.0)
    operations: tuple[int, int] = (0, 0)


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
        workers: among so many processes the clients' work is dealt. stack: so many clients train as one, at most.
        device_nbytes: of all clients' weights where these stay on the GPU between rounds; None: there is no GPU.
        devices: where devices are simulated, one entry for each client: id, device, memory (bytes it has), needs (bytes
            that training takes), fits, and the seconds down, train and up of a later round.
        simulated_seconds: of the whole run, if all are asked in every round; None where no devices are simulated.
        averaged: what the method averages with whom, in a line; "" where it averages no networks.
        class_remarks: who is held out of training, who has few test rows; what is odd about the classes
            (`polyfed.data.classes.remarks`).
        data_remarks: what is odd about the data set (`polyfed.data.federated_dataset.FederatedDataset.remarks`).
    """

    facts: Mapping[str, Any]
    architectures: tuple[ArchitectureCheck, ...]
    clients: tuple[Mapping[str, Any], ...]
    unused: int
    holdout: int
    seconds: float
    bytes_up: float
    bytes_down: float
    nbytes: int
    workers: int = 1
    stack: int = 1
    device_nbytes: int | None = None
    seconds_server: float = 0.0
    seconds_scoring: float = 0.0
    data_nbytes: int = 0
    devices: tuple[Mapping[str, Any], ...] = ()
    simulated_seconds: float | None = None
    averaged: str = ""
    class_remarks: tuple[str, ...] = ()
    data_remarks: tuple[str, ...] = ()

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
        return "\n".join([*_heading(self), *_tables(self), *_totals(self)])


# the page ---------------------------------------------------------------------------------------------------------


def _heading(check: CostEstimate) -> list[str]:
    facts = check.facts
    return [
        f"{facts['label'] or facts['method']} on {facts['dataset']}: {facts['clients']} clients, "
        f"{facts['rounds']} rounds, seed {facts['seed']}. Models and data fit the method.",
        *_wrap([check.averaged]),
        "",
    ]


def _tables(check: CostEstimate) -> list[str]:
    """The networks, what they cost, the clients, and their simulated devices."""
    network = ["network", "clients", "parameters", "FLOPs", "cut", "features"]
    costs = ["network", "down, rounds 1, 2", "up, rounds 1, 2", "one batch", "memory at work"]
    client = ["client", "train", "valid.", "test", "architecture"]
    is_named = any(one.get("name") for one in check.clients)
    if is_named:
        client.append("name")
    of_classes = _have_classes(check.clients)
    if of_classes:
        client.append("training rows of each class")
    clients = [_client_row(one, is_named, of_classes) for one in check.clients[:_SHOWN_CLIENTS]]
    return [
        *_table(network, [_network_row(kind) for kind in check.architectures], left=1),
        "",
        *_table(costs, [_cost_row(kind) for kind in check.architectures], left=1),
        "",
        *_table(client, clients, left=4 - len(client)),
        *_count_left_out(check.clients),
        "",
        *_feature_names(check.facts["feature_names"]),
        *_class_names(check.facts["class_names"]),
        *_device_lines(check),
    ]


def _totals(check: CostEstimate) -> list[str]:
    """How unequal the clients are, and what the whole run takes."""
    workers = f" with {check.workers} workers" if check.workers > 1 else ""
    return [
        *_client_summary(check.clients),
        *_wrap([*check.class_remarks, *check.data_remarks]),
        f"rows: {check.holdout} held out for the server, {check.unused} unused",
        f"whole run, about: {human_seconds(check.seconds)}{workers} (scoring "
        f"{human_seconds(check.seconds_scoring)}, the server {human_seconds(check.seconds_server)}); "
        f"{human_bytes(check.bytes_up)} up, {human_bytes(check.bytes_down)} down",
        f"memory, about: {human_bytes(check.peak)} beside Python and PyTorch: "
        f"{human_bytes(check.nbytes)} of weights and states, {human_bytes(check.data_nbytes)} of data, "
        f"{human_bytes(check.peak_at_work)} at work{workers}",
        *_device_memory(check),
    ]


def _device_memory(check: CostEstimate) -> list[str]:
    """What of the memory is a GPU's."""
    if check.device_nbytes is None:
        return []
    work = f"{human_bytes(check.peak_at_work)} at work, up to {check.stack} clients as one"
    if not check.device_nbytes:
        return [f"on the GPU: {work}; it has no room for all weights, which cross in every round"]
    kept = human_bytes(check.device_nbytes)
    return [f"on the GPU: {work}; {kept} of weights, which stay there, and as much again within a round"]


def _count_left_out(rows: Sequence[object]) -> list[str]:
    """A line on the rows that a table of clients does not show."""
    more = len(rows) - _SHOWN_CLIENTS
    return [f"... and {more} more"] if more > 0 else []


def _network_row(kind: ArchitectureCheck) -> list[str]:
    return [
        kind.name,
        str(kind.clients),
        f"{kind.parameters:,}",
        f"{kind.flops:,}",
        "-" if kind.cut is None else "x".join(map(str, kind.cut)),
        "-" if kind.feature_dim is None else str(kind.feature_dim),
    ]


def _cost_row(kind: ArchitectureCheck) -> list[str]:
    sent = [", ".join(map(human_bytes, sizes)) for sizes in (kind.down, kind.up)]
    return [kind.name, *sent, f"{1000 * kind.seconds_batch:.1f} ms", human_bytes(kind.peak)]


def _have_classes(clients: Sequence[Mapping[str, Any]]) -> bool:
    """Whether rows have classes; else numbers are predicted."""
    return any(client["labels"] for client in clients)


def _client_row(client: Mapping[str, Any], is_named: bool, of_classes: bool) -> list[str]:
    row = [*(str(client[key]) for key in ("id", "train", "validation", "test")), client["architecture"]]
    if is_named:
        row.append(client["name"][:_NAME])
    return [*row, _label_text(client["labels"])] if of_classes else row


def _device_lines(check: CostEstimate) -> list[str]:
    """The table of the clients' simulated devices, and what the run would take on them."""
    if check.simulated_seconds is None:
        return []
    heads = ["client", "device", "memory", "training takes", "down", "train", "up", "a later round"]
    rows = [
        [
            *(str(one["id"]), one["device"], human_bytes(one["memory"]), human_bytes(one["needs"])),
            *(f"{one[part]:.2f} s" for part in ("down", "train", "up")),
            human_seconds(one["seconds"]) if one["fits"] else "does not fit",
        ]
        for one in check.devices[:_SHOWN_CLIENTS]
    ]
    lines = [*_table(heads, rows, left=2), *_count_left_out(check.devices)]
    left_out = [one["id"] for one in check.devices if not one["fits"]]
    if left_out:
        told = clients_text(left_out, [one.get("name", "") for one in check.clients])
        lines += _wrap([f"left out, as their network does not fit: {told}"])
    lines += [f"whole run on these devices, about: {human_seconds(check.simulated_seconds)}", ""]
    return lines


def _label_text(labels: Mapping[int, int]) -> str:
    """All of a client's labels where they fit into a line, else how many there are and those with most rows.

    >>> _label_text({3: 44, 7: 19}), _label_text({label: 500 - label for label in range(100)})
    ('3:44 7:19', '100 classes, most: 0:500 1:499 2:498 3:497 4:496 5:495 ...')
    """
    whole = " ".join(f"{label}:{n}" for label, n in labels.items())
    if len(whole) <= _LABELS:
        return whole
    most = sorted(labels, key=lambda label: -labels[label])
    said = f"{len(labels)} classes, most: " + " ".join(f"{label}:{labels[label]}" for label in most[:9])
    return textwrap.shorten(said, _LABELS, placeholder=" ...")


def _feature_names(names: Sequence[str]) -> list[str]:
    """Which columns of a table are learned from, the first of them where there are many.

    >>> _feature_names(["age", "weight"]), _feature_names([])
    (['features: age, weight'], [])
    """
    if not names:
        return []
    more = f", ... and {len(names) - _SHOWN_FEATURES} more" if len(names) > _SHOWN_FEATURES else ""
    return _wrap([f"features: {', '.join(names[:_SHOWN_FEATURES])}{more}"])


def _class_names(names: Sequence[str]) -> list[str]:
    """What the classes are called, where they have names.

    >>> _class_names(["cat", "owl"]), _class_names(["0", "1"])
    (['classes: 0 cat, 1 owl'], [])
    """
    if list(names) == [str(label) for label in range(len(names))]:
        return []
    return textwrap.wrap("classes: " + ", ".join(f"{k} {name}" for k, name in enumerate(names)), _WIDTH)


def _client_summary(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """Over all clients: how unequal they are."""
    counted = {
        "training rows": [client["train"] for client in clients],
        "test rows": [client["test"] for client in clients],
    }
    if _have_classes(clients):
        counted["classes"] = [len(client["labels"]) for client in clients]
    ranges = [
        f"{what} {min(sizes)} to {max(sizes)}, median {statistics.median_low(sizes)}" for what, sizes in counted.items()
    ]
    lines = [f"a client has: {'; '.join(ranges)}"]
    names = [client.get("name", "") for client in clients]
    alone = [client["id"] for client in clients if len(client["labels"]) == 1]
    untested = [client["id"] for client in clients if not client["test"]]
    for what, who in (
        ("clients with one class only", alone),
        ("clients without test rows, which are not scored", untested),
    ):
        if who:
            lines += _wrap([f"{what} ({len(who)}): {clients_text(who, names)}"])
    return lines


def _wrap(lines: Sequence[str]) -> list[str]:
    """Long lines in several."""
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Aligned lines; the first (or last, if negative) `left` columns are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    words = range(len(heads))[:left] if left > 0 else range(len(heads))[left:]
    return [
        "  ".join(
            f"{c:<{w}}" if i in words else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [heads, ["-" * width for width in widths], *rows]
    ]
