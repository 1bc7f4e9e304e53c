"""Sums of rows of norm 1 as one release with noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from polyfed.functional import class_statistics
from polyfed.functional.class_statistics import are_possible, from_class_means, sum_rows
from polyfed.functional.closed_forms import discriminant
from polyfed.functional.noisy_sums import add_noise, are_within, nearest_possible
from polyfed.report.comparison import neighbors
from tests.helpers.class_rows import CLASSES, PHI, Y, near


def deviations(sums: Mapping[str, Tensor], noise: float) -> dict[str, Tensor]:
    """The deviation of the noise on each number: what comes of none with draws that are all one."""
    none = {name: torch.zeros_like(tensor) for name, tensor in sums.items()}
    return add_noise(none, noise, lambda shape: torch.ones(shape, dtype=torch.float64))


@pytest.mark.parametrize("phi", [PHI[:1], torch.eye(6)[:1], torch.ones(1, 6)])
@pytest.mark.parametrize("products", [True, False])
def test_a_row_of_norm_one_changes_all_by_one_over_its_noise(phi: Tensor, products: bool) -> None:
    row = sum_rows(torch.nn.functional.normalize(phi.double()), Y[:1], CLASSES, products)
    stds = deviations(row, 2.5)
    effect = sum(float((row[name] / stds[name]).square().sum()) for name in row)
    assert effect**0.5 == pytest.approx(1 / 2.5, rel=1e-3)
    half = sum_rows(torch.nn.functional.normalize(phi.double()) / 2, Y[:1], CLASSES, products)
    assert sum(float((half[name] / stds[name]).square().sum()) for name in half) < effect


@pytest.mark.parametrize("products", [True, False])
def test_another_row_in_a_rows_place_changes_all_by_no_more_than_is_said(products: bool) -> None:
    draws = torch.Generator().manual_seed(0)

    def effect(one: Tensor, other: Tensor, y: tuple[int, int]) -> float:
        first, second = (
            sum_rows(phi, torch.tensor([label]), CLASSES, products) for phi, label in zip((one, other), y, strict=True)
        )
        stds = deviations(first, 1.0)
        return sum(float(((first[name] - second[name]) / stds[name]).square().sum()) for name in first) ** 0.5

    phi = torch.nn.functional.normalize(torch.randn(30, 6, generator=draws, dtype=torch.float64))
    found = [effect(a[None], b[None], y) for a in phi[:10] for b in phi[10:] for y in ((0, 0), (0, 1))]
    worst = effect(phi[:1], -phi[:1], (0, 0))
    assert max(found) < worst
    assert worst == pytest.approx(2 * (0.7 if products else 0.95) ** 0.5, rel=1e-3)
    said = f"up to {worst:.2f} times" in neighbors(["sums"])
    assert said is not products  # of class means alone, where it is more


def test_noise_is_of_its_deviation_and_another_on_every_number() -> None:
    sums = sum_rows(torch.zeros(5, 40), torch.arange(5) % CLASSES, CLASSES)
    draws = torch.Generator().manual_seed(0)
    noisy = add_noise(sums, 1.5, lambda shape: torch.randn(shape, generator=draws, dtype=torch.float64))
    stds = deviations(sums, 1.5)
    drawn = torch.cat([((noisy[name] - sums[name]) / stds[name]).flatten() for name in sums])
    assert len(drawn.unique()) > 900  # of 984; they lie on grids
    assert float(drawn.std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("products", [True, False])
def test_sums_of_rows_with_noise_are_within_what_such_rows_can_have(noise: float, products: bool) -> None:
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        phi = torch.nn.functional.normalize(torch.randn(60, 6, generator=draws)) * (1 - 2**-20)  # rounded
        sums = sum_rows(phi if seed else phi[:1].expand(60, 6), torch.arange(60) % CLASSES, CLASSES, products)
        noisy = add_noise(sums, noise, lambda shape, draws=draws: torch.randn(shape, generator=draws).double())
        assert are_within(noisy if noise else sums, 60, noise)


@pytest.mark.parametrize("change", ["sums", "one class", "products", "trace", "counts", "one count", "more rows"])
def test_sums_that_no_rows_of_norm_one_have_are_not_within(change: str) -> None:
    phi = 0.999 * torch.nn.functional.normalize(PHI.double()).repeat(20, 1)
    sums = {name: tensor.double() for name, tensor in sum_rows(phi, Y.repeat(20), CLASSES).items()}
    rows = len(phi)
    wrong = {
        "sums": {"sums": torch.full_like(sums["sums"], float(rows))},
        "one class": {"sums": sums["sums"] * torch.tensor([[30.0], [1], [1], [1]])},
        "products": {"products": torch.full_like(sums["products"], float(rows))},
        "trace": {"products": -sums["products"]},
        "counts": {"counts": -sums["counts"]},
        "one count": {"counts": sums["counts"] + torch.tensor([0.0, 0, -50, 50])},
        "more rows": {"counts": sums["counts"] * 2},
    }
    assert are_within(sums, rows, 0.3)
    assert not are_within({**sums, **wrong[change]}, rows, 0.3)
    if change in ("sums", "one class", "counts"):
        means = {name: {**sums, **wrong[change]}[name] for name in ("counts", "sums")}
        assert not are_within(means, rows, 0.3)


@pytest.mark.parametrize(
    ("name", "share", "most"), [("counts", 0.05, 20), ("sums", 0.7, 12.44), ("products", 0.25, 14.58)]
)
def test_noise_reaches_as_far_as_its_numbers_let_it(name: str, share: float, most: float) -> None:
    """By 10 sqrt(4) deviations for the sum of 4 counts, sqrt(d) + 10 for the norm of d = 6 and 21 other numbers."""
    rows, noise = 60, 0.3
    sums = {key: tensor.double() for key, tensor in sum_rows(torch.zeros(60, 6), Y[:60], CLASSES).items()}
    bound = {"counts": rows, "sums": float(sums["counts"][0]) + 10 * noise / 0.05**0.5, "products": rows}[name]
    for deviations_away, expected in ((most - 0.1, True), (most + 0.1, False)):
        changed = sums[name].clone()
        changed.flatten()[0] = (
            bound + deviations_away * noise / share**0.5 - (sums["counts"][1:].sum() if name == "counts" else 0)
        )
        assert are_within({**sums, name: changed}, rows, noise) is expected


def test_without_noise_equal_rows_of_norm_one_are_just_within() -> None:
    assert are_within(sum_rows(torch.eye(6)[:1].expand(60, 6), torch.zeros(60, dtype=torch.int64), CLASSES), 60, 0.0)


def test_sums_with_noise_have_a_solution_and_exact_ones_stay() -> None:
    sums = sum_rows(PHI, Y, CLASSES)
    near({**nearest_possible(sums), "counts": sums["counts"].double()}, {**sums, "counts": sums["counts"].double()})
    draws = torch.Generator().manual_seed(0)
    noisy = add_noise(sums, 30.0, lambda shape: torch.randn(shape, generator=draws, dtype=torch.float64))
    assert float(class_statistics.unpack(noisy["products"], 6).trace()) < 1e4
    assert not are_possible(noisy, int(noisy["counts"].sum()))
    made = nearest_possible(noisy)
    assert (made["counts"] >= 0).all()
    assert are_possible(made, int(made["counts"].sum()))
    assert all(tensor.isfinite().all() for tensor in discriminant(made, 0.1))


@pytest.mark.parametrize("make", [nearest_possible, from_class_means])
def test_where_no_class_has_a_row_the_largest_is_left(make: Callable[..., dict[str, Tensor]]) -> None:
    sums = {name: tensor.double() for name, tensor in sum_rows(PHI, Y, CLASSES).items()}
    made = make({**sums, "counts": torch.tensor([-3.0, -1.0, -9.0, -2.0]).double()})
    assert made["counts"].tolist() == [0, 1, 0, 0]
    assert all(tensor.isfinite().all() for tensor in discriminant(made, 0.1))
