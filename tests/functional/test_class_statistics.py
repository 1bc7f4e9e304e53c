"""Sums of rows: what they add up to, and which ones rows can have."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional import class_statistics
from polyfed.functional.class_statistics import add, are_possible, divisor, from_class_means, sum_rows, within
from polyfed.functional.closed_forms import discriminant
from tests.helpers.class_rows import CLASSES, PHI, Y, near


def test_counts_are_of_all_classes_and_numbers_are_one_class() -> None:
    assert sum_rows(PHI, Y.clamp(max=1), CLASSES)["counts"][2:].tolist() == [0, 0]
    numbers = sum_rows(PHI, PHI[:, 0], 0)
    assert numbers["counts"].tolist() == [len(PHI)]
    torch.testing.assert_close(numbers["sums"][0], torch.cat([PHI, PHI[:, :1]], dim=1).double().sum(dim=0))


@pytest.mark.parametrize("cuts", [(10, 20, 60), (1, 89), (60, 10, 20)])
def test_any_grouping_and_order_give_one_solution(cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_statistics, "_ROWS", 7)
    whole = sum_rows(PHI, Y, CLASSES)
    order = torch.randperm(len(Y), generator=torch.Generator().manual_seed(1))
    parts = [sum_rows(PHI[some], Y[some], CLASSES) for some in order.split(cuts)]
    total = parts[-1]
    for part in parts[:-1]:
        total = add(total, part)
    near(total, whole)
    torch.testing.assert_close(discriminant(total, 0.1), discriminant(whole, 0.1), rtol=1e-9, atol=1e-9)


def of_clients(parts: list[Tensor]) -> dict[str, Tensor]:
    """What is added up of clients that hold these rows and send their class means alone."""
    sent = (sum_rows(PHI[rows], Y[rows], CLASSES, products=False) for rows in parts)
    return functools.reduce(add, map(from_class_means, sent))


def test_how_class_means_vary_is_by_hand() -> None:
    parts = list(torch.arange(len(Y)).split((50, 30, 10)))
    total = of_clients(parts)
    scatter = np.zeros((6, 6))
    free = 0
    for label in Y.unique():
        mean = PHI[label == Y].double().mean(dim=0)
        held = [rows[label == Y[rows]] for rows in parts]
        for rows in (one for one in held if len(one)):
            off = (PHI[rows].double().mean(dim=0) - mean).numpy()
            scatter += len(rows) * np.outer(off, off)
        free += sum(len(one) > 0 for one in held) - 1
    assert within(total).numpy() == pytest.approx(scatter, abs=1e-9)
    assert divisor(total) == free


def test_means_of_single_rows_vary_as_rows_do() -> None:
    total = of_clients(list(torch.arange(len(Y)).split(1)))
    torch.testing.assert_close(within(total), within(sum_rows(PHI, Y, CLASSES)), rtol=1e-9, atol=1e-9)
    assert divisor(total) == len(Y) - len(Y.unique())
    assert are_possible(total, len(Y))


NO_ROWS = {"counts": torch.zeros(CLASSES, dtype=torch.int64), "sums": torch.zeros(CLASSES, 6, dtype=torch.float64)}


@pytest.mark.parametrize("phi", [PHI, PHI[:1], PHI[:4], 1e6 + PHI, 0 * PHI], ids=["many", "one", "few", "far", "zero"])
def test_sums_of_rows_are_possible(phi: Tensor) -> None:
    y = Y[: len(phi)]
    assert are_possible(sum_rows(phi, y, CLASSES), len(y))
    assert are_possible(sum_rows(phi, phi[:, 0], 0), len(y))
    assert are_possible(sum_rows(phi.abs(), y, CLASSES, products=False), len(y))
    assert not are_possible(sum_rows(phi, y, CLASSES), len(y) + 1)


@pytest.mark.parametrize(
    "change",
    [
        {"products": -sum_rows(PHI, Y, CLASSES)["products"]},
        {"products": torch.zeros(21, dtype=torch.float64)},
        {"sums": 9 * sum_rows(PHI, Y, CLASSES)["sums"]},
        NO_ROWS,
    ],
    ids=["negative squares", "no squares", "far means", "no rows"],
)
def test_other_sums_are_not(change: Mapping[str, Tensor]) -> None:
    assert not are_possible({**sum_rows(PHI, Y, CLASSES), **change}, len(Y))


def test_no_word_occurs_less_than_never() -> None:
    assert not are_possible(sum_rows(PHI, Y, CLASSES, products=False), len(Y))
