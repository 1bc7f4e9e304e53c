"""Test rows of the classes that each client has no training rows of: `[evaluation] missing_classes`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.data.samples import LabeledSamples, SelectedSamples
from polyfed.errors import ConfigError


def select_missing(clients: Sequence[Client], shared_test: LabeledSamples | None) -> None:
    """Give each client the test rows of the classes that it never had: of all clients, or of the shared test set.

    Clients that lack the same classes share one selection.

    Raises:
        ConfigError: no client lacks a class that there are test rows of, or inputs differ in shape or type.
    """
    whole = _all_test_rows(clients) if shared_test is None else shared_test
    tested = set(whole.y.unique().tolist())
    known: dict[tuple[int, ...], SelectedSamples] = {}
    for client in clients:
        lacking = tuple(sorted(tested - _own_classes(client)))
        if lacking and lacking not in known:
            known[lacking] = SelectedSamples(whole, _rows_of(whole.y, lacking))
        client.missing = known.get(lacking)
    if not known:
        raise ConfigError(
            "evaluation.missing_classes = true does nothing, as every client has training rows of all classes of the "
            "test rows; leave it at false"
        )


def _own_classes(client: Client) -> set[int]:
    """The classes that the client has training rows of."""
    return set(client.data.train.y.unique().tolist() if client.own_classes is None else client.own_classes)


def _all_test_rows(clients: Sequence[Client]) -> LabeledSamples:
    """The test rows of all clients, in the order of the clients."""
    sides = [client.data.test for client in clients if len(client.data.test)]
    kinds = {(side.x.shape[1:], side.x.dtype) for side in sides}
    if len(kinds) > 1:
        raise ConfigError(
            "evaluation.missing_classes: expected test inputs of one shape and type at all clients, got "
            f"{' and '.join(sorted(f'{tuple(shape)} of {kind}' for shape, kind in kinds))}"
        )
    if not sides:
        raise ConfigError("evaluation.missing_classes: expected test rows at some client, got none")
    return LabeledSamples(torch.cat([side.x for side in sides]), torch.cat([side.y for side in sides]))


def _rows_of(y: Tensor, labels: Sequence[int]) -> Tensor:
    """The rows of these classes, in order."""
    return torch.isin(y, torch.tensor(labels)).nonzero().flatten()
