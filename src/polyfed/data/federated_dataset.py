"""From a source to a federation's data: holdout, deal, split, caps.

Order of things: rows for the server are set aside, the rest is assigned to the clients, each client's rows are split
into train, validation and test, caps are applied, last some clients lose half of what is left. Which rows of a class
a client gets, keeps or loses is drawn, never a matter of their order.
Every draw comes from a generator made for that purpose ("holdout", "test", "partition", "split", "halved", of caps also
for each client), so that, say, a larger holdout does not change how splits are drawn.

Shapes: N samples, K clients, C classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import column_remarks
from polyfed.data.dataset import DatasetSource
from polyfed.data.federation_columns import own_columns, with_all_columns
from polyfed.data.options import PartitionSettings
from polyfed.data.partition import (
    Generators,
    Partition,
    Rows,
    by_class,
    by_group,
    class_shares,
    dirichlet,
    draw_balanced,
    draw_rows,
    groups_like,
    hash_groups,
    iid,
    partition_like,
    split_rows,
)
from polyfed.data.samples import ClientData, LabeledSamples, fill_missing, own_means, target_scale
from polyfed.errors import ConfigError
from polyfed.escaping import client_text, one_line
from polyfed.registry import PARTITIONS, suggest

_NAMED = 5  # groups in a message
_SETTINGS: tuple[tuple[Any, dict[str, str]], ...] = (  # parameter -> key, of our own partitions; others get none
    (iid, {}),
    (dirichlet, {"alpha": "dirichlet_alpha", "min_samples": "min_samples"}),
    (by_class, {"classes_per_client": "classes_per_client", "class_assignment": "class_assignment"}),
)


@dataclass(frozen=True, eq=False)
class FederatedDataset:
    """The data of a whole federation.

    Args:
        clients: one entry per client; rows in the source's order. With ``test="global"`` every client's test is the one
            common object.
        holdout: rows that belong to the server alone; may be empty.
        test: the common test set of ``test="global"``, else None.
        classes: C; 0: numbers are predicted. Each client's are standardized by the mean and the deviation of its own
            training rows; those of the holdout and of a common test set are as they stand.
        source: what it was made from.
        unused: rows of the source that no client has: assigned to none, or cut off by `max_rows_per_client` and
            `max_test_per_client`.
        groups: of a deal by group, the values that each client holds; empty for other deals.
        names: what the clients are called, where each holds one value.
        left_out: of a deal by group, the values of fewer rows than `min_samples`.
    """

    clients: tuple[ClientData, ...]
    holdout: LabeledSamples
    test: LabeledSamples | None
    classes: int
    source: DatasetSource
    unused: int
    groups: tuple[tuple[str, ...], ...] = ()
    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is odd about the data set and the columns of a table, and which values of few rows were left out."""
        lines = [*self.source.remarks]
        if self.source.feature_names:
            titles = [client_text(number, name) for number, name in enumerate(self.names or [""] * len(self.clients))]
            names, columns = self.source.feature_names, self.source.columns
            rows = [with_all_columns(client.train, client.columns, names) for client in self.clients]
            lines += column_remarks.remarks(names, columns, rows, titles)
            lines += column_remarks.lacking(names, [client.columns for client in self.clients])
        if self.left_out:
            named = ", ".join(map(one_line, self.left_out[:_NAMED]))
            more = f" and {len(self.left_out) - _NAMED} more" if len(self.left_out) > _NAMED else ""
            lines.append(f"left out, as they have fewer than data.min_samples rows: {named}{more}")
        return tuple(lines)

    def __repr__(self) -> str:
        rows = [len(client.train) for client in self.clients]
        each = f"{min(rows)} to {max(rows)}" if len(set(rows)) > 1 else f"{rows[0]}"
        who = f"{len(rows)} clients with {each} training samples"
        what = f"{self.classes} classes" if self.classes else "numbers to predict"
        return f"FederatedDataset({self.source.name}, {who}, {what})"


class _ClientRows(NamedTuple):
    """A client's rows, sorted."""

    train: Rows
    validation: Rows
    test: Rows


