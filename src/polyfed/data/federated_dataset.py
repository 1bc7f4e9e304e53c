"""From a source to a federation's data: holdout, deal, split, caps.

Order of things: rows for the server are set aside, the rest is dealt to the clients, each client's rows are split into
train, validation and test, caps are applied, some clients lose half of what is left, and last the features are skewed.
Every draw comes from a generator made for that purpose ("holdout", "test", "partition", "split", "halved", "skew"), so
that, say, a larger holdout does not change how splits are drawn.

Shapes: N samples, K clients, C classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.dataset import DatasetSource
from polyfed.data.feature_shift import FeatureShift
from polyfed.data.options import PartitionOptions
from polyfed.data.partition import Rows, check_integer
from polyfed.data.pooled_rows import PooledRows, cap_rows, draw_balanced, split_rows
from polyfed.data.row_assignment import Generators, assign_rows, assign_test_rows, groups_of, is_by_group, values_of
from polyfed.data.samples import ClientData, LabeledSamples, target_scale
from polyfed.data.table_columns import fill_missing, own_means
from polyfed.errors import ConfigError
from polyfed.escaping import client_text, one_line
from polyfed.registry import suggest

TESTS = ("local", "global")
_TOLD = 5  # groups that are named


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
        unused: rows of the source that ended nowhere: dealt to nobody, or cut off by `max_train_per_client` and
            `max_test_per_client`.
        label_table: (K, C) int64 counts of the clients' training labels; (K, 1) where numbers are predicted.
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
    label_table: NDArray[np.int64]
    groups: tuple[tuple[str, ...], ...] = ()
    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is odd about the data set, and which values of few rows are nobody's."""
        if not self.left_out:
            return self.source.remarks
        told = ", ".join(map(one_line, self.left_out[:_TOLD]))
        more = f" and {len(self.left_out) - _TOLD} more" if len(self.left_out) > _TOLD else ""
        return (*self.source.remarks, f"left out, as they have fewer than data.min_samples rows: {told}{more}")

    def __repr__(self) -> str:
        rows = [len(client.train) for client in self.clients]
        each = f"{min(rows)} to {max(rows)}" if len(set(rows)) > 1 else f"{rows[0]}"
        who = f"{len(rows)} clients with {each} training samples"
        what = f"{self.classes} classes" if self.classes else "numbers to predict"
        return f"FederatedDataset({self.source.name}, {who}, {what})"


@dataclass(frozen=True)
class _Split:
    """A parsed `split`: parts of train, validation and test; `official` when the source says what is test."""

    official: bool
    parts: tuple[int, int, int]


class _ClientRows(NamedTuple):
    """A client's rows of the pool, sorted."""

    train: Rows
    validation: Rows
    test: Rows


class _Sides(NamedTuple):
    """Rows of the pool before anybody is dealt some. common_test: of everybody; None where each has its own."""

    holdout: Rows
    dealt: Rows
    official_test: Rows
    common_test: Rows | None


