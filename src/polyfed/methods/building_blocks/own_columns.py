"""A client's own columns among those of the federation: places, the common scale of numbers, and features of its rows.

Shapes: N rows, J columns and D features of the federation, J_k and D_k of a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group
from polyfed.core.server import Server
from polyfed.data.samples import OwnColumns, TableColumns
from polyfed.errors import ConfigError
from polyfed.functional import column_moments
from polyfed.functional.device_copies import in_float64

_CATEGORY = -1  # in place of the feature that says whether a value is missing: where it is the number 0
_ALWAYS = -2  # likewise: it is always there
_FACTORS = {"values": 1.0, "sums": 2.0**-6, "squares": 2.0**-12}  # of sums in fixed point
_LARGEST = 2.0**17
_LEAST_DEVIATION = 2.0**-8


def columns_of(client: Client) -> OwnColumns:
    """The client's columns; where a recipe names none, each number of an input is a column that everybody has."""
    if client.columns is not None:
        return client.columns
    if client.categories:
        raise ConfigError(f"{client.title}: expected a table with categories to be named in data.features, got others")
    count = client.prepare(client.data.train.x[:1]).numel()
    return OwnColumns(
        tuple(range(count)), (0,) * count, (), TableColumns(), (), mean=(0.0,) * count, std=(1.0,) * count
    )


def widths_of(server: Server) -> tuple[int, ...]:
    """Per column of the federation, how many categories it has; 0 for a number."""
    if server.column_widths:
        return server.column_widths
    return (0,) * math.prod(server.prepare(server.input_example).shape[1:])


def places(server: Server, client_id: int) -> list[int]:
    """The places of a client's columns, and where numbers are predicted that of these behind all others."""
    count = len(widths_of(server))
    own = [*(server.clients[client_id].columns or range(count))]
    return own if server.classes else [*own, count]


def of_features(server: Server) -> Tensor:
    """The column of each feature; where numbers are predicted one more behind."""
    return _columns_of_features(widths_of(server), server.classes)


def _columns_of_features(widths: Sequence[int], classes: int) -> Tensor:
    column_D = column_moments.make_features(widths)["column"]
    return column_D if classes else torch.cat([column_D, torch.tensor([len(widths)])])


def at_their_places(sums: Group, own: OwnColumns, classes: int) -> dict[str, Tensor]:
    """A client's sums among those of all columns and features of the federation."""
    column_D = _columns_of_features(own.widths, classes)
    places = torch.tensor([*own.places] if classes else [*own.places, len(own.widths)])
    features = torch.isin(column_D, places).nonzero().flatten()
    return column_moments.spread(sums, places, features, len(own.widths) + (not classes), len(column_D))


def _flags(own: OwnColumns) -> Tensor:
    """Per column, which feature says that a value is missing; or one of the two above."""
    flags = dict(own.table.flags)
    usual = [_CATEGORY if own.widths[place] else _ALWAYS for place in own.places]
    return torch.tensor([flags.get(place, other) for place, other in enumerate(usual)])


def _has(x: Tensor, flag_J: Tensor) -> Tensor:
    """Whether rows have a value in each column: a number is not said to be missing, a category has a number."""
    has = x[:, flag_J.clamp(min=0)] == 0
    has = torch.where(flag_J == _CATEGORY, x[:, : len(flag_J)] > 0, has)
    return has | (flag_J == _ALWAYS)


def sum_values(client: Client, own: OwnColumns) -> dict[str, Tensor]:
    """Of each column (J,) the number of the client's values in its training rows, their sum, that of their squares.

    Values are in the federation's units.
    """
    x = client.prepare(client.data.train.x).flatten(1).double()
    mean, std = (torch.tensor(numbers[: len(own.places)]).double() for numbers in (own.mean, own.std))
    values = x[:, : len(own.places)] * std + mean
    has = _has(x, _flags(own))
    present = torch.where(has, values, 0.0)
    places = torch.tensor(own.places)
    count = len(own.widths)
    return {
        "values": torch.zeros(count, dtype=torch.int64).index_copy(0, places, has.sum(dim=0)),
        "sums": torch.zeros(count, dtype=torch.float64).index_copy(0, places, present.sum(dim=0)),
        "squares": torch.zeros(count, dtype=torch.float64).index_copy(0, places, present.square().sum(dim=0)),
    }


def scale_of(sent: Sequence[Group], count: int) -> dict[str, Tensor]:
    """Mean and deviation (J,) of columns over all that have values; 0 and 1 without any, or if they do not vary."""
    zeros = torch.zeros(count, dtype=torch.float64)
    values = sum((one["values"] for one in sent), zeros).clamp(min=1)
    mean = sum((one["sums"] for one in sent), zeros) / values
    variance = sum((one["squares"] for one in sent), zeros) / values - mean.square()
    varies = variance > 1e-12 * mean.square()
    return {"mean": mean, "std": torch.where(varies, variance.clamp(min=0).sqrt(), 1.0)}


def shrink(client: Client, sums: Group) -> dict[str, Tensor]:
    """The sums of values in fixed point's range, whose squares fit and are not rounded away.

    Raises:
        ValueError: values of a column are too large for it, or differ by too little.
    """
    own = columns_of(client)
    for place, name in zip(own.places, own.names or map(str, own.places), strict=False):
        if own.widths[place]:
            continue
        count, total, square = (float(sums[key][place]) for key in ("values", "sums", "squares"))
        root = (square / max(count, 1)) ** 0.5
        deviation = max(square / max(count, 1) - (total / max(count, 1)) ** 2, 0.0) ** 0.5
        if root > _LARGEST or 1e-6 * root < deviation < _LEAST_DEVIATION:
            raise ValueError(
                f"expected column '{name}' in a unit in which values are around {_LARGEST:g} at most and deviate by "
                f"{_LEAST_DEVIATION:g} at least, as sums are in fixed point, got {root:.4g} and {deviation:.2g}"
            )
    return {name: tensor.double() * _FACTORS[name] for name, tensor in sums.items()}


def grow(total: Group) -> dict[str, Tensor]:
    """What was added up of these."""
    return {name: tensor / _FACTORS[name] for name, tensor in total.items()}


def make_map(client: Client, scale: Group) -> dict[str, Tensor]:
    """What makes features of the client's prepared rows: those are standardized by its own means, z by everybody's."""
    own = columns_of(client)
    count = len(own.places)
    made = column_moments.make_features([own.widths[place] for place in own.places])
    mean, std = (torch.tensor(numbers[:count], dtype=torch.float64) for numbers in (own.mean, own.std))
    is_number = torch.tensor([own.widths[place] == 0 for place in own.places])
    factor = torch.where(is_number, std / scale["std"], 1.0)
    added = torch.where(is_number, (mean - scale["mean"]) / scale["std"], 0.0)
    return {**made, "factor": factor, "added": added, "flag": _flags(own)}


def features_of_inputs(made: Group, x: Tensor) -> tuple[Tensor, Tensor]:
    """The features (N, D_k) of prepared rows, float64, and whether they have a value in each column (N, J_k)."""
    x = in_float64(x.flatten(1))
    here = {name: tensor.to(x.device) for name, tensor in made.items()}
    z_NJ = x[:, : len(here["flag"])] * here["factor"] + here["added"]
    return column_moments.find_features(here, z_NJ), _has(x, here["flag"])