def build_federated_dataset(
    source: DatasetSource, options: PartitionSettings, generators: Generators, private: bool = False
) -> FederatedDataset:
    """Deal a source to clients: row numbers first, then everybody's samples.

    Args:
        source: what to deal.
        options: how.
        generators: purpose -> generator; all draws come from these.
        private: what is made of a row depends on no other row: sides and caps are drawn without labels, and missing
            values become the data set's mean. A recipe sets it where noise hides rows (`Privacy.hides_rows`).

    Raises:
        ConfigError: settings that do not fit the source, a source without the test side that was asked for, or a
            client that would end without training rows or, unless rows are assigned by group, without test rows.
    """
    if private and source.columns.flags:
        source = replace(source, columns=replace(source.columns, own_means=False))
    deal = _Deal(source, options, generators, private)
    _check_options(source, deal, options, private)
    holdout, assigned, common_test = deal.set_aside()
    values = deal.group_values(assigned) if options.is_by_group else None
    partition = deal.assign(assigned, values)
    clients = deal.cap(deal.split(assigned, partition, values))

    groups: tuple[tuple[str, ...], ...] = ()
    left_out: tuple[str, ...] = ()
    if values is not None:
        groups = tuple(tuple(map(str, np.unique(values[rows]))) for rows in partition.rows)
        held = {name for names in groups for name in names}
        left_out = tuple(name for name in map(str, np.unique(values)) if name not in held)
    named = options.num_groups is None and all(len(held) == 1 for held in groups)
    names = tuple(one_line(held[0]) for held in groups) if named else ()
    titles = [client_text(number, name) for number, name in enumerate(names or [""] * len(clients))]
    _check_training(clients, titles, options)
    if common_test is None:
        _check_tests(clients, deal.official, options)

    test = None if common_test is None else deal.select(common_test)
    unused = len(deal.y) - len(holdout) - sum(len(rows) for client in clients for rows in client)
    return FederatedDataset(
        clients=tuple(
            _client_data(deal, rows, test, options, title) for rows, title in zip(clients, titles, strict=True)
        ),
        holdout=deal.select(holdout),
        test=test,
        classes=source.classes,
        source=source,
        unused=unused - (0 if common_test is None else len(common_test)),
        groups=groups,
        names=names,
        left_out=left_out,
    )


# rows ----------------------------------------------------------------------------------------------------------------