def build_federated_dataset(
    source: DatasetSource, options: PartitionOptions, generators: Generators
) -> FederatedDataset:
    """Deal a source to clients.

    Args:
        source: what to deal.
        options: how.
        generators: purpose -> generator; all draws come from these.

    Raises:
        ConfigError: any setting out of its range, a source without the test side that was asked for, or a client that
            would end without training rows or, unless rows are dealt by group, without test rows.
    """
    plan = _parse_split(options.split)
    _check_options(options)
    _check_test_side(source, plan, options)
    if source.is_regression and options.label_space == "own":
        raise ConfigError(f"data.label_space 'own': expected classes as labels, '{source.name}' has numbers to predict")
    pool = PooledRows(source)
    sides = _set_aside(pool, plan, options, generators)
    partition = assign_rows(pool, sides.dealt, options, generators)
    shift = FeatureShift(options.feature_shift, options.feature_shift_strength, len(partition.rows), generators)
    clients = [_ClientRows(*rows) for rows in _split_clients(pool, sides, partition.rows, plan, options, generators)]
    if options.test == "local" and plan.official:
        alike = assign_test_rows(partition, pool, sides.dealt, sides.official_test, options)
        clients = [rows._replace(test=sides.official_test[own]) for rows, own in zip(clients, alike.rows, strict=True)]
    clients = _halve(pool, _cap(pool, clients, options), options.halved_client_fraction, generators)
    common_test = (
        None if sides.common_test is None else cap_rows(sides.common_test, pool.y, options.max_test_per_client)
    )
    groups = groups_of(partition, pool, sides.dealt, options)
    names = _names(groups, options)
    titles = [client_text(number, name) for number, name in enumerate(names or [""] * len(clients))]
    _check_training(clients, titles, options)
    if options.test == "local":
        _check_tests(clients, options, lambda: values_of(pool, sides.official_test, options))
    used = len(sides.holdout) + sum(len(rows) for client in clients for rows in client)
    if common_test is not None:
        used += len(common_test)
    test = None if common_test is None else pool.select(common_test)
    of_clients = [_client_data(pool, rows, client, shift, test) for client, rows in enumerate(clients)]
    return FederatedDataset(
        clients=tuple(
            _labeled(source, _filled(source, data, common=test is not None), options, title)
            for title, data in zip(titles, of_clients, strict=True)
        ),
        holdout=pool.select(sides.holdout),
        test=test,
        classes=source.classes,
        source=source,
        unused=pool.size - used,
        label_table=np.stack([np.bincount(pool.y[rows.train], minlength=pool.classes) for rows in clients]),
        groups=groups,
        names=names,
        left_out=_left_out(groups, pool, sides, options),
    )


def _names(groups: Sequence[Sequence[str]], options: PartitionOptions) -> tuple[str, ...]:
    """What clients are called by the groups that they hold: nothing where one has several, or groups are hashes."""
    if options.num_groups is not None or any(len(held) != 1 for held in groups):
        return ()
    return tuple(one_line(held[0]) for held in groups)


def _left_out(
    groups: Sequence[Sequence[str]], pool: PooledRows, sides: _Sides, options: PartitionOptions
) -> tuple[str, ...]:
    """The groups that no client was dealt."""
    if options.min_samples is None:
        return ()
    dealt = {name for held in groups for name in held}
    return tuple(name for name in values_of(pool, sides.dealt, options) if name not in dealt)


# its steps --------------------------------------------------------------------------------------------------------


def _set_aside(pool: PooledRows, plan: _Split, options: PartitionOptions, generators: Generators) -> _Sides:
    """The rows of the server, those of a common test set, and those that are dealt."""
    train_count = len(pool.source.train)
    train = np.arange(train_count)
    official_test = np.arange(train_count, pool.size)
    if options.holdout >= train_count:
        raise ConfigError(f"expected a holdout below the {train_count} training rows, got {options.holdout}")
    holdout = train[:0]
    if options.holdout:
        holdout = draw_balanced(pool.y[train], options.holdout, generators("holdout"))
    train = np.setdiff1d(train, holdout, assume_unique=True)
    if options.test == "local":
        dealt = train if plan.official else np.concatenate([train, official_test])
        return _Sides(holdout, dealt, official_test, None)
    if pool.source.test is not None:
        return _Sides(holdout, train, official_test, official_test)
    train_part, validation_part, test_part = plan.parts
    ratio = (train_part + validation_part, 0, test_part)
    dealt, _, common_test = split_rows(train, pool.y, ratio, generators("test"))
    return _Sides(holdout, dealt, official_test, common_test)


def _split_clients(
    pool: PooledRows,
    sides: _Sides,
    dealt: Sequence[Rows],
    plan: _Split,
    options: PartitionOptions,
    generators: Generators,
) -> list[tuple[Rows, Rows, Rows]]:
    """Each client's rows as train, validation and test."""
    parts = plan.parts
    if plan.official or options.test == "global":
        parts = (parts[0], parts[1], 0)
    several = sum(part > 0 for part in parts) > 1
    generator = generators("split") if several else None
    return [split_rows(sides.dealt[rows], pool.y, parts, generator) for rows in dealt]