class _Deal:
    """Rows of both sides of a source under one numbering, training rows first, then test rows; and who gets which.

    Rows with numbers to predict count as rows of one class.

    Attributes:
        y: (N,) classes. strata: (N,) within which rows are drawn: the classes, or all are one where these must not
            decide.
        official, ratio: the split: whether the source says what is test, and the parts of train, validation and test.
    """

    def __init__(
        self, source: DatasetSource, options: PartitionSettings, generators: Generators, private: bool
    ) -> None:
        self.source = source
        self.options = options
        self._generators = generators
        self._sides = [samples for _, samples in source.splits()]
        labels = torch.cat([side.y for side in self._sides])
        if source.is_regression:
            labels = torch.zeros(len(labels), dtype=torch.int64)
        self.y: Rows = labels.numpy()
        self.strata: Rows = np.zeros_like(self.y) if private else self.y
        self.classes = source.classes or 1
        self.official, self.ratio = _parse_split(options.split)
        self._first_test = len(source.train)

    def select(self, rows: Rows) -> LabeledSamples:
        """The samples at `rows` (sorted), copied."""
        first = self._first_test
        here = self._sides[0].select(torch.from_numpy(rows[rows < first]))
        if not np.any(rows >= first):
            return here
        there = self._sides[1].select(torch.from_numpy(rows[rows >= first] - first))
        return there if not len(here) else LabeledSamples(torch.cat([here.x, there.x]), torch.cat([here.y, there.y]))

    def group_values(self, rows: Rows) -> NDArray[Any]:
        """What rows, some training rows among them, are assigned by: a column's values, or their groups."""
        name = str(self.options.group_by)
        sides = [("training", self.source.train_columns, "")]
        if np.any(rows >= self._first_test):
            sides.append(("test", self.source.test_columns, "; with test = 'global' it needs none"))
        for what, columns, hint in sides:
            if name not in columns:
                hint = hint or (suggest(name, columns) if columns else "")
                raise ConfigError(f"the {what} side of '{self.source.name}' has no column '{name}' to deal by{hint}")
        parts = [columns[name] for _, columns, _ in sides]
        if len({part.dtype.kind for part in parts}) > 1:
            raise ConfigError(
                f"expected '{name}' of both sides of '{self.source.name}' in one type, got numbers and text"
            )
        values: NDArray[Any] = np.concatenate(parts)[rows]
        return values if self.options.num_groups is None else hash_groups(values, self.options.num_groups)

    def set_aside(self) -> tuple[Rows, Rows, Rows | None]:
        """The rows of the server, those that are assigned, and those of a common test set, if there is one."""
        options, generators = self.options, self._generators
        train = np.arange(self._first_test)
        official_test = np.arange(self._first_test, len(self.y))
        if options.holdout >= len(train):
            raise ConfigError(f"expected a holdout below the {len(train)} training rows, got {options.holdout}")
        holdout = train[:0]
        if options.holdout:
            holdout = draw_balanced(self.strata[train], options.holdout, generators("holdout"))
        train = np.setdiff1d(train, holdout, assume_unique=True)
        if options.test == "local":
            return holdout, train if self.official else np.concatenate([train, official_test]), None
        assigned, common_test = train, official_test
        if self.source.test is None:
            train_part, validation_part, test_part = self.ratio
            ratio = (train_part + validation_part, 0, test_part)
            assigned, _, common_test = split_rows(train, self.strata, ratio, generators("test"))
        return (
            holdout,
            assigned,
            draw_rows(common_test, self.strata, options.max_test_per_client, generators("cap test")),
        )

    def assign(self, rows: Rows, values: NDArray[Any] | None) -> Partition:
        """Divide rows among clients; the result counts among them and always has class shares.

        values: what they are divided by, of a deal by group.
        """
        options = self.options
        y = self.y[rows]
        if values is not None:
            found = by_group(values, options.client_count, self._generators("partition"), options.least_group)
        else:
            found = self._partition(y)
            if len(found.rows) != options.num_clients:
                raise ConfigError(
                    f"expected a partition of {options.num_clients} clients, got one of {len(found.rows)}"
                )
            for client, mine in enumerate(found.rows):
                if len(mine) and int(mine.max()) >= len(y):
                    raise ConfigError(
                        f"expected rows below {len(y)} in the partition, client {client} has {mine.max()}"
                    )
        if found.shares is not None and found.shares.shape == (len(found.rows), self.classes):
            return found
        return Partition(found.rows, class_shares(found.rows, y, self.classes))

    def _partition(self, y: Rows) -> Partition:
        """What the partition that is asked for makes of rows of these classes."""
        options = self.options
        wanted = options.partition
        if self.source.is_regression and isinstance(wanted, str):
            fitting = [name for name, function in PARTITIONS.items() if function not in (dirichlet, by_class)]
            if wanted not in fitting:
                raise ConfigError(
                    f"partition '{wanted}' deals by classes; expected {', '.join(fitting)} where numbers are predicted"
                )
        function = wanted if callable(wanted) else PARTITIONS[wanted]
        draws = self._generators("partition")
        for own, names in _SETTINGS:
            if function is own:
                settings = {name: getattr(options, key) for name, key in names.items()}
                return own(y, options.num_clients, draws, class_count=self.classes, **settings)  # type: ignore[no-any-return]
        return _as_partition(function(y, options.num_clients, draws))

    def split(self, assigned: Rows, partition: Partition, values: NDArray[Any] | None) -> list[_ClientRows]:
        """Each client's rows as train, validation and test. values: what they are assigned by, of a deal by group."""
        ratio = self.ratio
        if self.official or self.options.test == "global":
            ratio = (ratio[0], ratio[1], 0)
        generator = self._generators("split") if sum(part > 0 for part in ratio) > 1 else None
        clients = [_ClientRows(*split_rows(assigned[rows], self.strata, ratio, generator)) for rows in partition.rows]
        if self.options.test == "global" or not self.official:
            return clients
        test = np.arange(self._first_test, len(self.y))
        if values is None:
            alike = partition_like(partition, self.y[test], self._generators("test"))
        else:
            alike = groups_like(partition, values, self.group_values(np.concatenate([assigned, test]))[len(values) :])
        return [rows._replace(test=test[own]) for rows, own in zip(clients, alike.rows, strict=True)]

    def cap(self, clients: Sequence[_ClientRows]) -> list[_ClientRows]:
        """The clients' rows below their caps; some clients lose half of what is left."""
        options, generators = self.options, self._generators
        most_train = options.max_train_per_client
        caps: list[int | None] = [*most_train] if isinstance(most_train, list) else [most_train]
        if not 1 <= len(caps) <= len(clients):
            raise ConfigError(
                f"max_train_per_client: expected one cap, or a list of at most {len(clients)}, one for each client; "
                f"got {len(caps)} caps"
            )
        share = options.halved_client_fraction
        count = int(share * len(clients) + 1e-9)
        if share and not count:
            raise ConfigError(
                f"halved_client_fraction = {share:g} does nothing with {len(clients)} clients; set it to at least "
                f"{1 / len(clients):.2g}, or leave it at 0"
            )
        halved = set(generators("halved").permutation(len(clients))[:count].tolist()) if count else set()
        capped = []
        for client, every in enumerate(clients):
            rows = self._cap_labeled(client, every)
            most = min(len(rows.train), caps[client % len(caps)] or len(rows.train))
            if client in halved:
                most = (most + 1) // 2
            train = draw_rows(rows.train, self.strata, most, generators(f"cap train {client}"))
            test = draw_rows(rows.test, self.strata, options.max_test_per_client, generators(f"cap test {client}"))
            capped.append(_ClientRows(train, rows.validation, test))
        return capped

    def _cap_labeled(self, client: int, rows: _ClientRows) -> _ClientRows:
        """Training and validation rows below their common cap, divided anew."""
        labeled = np.sort(np.concatenate([rows.train, rows.validation]))
        most = self.options.max_rows_per_client
        if most is None or len(labeled) <= most:
            return rows
        kept = draw_rows(labeled, self.strata, most, self._generators(f"cap rows {client}"))
        ratio = (self.ratio[0], self.ratio[1], 0)
        train, validation, _ = split_rows(kept, self.strata, ratio, self._generators(f"split rows {client}"))
        return _ClientRows(train, validation, rows.test)


def _as_partition(found: Any) -> Partition:
    """What a partition's function has returned."""
    if isinstance(found, Partition):
        return found
    try:
        parts = [np.asarray(part) for part in found]
    except (TypeError, ValueError):
        parts = []
    if not parts or any(part.ndim != 1 or (len(part) and part.dtype.kind not in "iu") for part in parts):
        raise ConfigError(
            f"expected row numbers for every client, or a Partition, from the partition's function, got "
            f"{type(found).__name__}"
        )
    return Partition(tuple(np.sort(part.astype(np.int64)) for part in parts))


# samples -------------------------------------------------------------------------------------------------------------


def _client_data(
    deal: _Deal, rows: _ClientRows, common_test: LabeledSamples | None, options: PartitionSettings, title: str
) -> ClientData:
    """A client's samples, with labels as it has them; a common test set as it is."""
    source = deal.source
    own_rows = rows if common_test is None else rows[:2]
    parts = [deal.select(own) for own in own_rows]
    columns = None
    if source.columns_differ:
        columns = own_columns(parts[0].x, source.columns, source.feature_names, source.prepare)
        if not columns.places:
            raise ConfigError(f"{title}: expected a value in one column at least of its training rows, got none")
        kept = columns.features
        parts = [LabeledSamples(part.x[:, kept], part.y, part.scale) for part in parts]
        means = own_means(parts[0].x, columns.table, [source.mean[place] for place in kept])
        parts = [fill_missing(part, columns.table, means) for part in parts]
    elif source.columns.flags:
        means = own_means(parts[0].x, source.columns, source.mean)
        parts = [fill_missing(part, source.columns, means) for part in parts]
    if source.is_regression:
        scale = target_scale(parts[0].y)
        parts = [part.standardized(scale) for part in parts]
    if common_test is not None:
        parts.append(common_test)
    train, validation, test = parts
    data = ClientData(train, validation, test, columns=columns)
    return own_label_space(data, source.class_names, title) if options.label_space == "own" else data