def _cap(pool: PooledRows, clients: Sequence[_ClientRows], options: PartitionOptions) -> list[_ClientRows]:
    """No client has more rows than its cap."""
    caps = _caps(options.max_train_per_client)
    if not 1 <= len(caps) <= len(clients):
        raise ConfigError(
            f"max_train_per_client: expected one cap, or a list of at most {len(clients)}, one for each client; "
            f"got {len(caps)} caps"
        )
    capped = []
    for client, rows in enumerate(clients):
        train = cap_rows(rows.train, pool.y, caps[client % len(caps)])
        capped.append(_ClientRows(train, rows.validation, cap_rows(rows.test, pool.y, options.max_test_per_client)))
    return capped


def _halve(pool: PooledRows, clients: Sequence[_ClientRows], share: float, generators: Generators) -> list[_ClientRows]:
    """A share of the clients, drawn, keeps half of its training rows."""
    if not share:
        return list(clients)
    count = int(share * len(clients) + 1e-9)
    if not count:
        raise ConfigError(
            f"halved_client_fraction = {share:g} does nothing with {len(clients)} clients; set it to at least "
            f"{1 / len(clients):.2g}, or leave it at 0"
        )
    drawn = set(generators("halved").permutation(len(clients))[:count].tolist())
    halved = []
    for client, rows in enumerate(clients):
        if client in drawn:
            rows = rows._replace(train=cap_rows(rows.train, pool.y, (len(rows.train) + 1) // 2))
        halved.append(rows)
    return halved


def _client_data(
    pool: PooledRows, rows: _ClientRows, client: int, shift: FeatureShift, common_test: LabeledSamples | None
) -> ClientData:
    """A client's samples as it sees them; a common test set as it is."""
    return ClientData(
        shift(pool.select(rows.train), client, "train"),
        shift(pool.select(rows.validation), client, "validation"),
        shift(pool.select(rows.test), client, "test") if common_test is None else common_test,
    )


def _labeled(source: DatasetSource, data: ClientData, options: PartitionOptions, title: str) -> ClientData:
    """A client's rows with labels as it has them: numbers standardized by its own training rows, classes of its own."""
    if options.label_space == "own":
        return own_label_space(data, source.class_names, title)
    if not source.is_regression:
        return data
    scale = target_scale(data.train.y)
    test = data.test.standardized(scale) if options.test == "local" else data.test
    return ClientData(data.train.standardized(scale), data.validation.standardized(scale), test)


def own_label_space(data: ClientData, class_names: Sequence[str], title: str) -> ClientData:
    """A client's rows with its classes numbered from 0; those of classes that it has no training rows of are left out.

    Args:
        class_names: of the whole task. title: of the client, for errors.

    Raises:
        ConfigError: fewer than two classes.
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


def _filled(source: DatasetSource, data: ClientData, common: bool) -> ClientData:
    """A client's rows with means of its own training rows in place of missing values; a common test set as it is."""
    if not source.columns.flags:
        return data
    values = own_means(data.train.x, source.columns, source.mean)
    train, validation, test = (
        fill_missing(part, source.columns, values) for part in (data.train, data.validation, data.test)
    )
    return ClientData(train, validation, data.test if common else test)


# checks -----------------------------------------------------------------------------------------------------------


def _parse_split(split: str) -> _Split:
    """A split's words; raises `ConfigError` for anything else."""
    match = re.fullmatch(r"(?:(official)(?::(\d+):(\d+))?|(\d+):(\d+):(\d+))", str(split))
    if match:
        official, a, b, train, validation, test = match.groups()
        parts = (int(a or 1), int(b or 0), 0) if official else (int(train), int(validation), int(test))
        if parts[0] > 0:
            return _Split(bool(official), parts)
    raise ConfigError(
        f"expected split as 'train:validation:test' in whole numbers with train above 0 ('8:1:1'), 'official' or "
        f"'official:train:validation' ('official:9:1'), got '{split}'"
    )


def _caps(max_train: int | Sequence[int] | None) -> list[int | None]:
    return list(max_train) if isinstance(max_train, Sequence) else [max_train]


def _check_options(options: PartitionOptions) -> None:
    """Refuse numbers out of their range."""
    if options.test not in TESTS:
        raise ConfigError(f"unknown test '{options.test}'{suggest(str(options.test), TESTS)}")
    if options.num_clients is not None or not is_by_group(options.partition):
        check_integer("num_clients", options.num_clients, 1)
    check_integer("holdout", options.holdout, 0)
    if options.label_space not in ("shared", "own"):
        raise ConfigError(f"label_space: expected 'shared' or 'own', got '{options.label_space}'")
    if options.label_space == "own" and options.test == "global":
        raise ConfigError("data.label_space 'own': expected test = 'local', as clients' classes differ, got 'global'")
    if not 0 <= options.halved_client_fraction <= 1:
        raise ConfigError(
            f"halved_client_fraction: expected a share of the clients between 0 and 1, got "
            f"{options.halved_client_fraction}"
        )
    for cap in _caps(options.max_train_per_client):
        if cap is not None:
            check_integer("max_train_per_client", cap, 1)
    if options.max_test_per_client is not None:
        check_integer("max_test_per_client", options.max_test_per_client, 1)


def _check_test_side(source: DatasetSource, plan: _Split, options: PartitionOptions) -> None:
    """Refuse a test side that cannot be."""
    if source.test is None and plan.official:
        raise ConfigError(
            f"split '{options.split}' expects an official test side, '{source.name}' has none; use '8:1:1'"
        )
    from_ratio = not plan.official and (options.test == "local" or source.test is None)
    if from_ratio and plan.parts[2] == 0:
        raise ConfigError(f"expected a test part above 0 in split, got '{options.split}'; use for instance '8:1:1'")


def _check_training(clients: Sequence[_ClientRows], titles: Sequence[str], options: PartitionOptions) -> None:
    """Every client can train."""
    hint = "use fewer clients or more rows"
    if is_by_group(options.partition):
        hint = "leave out such values with data.min_samples"
    for title, rows in zip(titles, clients, strict=True):
        if len(rows.train) == 0:
            raise ConfigError(
                f"expected at least one training row for every client, {title} came out with none; {hint}"
            )


def _check_tests(
    clients: Sequence[_ClientRows], options: PartitionOptions, tested: Callable[[], Sequence[str]]
) -> None:
    """Every client can be tested; where rows are dealt by group, of which some are small, one at least.

    tested: the groups of the official test side.
    """
    untested = [client for client, rows in enumerate(clients) if len(rows.test) == 0]
    by_group = is_by_group(options.partition)
    if not untested or (by_group and len(untested) < len(clients)):
        return
    if by_group and _parse_split(options.split).official:
        others = tested()
        more = ", ..." if len(others) > _TOLD else ""
        raise ConfigError(
            f"split '{options.split}' expects test rows of those who train, all are of others ({options.group_by}: "
            f"{', '.join(others[:_TOLD])}{more}); to test these as newcomers, set data.split to '8:1:1', which splits "
            "everybody's rows, and list them in evaluation.held_out"
        )
    first = untested[0]
    if by_group:
        raise ConfigError(
            f"expected a test row for one client at least, all {len(clients)} came out with none (client {first} with "
            f"{len(clients[first].train)} rows to train on); use fewer clients, a larger test part in split, or "
            "test='global'"
        )
    raise ConfigError(
        f"expected at least one test row for every client, client {first} came out with none "
        f"({len(clients[first].train)} to train on); use fewer clients, a larger test part in split, or test='global'"
    )