def own_label_space(data: ClientData, class_names: Sequence[str], title: str) -> ClientData:
    """A client's rows with its classes numbered from 0; those of classes that it has no training rows of are left out.

    Args:
        class_names: of the whole task. title: of the client, for errors.
    """
    own = data.train.y.unique()
    if len(own) < 2:
        raise ConfigError(f"data.label_space 'own': expected two or more classes at each client, {title} has one")
    parts = []
    for part in (data.train, data.validation, data.test):
        kept = part.select(torch.isin(part.y, own).nonzero().flatten())
        parts.append(LabeledSamples(kept.x, torch.searchsorted(own, kept.y)))
    train, validation, test = parts
    return ClientData(train, validation, test, tuple(class_names[label] for label in own.tolist()))


# checks --------------------------------------------------------------------------------------------------------------


def _parse_split(split: str) -> tuple[bool, tuple[int, int, int]]:
    """Whether the source says what is test, and the parts of train, validation and test."""
    match = re.fullmatch(r"(?:(official)(?::(\d+):(\d+))?|(\d+):(\d+):(\d+))", str(split))
    if match:
        official, a, b, train, validation, test = match.groups()
        parts = (int(a or 1), int(b or 0), 0) if official else (int(train), int(validation), int(test))
        if parts[0] > 0:
            return bool(official), parts
    raise ConfigError(
        f"expected split as 'train:validation:test' in whole numbers with train above 0 ('8:1:1'), 'official' or "
        f"'official:train:validation' ('official:9:1'), got '{split}'"
    )


def _check_options(source: DatasetSource, deal: _Deal, options: PartitionSettings, private: bool) -> None:
    if options.label_space == "own" and options.test == "global":
        raise ConfigError("data.label_space 'own': expected test = 'local', as clients' classes differ, got 'global'")
    if source.columns_differ and (options.test == "global" or options.holdout or options.label_space == "own"):
        raise ConfigError(
            "data.features: expected test = 'local', no holdout and label_space = 'shared', as no rows have all "
            "clients' columns, got another"
        )
    if options.label_space == "own" and source.is_regression:
        raise ConfigError(f"data.label_space 'own': expected classes as labels, '{source.name}' has numbers to predict")
    if private and source.is_regression:
        raise ConfigError(
            f"expected classes where noise hides rows, '{source.name}' has numbers to predict, which each client "
            "standardizes by its own rows"
        )
    if source.test is None and deal.official:
        raise ConfigError(
            f"split '{options.split}' expects an official test side, '{source.name}' has none; use '8:1:1'"
        )
    from_ratio = not deal.official and (options.test == "local" or source.test is None)
    if from_ratio and deal.ratio[2] == 0:
        raise ConfigError(f"expected a test part above 0 in split, got '{options.split}'; use for instance '8:1:1'")


def _check_training(clients: Sequence[_ClientRows], titles: Sequence[str], options: PartitionSettings) -> None:
    hint = "use fewer clients or more rows"
    if options.is_by_group:
        hint = "leave out such values with data.min_samples"
    for title, rows in zip(titles, clients, strict=True):
        if len(rows.train) == 0:
            raise ConfigError(f"expected at least one training row for every client, {title} has none; {hint}")


def _check_tests(clients: Sequence[_ClientRows], official: bool, options: PartitionSettings) -> None:
    """Every client can be tested; where rows are assigned by group, of which some are small, one at least."""
    untested = [client for client, rows in enumerate(clients) if len(rows.test) == 0]
    grouped = options.is_by_group
    if not untested or (grouped and len(untested) < len(clients)):
        return
    if grouped and official:
        raise ConfigError(
            f"split '{options.split}' expects test rows of those who train, all are of others; to test these as "
            "newcomers, set data.split to '8:1:1', which splits everybody's rows, and list them in evaluation.held_out"
        )
    first = untested[0]
    who = f"one client at least, all {len(clients)} have" if grouped else f"every client, client {first} has"
    raise ConfigError(
        f"expected a test row for {who} none ({len(clients[first].train)} rows to train on at client "
        f"{first}); use fewer clients, a larger test part in split, or test='global'"
    )
